import gc
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from fake_device import FakeDevice
from processes import promptly, run_ranks, started
from ranks import (
    BYTES,
    DIFFERENT,
    LOOPS,
    ROUNDS,
    TCP_INFO_BYTES_SENT,
    expected,
    methods,
    train_in_process,
)
from thinwire.testing import TransportContract
from thinwire.testing.transports import gathered, swapped
from thinwire.transport import Post, Posts, RoundTag, Sealed, in_process
from thinwire.transport.base import RunningExchange, to_all
from thinwire.transport.distributed import ProgressThread
from thinwire.transport.gloo import GlooMessages, gloo_group
from thinwire.transport.metered import Metered
from transport_checks import reduced

SECRET = "a secret of many characters"


class TestInProcess(TransportContract):
    def connect(self, workers):
        return in_process(workers, timeout_s=20)


class TestSealed(TransportContract):
    def connect(self, workers):
        return [Metered(Sealed(t, SECRET)) for t in in_process(workers, timeout_s=20)]


TAG = RoundTag(what="x", round=1)


def nothing_posted() -> Posts[int]:
    yield from ()
    return lambda: 7


def longer(rank: int) -> Posts[None]:
    for _ in range(1 + rank):
        yield to_all(BYTES, rank, 2)
    return lambda: None


def one_sided(rank: int) -> Posts[None]:
    yield Post({1: BYTES}, {}) if rank == 0 else Post({}, {})
    return lambda: None


SIZES = [case for case in DIFFERENT if case.startswith("sizes")]
DIFFERENT_HERE = {
    **{case: lambda rank, case=case: DIFFERENT[case](rank, 3 + rank, 2) for case in SIZES},
    "peers": lambda rank: swapped(BYTES, rank, 1),
    "a payload nobody expects": one_sided,
    "one of a worker that posts on": longer,
}


@pytest.mark.parametrize("posts", DIFFERENT_HERE.values(), ids=DIFFERENT_HERE.keys())
def test_workers_that_expect_other_payloads_than_are_sent_are_told(posts) -> None:
    told = r"exchange x in round 1.*worker \d expects .* bytes by sender, and gets "
    for each in [t.run(posts(t.rank), TAG) for t in in_process(2)]:
        with pytest.raises(tw.ExchangeError, match=told):
            each.wait()


def test_an_exchange_without_posts_needs_no_other_worker_and_meetings_are_forgotten() -> None:
    transports = in_process(2)
    assert transports[0].run(nothing_posted(), TAG).wait() == 7
    for _ in range(3):
        for each in [t.run(gathered(BYTES, t.rank, 2), TAG) for t in transports]:
            each.wait()
    assert transports[0].meetings == {}


def test_workers_that_do_not_come_are_named_and_impossible_worlds_refused() -> None:
    for workers, timeout_s, missing in ((2, 0.0, "1"), (3, 0.1, "1, 2")):
        first, *_others = in_process(workers, timeout_s=timeout_s)
        named = f"x in round 1.*worker {missing} of {workers}"
        with pytest.raises(tw.ExchangeTimeout, match=named):
            first.run(gathered(BYTES, 0, workers), TAG).wait()
    for workers, timeout_s in ((0, 0.0), (-1, 0.0), (2, -1.0)):
        with pytest.raises(tw.ConfigurationError, match="connect"):
            in_process(workers, timeout_s=timeout_s)


def test_distributed_without_a_process_group_is_a_world_of_one(monkeypatch) -> None:
    transport = tw.transport.Distributed()
    assert (transport.rank, transport.world_size) == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(tw.ConfigurationError, match="init_process_group"):
        tw.transport.Distributed()


# "left_under_way": no later transport takes a message that was left there.
@pytest.mark.slow_cases("carry-3")
@pytest.mark.parametrize(("case", "ranks"), [("carry", 2), ("carry", 3), ("left_under_way", 2)])
def test_gloo_carries_payloads_and_cards_and_goes_on_while_no_worker_waits(case, ranks) -> None:
    for process in run_ranks(case, ranks):
        assert process.returncode == 0, process.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_carries_on_while_no_worker_waits() -> None:
    for process in run_ranks("on_gpus", 2):
        assert process.returncode == 0, process.stderr


@pytest.mark.slow_cases("3")
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
    return len(info) >= TCP_INFO_BYTES_SENT + 16


@pytest.mark.skipif(not kernel_counts_sent_bytes(), reason="no tcpi_bytes_sent in this kernel")
def test_the_kernel_sends_the_bytes_that_are_counted() -> None:
    for process in run_ranks("count_wire", 2):
        assert process.returncode == 0, process.stderr
        kernel, counted, rounds, per_round = map(int, process.stdout.split())
        assert rounds == ROUNDS
        assert counted == rounds * per_round
        assert counted <= kernel <= counted + rounds * GLOO_NBYTES_PER_MESSAGE


def test_a_silent_peer_is_an_error_within_the_timeout() -> None:
    first, _silent = run_ranks("silent", 2)
    kind, seconds = first.stdout.split()[0], float(first.stdout.split()[-1])
    assert kind == "ExchangeTimeout"
    assert 2.0 <= seconds < 8.0


@pytest.mark.parametrize("ranks", [2, 3])
def test_workers_that_exchange_different_things_are_told(ranks: int) -> None:
    """gloo alone aborts one of the processes and tells the others that all is well."""
    processes = run_ranks("mistakes", ranks)
    assert [process.returncode for process in processes] == [0] * ranks, processes[0].stderr
    told = [dict(line.split(" ", 1) for line in p.stdout.splitlines()) for p in processes]
    for case in told[0]:
        errors = [each[case] for each in told]
        if case == "fails_in_reduce":
            assert errors.pop(0).startswith("MismatchError cannot use it; because it is odd")
        elif case == "peers":  # the others swap
            assert errors[1:] == ["none"] * 2
            del errors[1:]
        else:
            assert any(error.startswith("ExchangeTimeout") for error in errors), (case, errors)
        for error in errors:
            assert re.match("Exchange.* exchange a test payload in round 3", error), (case, error)
            assert float(error.split()[-1]) < 15.0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_process_leaves_promptly_with_exchanges_under_way(ranks: int) -> None:
    with started("leave", ranks) as (*leaving, _):
        for process in leaving:
            assert process.stdout.readline() == "leaving\n"
        with promptly(30):  # gloo would wait for 60
            errors = [process.communicate(timeout=60)[1] for process in leaving]
        assert [process.returncode for process in leaving] == [7] * len(leaving), errors


@pytest.mark.slow
def test_a_forked_child_that_exits_leaves_exchanges_alone() -> None:
    with started("child_exits", 2) as processes:
        for process in processes:
            said, error = process.communicate(timeout=60)
            assert (process.returncode, said) == (0, "done\n"), error


def test_a_transport_that_is_closed_fails_what_is_under_way() -> None:
    thread, is_closing = ProgressThread(), threading.Event()
    assert idle(thread, 1).wait() == 7
    first, second = RunningExchange(nothing_posted()), RunningExchange(nothing_posted())
    thread.submit(first, TAG, carry=is_closing.wait, abort=is_closing.set)
    thread.submit(second, RoundTag(what="x", round=2), carry=bool, abort=bool)
    thread.close()
    with pytest.raises(tw.ExchangeError, match=r"x in round 2.*closed"):
        second.wait()
    assert not [t for t in threading.enumerate() if t is thread._thread]


def idle(thread: ProgressThread, number: int) -> RunningExchange[int]:
    """An exchange of which nothing has to be carried."""
    running = RunningExchange(nothing_posted())
    thread.submit(running, RoundTag(what="x", round=number), carry=bool, abort=bool)
    return running


def test_an_unused_transport_ends_its_thread() -> None:
    """Its thread does not keep a transport alive."""
    transport = tw.transport.Distributed()
    progress = transport._progress
    idle(progress, 1).wait()
    del transport
    gc.collect()
    assert not progress._thread.is_alive()


@pytest.mark.parametrize(
    ("travel_s", "train_s", "hidden_s", "waited_s", "use_s"),
    [(0.25, 0.75, 0.25, 0.0, 0.125), (0.75, 0.25, 0.25, 0.5, 0.125)],
)
def test_only_what_is_hidden_counts_as_overlapped_and_work_is_no_waiting(
    monkeypatch, travel_s: float, train_s: float, hidden_s: float, waited_s: float, use_s: float
) -> None:
    clock = SimpleNamespace(now_s=100.0, perf_counter=lambda: clock.now_s)
    monkeypatch.setattr("thinwire.transport.metered.time", clock)

    def run(posts: Posts[None], tag: RoundTag) -> RunningExchange[None]:
        """Everything has arrived after `travel_s`."""
        running, at_s = RunningExchange(posts), clock.now_s + travel_s

        def arrive() -> None:
            waiting_s, clock.now_s = clock.now_s, at_s
            running.answer({1: BYTES})
            clock.now_s = max(waiting_s, at_s)

        running.arrive = arrive
        return running

    def averaged() -> Posts[None]:
        finish = yield from gathered(BYTES, 0, 2)

        def use() -> None:
            finish()
            clock.now_s += use_s

        return use

    slow = in_process(2)[0]
    monkeypatch.setattr(slow, "run", run)
    meter = Metered(slow)
    under_way = meter.run(averaged(), TAG)
    clock.now_s += train_s
    meter.wait(under_way)
    assert (meter.counters.overlapped_s, meter.counters.wait_s) == (hidden_s, waited_s)


def test_an_exchange_under_way_has_counted_what_it_sent_first_and_nothing_else() -> None:
    """A worker that resumes from then sends that again, and its count goes on from there."""
    meters = [Metered(t) for t in in_process(2)]
    payloads = [BYTES.expand(5), BYTES.expand(7)]
    started = [
        m.run(reduced(payloads, m.rank, lambda received: BYTES.expand(3)), TAG) for m in meters
    ]
    assert [m.counters.sent_bytes for m in meters] == [7, 5]
    meters[0].wait(started[0])  # carries for both, as the progress thread would
    first, second = (m.counters for m in meters)
    assert (first.sent_bytes, first.received_bytes) == (10, 8)
    assert (second.sent_bytes, second.received_bytes) == (5, 0)
    meters[1].wait(started[1])
    assert (second.sent_bytes, second.received_bytes) == (8, 10)


@pytest.mark.slow_cases("at_once-3")
@pytest.mark.parametrize(
    ("case", "ranks"), [("one_after_another", 2), ("at_once", 2), ("at_once", 3)]
)
def test_many_loops_on_one_group_reach_the_bits_of_one_process(case: str, ranks: int) -> None:
    wanted = "\n".join([*expected(LOOPS, ranks), ""])
    for process in run_ranks(case, ranks):
        assert (process.returncode, process.stdout) == (0, wanted), process.stderr


def payload(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)


@pytest.mark.parametrize("is_there", [False, True])
def test_what_is_sent_from_a_gpu_is_copied_beside_its_work(is_there: bool) -> None:
    store = dist.HashStore()

    def run(rank: int) -> list:
        group = gloo_group(store, rank, 2, host="127.0.0.1", timeout_s=20)
        fake = FakeDevice()
        with fake if is_there and rank == 0 else nullcontext():
            sent = [payload(rank, 7), payload(10 * rank)]
            if is_there and rank == 0:
                fake.hold(*sent)
            posts = [Post({1 - rank: each}, {1 - rank: each.numel()}) for each in sent]
            waits = [GlooMessages(group, n).start(post, 0) for n, post in enumerate(posts, start=1)]
            assert not fake.waits
            if is_there and rank == 0:
                # What is sent is what lay there when it was asked for.
                with pytest.raises(AssertionError, match="another stream is at work on"):
                    sent[0].fill_(99)
            return [received[1 - rank].tolist() for received in (wait() for wait in waits)]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    assert found == [[[1, 7], [10]], [[0, 7], [0]]]


def test_a_peer_that_dies_is_an_error_that_names_the_exchange() -> None:
    survivor, victim = run_ranks("die", 2)
    assert victim.returncode == 9
    assert "ExchangeError cannot exchange fragment 0" in survivor.stdout
    assert "in round 2" in survivor.stdout
