"""The contract every transport keeps; subclass it and say how to connect yours."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import pytest
import torch
from torch import Tensor

from thinwire.transport import Label, Transport

__all__ = ["TransportContract", "check_worker", "payload_of"]

_LABEL = Label(what="a test payload", round=1)


def payload_of(rank: int, numel: int) -> Tensor:
    """A uint8 vector [numel] that no other rank has.

    >>> payload_of(1, 3).tolist()
    [1, 8, 15]
    """
    return ((torch.arange(numel) * 7 + rank) % 251).to(torch.uint8)


def check_worker(transport: Transport) -> None:
    """What one worker can see of the contract: run it on all workers, each in its own thread.

    Raises:
        AssertionError: the transport does not keep the contract.
    """
    gathers = [transport.start(payload_of(transport.rank, n), _LABEL) for n in (1, 7, 100_003)]
    reduces = [_Reduction(transport, seed) for seed in (1, 2)]
    reduces[1].check()
    for n, pending in zip((1, 7, 100_003), gathers, strict=True):
        for rank, payload in enumerate(pending.wait()):
            assert torch.equal(payload, payload_of(rank, n))
    reduces[0].check()
    card = b"x" * transport.rank
    known = transport.introduce(card)
    assert known[transport.rank] == card
    assert all(known[rank] == b"x" * rank for rank in known)


@final
class _Reduction:
    """One worker's part in a `start_reduce`: what goes to worker j has 37 j bytes, and 0 for j = 0.

    Args:
        transport: the worker's.
        seed: payloads of two seeds differ.
    """

    def __init__(self, transport: Transport, seed: int) -> None:
        self._transport, self._seed, self._reduced = transport, seed, 0
        payloads = [self._shard(transport.rank, to) for to in range(transport.world_size)]
        self._pending = transport.start_reduce(payloads, self._reduce, _LABEL)

    def check(self) -> None:
        """Wait: every reducer's result is there in rank order, and mine was made once."""
        results = self._pending.wait()
        assert len(results) == self._transport.world_size
        for rank, result in enumerate(results):
            assert torch.equal(result, self._result(rank))
        assert self._reduced == 1

    def _shard(self, sender: int, to: int) -> Tensor:
        return payload_of(100 * self._seed + 10 * to + sender, 37 * to)

    def _result(self, rank: int) -> Tensor:
        return payload_of(100 * self._seed + 50 + rank, 11)

    def _reduce(self, received: Sequence[Tensor]) -> Tensor:
        mine = self._transport.rank
        assert len(received) == self._transport.world_size
        for sender, payload in enumerate(received):
            assert torch.equal(payload, self._shard(sender, mine))
        self._reduced += 1
        return self._result(mine)


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
    def test_everybody_gets_every_payload_in_rank_order(self, workers: int, numel: int) -> None:
        """Bytes arrive as they were sent."""
        transports = self.connect(workers)
        pending = [t.start(payload_of(t.rank, numel), _LABEL) for t in transports]
        for arrived in [p.wait() for p in pending]:
            assert len(arrived) == workers
            for rank, payload in enumerate(arrived):
                assert torch.equal(payload, payload_of(rank, numel))

    def test_several_exchanges_in_flight_do_not_mix(self) -> None:
        """Waiting in another order than starting gives each its own payloads."""
        transports = self.connect(2)
        first = [t.start(payload_of(t.rank, 5), _LABEL) for t in transports]
        second = [t.start(payload_of(t.rank + 10, 9), _LABEL) for t in transports]
        late = [p.wait() for p in second]
        early = [p.wait() for p in first]
        assert all(torch.equal(a[1], payload_of(1, 5)) for a in early)
        assert all(torch.equal(a[1], payload_of(11, 9)) for a in late)

    @pytest.mark.parametrize("workers", [1, 2, 3, 5])
    def test_everybody_gets_every_reducers_result_in_rank_order(self, workers: int) -> None:
        """Shards of any size, and none, reach their reducer; results of all come back to all."""
        for reduction in [_Reduction(t, 1) for t in self.connect(workers)]:
            reduction.check()

    def test_several_reductions_in_flight_do_not_mix(self) -> None:
        """Nor do they with a gather between them."""
        transports = self.connect(3)
        first = [_Reduction(t, 1) for t in transports]
        gathered = [t.start(payload_of(t.rank, 5), _LABEL) for t in transports]
        second = [_Reduction(t, 2) for t in transports]
        for reduction in second + first:
            reduction.check()
        for arrived in [p.wait() for p in gathered]:
            assert all(torch.equal(p, payload_of(r, 5)) for r, p in enumerate(arrived))

    def test_cards_reach_those_who_come_later(self) -> None:
        """The last worker to introduce itself knows everybody."""
        transports = self.connect(3)
        known = [t.introduce(f"card {t.rank}".encode()) for t in transports]
        assert known[-1] == {rank: f"card {rank}".encode() for rank in range(3)}
