"""What a transport is: it carries equal-sized payloads between all workers, and changes nothing."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, final

from torch import Tensor

from thinwire.elastic.shared_state import RoundRecord, SharedState
from thinwire.rejection import Rejection

__all__ = [
    "Inspect",
    "Label",
    "Pending",
    "Phase",
    "Reduce",
    "RoundPlan",
    "Transport",
    "accept_all",
]

Inspect: TypeAlias = Callable[[Sequence[Tensor]], Mapping[int, Rejection]]
"""Every worker's payload (uint8, rank order) in, what is wrong with some of them out, by rank."""


def accept_all(payloads: Sequence[Tensor]) -> Mapping[int, Rejection]:
    """Nothing is wrong with anything."""
    del payloads
    return {}


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


@final
class Phase(Enum):
    """Why workers convene."""

    ENTER = "enter"
    """This worker has just started."""
    ROUND = "round"
    """A round begins."""
    LAST = "last"
    """Training is over; what is left is exchanged."""
    OVER = "over"
    """All others have finished, and this worker has what they had: nothing is left to do."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlan:
    """Who takes part from here on.

    Args:
        changed: whether others do than before; what is under way then counts on nobody.
        occasion: why the others are here; ENTER if all have just started.
        joins: whether this worker has just come and has nothing to contribute to what is due now.
        step: inner steps of the schedule, the same on all.
        names: of the workers, in rank order.
        dealt: data shares dealt so far; from here on this worker's is the one numbered `dealt` plus
            its rank.
    """

    changed: bool
    occasion: Phase
    joins: bool
    step: int
    names: Sequence[str]
    dealt: int


class Pending(ABC):
    """An exchange under way."""

    @abstractmethod
    def wait(self) -> list[Tensor]:
        """Every worker's payload, in rank order, this worker's own included; call it once.

        Raises:
            ExchangeError: a peer died. ExchangeTimeout: a peer stayed silent for too long.
            RoundDiscarded: the exchange counts on nobody, and the run goes on.
        """

    def left_out(self) -> Mapping[int, Rejection]:
        """Whose payloads all workers have agreed not to use; known once `wait` has returned."""
        return {}

    def overhead_nbytes(self) -> int:
        """Bytes that each worker sent besides payloads, to agree on them."""
        return 0

    @abstractmethod
    def arrived_s(self) -> float | None:
        """When everything was there, both halves of a reduction; None before that.

        Seconds of `time.perf_counter()`. Once `wait` has returned it is known.
        """


class Transport(ABC):
    """A connection of one worker to all others, who may be others from round to round.

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

    @property
    def forgiving(self) -> bool:
        """Whether a worker whose message is bad is left out, and the round goes on without it."""
        return False

    @property
    def norm_limit(self) -> float:
        """A contribution longer than this many times the median is left out."""
        return math.inf

    def convene(self, ward: SharedState, occasion: Phase) -> RoundPlan | None:
        """Settle who takes part from here on; None where nobody comes or goes.

        Every worker calls it at the same inner steps, before it starts what is due there. Whoever
        is behind the others catches up in it.
        """
        del ward, occasion
        return None

    def remember(self, record: Callable[[], RoundRecord]) -> None:
        """Keep what `record` returns for those who missed the round; by default nobody can."""
        del record

    def leave(self) -> None:
        """This worker's part is done; by default nobody waits to hear it."""
        return

    @abstractmethod
    def start(self, payload: Tensor, label: Label, inspect: Inspect = accept_all) -> Pending:
        """Start sending `payload` (uint8 [n], the same n everywhere) to all workers.

        Args:
            payload: this worker's.
            label: for error messages.
            inspect: finds flaws in what has arrived; a transport that agrees on them calls it,
                perhaps in another thread.
        """

    @abstractmethod
    def start_reduce(
        self,
        payloads: Sequence[Tensor],
        reduce: Reduce,
        label: Label,
        inspect: Inspect = accept_all,
    ) -> Pending:
        """Start sending `payloads[j]` (uint8) to worker j, for every j.

        Once the payloads of all workers for this one are there, `reduce` is called with them, at
        the latest while somebody waits and perhaps on another thread. What it returns, of the same
        size everywhere, goes to all workers: the pending exchange's result.

        Args:
            payloads: one per worker; the j-th has the same size on all workers.
            reduce: called once.
            label: for error messages.
            inspect: as in `start`, of the results.
        """
