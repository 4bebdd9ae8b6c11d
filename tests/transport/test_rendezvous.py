import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import thinwire as tw
from processes import free_port, promptly, run_workers
from thinwire.testing.transports import check_worker, gathered
from thinwire.transport import Rendezvous, RoundTag

TAG = RoundTag(what="x", round=1)


def meet(port: int, count: int, **fields) -> list[Rendezvous]:
    """`count` workers in threads; fields that are lists have a value for each."""

    def one(worker: int) -> Rendezvous:
        own = {k: v[worker] if isinstance(v, list) else v for k, v in fields.items()}
        given = {"worker": worker, "workers": count, "timeout_s": 20.0, **own}
        return Rendezvous(f"127.0.0.1:{port}", **given)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_that_met_keep_the_contract(workers: int) -> None:
    transports = meet(free_port(), workers)
    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(check_worker, transports))
    for transport in transports:
        transport.close()
        if workers > 1:
            with pytest.raises(tw.ExchangeError, match="x in round 1; because its transport was"):
                transport.run(gathered(torch.zeros(1), transport.rank, workers), TAG)


def test_ranks_meet_their_counterparts() -> None:
    """Two workers of two ranks, without a process group that joins a worker's ranks."""
    places = {"worker": [0, 0, 1, 1], "rank": [0, 1, 0, 1]}
    transports = meet(free_port(), 4, workers=2, ranks=2, **places)

    def gather(number: int) -> list[int]:
        payload, transport = torch.tensor([number], dtype=torch.uint8), transports[number]
        received = transport.run(gathered(payload, transport.rank, 2), TAG).wait()
        return [int(each) for each in received]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(gather, range(4))) == [[0, 2], [1, 3]] * 2
    for transport in transports:
        transport.close()


@pytest.mark.parametrize(
    ("count", "fields", "come"),
    [
        (2, {"workers": [2, 3]}, "worker 0 of 2, .*worker 1 of 3, "),
        (2, {"ranks": [1, 2]}, "worker 0 .*1 ranks, worker 1 .*2 ranks"),
        (3, {"worker": [0, 1, 1]}, ".*worker 1 of 3, with 1 ranks, worker 1 of 3, with 1 ranks;"),
    ],
)
def test_workers_that_do_not_belong_together_are_named(count: int, fields, come: str) -> None:
    with promptly(18), pytest.raises(tw.ThinwireError, match=f"these have come: {come}"):
        meet(free_port(), count, **fields)  # which waits for 20 seconds for who is late


def test_a_missing_worker_is_named_in_time_and_in_a_line(capfd) -> None:
    with pytest.raises(tw.errors.ExchangeTimeout, match="missing: worker 1 of 2"):
        Rendezvous(f"127.0.0.1:{free_port()}", worker=0, workers=2, timeout_s=0.3)
    with pytest.raises(tw.errors.ExchangeTimeout, match=r"reach worker 0 at 127.0.0.1:\d+ within"):
        Rendezvous(f"127.0.0.1:{free_port()}", worker=1, workers=2, timeout_s=0.3)
    # torch waits twice, and prints its stack.
    assert "frame #0" not in capfd.readouterr().err
    began_s = time.monotonic()
    with pytest.raises(tw.errors.ExchangeTimeout, match="within 2 s; because Connection refused"):
        Rendezvous(f"127.0.0.1:{free_port()}", worker=1, workers=2, timeout_s=2.0)
    assert time.monotonic() - began_s < 3.5


def test_worker_0_may_come_last() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as threads:
        first, second = (
            threads.submit(
                lambda worker: (
                    time.sleep(1.0 - worker),
                    Rendezvous(f"127.0.0.1:{port}", worker=worker, workers=2, timeout_s=20.0),
                )[1],
                worker,
            )
            for worker in range(2)
        )
        assert (first.result().rank, second.result().rank) == (0, 1)


def test_an_address_that_is_not_here_or_taken_and_numbers_that_cannot_be_are_refused() -> None:
    for worker, workers in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(tw.ConfigurationError, match=f"be worker {worker} of {workers}"):
            Rendezvous("127.0.0.1:1", worker=worker, workers=workers)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for host, port in (("192.0.2.1", 29400), taken.getsockname()):
            with pytest.raises(tw.ConfigurationError, match=f"listen at {host}:{port} as worker 0"):
                Rendezvous(f"{host}:{port}", worker=0, workers=2, timeout_s=1)


def test_it_listens_at_its_address_and_nowhere_else() -> None:
    port = free_port()
    transports = meet(port, 2)
    with socket.socket() as stranger, pytest.raises(ConnectionRefusedError):
        stranger.connect(("127.0.0.2", port))
    with socket.socket() as known:
        known.connect(("127.0.0.1", port))
    for transport in transports:
        transport.close()


def run(case: str, ranks: int, methods: str = "0") -> list[list[Any]]:
    """Two workers of so many ranks."""
    ports = [free_port() for _ in range(6)]
    where = {"PORTS": " ".join(map(str, ports)), "THINWIRE_AT": f"tcp://127.0.0.1:{ports[0]}"}
    known = {"ranks": ranks, "METHODS": methods, **where}
    processes = run_workers("meeting_ranks.py", case, 2, **known)
    assert {process.returncode for process in processes} == {0}, processes[0].stderr
    return [json.loads(process.stdout.splitlines()[-1]) for process in processes]


@pytest.mark.slow
def test_ranks_that_hold_the_same_send_it_once() -> None:
    """As if a worker were one rank of twice the batch, bit for bit, and in as many bytes."""
    divided, whole = (run(case, 3, "0 2 4 5") for case in ("train_ddp", "train_ddp_undivided"))
    for mine, theirs in zip(zip(*divided, strict=True), zip(*whole, strict=True), strict=True):
        assert len({each["digest"] for each in mine[:3]}) == 1
        assert [each["digest"] for each in mine] == [each["digest"] for each in theirs]
        for worker in range(2):
            ranks, alone = mine[3 * worker : 3 * worker + 3], theirs[3 * worker]
            sent = [each["sent_bytes"] for each in ranks]
            assert sum(sent) == alone["sent_bytes"]
            assert max(sent) - min(sent) <= 16
            peak = sum(each["peak_sent_bytes_per_step"] for each in ranks)
            assert 0 <= peak - alone["peak_sent_bytes_per_step"] < len(ranks)


def test_ranks_that_hold_different_things_are_refused() -> None:
    for told in run("differ", ranks=2):
        assert len(told) == 2
        assert all("its ranks 0 and 1 hold other parameters" in each for each in told)
