"""Who takes part in a round: the interface between the loop and an elastic run.

At the start of a round the loop asks its membership what to do, and does it:

    Snapshot     load this state: this worker is too far behind, or has drifted
    Replay       take the outer steps of these rounds, which this worker missed
    RoundPlan    begin the round, with these workers; if its phase is DONE, the run has ended
                 without this worker: drop what it trained since the last round

Membership reads the loop's state (`SharedState`) and never changes it. Fixed workers are not
asked.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from torch import Tensor

from thinwire.errors import ThinwireError

if TYPE_CHECKING:
    from thinwire.loop_state import LoopState

_LARGEST = 10**18
MALFORMED = (ThinwireError, KeyError, IndexError, TypeError, ValueError)
"""Errors of loading another worker's data; the worker then asks for other data."""


class Phase(Enum):
    """Why the workers meet at the start of a round."""

    JOIN = "join"
    """This worker has just started."""
    ROUND = "round"
    """A round begins."""
    LAST = "last"
    """Training is over; what is left is exchanged."""
    DONE = "done"
    """All others have finished, and this worker has their state: nothing is left to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Outer step, inner step and digest of a worker's shared state.

    Args:
        version: outer steps taken, summed over fragments.
        step: inner steps of the schedule.
        digest: digest of the shared state, hexadecimal; equal states have equal digests.
        dealt: data shares handed out so far.
        over: whether all steps are taken, and nothing is left to be exchanged.
    """

    version: int
    step: int
    digest: str
    dealt: int = 0
    over: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerMetrics:
    """Measurements of a worker in training; None if unknown.

    Args:
        loss: loss of its last training steps.
        tokens_per_s: tokens that it reads per second.
        sent_bytes: bytes of payloads passed to the transport, metadata included.
        received_bytes: bytes of payloads from other workers.
        wait_s: time spent waiting for rounds to begin and for exchanges.

    >>> WorkerMetrics(loss=2.5, sent_bytes=7).describe()
    {'loss': 2.5, 'sent_bytes': 7}
    >>> WorkerMetrics.read({"loss": float("nan"), "sent_bytes": 7}).describe()
    {'sent_bytes': 7}
    """

    loss: float | None = None
    tokens_per_s: float | None = None
    sent_bytes: int | None = None
    received_bytes: int | None = None
    wait_s: float | None = None

    def describe(self) -> dict[str, Any]:
        """Return the known values as JSON-able data."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Self:
        """The plausible values of what `describe` returned elsewhere, or of anything else.

        Unknown names are ignored: a later version may have them.
        """
        names = [field.name for field in fields(cls)]
        return cls(**{n: told[n] for n in names if n in told and _is_plausible(n, told[n])})


def _is_plausible(name: str, value: Any) -> bool:
    kinds = (int,) if name.endswith("_bytes") else (int, float)
    least = -_LARGEST if name == "loss" else 0
    # NaN fails both comparisons.
    return type(value) in kinds and least <= value <= _LARGEST


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state that all workers share at one version: outer parameters and optimizer, schedule.

    Args:
        facts: numbers and texts, JSON-able; has `version`.
        tensors: tensors on the CPU, which do not change.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRecord:
    """Record of a round: enough to take its outer step on another worker.

    Args:
        version: version of the shared state after it.
        facts: which fragment and round, and which workers are in the mean; JSON-able.
        messages: the messages as exchanged, uint8 [n] each.
    """

    version: int
    facts: Mapping[str, Any]
    messages: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlan:
    """A round that begins.

    Args:
        phase: why the workers meet; JOIN if all have just started; DONE if the run is over.
        changed: whether other workers take part than before; rounds under way are then cancelled.
        joins: whether this worker has just joined and has nothing to contribute yet.
        step: inner steps of the schedule, the same on all workers.
        names: names of the workers, in rank order.
        dealt: data shares handed out so far; this worker's share is number `dealt` + its rank.
    """

    phase: Phase
    changed: bool
    joins: bool
    step: int
    names: Sequence[str]
    dealt: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Take the outer steps of `records`, which lead to `until`.

    If they lead elsewhere, this worker has drifted: its inner steps since the last round are
    dropped, and another answer follows.
    """

    records: Sequence[RoundRecord]
    until: Progress


Answer: TypeAlias = Snapshot | Replay | RoundPlan


SharedState: TypeAlias = "LoopState"
"""The part of a worker's state that all workers share, to be read only; safe from any thread."""


class Membership:
    """Decides who takes part in which round; here, the same workers from beginning to end."""

    is_fixed = True
    """True if the same workers take part from beginning to end.
    Otherwise a round may be cancelled, and bad messages are left out of it.
    """

    def join(self, state: SharedState) -> None:
        """Join the run; call it once, before the first inner step. Does nothing by default.

        Raises:
            ExchangeError: the run cannot be reached. MismatchError: it is another run.
        """

    def begin_round(self, phase: Phase) -> Generator[Answer, None, None]:
        """Yield what to do before a round, unless `is_fixed`; a `RoundPlan` is the last answer.

        Every worker asks at the same inner steps, before it sends what is due there. Act on an
        answer before you ask for the next one. If that raises one of `MALFORMED`, throw the error
        into the generator.
        """
        raise NotImplementedError

    def log_round(self, record: RoundRecord) -> None:
        """Keep the record of a round that counted, for workers that missed it; default: do not."""

    def discard_round(self, why: str) -> None:
        """Tell the user that a round does not count for this worker; default: do nothing."""

    def may_end(self) -> bool:
        """True if a worker with nothing left to exchange may end, as it may by default.

        Otherwise the others have continued without it, and it begins a last round again.
        """
        return True

    def member(self, rank: int) -> str:
        """Name of worker `rank` of the round in counts and tables; by default its rank.

        >>> Membership().member(3)
        'worker 3'
        """
        return f"worker {rank}"

    def report(self, metrics: WorkerMetrics) -> None:
        """Publish this worker's measurements for people who watch the run; default: ignore them.

        Args:
            metrics: replace the previous ones.
        """

    def leave(self) -> None:
        """Tell the others that this worker leaves the run; default: do nothing."""
