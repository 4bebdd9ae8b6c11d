"""Reasons to reject a worker's contribution, and their consequences."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum

from thinwire.errors import RoundDiscarded


class RejectReason(IntEnum):
    """The fault of a contribution."""

    NONE = 0
    EMPTY = 1
    DAMAGED = 2
    DRIFTED = 3
    NOT_FINITE = 4
    OUTLIER = 5

    @property
    def label(self) -> str:
        """The reason's name in tables and counts.

        >>> RejectReason.NOT_FINITE.label
        'not finite'
        """
        return self.name.lower().replace("_", " ")


class Kind(IntEnum):
    """The content of a message's body; the wire format has these numbers."""

    WHOLE = 0  # a worker's pseudo-gradient
    SHARD = 1  # one shard of a worker's pseudo-gradient
    MEAN = 2  # the mean of all workers' shards, from the shard's owner
    NOTHING = 3  # of a sender that has just joined the run; the body is zeros
    ANCHOR = 4  # the outer parameters, from a server to a worker that starts from them


class Consequence(Enum):
    """The consequence of a bad message in a run that continues without it (elastic runs)."""

    SKIPPED = "the round goes on without it, and nothing is lost"
    SENT_AGAIN = "the round goes on without it, and its sender contributes the same work again"
    LOST = "the round goes on without it, and its sender's work of this round is given up"
    DISCARDED = "the round counts on no worker, and all contribute the same work again"


# Text and consequence: the one place that decides what follows a rejection. With
# fixed workers a damaged or drifted message is an error instead, and the run stops.
_TABLE: Mapping[RejectReason, tuple[str, Consequence]] = {
    RejectReason.EMPTY: ("it has just joined and has nothing to contribute", Consequence.SKIPPED),
    # Nothing is wrong with the work itself.
    RejectReason.DAMAGED: ("its message did not arrive as it was sent", Consequence.SENT_AGAIN),
    RejectReason.DRIFTED: ("its outer parameters differ from the other workers'", Consequence.LOST),
    RejectReason.NOT_FINITE: ("what it sent is not finite", Consequence.LOST),
    RejectReason.OUTLIER: ("what it sent is far longer than the others'", Consequence.LOST),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """The reason for which a worker's contribution is left out.

    Args:
        reason: the code.
        detail: what this worker observed; "" if nothing.

    >>> str(Rejection(reason=RejectReason.DAMAGED, detail="its body does not match its checksum"))
    'its message did not arrive as it was sent (its body does not match its checksum)'
    """

    reason: RejectReason
    detail: str = ""

    def consequence(self, kind: Kind = Kind.WHOLE) -> Consequence:
        """The consequence for a message of `kind`.

        >>> Rejection(reason=RejectReason.DAMAGED).consequence().name
        'SENT_AGAIN'
        """
        _, found = _TABLE[self.reason]
        # A mean stands for all workers' shards: without it the round has a hole. The sender of a
        # shard does not learn that it was damaged, so it would not know what to send again.
        is_hole = kind is Kind.MEAN or (kind, self.reason) == (Kind.SHARD, RejectReason.DAMAGED)
        return Consequence.DISCARDED if is_hole else found

    def __str__(self) -> str:
        return _TABLE[self.reason][0] + (f" ({self.detail})" if self.detail else "")


def check_round_counts(
    rejected: Mapping[int, Rejection], kind: Kind, *, what: object, workers: int
) -> None:
    """Raise `RoundDiscarded` if the round cannot count without the messages of `rejected`.

    Args:
        rejected: by rank.
        kind: of those messages.
        what: name of the exchange, for the error message.
        workers: K; without any message no round counts.
    """
    fatal = any(r.consequence(kind) is Consequence.DISCARDED for r in rejected.values())
    if fatal or len(rejected) == workers:
        raise RoundDiscarded(
            f"use {what}",
            because="; ".join(f"worker {rank}: {why}" for rank, why in rejected.items()),
            do="nothing: the next round sends it again",
        )
