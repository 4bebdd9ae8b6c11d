"""The contract every transport keeps; subclass it and say how to connect yours."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import pytest
import torch
from torch import Tensor

from thinwire.transport import Label, Metered, Transport

__all__ = ["TransportContract", "check_background", "check_worker", "payload_of"]

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
            assert torch.equal(payload.cpu(), payload_of(rank, n))
    reduces[0].check()
    card = b"x" * transport.rank
    known = transport.introduce(card)
    assert known[transport.rank] == card
    assert all(known[rank] == b"x" * rank for rank in known)
    _check_any_order(transport)


def check_background(transport: Transport, *, within_s: float = 20.0) -> None:
    """What one worker sees of a transport that carries on while training does.

    Exchanges must arrive, second halves of reductions included, before anybody waits for them, and
    what they take until then must count as overlapped.

    Args:
        transport: the worker's.
        within_s: how long a few bytes may take.

    Raises:
        AssertionError: something arrives only when it is waited for.
    """
    meter = Metered(transport)
    reduction, later = _Reduction(meter, 1), _Reduction(meter, 2)
    gathered = meter.start(payload_of(meter.rank, 7), _LABEL)
    until_s = time.perf_counter() + within_s
    pendings = [gathered, later.pending, reduction.pending]
    while any(pending.arrived_s() is None for pending in pendings):
        assert time.perf_counter() < until_s, "exchanges do not arrive unless somebody waits"
        time.sleep(0.001)
    trained_s = 0.2
    time.sleep(trained_s)
    arrived_s = [pending.arrived_s() for pending in pendings]
    for check in (gathered.wait, later.check, reduction.check):
        check()
    assert arrived_s == [pending.arrived_s() for pending in pendings]
    assert meter.traffic.wait_s < trained_s
    assert 0 < meter.traffic.overlapped_s < 3 * within_s


def _check_any_order(transport: Transport) -> None:
    """Exchanges of both kinds, in turns, waited for in orders in which they were not started."""
    for order in ((5, 2, 0, 4, 1, 3), (3, 4, 5, 0, 1, 2)):
        begun_s = time.perf_counter()
        exchanges = [
            kind(transport, seed) for seed in range(3) for kind in (_Gathering, _Reduction)
        ]
        for i in order:
            exchanges[i].check()
            arrived_s = exchanges[i].pending.arrived_s()
            assert arrived_s is not None
            assert begun_s <= arrived_s <= time.perf_counter()


@final
class _Gathering:
    """One worker's part in a `start`."""

    def __init__(self, transport: Transport, seed: int) -> None:
        self._seed, self._numel = seed, 13 + seed
        self.pending = transport.start(self._payload(transport.rank), _LABEL)

    def check(self) -> None:
        """Wait: every worker's payload is there."""
        for rank, payload in enumerate(self.pending.wait()):
            assert torch.equal(payload.cpu(), self._payload(rank))

    def _payload(self, rank: int) -> Tensor:
        return payload_of(20 * self._seed + rank, self._numel)


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
        self.pending = transport.start_reduce(payloads, self._reduce, _LABEL)

    def check(self) -> None:
        """Wait: every reducer's result is there in rank order, and mine was made once."""
        results = self.pending.wait()
        assert len(results) == self._transport.world_size
        for rank, result in enumerate(results):
            assert torch.equal(result.cpu(), self._result(rank))
        assert self._reduced == 1

    def _shard(self, sender: int, to: int) -> Tensor:
        return payload_of(100 * self._seed + 10 * to + sender, 37 * to)

    def _result(self, rank: int) -> Tensor:
        return payload_of(100 * self._seed + 50 + rank, 11)

    def _reduce(self, received: Sequence[Tensor]) -> Tensor:
        mine = self._transport.rank
        assert len(received) == self._transport.world_size
        for sender, payload in enumerate(received):
            assert torch.equal(payload.cpu(), self._shard(sender, mine))
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

    @pytest.mark.parametrize("workers", [1, 2, 3])
    def test_the_time_of_arrival_is_known_after_the_wait(self, workers: int) -> None:
        """It lies between the start by the last worker and the end of the wait."""
        transports = self.connect(workers)
        early = [t.start(payload_of(t.rank, 5), _LABEL) for t in transports[:-1]]
        assert all(pending.arrived_s() is None for pending in early)
        begun_s = time.perf_counter()
        pending = [*early, transports[-1].start(payload_of(workers - 1, 5), _LABEL)]
        reductions = [_Reduction(t, 1) for t in transports]
        for exchange in pending:
            exchange.wait()
        for reduction in reductions:
            reduction.check()
        ended_s = time.perf_counter()
        for exchange in [*pending, *(reduction.pending for reduction in reductions)]:
            arrived_s = exchange.arrived_s()
            assert arrived_s is not None
            assert begun_s <= arrived_s <= ended_s

    def test_cards_reach_those_who_come_later(self) -> None:
        """The last worker to introduce itself knows everybody."""
        transports = self.connect(3)
        known = [t.introduce(f"card {t.rank}".encode()) for t in transports]
        assert known[-1] == {rank: f"card {rank}".encode() for rank in range(3)}
