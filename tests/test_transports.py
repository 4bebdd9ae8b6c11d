import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import thinwire as tw
from processes import run_ranks
from ranks import ROUNDS, TCP_INFO_BYTES_SENT, methods, train_in_process
from thinwire.testing import TransportContract
from thinwire.testing.transports import check_worker
from thinwire.transport import Label, Metered, in_process


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
        assert counted <= kernel <= counted + rounds * GLOO_NBYTES_PER_MESSAGE


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


def test_workers_that_differ_are_all_told() -> None:
    for process in run_ranks("differ", 2):
        assert "method.sync_every" in process.stdout
        assert "worker 0 has 4 and worker 1 has 5" in process.stdout


def test_a_worker_may_be_a_ddp_group() -> None:
    digests = [process.stdout.strip() for process in run_ranks("ddp_groups", 4)]
    assert len(set(digests)) == 1
    assert len(digests[0]) == 64


def test_a_worker_may_be_an_fsdp_group() -> None:
    outputs = [process.stdout.split() for process in run_ranks("fsdp_groups", 4)]
    # Rank r of each worker holds the same shard; ranks of one worker hold different ones.
    assert outputs[0][1] == outputs[2][1] != outputs[1][1] == outputs[3][1]
    # Nine steps of AdamW on weights near 1 turn the other order of the sums into a few ulp.
    assert max(float(output[0]) for output in outputs) < 2e-5
