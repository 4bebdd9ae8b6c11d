"""What a transport is: it carries equal-sized payloads between all workers, and changes nothing."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from torch import Tensor

__all__ = ["Label", "Pending", "Reduce", "Transport"]

Reduce: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
"""Every worker's payload for this one (uint8, rank order) in, one payload for everybody out."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """What a payload is, for error messages.

    >>> str(Label(what="the whole model", round=3))
    'the whole model in round 3'
    """

    what: str
    round: int

    def __str__(self) -> str:
        return f"{self.what} in round {self.round}"


class Pending(ABC):
    """An exchange under way."""

    @abstractmethod
    def wait(self) -> list[Tensor]:
        """Every worker's payload, in rank order, this worker's own included; call it once.

        Raises:
            ExchangeError: a peer died. ExchangeTimeout: a peer stayed silent for too long.
        """

    @abstractmethod
    def arrived_s(self) -> float | None:
        """When everything was there, both halves of a reduction; None before that.

        Seconds of `time.perf_counter()`. Once `wait` has returned it is known.
        """


class Transport(ABC):
    """A connection of one worker to all others.

    Workers make the same calls in the same order. A payload must not be changed before `wait`
    returned, and what `wait` returns is to be read, not written.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """This worker's number, from 0."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of workers, K."""

    @abstractmethod
    def introduce(self, card: bytes) -> dict[int, bytes]:
        """Make `card` known to the others; returns the cards known so far by rank, own included."""

    @abstractmethod
    def start(self, payload: Tensor, label: Label) -> Pending:
        """Start sending `payload` (uint8 [n], the same n everywhere) to all workers."""

    @abstractmethod
    def start_reduce(self, payloads: Sequence[Tensor], reduce: Reduce, label: Label) -> Pending:
        """Start sending `payloads[j]` (uint8) to worker j, for every j.

        Once the payloads of all workers for this one are there, `reduce` is called with them, at
        the latest while somebody waits and perhaps on another thread. What it returns, of the same
        size everywhere, goes to all workers: the pending exchange's result.

        Args:
            payloads: one per worker; the j-th has the same size on all workers.
            reduce: called once.
            label: for error messages.
        """
