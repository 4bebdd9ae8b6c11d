"""Who takes part in a round: the seam between the loop and a run whose workers come and go.

At the start of a round the loop asks its membership what to do, and does it:

    Snapshot     take over this state: this worker is too far behind, or has drifted
    Replay       take the outer steps of these rounds: this worker missed them
    RoundPlan    begin the round, with these workers; if its phase is DONE, the run has ended
                 without this worker: drop what it trained since

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
    """All others have finished, and this worker has what they had: nothing is left to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Outer step, inner step and digest of a worker's shared state.

    Args:
        version: outer steps that it has taken, each fragment's counted.
        step: inner steps of the schedule.
        digest: of the shared state, hexadecimal; equal versions have equal digests.
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
    """Measurements of a worker in training; None is unknown.

    Args:
        loss: of its last training steps.
        tokens_per_s: that it reads.
        sent_bytes: of payloads handed to the transport, metadata included.
        received_bytes: of payloads that came from other workers.
        wait_s: for rounds to begin, and for exchanges.

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
        """Return what is known as JSON-able data."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Self:
        """The plausible values of what `describe` returned elsewhere, or of anything else.

        Names that are not known here are passed over: a later version may have them.
        """
        names = [field.name for field in fields(cls)]
        return cls(**{n: told[n] for n in names if n in told and _is_plausible(n, told[n])})


def _is_plausible(name: str, value: Any) -> bool:
    kinds = (int,) if name.endswith("_bytes") else (int, float)
    least = -_LARGEST if name == "loss" else 0
    # In this form, NaN is refused.
    return type(value) in kinds and least <= value <= _LARGEST


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state that all workers share at one version: outer parameters and optimizer, schedule.

    Args:
        facts: numbers and texts, JSON-able; has `version`.
        tensors: on the CPU; they do not change.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRecord:
    """Record of a round: enough to take its outer step again, on another worker.

    Args:
        version: of the shared state after it.
        facts: which fragment and round, and which workers are in the mean; JSON-able.
        messages: uint8 [n] each, as they were exchanged.
    """

    version: int
    facts: Mapping[str, Any]
    messages: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlan:
    """A round that begins.

    Args:
        phase: why the others are here; JOIN if all have just started; DONE if the run is over.
        changed: other workers take part than before; what is under way is cancelled.
        joins: this worker has just come and has nothing to contribute to what is due now.
        step: inner steps of the schedule, the same on all.
        names: of the workers, in rank order.
        dealt: data shares handed out so far; this worker's is the one numbered `dealt` + its rank.
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

    If they do not, this worker has drifted: its inner steps since the last round are dropped, and
    another answer follows.
    """

    records: Sequence[RoundRecord]
    until: Progress


Answer: TypeAlias = Snapshot | Replay | RoundPlan


SharedState: TypeAlias = "LoopState"
"""A worker's state as far as all workers share it, for reading; safe from any thread."""


class Membership:
    """Decides who takes part in which round: this one, the same workers from beginning to end."""

    is_fixed = True
    """True if the same workers take part from the beginning to the end.
    If not, a round may be cancelled and bad messages are left out of it.
    """

    def join(self, state: SharedState) -> None:
        """Take a place in the run; call it once, before the first inner step; by default nothing.

        Raises:
            ExchangeError: the run cannot be reached. MismatchError: it is another run.
        """

    def begin_round(self, phase: Phase) -> Generator[Answer, None, None]:
        """Yield what to do before a round, unless `is_fixed`; a `RoundPlan` is the last answer.

        Every worker asks at the same inner steps, before it sends what is due there. An answer is
        to be acted on before the next one is asked for. If that raised a `ThinwireError` or the
        answer's data was malformed, throw the error into the iterator.
        """
        raise NotImplementedError

    def log_round(self, record: RoundRecord) -> None:
        """Keep the record of a round that counted, for workers that missed it; by default not."""

    def discard_round(self, why: str) -> None:
        """Tell people that a round does not count for this worker; by default nobody."""

    def may_end(self) -> bool:
        """True if a worker that has nothing left to exchange may end; the default.

        Otherwise the others have continued without it: it begins a last round again.
        """
        return True

    def member(self, rank: int) -> str:
        """Name of worker `rank` of the round in counts and tables; by default its rank.

        >>> Membership().member(3)
        'worker 3'
        """
        return f"worker {rank}"

    def report(self, metrics: WorkerMetrics) -> None:
        """Take what this worker measured so far, for people who watch the run; by default ignored.

        Args:
            metrics: in place of those before.
        """

    def leave(self) -> None:
        """Tell the others that this worker takes no further part; by default nobody."""
