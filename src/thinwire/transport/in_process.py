"""K workers in one process: the twin of the real network, exact and without one."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, final

from torch import Tensor

from thinwire.errors import ConfigurationError, ExchangeError, ExchangeTimeout
from thinwire.transport.base import Inspect, Label, Pending, Reduce, Transport, accept_all

__all__ = ["in_process"]


T = TypeVar("T")


@final
class _Slot(Generic[T]):
    """What the workers bring to one exchange, and what was made of it."""

    def __init__(self) -> None:
        self.brought: dict[int, T] = {}
        self.complete_s: float | None = None
        self.made: list[Tensor] | None = None


@final
class _Hub:
    """Where the workers meet: exchange n of each worker goes to slot n."""

    def __init__(self, workers: int, timeout_s: float) -> None:
        self.workers = workers
        self.timeout_s = timeout_s
        self.arrived = threading.Condition()
        self.cards: dict[int, bytes] = {}
        self.slots: dict[int, _Slot[Any]] = {}

    def put(self, slot: int, rank: int, brought: object) -> _Slot[Any]:
        with self.arrived:
            meeting = self.slots.setdefault(slot, _Slot())
            meeting.brought[rank] = brought
            if len(meeting.brought) == self.workers:
                meeting.complete_s = time.perf_counter()
                # Those who came hold on to it; nobody else will ask.
                del self.slots[slot]
            self.arrived.notify_all()
            return meeting

    def take(
        self, meeting: _Slot[Any], label: Label, make: Callable[[list[Any]], list[Tensor]]
    ) -> list[Tensor]:
        """What is made of the things brought to a slot, by the first who finds them all there."""
        with self.arrived:
            brought = meeting.brought
            if not self.arrived.wait_for(lambda: len(brought) == self.workers, self.timeout_s):
                raise self._missing(brought, label)
            if meeting.made is None:
                meeting.made = make([brought[rank] for rank in range(self.workers)])
            return meeting.made

    def _missing(self, brought: dict[int, Any], label: Label) -> ExchangeTimeout:
        missing = [str(rank) for rank in range(self.workers) if rank not in brought]
        return ExchangeTimeout(
            f"exchange {label}",
            because=f"worker {', '.join(missing)} of {self.workers} has not sent it"
            + (f" within {self.timeout_s:g} s" if self.timeout_s else ""),
            do="call begin() on all workers and then finish() on all, or give each worker a thread "
            "and in_process() a timeout_s",
        )


@final
class _Arrival(Pending):
    def __init__(
        self,
        hub: _Hub,
        meeting: _Slot[Any],
        label: Label,
        make: Callable[[list[Any]], list[Tensor]],
    ) -> None:
        self._hub, self._meeting, self._label, self._make = hub, meeting, label, make

    def wait(self) -> list[Tensor]:
        payloads = self._hub.take(self._meeting, self._label, self._make)
        sizes = [payload.numel() for payload in payloads]
        if len(set(sizes)) > 1:
            raise ExchangeError(
                f"exchange {self._label}",
                because=f"the workers sent payloads of {sizes} bytes",
                do="give all workers the same model and method",
            )
        return payloads

    def arrived_s(self) -> float | None:
        return self._meeting.complete_s


def _as_brought(payloads: list[Tensor]) -> list[Tensor]:
    return payloads


def _reduced(brought: list[tuple[Sequence[Tensor], Reduce]]) -> list[Tensor]:
    """Every worker's result; one thread makes them all, for nobody else may come by."""
    shards = zip(*(payloads for payloads, _ in brought), strict=True)
    return [reduce(mine) for (_, reduce), mine in zip(brought, shards, strict=True)]


@final
class _InProcess(Transport):
    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub, self._rank, self._next_slot = hub, rank, 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._hub.workers

    def introduce(self, card: bytes) -> dict[int, bytes]:
        with self._hub.arrived:
            self._hub.cards[self._rank] = card
            return dict(self._hub.cards)

    def start(self, payload: Tensor, label: Label, inspect: Inspect = accept_all) -> Pending:
        del inspect  # nobody is left out: a bad message is an error
        return self._bring(payload, label, _as_brought)

    def start_reduce(
        self,
        payloads: Sequence[Tensor],
        reduce: Reduce,
        label: Label,
        inspect: Inspect = accept_all,
    ) -> Pending:
        del inspect
        return self._bring((payloads, reduce), label, _reduced)

    def _bring(
        self, brought: object, label: Label, make: Callable[[list[Any]], list[Tensor]]
    ) -> Pending:
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        meeting = self._hub.put(slot, self._rank, brought)
        return _Arrival(self._hub, meeting, label, make)


def in_process(workers: int, *, timeout_s: float = 0.0) -> list[Transport]:
    """Connected transports for `workers` workers that live in this process.

    Args:
        workers: K.
        timeout_s: seconds that a worker waits for the others. 0 suits workers that share a thread
            (`begin()` on all, then `finish()` on all): who is not there then never will be.

    Returns:
        One transport per worker, in rank order.

    Raises:
        ConfigurationError: `workers` below 1 or a negative timeout.

    >>> [t.rank for t in in_process(3)]
    [0, 1, 2]
    """
    if workers < 1 or timeout_s < 0:
        raise ConfigurationError(
            f"connect {workers} workers with a timeout of {timeout_s:g} s",
            because="a run needs a worker, and time does not run backwards",
            do="pass workers >= 1 and timeout_s >= 0",
        )
    hub = _Hub(workers, timeout_s)
    return [_InProcess(hub, rank) for rank in range(workers)]
