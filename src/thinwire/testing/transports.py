"""The contract every transport keeps; subclass it and say how to connect yours."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from thinwire.transport import Label, Transport

__all__ = ["TransportContract", "payload_of"]

_LABEL = Label(what="a test payload", round=1)


def payload_of(rank: int, numel: int) -> Tensor:
    """A uint8 vector [numel] that no other rank has.

    >>> payload_of(1, 3).tolist()
    [1, 8, 15]
    """
    return ((torch.arange(numel) * 7 + rank) % 251).to(torch.uint8)


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

    def test_cards_reach_those_who_come_later(self) -> None:
        """The last worker to introduce itself knows everybody."""
        transports = self.connect(3)
        known = [t.introduce(f"card {t.rank}".encode()) for t in transports]
        assert known[-1] == {rank: f"card {rank}".encode() for rank in range(3)}
