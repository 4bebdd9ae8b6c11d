"""What carries payloads between workers: streams, directly and by way of the relay."""

import contextlib
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic_http import TOKEN, eventually
from thinwire.elastic.carrier import StreamCarrier
from thinwire.elastic.dialer import Dialer, open_stream
from thinwire.elastic.https import RunServer
from thinwire.transport import Post, to_all

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


def begun(links, rank: int, number: int, sent: torch.Tensor, timeout_s: float):
    post = to_all(sent, rank, len(links))
    return links[rank].backend(number, timeout_s=timeout_s).start(post, 0)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_post_is_answered(count: int, copied: bool, monkeypatch) -> None:
    # As payloads on a GPU are, which are on their way to the host while they are asked for.
    monkeypatch.setattr("thinwire.elastic.carrier.lies_on_gpu", lambda _: copied)
    with linked(count) as (links, pool):
        assert {link.workers for link in links} == {count}

        def answer(rank: int, number: int, post: Post) -> list[list[int]]:
            wait = links[rank].backend(number, timeout_s=20).start(post, 0)
            return [row.tolist() for _, row in sorted(wait().items())]

        def gathered(rank: int) -> list[list[int]]:
            return answer(rank, 1, to_all(payload(rank, 7), rank, count))

        def scattered(rank: int) -> list[list[int]]:
            # For each worker a part of another size, and for the last an empty one.
            others = [other for other in range(count) if other != rank]
            parts = {o: payload(*[10 * rank + o] * (count - 1 - o)) for o in others}
            return answer(rank, 2, Post(parts, dict.fromkeys(others, count - 1 - rank)))

        everyone = range(count)
        others = [[other for other in everyone if other != rank] for rank in everyone]
        assert list(pool.map(gathered, everyone)) == [[[o, 7] for o in those] for those in others]
        assert list(pool.map(scattered, everyone)) == [
            [[10 * o + rank] * (count - 1 - rank) for o in those]
            for rank, those in enumerate(others)
        ]


@pytest.mark.parametrize("nbytes", [0, 1, 4097, LARGEST])
def test_messages_of_any_size_arrive_whole_and_in_any_order(nbytes: int) -> None:
    sent = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    with linked(2) as (links, _):
        early = [begun(links, 0, n, sent, 20) for n in (1, 2)]
        late = [begun(links, 1, n, sent, 20) for n in (2, 1)]
        for work in (*early, *late):
            assert all(torch.equal(row, sent) for row in work().values())


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
        waiting = [begun(links, rank, 1, payload(1), 30) for rank in range(2)]
        began_s = time.monotonic()
        links[2].abort()
        for work in waiting:
            with pytest.raises(RuntimeError, match=r"worker \d is gone"):
                work()
        assert time.monotonic() - began_s < 5.0
        with pytest.raises(RuntimeError, match="given up"):
            begun(links, 2, 2, payload(1), 30)()


def test_what_a_worker_sent_before_it_left_is_there_and_what_it_did_not_send_is_missed() -> None:
    with linked(2) as (links, _):
        last, mine = begun(links, 1, 1, payload(5), 5), begun(links, 0, 1, payload(4), 5)
        last()
        links[1].abort()
        assert eventually(lambda: links[0].broken)
        assert mine()[1].tolist() == [5]
    with linked(2) as (links, _):
        large = torch.zeros(LARGEST, dtype=torch.uint8)
        theirs = [begun(links, 1, n, large, 30) for n in range(1, 7)]
        links[0]._unsent[1].put(None)  # its thread ends: nothing more leaves
        time.sleep(0.3)
        mine = begun(links, 0, 1, large, 30)
        began_s = time.monotonic()
        links[1].abort()
        with pytest.raises(RuntimeError, match="gone"):
            mine()
        assert time.monotonic() - began_s < 5
        assert theirs


def test_silence_ends_with_the_timeout_and_what_was_not_asked_for_is_named() -> None:
    with linked(3) as (links, _):
        begun(links, 1, 1, payload(1), 5)
        with pytest.raises(RuntimeError, match=r"timed out: workers \[2\]"):
            begun(links, 0, 1, payload(1), 0.3)()
    with linked(2) as (links, _):
        one = begun(links, 0, 1, payload(1, 2), 5)
        begun(links, 1, 1, payload(1), 5)
        with pytest.raises(RuntimeError, match="worker 1 sent 1 bytes where 2 were expected"):
            one()
    with linked(2) as (links, _):
        one = begun(links, 0, 1, payload(1), 0.3)
        links[1].backend(1, timeout_s=5).start(Post({0: payload(1)}, {}), 1)
        with pytest.raises(RuntimeError, match="timed out"):
            one()
    with linked(2) as (links, _):
        for number in range(10, 20):
            begun(links, 1, number, torch.zeros(LARGEST, dtype=torch.uint8), 5)
        with pytest.raises(RuntimeError, match="more than this worker asked for"):
            begun(links, 0, 1, payload(1), 5)()


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
            link.backend(1, timeout_s=5).start(to_all(payload(1), 0, 2), 0)()
