"""Tests that every transport must pass: subclass `TransportContract` and connect yours."""

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from thinwire.exchange.state import peers_of
from thinwire.transport import Post, Posts, RoundTag, Transport
from thinwire.transport.base import Received, Round, to_all

_TAG = RoundTag(what="a test payload", round=1)


def payload_of(rank: int, numel: int) -> Tensor:
    """A uint8 vector [numel] that differs from those of other ranks.

    >>> payload_of(1, 3).tolist()
    [1, 8, 15]
    """
    return ((torch.arange(numel) * 7 + rank) % 251).to(torch.uint8)


# -- exchanges that tests run ----------------------------------------------------------------------


def gathered(payload: Tensor, rank: int, workers: int) -> Posts[list[Tensor]]:
    """Every worker's payload, in rank order."""
    by_rank = {rank: payload, **(yield to_all(payload, rank, workers))}
    return lambda: [by_rank[sender] for sender in range(workers)]


def scattered(payloads: Sequence[Tensor], rank: int) -> Generator[Post, Received, list[Tensor]]:
    """All workers' payloads for this one, in rank order."""
    workers = range(len(payloads))
    others = [worker for worker in workers if worker != rank]
    taken = dict.fromkeys(others, payloads[rank].numel())
    received = yield Post({worker: payloads[worker] for worker in others}, taken)
    by_rank = {rank: payloads[rank], **received}
    return [by_rank[worker] for worker in workers]


def swapped(payload: Tensor, rank: int, peer: int) -> Posts[Tensor]:
    """The payload of `peer`; a worker that is its own peer keeps its payload."""
    is_alone = peer == rank
    post = Post({}, {}) if is_alone else Post({peer: payload}, {peer: payload.numel()})
    theirs = (yield post).get(peer, payload)
    return lambda: theirs


Kind: TypeAlias = Callable[[int, int, int], Posts[threading.Thread]]
"""Takes (rank, workers, seed); the exchange returns the thread in which it ended."""


def _ended(arrived: Sequence[Tensor], wanted: Iterable[Tensor]) -> threading.Thread:
    for one, other in zip(arrived, wanted, strict=True):
        assert torch.equal(one.cpu(), other)
    return threading.current_thread()


def _gathering(rank: int, workers: int, seed: int) -> Posts[threading.Thread]:
    wanted = [payload_of(20 * seed + sender, 13 + seed) for sender in range(workers)]
    finish = yield from gathered(wanted[rank], rank, workers)
    return lambda: _ended(finish(), wanted)


def _reduction(rank: int, workers: int, seed: int) -> Posts[threading.Thread]:
    """The message to worker j has 37 j bytes."""

    def shard(sender: int, to: int) -> Tensor:
        return payload_of(100 * seed + 10 * to + sender, 37 * to)

    wanted = [payload_of(100 * seed + 50 + owner, 11) for owner in range(workers)]
    received = yield from scattered([shard(rank, to) for to in range(workers)], rank)
    _ended(received, [shard(sender, rank) for sender in range(workers)])
    finish = yield from gathered(wanted[rank], rank, workers)
    return lambda: _ended(finish(), wanted)


def _swapping(rank: int, workers: int, seed: int) -> Posts[threading.Thread]:
    """Pairs may differ in the sizes they send; an odd number leaves one worker alone."""
    peer = peers_of(workers, round=seed, seed=0)[rank]
    nbytes = 17 + 5 * min(rank, peer)
    finish = yield from swapped(payload_of(60 * seed + rank, nbytes), rank, peer)
    return lambda: _ended([finish()], [payload_of(60 * seed + peer, nbytes)])


def _three_posts(rank: int, workers: int, seed: int) -> Posts[threading.Thread]:
    """Each post sends what the one before it received."""
    mine = [payload_of(30 * seed + sender, 3) // 2 for sender in range(workers)]
    peer = peers_of(workers, round=seed, seed=0)[rank]
    received = yield from scattered([mine[rank].clone() for _ in range(workers)], rank)
    own = torch.cat([each.cpu() for each in received]) + peer
    theirs = yield from swapped(own, rank, peer)
    finish = yield from gathered(theirs(), rank, workers)
    # The peer of a worker's peer is the worker.
    return lambda: _ended(finish(), [torch.cat(mine) + owner for owner in range(workers)])


KINDS: Sequence[Kind] = (_gathering, _reduction, _swapping, _three_posts)
"""Exchanges that check their own answers."""
_ORDERS = ((5, 2, 7, 0, 4, 1, 6, 3), (3, 4, 5, 7, 6, 0, 1, 2))
"""Orders of waits for two exchanges of each kind, which differ from the order of starts."""


def _failing(transport: Transport) -> Posts[None]:
    yield to_all(payload_of(transport.rank, 3), transport.rank, transport.world_size)
    raise LookupError("what an exchange of a test raises")


def _begun(kind: Kind, transport: Transport, seed: int) -> Round[threading.Thread]:
    """An exchange that checks its own answers; payloads of two seeds differ."""
    return transport.run(kind(transport.rank, transport.world_size, seed), _TAG)


def _check(part: Round[threading.Thread]) -> None:
    """Wait, and check that the exchange ended in this thread; it has checked its answers."""
    assert part.wait() is threading.current_thread()


# -- the contract ----------------------------------------------------------------------------------


def check_worker(transport: Transport) -> None:
    """The part of the contract that one worker can check; run it on all workers, in threads.

    Raises:
        AssertionError: the transport breaks the contract.
    """
    sizes, rank, workers = (1, 7, 100_003), transport.rank, transport.world_size
    gathers = [transport.run(gathered(payload_of(rank, n), rank, workers), _TAG) for n in sizes]
    parts = [_begun(kind, transport, seed) for kind in KINDS for seed in (1, 2)]
    for part in parts[1::2]:
        _check(part)
    for n, gather in zip(sizes, gathers, strict=True):
        for sender, payload in enumerate(gather.wait()):
            assert torch.equal(payload.cpu(), payload_of(sender, n))
    for part in parts[::2]:
        _check(part)
    failing = transport.run(_failing(transport), _TAG)
    with pytest.raises(LookupError, match="of a test"):
        failing.wait()
    known = transport.announce(b"x" * rank, _TAG)
    assert known[rank] == b"x" * rank
    assert all(known[sender] == b"x" * sender for sender in known)
    for order in _ORDERS:
        parts = [_begun(kind, transport, s) for s, kind in itertools.product(range(2), KINDS)]
        for place in order:
            _check(parts[place])


class TransportContract(ABC):
    """Tests for pytest: `class TestMine(TransportContract)` with `connect`.

    Each worker is a thread. A transport whose workers must be processes runs `check_worker` there.
    """

    @abstractmethod
    def connect(self, workers: int) -> Sequence[Transport]:
        """Connected transports, one per worker, in rank order."""

    @pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
    def test_workers_keep_the_contract(self, workers: int) -> None:
        """Bytes arrive as sent, in any order of waits, and errors reach every wait."""
        transports = self.connect(workers)
        assert [t.rank for t in transports] == list(range(workers))
        assert {t.world_size for t in transports} == {workers}
        with ThreadPoolExecutor(workers) as threads:
            list(threads.map(check_worker, transports))

    def test_announcements_reach_workers_that_come_later(self) -> None:
        """The last worker to announce itself knows everyone's card."""
        known = [t.announce(f"card {t.rank}".encode(), _TAG) for t in self.connect(3)]
        assert known[-1] == {rank: f"card {rank}".encode() for rank in range(3)}
