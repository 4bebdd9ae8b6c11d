"""What a transport is: it carries equal-sized payloads between all workers, and changes nothing."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from torch import Tensor

__all__ = ["Label", "Pending", "Transport"]


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
