"""The contract every transport keeps; subclass it and say how to connect yours."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Generic, TypeVar

import pytest
import torch
from torch import Tensor

from thinwire.transport import (
    Metered,
    Post,
    Posts,
    Received,
    Round,
    RoundTag,
    Transport,
    to_all,
)

_TAG = RoundTag(what="a test payload", round=1)

T = TypeVar("T")


def payload_of(rank: int, numel: int) -> Tensor:
    """A uint8 vector [numel] that no other rank has.

    >>> payload_of(1, 3).tolist()
    [1, 8, 15]
    """
    return ((torch.arange(numel) * 7 + rank) % 251).to(torch.uint8)


# -- exchanges that tests run ----------------------------------------------------------------------


def gathered(payload: Tensor, rank: int, workers: int) -> Posts[Sequence[Tensor]]:
    """Every worker's payload, in rank order."""
    by_rank = {rank: payload, **(yield to_all(payload, rank, workers))}
    return lambda: [by_rank[sender] for sender in range(workers)]


def reduced(
    payloads: Sequence[Tensor], rank: int, reduce: Callable[[Sequence[Tensor]], Tensor]
) -> Posts[Sequence[Tensor]]:
    """What every worker made of the payloads that were sent to it, in rank order."""
    received = yield from _scattered(payloads, rank)
    return (yield from gathered(reduce(received), rank, len(payloads)))


def swapped(payload: Tensor, rank: int, peer: int) -> Posts[Tensor]:
    """What `peer` sent."""
    received = yield _to_one(payload, rank, peer)
    return lambda: received.get(peer, payload)


def _to_one(payload: Tensor, rank: int, peer: int) -> Post:
    return Post({}, {}) if peer == rank else Post({peer: payload}, {peer: payload.numel()})


def _scattered(payloads: Sequence[Tensor], rank: int) -> Generator[Post, Received, list[Tensor]]:
    others = [worker for worker in range(len(payloads)) if worker != rank]
    taken = dict.fromkeys(others, payloads[rank].numel())
    received = yield Post({worker: payloads[worker] for worker in others}, taken)
    by_rank = {rank: payloads[rank], **received}
    return [by_rank[worker] for worker in range(len(payloads))]


def neighbours(workers: int, *, first: int) -> list[int]:
    """The peer of each worker: neighbours from worker `first` on swap, and the last may be left.

    >>> neighbours(3, first=1)
    [0, 2, 1]
    """
    order = [(first + place) % workers for place in range(workers)]
    peers = list(range(workers))
    for left, right in zip(order[::2], order[1::2], strict=False):
        peers[left], peers[right] = right, left
    return peers


class _Part(ABC, Generic[T]):
    """One worker's part in an exchange whose outcome is known.

    Args:
        transport: the worker's.
        seed: payloads of two seeds differ.
    """

    def __init__(self, transport: Transport, seed: int) -> None:
        self._seed, self._rank, self._workers = seed, transport.rank, transport.world_size
        self._caller: threading.Thread | None = None
        self.round: Round[T] = transport.run(self._seen_by_caller(self._posts()), _TAG)

    def check(self) -> None:
        """Wait: the outcome is the right one, and the rest of the exchange ran in this thread."""
        self._check(self.round.wait())
        assert self._caller is threading.current_thread()

    @abstractmethod
    def _posts(self) -> Posts[T]: ...

    @abstractmethod
    def _check(self, outcome: T) -> None: ...

    def _seen_by_caller(self, posts: Posts[T]) -> Posts[T]:
        finish = yield from posts

        def seen() -> T:
            self._caller = threading.current_thread()
            return finish()

        return seen


class _Gathering(_Part[Sequence[Tensor]]):
    def _posts(self) -> Posts[Sequence[Tensor]]:
        return gathered(self._payload(self._rank), self._rank, self._workers)

    def _check(self, outcome: Sequence[Tensor]) -> None:
        assert len(outcome) == self._workers
        for rank, payload in enumerate(outcome):
            assert torch.equal(payload.cpu(), self._payload(rank))

    def _payload(self, rank: int) -> Tensor:
        return payload_of(20 * self._seed + rank, 13 + self._seed)


class _Reduction(_Part[Sequence[Tensor]]):
    """What goes to worker j has 37 j bytes, and 0 for j = 0."""

    def _posts(self) -> Posts[Sequence[Tensor]]:
        self._reduced = 0
        payloads = [self._shard(self._rank, to) for to in range(self._workers)]
        return reduced(payloads, self._rank, self._reduce)

    def _check(self, outcome: Sequence[Tensor]) -> None:
        assert len(outcome) == self._workers
        for rank, result in enumerate(outcome):
            assert torch.equal(result.cpu(), self._result(rank))
        assert self._reduced == 1

    def _shard(self, sender: int, to: int) -> Tensor:
        return payload_of(100 * self._seed + 10 * to + sender, 37 * to)

    def _result(self, rank: int) -> Tensor:
        return payload_of(100 * self._seed + 50 + rank, 11)

    def _reduce(self, received: Sequence[Tensor]) -> Tensor:
        assert len(received) == self._workers
        for sender, payload in enumerate(received):
            assert torch.equal(payload.cpu(), self._shard(sender, self._rank))
        self._reduced += 1
        return self._result(self._rank)


class _Swapping(_Part[Tensor]):
    """Pairs may send other sizes than other pairs; with an odd number one worker is left."""

    def _posts(self) -> Posts[Tensor]:
        return swapped(self._payload(self._rank), self._rank, self._peer())

    def _check(self, outcome: Tensor) -> None:
        assert torch.equal(outcome.cpu(), self._payload(self._peer()))

    def _peer(self) -> int:
        return neighbours(self._workers, first=self._seed)[self._rank]

    def _payload(self, rank: int) -> Tensor:
        pair = min(self._rank, self._peer())
        return payload_of(60 * self._seed + rank, 17 + 5 * pair)


class _ThreePosts(_Part[Tensor]):
    """Each post sends what came of the one before."""

    def _posts(self) -> Posts[Tensor]:
        peer = neighbours(self._workers, first=self._seed)[self._rank]
        mine = [self._mine(self._rank).clone() for _ in range(self._workers)]
        received = yield from _scattered(mine, self._rank)
        own = torch.cat([payload.cpu() for payload in received]) + peer
        answer = yield _to_one(own, self._rank, peer)
        finish = yield from gathered(answer.get(peer, own), self._rank, self._workers)
        return lambda: torch.stack([payload.cpu() for payload in finish()])

    def _check(self, outcome: Tensor) -> None:
        everyone = torch.cat([self._mine(rank) for rank in range(self._workers)])
        # The peer of a worker's peer is the worker.
        assert torch.equal(outcome, torch.stack([everyone + r for r in range(self._workers)]))

    def _mine(self, rank: int) -> Tensor:
        return payload_of(30 * self._seed + rank, 3) // 2


_KINDS: Sequence[Callable[[Transport, int], _Part[Sequence[Tensor]] | _Part[Tensor]]] = (
    _Gathering,
    _Reduction,
    _Swapping,
    _ThreePosts,
)


class _ExpectedError(Exception):
    """What an exchange of a test raises."""


def _failing(transport: Transport) -> Posts[None]:
    yield to_all(payload_of(transport.rank, 3), transport.rank, transport.world_size)
    raise _ExpectedError


def _gather(transport: Transport, payload: Tensor) -> Round[Sequence[Tensor]]:
    return transport.run(gathered(payload, transport.rank, transport.world_size), _TAG)


# -- the contract ----------------------------------------------------------------------------------


def check_worker(transport: Transport) -> None:
    """What one worker can see of the contract: run it on all workers, each in its own thread.

    Raises:
        AssertionError: the transport does not keep the contract.
    """
    sizes = (1, 7, 100_003)
    gathers = [_gather(transport, payload_of(transport.rank, n)) for n in sizes]
    parts = [kind(transport, seed) for kind in _KINDS for seed in (1, 2)]
    for part in parts[1::2]:
        part.check()
    for n, gather in zip(sizes, gathers, strict=True):
        for rank, payload in enumerate(gather.wait()):
            assert torch.equal(payload.cpu(), payload_of(rank, n))
    for part in parts[::2]:
        part.check()
    failing = transport.run(_failing(transport), _TAG)
    with pytest.raises(_ExpectedError):
        failing.wait()
    payload = b"x" * transport.rank
    known = transport.announce(payload, _TAG)
    assert known[transport.rank] == payload
    assert all(known[rank] == b"x" * rank for rank in known)
    _check_any_order(transport)


def check_background(transport: Transport, *, within_s: float = 20.0) -> None:
    """What one worker sees of a transport that carries on while training does.

    Exchanges must arrive, all their requests included, before any of them is waited for, and what
    they take until then must count as overlapped.

    Args:
        transport: the worker's.
        within_s: how long a few bytes may take.

    Raises:
        AssertionError: something arrives only when it is waited for.
    """
    meter = Metered(transport)
    parts = [kind(meter, 1) for kind in _KINDS]
    until_s = time.perf_counter() + within_s
    while any(part.round.arrived_s() is None for part in parts):
        assert time.perf_counter() < until_s, "exchanges arrive only when they are waited for"
        time.sleep(0.001)
    trained_s = 0.2
    time.sleep(trained_s)
    arrived_s = [part.round.arrived_s() for part in parts]
    for place in (0, 2, 1, 3):
        parts[place].check()
    assert arrived_s == [part.round.arrived_s() for part in parts]
    assert meter.counters.wait_s < trained_s
    assert 0 < meter.counters.overlapped_s < len(parts) * within_s


def _check_any_order(transport: Transport) -> None:
    """Exchanges of all kinds, in turns, waited for in orders in which they were not started."""
    for order in ((5, 2, 7, 0, 4, 1, 6, 3), (3, 4, 5, 7, 6, 0, 1, 2)):
        begun_s = time.perf_counter()
        parts = [kind(transport, seed) for seed in range(2) for kind in _KINDS]
        for place in order:
            parts[place].check()
            arrived_s = parts[place].round.arrived_s()
            assert arrived_s is not None
            assert begun_s <= arrived_s <= time.perf_counter()


class TransportContract(ABC):
    """Tests for pytest: `class TestMine(TransportContract)` with `connect`.

    The workers share this thread: a transport that needs a process each runs `check_worker` there.
    """

    @abstractmethod
    def connect(self, workers: int) -> Sequence[Transport]:
        """Connected transports, one per worker, in rank order."""

    @pytest.mark.parametrize("workers", [1, 2, 3, 5])
    def test_ranks_and_world(self, workers: int) -> None:
        """Every worker knows its number and how many there are."""
        transports = self.connect(workers)
        assert [t.rank for t in transports] == list(range(workers))
        assert {t.world_size for t in transports} == {workers}

    @pytest.mark.parametrize("workers", [1, 2, 3, 5])
    @pytest.mark.parametrize("numel", [1, 7, 4097])
    def test_all_workers_get_every_payload_in_rank_order(self, workers: int, numel: int) -> None:
        """Bytes arrive as they were sent."""
        transports = self.connect(workers)
        rounds = [_gather(t, payload_of(t.rank, numel)) for t in transports]
        for arrived in [r.wait() for r in rounds]:
            assert len(arrived) == workers
            for rank, payload in enumerate(arrived):
                assert torch.equal(payload, payload_of(rank, numel))

    def test_several_exchanges_in_flight_do_not_mix(self) -> None:
        """Waiting in another order than starting gives each its own payloads."""
        transports = self.connect(2)
        first = [_gather(t, payload_of(t.rank, 5)) for t in transports]
        second = [_gather(t, payload_of(t.rank + 10, 9)) for t in transports]
        late = [r.wait() for r in second]
        early = [r.wait() for r in first]
        assert all(torch.equal(a[1], payload_of(1, 5)) for a in early)
        assert all(torch.equal(a[1], payload_of(11, 9)) for a in late)

    @pytest.mark.parametrize("workers", [1, 2, 3, 5])
    def test_all_workers_get_every_reducers_result_in_rank_order(self, workers: int) -> None:
        """Shards of any size, and none, reach their reducer; results of all come back to all."""
        for reduction in [_Reduction(t, 1) for t in self.connect(workers)]:
            reduction.check()

    @pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
    @pytest.mark.parametrize("first", [0, 1, 2])
    def test_a_swap_gives_each_worker_what_its_peer_sent(self, workers: int, first: int) -> None:
        """A worker without a peer gets its own payload back."""
        for swap in [_Swapping(t, first) for t in self.connect(workers)]:
            swap.check()

    @pytest.mark.parametrize("workers", [1, 2, 3, 5])
    def test_an_exchange_may_ask_three_times(self, workers: int) -> None:
        """What is asked for later depends on what came before."""
        for exchange in [_ThreePosts(t, 1) for t in self.connect(workers)]:
            exchange.check()

    def test_several_reductions_in_flight_do_not_mix(self) -> None:
        """Nor do they with a gather between them."""
        transports = self.connect(3)
        first = [_Reduction(t, 1) for t in transports]
        gathers = [_gather(t, payload_of(t.rank, 5)) for t in transports]
        second = [_Reduction(t, 2) for t in transports]
        for reduction in second + first:
            reduction.check()
        for arrived in [r.wait() for r in gathers]:
            assert all(torch.equal(p, payload_of(r, 5)) for r, p in enumerate(arrived))

    @pytest.mark.parametrize("workers", [1, 2, 3])
    def test_exchanges_of_all_kinds_may_be_waited_for_in_any_order(self, workers: int) -> None:
        """Each worker in the same order, which is not that of the starts."""
        transports = self.connect(workers)
        for order in ((2, 0, 3, 1), (3, 2, 1, 0)):
            started = [[kind(t, seed) for t in transports] for seed, kind in enumerate(_KINDS)]
            for place in order:
                for part in started[place]:
                    part.check()

    @pytest.mark.parametrize("workers", [1, 2, 3])
    def test_an_error_inside_an_exchange_reaches_every_wait(self, workers: int) -> None:
        """It does not come out of `run`, and exchanges after it work."""
        transports = self.connect(workers)
        rounds = [t.run(_failing(t), _TAG) for t in transports]
        after = [_Gathering(t, 1) for t in transports]
        for failing in rounds:
            with pytest.raises(_ExpectedError):
                failing.wait()
        for part in after:
            part.check()

    @pytest.mark.parametrize("workers", [1, 2, 3])
    def test_the_time_of_arrival_is_known_after_the_wait(self, workers: int) -> None:
        """It lies between the start by the last worker and the end of the wait."""
        transports = self.connect(workers)
        early = [_gather(t, payload_of(t.rank, 5)) for t in transports[:-1]]
        assert all(r.arrived_s() is None for r in early)
        begun_s = time.perf_counter()
        rounds = [*early, _gather(transports[-1], payload_of(workers - 1, 5))]
        parts = [kind(t, 1) for kind in _KINDS for t in transports]
        for gather in rounds:
            gather.wait()
        for part in parts:
            part.check()
        ended_s = time.perf_counter()
        for arrived_s in [*(r.arrived_s() for r in rounds), *(p.round.arrived_s() for p in parts)]:
            assert arrived_s is not None
            assert begun_s <= arrived_s <= ended_s

    def test_announcements_reach_workers_that_come_later(self) -> None:
        """The last worker to announce itself knows all cards."""
        transports = self.connect(3)
        known = [t.announce(f"card {t.rank}".encode(), _TAG) for t in transports]
        assert known[-1] == {rank: f"card {rank}".encode() for rank in range(3)}
