"""A transport that counts what another one carries."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from torch import Tensor

from thinwire.elastic.shared_state import RoundRecord, SharedState
from thinwire.rejection import Rejection
from thinwire.transport.base import (
    Inspect,
    Label,
    Pending,
    Phase,
    Reduce,
    RoundPlan,
    Transport,
    accept_all,
)

__all__ = ["Metered", "TransportCounters"]


@final
@dataclass(kw_only=True, slots=True)  # state: counters
class TransportCounters:
    """What went over a transport.

    `sent_bytes` counts a payload once, as this worker hands it over; whether it then crosses the
    wire once (a pair, an object store) or K-1 times (a ring) is the transport's affair.

        wait_s        seconds that the worker stood still in `Pending.wait` and `Transport.convene`
        overlapped_s  seconds that exchanges travelled while the worker did something else: from
                      their start until they had arrived or were waited for, whichever came first
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    wait_s: float = 0.0
    overlapped_s: float = 0.0

    def restore(self, saved: Mapping[str, float]) -> None:
        """Count on from `saved`; what is under way counts into this very object."""
        for counter, value in saved.items():
            setattr(self, counter, value)

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Count the seconds inside as waited, however it ends."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.wait_s += time.perf_counter() - started_s


@final
class _MeteredPending(Pending):
    """Counts in the thread that waits: a reduction may run in another one."""

    def __init__(
        self, inner: Pending, traffic: TransportCounters, rank: int, halfway: TransportCounters
    ) -> None:
        self._inner, self._traffic, self._rank = inner, traffic, rank
        self._halfway = halfway  # what a reduction received and sent between its halves
        self._started_s = time.perf_counter()

    def wait(self) -> list[Tensor]:
        waiting_s = time.perf_counter()
        with self._traffic.waiting():
            payloads = self._inner.wait()
        self._traffic.overlapped_s += self._hidden_s(waiting_s)
        others = (p for rank, p in enumerate(payloads) if rank != self._rank)
        self._traffic.received_bytes += sum(_nbytes(p) for p in others)
        self._traffic.received_bytes += self._halfway.received_bytes
        self._traffic.sent_bytes += self._halfway.sent_bytes
        overhead = self._inner.overhead_nbytes()
        self._traffic.sent_bytes += overhead
        self._traffic.received_bytes += overhead * (len(payloads) - 1)
        return payloads

    def left_out(self) -> Mapping[int, Rejection]:
        return self._inner.left_out()

    def overhead_nbytes(self) -> int:
        return self._inner.overhead_nbytes()

    def arrived_s(self) -> float | None:
        return self._inner.arrived_s()

    def _hidden_s(self, waiting_s: float) -> float:
        arrived_s = self._inner.arrived_s()
        until_s = waiting_s if arrived_s is None else min(arrived_s, waiting_s)
        return max(0.0, until_s - self._started_s)


@final
class Metered(Transport):
    """Wraps a transport and counts bytes and seconds in `traffic`.

    >>> from thinwire.transport import in_process
    >>> import torch
    >>> meter = Metered(in_process(2)[0])
    >>> _ = meter.start(torch.zeros(7, dtype=torch.uint8), Label(what="x", round=1))
    >>> meter.traffic.sent_bytes, meter.traffic.received_bytes
    (7, 0)
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.traffic = TransportCounters()

    @property
    def rank(self) -> int:
        """The wrapped transport's rank."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """The wrapped transport's world size."""
        return self._inner.world_size

    def introduce(self, card: bytes) -> dict[int, bytes]:
        """Introductions happen once, before training, and are not counted."""
        return self._inner.introduce(card)

    @property
    def forgiving(self) -> bool:
        """The wrapped transport's."""
        return self._inner.forgiving

    @property
    def norm_limit(self) -> float:
        """The wrapped transport's."""
        return self._inner.norm_limit

    def convene(self, ward: SharedState, occasion: Phase) -> RoundPlan | None:
        """Count the seconds it takes as waited; what healing costs is no payload."""
        with self.traffic.waiting():
            return self._inner.convene(ward, occasion)

    def remember(self, record: Callable[[], RoundRecord]) -> None:
        """The wrapped transport remembers."""
        self._inner.remember(record)

    def leave(self) -> None:
        """The wrapped transport leaves."""
        self._inner.leave()

    def start(self, payload: Tensor, label: Label, inspect: Inspect = accept_all) -> Pending:
        """Count `payload` as sent and start it."""
        self._count_sent(payload)
        return self._metered(self._inner.start(payload, label, inspect), TransportCounters())

    def start_reduce(
        self,
        payloads: Sequence[Tensor],
        reduce: Reduce,
        label: Label,
        inspect: Inspect = accept_all,
    ) -> Pending:
        """Count what goes to and comes from others, and the result as sent once."""
        halfway = TransportCounters()
        for worker, payload in enumerate(payloads):
            if worker != self.rank:
                self._count_sent(payload)

        def counted(received: Sequence[Tensor]) -> Tensor:
            others = (p for worker, p in enumerate(received) if worker != self.rank)
            halfway.received_bytes = sum(_nbytes(p) for p in others)
            result = reduce(received)
            halfway.sent_bytes = _nbytes(result) if self.world_size > 1 else 0
            return result

        return self._metered(self._inner.start_reduce(payloads, counted, label, inspect), halfway)

    def _metered(self, pending: Pending, halfway: TransportCounters) -> Pending:
        return _MeteredPending(pending, self.traffic, self.rank, halfway)

    def _count_sent(self, payload: Tensor) -> None:
        # A lone worker has nobody to send to.
        if self.world_size > 1:
            self.traffic.sent_bytes += _nbytes(payload)


def _nbytes(payload: Tensor) -> int:
    return payload.numel() * payload.element_size()
