"""What carries payloads between workers: streams, directly and by way of the relay."""

import contextlib
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic_http import TOKEN
from thinwire.elastic.carrier import StreamCarrier
from thinwire.elastic.dialer import Dialer, open_stream
from thinwire.elastic.https import RunServer
from thinwire.transport import AllGather, AllToAll, Swap

LARGEST = 1 << 20


@contextlib.contextmanager
def workers(count: int) -> Iterator[tuple[list[StreamCarrier], list[str]]]:
    with contextlib.ExitStack() as opened:
        carriers, addresses = [], []
        for _ in range(count):
            dialer = Dialer(TOKEN)
            carrier = StreamCarrier(
                lambda address, target, s, dialer=dialer: open_stream(
                    dialer, address, target, timeout_s=s
                ),
                largest_nbytes=LARGEST,
            )
            server = RunServer(TOKEN, {}, host="127.0.0.1", tunnels={"payload": carrier.accept})
            opened.callback(server.close)
            opened.callback(carrier.close)
            carriers.append(carrier)
            addresses.append(f"127.0.0.1:{server.port}")
        yield carriers, addresses


@contextlib.contextmanager
def linked(count: int):
    with workers(count) as (carriers, addresses), ThreadPoolExecutor(count) as pool:

        def connect(rank: int):
            return carriers[rank].connect(addresses, key="k/0", rank=rank, timeout_s=20.0)

        yield list(pool.map(connect, range(count))), pool


def payload(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_request_is_answered_as_it_is_asked(count: int, copied: bool, monkeypatch) -> None:
    # As payloads on a GPU are, which are on their way to the host while they are asked for.
    monkeypatch.setattr("thinwire.elastic.carrier.lies_on_gpu", lambda _: copied)
    with linked(count) as (links, pool):
        assert {link.workers for link in links} == {count}

        def gathered(rank: int) -> list[list[int]]:
            work = links[rank].backend(1, timeout_s=20).start(AllGather(payload(rank, 7)), 0)
            return [row.tolist() for row in work.wait()]

        def scattered(rank: int) -> list[list[int]]:
            # For each worker a part of another size, and for the last an empty one.
            parts = [payload(*[10 * rank + other] * (count - 1 - other)) for other in range(count)]
            work = links[rank].backend(2, timeout_s=20).start(AllToAll(parts), 0)
            return [row.tolist() for row in work.wait()]

        def swapped(rank: int) -> list[int]:
            peer = rank ^ 1 if rank ^ 1 < count else rank
            request = Swap(payload(rank), peer)
            return links[rank].backend(3, timeout_s=20).start(request, 0).wait().tolist()

        everyone = range(count)
        assert list(pool.map(gathered, everyone)) == [[[rank, 7] for rank in everyone]] * count
        assert list(pool.map(scattered, everyone)) == [
            [[10 * other + rank] * (count - 1 - rank) for other in everyone] for rank in everyone
        ]
        assert list(pool.map(swapped, everyone)) == [
            [rank ^ 1 if rank ^ 1 < count else rank] for rank in everyone
        ]


@pytest.mark.parametrize("nbytes", [0, 1, 4097, LARGEST])
def test_messages_of_any_size_arrive_whole_and_in_any_order(nbytes: int) -> None:
    sent = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    with linked(2) as (links, _):
        early = [links[0].backend(n, timeout_s=20).start(AllGather(sent), 0) for n in (1, 2)]
        late = [links[1].backend(n, timeout_s=20).start(AllGather(sent), 0) for n in (2, 1)]
        for work in (*early, *late):
            assert all(torch.equal(row, sent) for row in work.wait())


def test_a_worker_that_does_not_come_is_waited_for_no_longer_than_the_timeout() -> None:
    with workers(2) as (carriers, addresses):
        began_s = time.monotonic()
        with pytest.raises(RuntimeError, match=r"workers \[1\] did not connect .* in 0.5 s"):
            carriers[0].connect(addresses, key="k", rank=0, timeout_s=0.5)
        with pytest.raises(RuntimeError, match=r"the worker at 127.0.0.1:1 was not reached"):
            carriers[0].connect([addresses[0], "127.0.0.1:1"], key="k", rank=0, timeout_s=0.5)
        assert 0.9 <= time.monotonic() - began_s < 5.0


def test_the_end_of_one_is_noticed_by_the_others_at_once() -> None:
    with linked(3) as (links, _):
        waiting = [
            link.backend(1, timeout_s=30).start(AllGather(payload(1)), 0) for link in links[:2]
        ]
        began_s = time.monotonic()
        links[2].abort()
        for work in waiting:
            with pytest.raises(RuntimeError, match=r"worker \d is gone"):
                work.wait()
        assert time.monotonic() - began_s < 5.0
        with pytest.raises(RuntimeError, match="given up"):
            links[2].backend(2, timeout_s=30).start(AllGather(payload(1)), 0).wait()


def test_what_a_worker_sent_before_it_left_is_there() -> None:
    with linked(2) as (links, _):
        last = links[1].backend(1, timeout_s=5).start(AllGather(payload(5)), 0)
        mine = links[0].backend(1, timeout_s=5).start(AllGather(payload(4)), 0)
        last.wait()
        links[1].abort()
        deadline_s = time.monotonic() + 5
        while not links[0].broken:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert [row.tolist() for row in mine.wait()] == [[4], [5]]


def test_what_was_not_sent_before_a_worker_left_is_noticed_at_once() -> None:
    with linked(2) as (links, _):
        large = torch.zeros(LARGEST, dtype=torch.uint8)
        theirs = [links[1].backend(n, timeout_s=30).start(AllGather(large), 0) for n in range(1, 7)]
        links[0]._unsent[1].put(None)  # its thread ends: nothing more leaves
        time.sleep(0.3)
        mine = links[0].backend(1, timeout_s=30).start(AllGather(large), 0)
        began_s = time.monotonic()
        links[1].abort()
        with pytest.raises(RuntimeError, match="gone"):
            mine.wait()
        assert time.monotonic() - began_s < 5
        assert theirs


def test_silence_ends_with_the_timeout_and_names_who_is_silent() -> None:
    with linked(3) as (links, _):
        links[1].backend(1, timeout_s=5).start(AllGather(payload(1)), 0)
        with pytest.raises(RuntimeError, match=r"timed out: workers \[2\]"):
            links[0].backend(1, timeout_s=0.3).start(AllGather(payload(1)), 0).wait()


def test_workers_that_ask_for_different_things_are_told() -> None:
    with linked(2) as (links, _):
        one = links[0].backend(1, timeout_s=5).start(AllGather(payload(1, 2)), 0)
        links[1].backend(1, timeout_s=5).start(AllGather(payload(1)), 0)
        with pytest.raises(RuntimeError, match="worker 1 sent 1 bytes where 2 were expected"):
            one.wait()
    with linked(2) as (links, _):
        one = links[0].backend(1, timeout_s=0.3).start(AllGather(payload(1)), 0)
        links[1].backend(1, timeout_s=5).start(Swap(payload(1), 0), 0)
        with pytest.raises(RuntimeError, match="timed out"):
            one.wait()


@pytest.mark.parametrize(
    ("head", "because"),
    [
        (struct.pack("<QB3sQ", 1, 0, b"all", LARGEST + 1), "at most 1048576 are taken"),
        (struct.pack("<QB3sQ", 1, 0, b"all", 5) + b"abc", "hung up"),
    ],
)
def test_a_member_that_sends_what_is_no_message_ends_the_link(head: bytes, because: str) -> None:
    with workers(2) as (carriers, addresses):
        stream = open_stream(Dialer(TOKEN), addresses[0], "payload/k/1", timeout_s=5)
        link = carriers[0].connect(addresses, key="k", rank=0, timeout_s=5)
        stream.sendall(head)
        stream.close()
        with pytest.raises(RuntimeError, match=because):
            link.backend(1, timeout_s=5).start(AllGather(payload(1)), 0).wait()


def test_a_member_that_sends_more_than_it_was_asked_for_ends_the_link() -> None:
    with linked(2) as (links, _):
        for number in range(10, 20):
            links[1].backend(number, timeout_s=5).start(AllGather(torch.zeros(LARGEST).byte()), 0)
        with pytest.raises(RuntimeError, match="more than this worker asked for"):
            links[0].backend(1, timeout_s=5).start(AllGather(payload(1)), 0).wait()
