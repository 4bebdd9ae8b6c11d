"""Why a worker's contribution is not used, and what follows from that."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum

from thinwire.errors import RoundDiscarded


class RejectReason(IntEnum):
    """What is wrong with a contribution."""

    NONE = 0
    EMPTY = 1
    DAMAGED = 2
    DRIFTED = 3
    NOT_FINITE = 4
    OUTLIER = 5

    @property
    def label(self) -> str:
        """In tables and counts.

        >>> RejectReason.NOT_FINITE.label
        'not finite'
        """
        return self.name.lower().replace("_", " ")


_TEXTS = {
    RejectReason.NONE: "nothing is wrong",
    RejectReason.EMPTY: "it has just joined and has nothing to contribute",
    RejectReason.DAMAGED: "its message did not arrive as it was sent",
    RejectReason.DRIFTED: "its outer parameters differ from those of the other workers",
    RejectReason.NOT_FINITE: "what it sent is not finite",
    RejectReason.OUTLIER: "what it sent is far longer than what the others sent",
}


class MessageKind(Enum):
    """Where in an exchange a contribution is rejected."""

    WHOLE = "a worker's pseudo-gradient"
    SHARD = "a worker's shard, at the shard's owner"
    RESULT = "an owner's combined shard"


class Consequence(Enum):
    """What follows where the run goes on without a bad message (elastic runs)."""

    SKIPPED = "the round goes on without it, and nothing is lost"
    SENT_AGAIN = "the round goes on without it, and its sender contributes the same work again"
    LOST = "the round goes on without it, and its sender's work of this round is given up"
    DISCARDED = "the round counts on no worker, and all contribute the same work again"


_WHOLE, _SHARD, _RESULT = MessageKind.WHOLE, MessageKind.SHARD, MessageKind.RESULT
_SKIPPED, _SENT_AGAIN = Consequence.SKIPPED, Consequence.SENT_AGAIN
_LOST, _DISCARDED = Consequence.LOST, Consequence.DISCARDED

# The one place that decides what happens to a contribution that is not used. With fixed workers a
# message that is damaged or drifted is an error instead, and the run stops.
_CONSEQUENCES: Mapping[tuple[RejectReason, MessageKind], Consequence] = {
    (RejectReason.EMPTY, _WHOLE): _SKIPPED,
    (RejectReason.EMPTY, _SHARD): _SKIPPED,
    # Nothing is wrong with the work itself. A shard's sender does not hear that it was damaged, so
    # it would not know what to send again.
    (RejectReason.DAMAGED, _WHOLE): _SENT_AGAIN,
    (RejectReason.DAMAGED, _SHARD): _DISCARDED,
    (RejectReason.DRIFTED, _WHOLE): _LOST,
    (RejectReason.DRIFTED, _SHARD): _LOST,
    (RejectReason.NOT_FINITE, _WHOLE): _LOST,
    (RejectReason.NOT_FINITE, _SHARD): _LOST,
    (RejectReason.OUTLIER, _WHOLE): _LOST,
    (RejectReason.OUTLIER, _SHARD): _LOST,
    # A result stands for all workers' shards: without it the round has a hole.
    **{(reason, _RESULT): _DISCARDED for reason in RejectReason if reason},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """Why one worker's contribution is left out.

    Args:
        reason: the code.
        detail: what this worker saw of it, if it did.

    >>> str(Rejection(reason=RejectReason.DAMAGED, detail="its body does not match its checksum"))
    'its message did not arrive as it was sent (its body does not match its checksum)'
    """

    reason: RejectReason
    detail: str = ""

    def consequence(self, kind: MessageKind = MessageKind.WHOLE) -> Consequence:
        """What follows for a message of `kind`.

        >>> Rejection(reason=RejectReason.DAMAGED).consequence().name
        'SENT_AGAIN'
        """
        return _CONSEQUENCES[self.reason, kind]

    def __str__(self) -> str:
        return _TEXTS[self.reason] + (f" ({self.detail})" if self.detail else "")


def check_round_counts(
    rejected: Mapping[int, Rejection], kind: MessageKind, *, what: object, workers: int
) -> None:
    """Raise `RoundDiscarded` if the round cannot count without the messages of `rejected`.

    Args:
        rejected: by rank.
        kind: of those messages.
        what: is exchanged, for the error message.
        workers: K; with none of their messages no round counts.
    """
    fatal = any(r.consequence(kind) is Consequence.DISCARDED for r in rejected.values())
    if fatal or len(rejected) == workers:
        raise RoundDiscarded(
            f"use {what}",
            because="; ".join(f"worker {rank}: {why}" for rank, why in rejected.items()),
            do="nothing: the next round sends it again",
        )
