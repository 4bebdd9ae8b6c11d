"""Reasons to reject a worker's contribution, their consequences, and counts of both."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Final

from thinwire.errors import RoundDiscarded


class RejectReason(IntEnum):
    """The fault of a contribution."""

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
    """The content of a message's body; the wire format uses these numbers."""

    WHOLE = 0  # a worker's pseudo-gradient
    SHARD = 1  # one shard of a worker's pseudo-gradient
    MEAN = 2  # the mean of all workers' shards, from the shard's owner
    NOTHING = 3  # the sender has just joined the run; the body is zeros


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
    """The reason why a worker's contribution is left out.

    Args:
        reason: the code.
        detail: what this worker observed; "" if nothing.
        is_absent: whether no worker has the message, and its sender knows that.

    >>> str(Rejection(reason=RejectReason.DAMAGED, detail="its body does not match its checksum"))
    'its message did not arrive as it was sent (its body does not match its checksum)'
    """

    reason: RejectReason
    detail: str = ""
    is_absent: bool = False

    def consequence(self, kind: Kind = Kind.WHOLE) -> Consequence:
        """The consequence for a message of `kind`.

        >>> Rejection(reason=RejectReason.DAMAGED).consequence().name
        'SENT_AGAIN'
        """
        _, found = _TABLE[self.reason]
        # A mean stands for all workers' shards: without it the round has a hole. The sender of a
        # shard does not learn that it was damaged, and so would not send it again.
        is_damaged = self.reason is RejectReason.DAMAGED and not self.is_absent
        is_hole = kind is Kind.MEAN or (kind is Kind.SHARD and is_damaged)
        return Consequence.DISCARDED if is_hole else found

    def __str__(self) -> str:
        return _TABLE[self.reason][0] + (f" ({self.detail})" if self.detail else "")


def check_round_counts(
    rejected: Mapping[int, Rejection], kind: Kind, *, what: object, workers: int
) -> None:
    """Raise `RoundDiscarded` if the round cannot count without the messages of `rejected`.

    Args:
        rejected: rejections, by rank.
        kind: kind of those messages.
        what: name of the exchange, for the error message.
        workers: K; without any message no round counts.
    """
    fatal = any(r.consequence(kind) is Consequence.DISCARDED for r in rejected.values())
    if fatal or len(rejected) == workers:
        raise discarded(what, "; ".join(f"worker {k}: {why}" for k, why in rejected.items()))


def discarded(what: object, because: str) -> RoundDiscarded:
    """The error of an exchange, called `what`, that does not count on any worker."""
    do = "nothing: the next round sends it again"
    return RoundDiscarded(f"use {what}", because=because, do=do)


CLIPPED: Final = "clipped"
"""Counted for a contribution that was used, but scaled down."""

_WRONG = (reason.label for reason in RejectReason if reason > RejectReason.EMPTY)
KINDS: Final = (*_WRONG, CLIPPED)
"""The kinds that are counted: the reasons of rejections, and `CLIPPED`."""

_LOG: Final = logging.getLogger(__name__)


def kinds_of(left_out: Mapping[int, Rejection], clipped: Collection[int]) -> dict[int, str]:
    """The kinds that one exchange counts, by rank; a worker that has just joined is not counted.

    Args:
        left_out: rejections, by rank.
        clipped: ranks whose contribution was scaled down.

    >>> kinds_of({2: Rejection(reason=RejectReason.NOT_FINITE)}, [0])
    {0: 'clipped', 2: 'not finite'}
    """
    rejected = {
        rank: why.reason.label
        for rank, why in left_out.items()
        if why.consequence() is not Consequence.SKIPPED
    }
    return dict(sorted({**dict.fromkeys(clipped, CLIPPED), **rejected}.items()))


class ContributionLog:
    """Counts rejected and clipped contributions to a worker's rounds, and warns of rejections.

    Args:
        member: returns the name of the worker with a given rank.

    Attributes:
        left_out: number of means that lack a worker's contribution, by rank.

    >>> log = ContributionLog("worker {}".format)
    >>> log.note({}, {1: 0.25}, "a round")
    >>> log.left_out, log.counts()
    ({}, {'worker 1': {'clipped': 1}})
    """

    def __init__(self, member: Callable[[int], str]) -> None:
        self._member = member
        self.left_out: dict[int, int] = {}
        self._kinds = defaultdict[str, Counter[str]](Counter)

    def note(
        self, left_out: Mapping[int, Rejection], clipped: Collection[int], what: object
    ) -> None:
        """Count the contributions of one exchange, called `what` in warnings."""
        for rank, kind in kinds_of(left_out, clipped).items():
            self._kinds[self._member(rank)][kind] += 1
            if kind != CLIPPED:
                self.left_out[rank] = self.left_out.get(rank, 0) + 1
                _LOG.warning("worker %d was left out of %s: %s", rank, what, left_out[rank])

    def counts(self) -> dict[str, dict[str, int]]:
        """Numbers of rejected and clipped contributions, by member and kind.

        A copy for JSON, in the order of the members' names.
        """
        return {
            member: kinds
            for member, found in sorted(self._kinds.items())
            if (kinds := {kind: found[kind] for kind in KINDS if found[kind]})
        }

    def state_dict(self, *, workers: int) -> dict[str, Any]:
        """Counts of all workers and kinds, zeros included.

        torch.distributed.checkpoint fills the keys of this state, and no others.
        """
        known, members = self.counts(), map(self._member, range(workers))
        return {
            "left_out": {rank: self.left_out.get(rank, 0) for rank in range(workers)},
            "contributions": {m: dict.fromkeys(KINDS, 0) | known.get(m, {}) for m in members},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, workers: int) -> None:
        """Continue from `state`, perhaps of another number of workers."""
        counts = {int(rank): int(count) for rank, count in state["left_out"].items()}
        self.left_out = {rank: n for rank, n in counts.items() if n and rank < workers}
        # Checkpoints of earlier versions have no reasons.
        saved: Mapping[str, Any] = state.get("contributions", {})
        self._kinds.clear()
        for member in map(self._member, range(workers)):
            self._kinds[member].update({k: int(n) for k, n in saved.get(member, {}).items()})
