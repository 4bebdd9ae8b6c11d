import gc
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import thinwire as tw
from processes import run_ranks, start_ranks
from ranks import ROUNDS, TCP_INFO_BYTES_SENT, methods, train_in_process
from thinwire.testing import TransportContract
from thinwire.testing.transports import check_worker
from thinwire.transport import Label, Metered, Pending, Transport, in_process
from thinwire.transport.progress_thread import Future, ProgressThread, Task


class TestInProcess(TransportContract):
    def connect(self, workers):
        return in_process(workers)


class TestMetered(TransportContract):
    def connect(self, workers):
        return [Metered(transport) for transport in in_process(workers)]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_in_threads_keep_the_contract(workers: int) -> None:
    transports = [Metered(t) for t in in_process(workers, timeout_s=20)]
    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(check_worker, transports))


def test_payloads_of_different_sizes_are_refused() -> None:
    label = Label(what="x", round=1)
    pending = [t.start(torch.zeros(3 + t.rank, dtype=torch.uint8), label) for t in in_process(2)]
    with pytest.raises(tw.ExchangeError, match=r"exchange x in round 1.*\[3, 4\] bytes"):
        pending[0].wait()


def test_slots_are_forgotten_once_everybody_took_them() -> None:
    transports = in_process(2)
    for _ in range(3):
        for p in [t.start(torch.zeros(1, dtype=torch.uint8), Label(what="x", round=1))
                  for t in transports]:  # fmt: skip
            p.wait()
    assert transports[0]._hub.slots == {}


@pytest.mark.parametrize(("workers", "timeout_s"), [(0, 0.0), (-1, 0.0), (2, -1.0)])
def test_impossible_worlds_are_refused(workers: int, timeout_s: float) -> None:
    with pytest.raises(tw.ConfigurationError, match="connect"):
        in_process(workers, timeout_s=timeout_s)


def test_distributed_without_a_process_group_is_a_world_of_one() -> None:
    transport = tw.transport.Distributed()
    assert (transport.rank, transport.world_size) == (0, 1)


def test_distributed_under_torchrun_wants_a_process_group(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(tw.ConfigurationError, match="init_process_group"):
        tw.transport.Distributed()


@pytest.mark.parametrize("ranks", [2, 3])
def test_gloo_carries_payloads_and_cards(ranks: int) -> None:
    for process in run_ranks("carry", ranks):
        assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("ranks", [2, 3])
def test_exchanges_carry_on_while_nobody_waits(ranks: int) -> None:
    for process in run_ranks("background", ranks):
        assert process.returncode == 0, process.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_carries_on_while_nobody_waits() -> None:
    for process in run_ranks("on_gpus", 2):
        assert process.returncode == 0, process.stderr


def test_one_dimension_of_a_mesh_joins_the_workers() -> None:
    for rank, process in enumerate(run_ranks("mesh", 4)):
        first, error = process.stdout.splitlines()
        assert first.split() == [str(rank), str(rank % 2), "2"], process.stderr
        assert "ConfigurationError" in error
        assert "do: pass mesh['worker']" in error


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_reach_the_bits_of_one_process_with_every_method(ranks: int) -> None:
    expected = train_in_process(ranks)
    names = [f"{method.name} {method.codec.id} {method.exchange}" for method in methods()]
    for process in run_ranks("train", ranks):
        assert process.returncode == 0, process.stderr
        digests = process.stdout.split()
        assert dict(zip(names, digests, strict=True)) == dict(zip(names, expected, strict=True))


# What gloo sends around a message (torch 2.13, measured): a preamble of 48 bytes with the message,
# and 48 bytes for each of "ready to send" and "ready to receive".
GLOO_NBYTES_PER_MESSAGE = 3 * 48
# A note to the others on how far this worker is: a key and two numbers.
NBYTES_PER_NOTE = 80


def kernel_counts_sent_bytes() -> bool:
    try:
        with socket.socket() as s:
            info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
    except (AttributeError, OSError):
        return False
    return len(info) >= TCP_INFO_BYTES_SENT + 8


@pytest.mark.skipif(not kernel_counts_sent_bytes(), reason="no tcpi_bytes_sent in this kernel")
def test_the_kernel_sends_the_bytes_that_are_counted() -> None:
    for process in run_ranks("count_wire", 2):
        assert process.returncode == 0, process.stderr
        kernel, counted, rounds, per_round = map(int, process.stdout.split())
        assert rounds == ROUNDS
        assert counted == rounds * per_round
        assert counted <= kernel <= counted + rounds * (GLOO_NBYTES_PER_MESSAGE + NBYTES_PER_NOTE)


def test_a_peer_that_dies_is_an_error_that_names_the_exchange() -> None:
    survivor, victim = run_ranks("die", 2)
    assert victim.returncode == 9
    assert "ExchangeError cannot exchange fragment 0" in survivor.stdout
    assert "in round 2" in survivor.stdout


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_silent_peer_is_an_error_within_the_timeout(ranks: int) -> None:
    first, *_others = run_ranks("silent", ranks)
    kind, seconds = first.stdout.split()[0], float(first.stdout.split()[-1])
    assert kind == "ExchangeTimeout"
    assert 2.0 <= seconds < 8.0


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_worker_that_lags_is_named(ranks: int) -> None:
    *waiting, _last = run_ranks("lag", ranks)
    lag = f"worker {ranks - 1} has begun 4 exchanges, this worker 6"  # two are introductions
    for process in waiting:
        assert process.returncode == 1, process.stderr
        assert f"exchange a test payload in round 3; because {lag}" in process.stdout
    # Who notices first closes its connections, which the others may see before they notice.
    assert any(process.stdout.startswith("ExchangeTimeout") for process in waiting)


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("sizes_of_gathers", 2),
        ("sizes_of_gathers", 3),
        ("sizes_of_shards", 3),
        ("sizes_of_results", 3),
        ("kinds", 2),
    ],
)
def test_workers_that_exchange_different_things_are_told(case: str, ranks: int) -> None:
    """gloo alone aborts one of the processes and tells the others that all is well."""
    processes = run_ranks(case, ranks)
    for process in processes:
        assert process.returncode == 1, process.stderr
        assert "exchange a test payload in round 3" in process.stdout
        assert float(process.stdout.split()[-1]) < 10.0
    assert any(process.stdout.startswith("ExchangeTimeout") for process in processes)
    if case in ("sizes_of_gathers", "sizes_of_shards"):
        assert "worker 1 has sent" in processes[0].stdout


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_fails_between_the_halves_is_told_to_who_waits(ranks: int) -> None:
    first, *others = run_ranks("fail_in_reduce", ranks)
    assert first.stdout.startswith("MismatchError cannot use it; because it is odd")
    for process in others:
        assert process.stdout.startswith("Exchange"), process.stderr
        assert "exchange a test payload in round 3" in process.stdout


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_process_leaves_promptly_with_exchanges_under_way(ranks: int) -> None:
    *leaving, last = start_ranks("leave", ranks)
    try:
        for process in leaving:
            assert process.stdout.readline() == "leaving\n"
        left_s = time.perf_counter()
        errors = [process.communicate(timeout=60)[1] for process in leaving]
        assert time.perf_counter() - left_s < 30.0  # gloo would wait for 60
        assert [process.returncode for process in leaving] == [7] * len(leaving), errors
    finally:
        for process in (*leaving, last):
            process.kill()
            process.communicate()


def test_a_closed_transport_carries_nothing() -> None:
    courier = ProgressThread()
    errand = Idle(Label(what="x", round=1), Future())
    assert courier.send(errand).wait() == []
    courier.close()
    late = courier.send(Idle(Label(what="x", round=2), Future()))
    with pytest.raises(tw.ExchangeError, match=r"x in round 2.*closed"):
        late.wait()
    assert not [t for t in threading.enumerate() if t is courier._thread]


class Idle(Task):
    def see_through(self):
        return []

    def abort(self) -> None:
        pass


def test_an_unused_transport_ends_its_thread() -> None:
    """Its thread does not keep a transport alive."""
    transport = tw.transport.Distributed()
    courier = transport._courier
    courier.send(Idle(Label(what="x", round=1), Future())).wait()
    del transport
    gc.collect()
    assert not courier._thread.is_alive()


class Clock:
    """Time that passes when it is told to."""

    now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


class Slow(Pending):
    def __init__(self, clock: Clock, travel_s: float) -> None:
        self.clock, self.at_s = clock, clock.now_s + travel_s

    def wait(self) -> list[torch.Tensor]:
        self.clock.now_s = max(self.clock.now_s, self.at_s)
        return [torch.zeros(1, dtype=torch.uint8)] * 2

    def arrived_s(self) -> float | None:
        return self.at_s if self.clock.now_s >= self.at_s else None


class SlowTransport(Transport):
    rank, world_size = 0, 2

    def __init__(self, clock: Clock, travel_s: float) -> None:
        self.clock, self.travel_s = clock, travel_s

    def introduce(self, card: bytes) -> dict[int, bytes]:
        return {0: card}

    def start(self, payload, label, inspect=None):
        return Slow(self.clock, self.travel_s)

    def start_reduce(self, payloads, reduce, label, inspect=None):
        return Slow(self.clock, self.travel_s)


@pytest.mark.parametrize(
    ("travel_s", "train_s", "hidden_s", "waited_s"),
    [(0.25, 0.75, 0.25, 0.0), (0.75, 0.25, 0.25, 0.5), (-0.5, 0.25, 0.0, 0.0)],
)
def test_only_what_is_hidden_counts_as_overlapped(
    monkeypatch, travel_s: float, train_s: float, hidden_s: float, waited_s: float
) -> None:
    clock = Clock()
    monkeypatch.setattr("thinwire.transport.metered.time", clock)
    meter = Metered(SlowTransport(clock, travel_s))
    pending = meter.start(torch.zeros(1, dtype=torch.uint8), Label(what="x", round=1))
    clock.now_s += train_s
    pending.wait()
    assert (meter.traffic.overlapped_s, meter.traffic.wait_s) == (hidden_s, waited_s)


def test_workers_that_differ_are_all_told() -> None:
    for process in run_ranks("differ", 2):
        assert "method.sync_every" in process.stdout
        assert "worker 0 has 4 and worker 1 has 5" in process.stdout


def test_a_worker_may_be_a_ddp_group() -> None:
    digests = [process.stdout.strip() for process in run_ranks("ddp_groups", 4)]
    assert len(set(digests)) == 1
    assert len(digests[0]) == 64
