"""Which members' contributions were rejected or scaled down, how often and why."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from thinwire.rejection import Consequence, Rejection, RejectReason

CLIPPED: Final = "clipped"
"""What is said of a contribution that was used, but scaled down."""

KINDS: Final = (
    *(reason.label for reason in RejectReason if reason > RejectReason.EMPTY),
    CLIPPED,
)
"""All that is counted: the reasons of rejections, and `CLIPPED`."""

_LOG: Final = logging.getLogger(__name__)


def kinds_of(left_out: Mapping[int, Rejection], clipped: Collection[int]) -> dict[int, str]:
    """What is counted of one exchange, by rank; a worker that has just joined did nothing wrong.

    Args:
        left_out: why a worker is not in the mean, by rank.
        clipped: ranks that were scaled down.

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
    """What became of the contributions to a worker's rounds: warns of rejections, counts all.

    Args:
        member: returns what the worker of a rank is called.

    Attributes:
        left_out: how often each worker was left out of a mean, by rank.

    >>> log = ContributionLog("worker {}".format)
    >>> log.note({}, {1: 0.25}, "a round")
    >>> log.left_out, log.counts()
    ({}, {'worker 1': {'clipped': 1}})
    """

    def __init__(self, member: Callable[[int], str]) -> None:
        self._member = member
        self.left_out: dict[int, int] = {}
        self._kinds: dict[str, Counter[str]] = {}

    def note(
        self, left_out: Mapping[int, Rejection], clipped: Collection[int], what: object
    ) -> None:
        """Count those of one exchange; `what` names it."""
        for rank, kind in kinds_of(left_out, clipped).items():
            self._kinds.setdefault(self._member(rank), Counter())[kind] += 1
            if kind == CLIPPED:
                continue
            self.left_out[rank] = self.left_out.get(rank, 0) + 1
            _LOG.warning("worker %d was left out of %s: %s", rank, what, left_out[rank])

    def counts(self) -> dict[str, dict[str, int]]:
        """Exchanges in which a member's contribution was rejected or clipped, by member and kind.

        A copy, in the order of the members' names: JSON-able.
        """
        return {
            member: kinds
            for member, found in sorted(self._kinds.items())
            if (kinds := {kind: found[kind] for kind in KINDS if found[kind]})
        }

    def state_dict(self, *, workers: int) -> dict[str, Any]:
        """Counts of all workers and kinds.

        Those of 0, too: torch.distributed.checkpoint fills the keys that are there, and no other.
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
        # What earlier versions wrote has no reasons.
        told: Mapping[str, Any] = state.get("contributions", {})
        members = map(self._member, range(workers))
        self._kinds = {
            m: Counter({k: int(n) for k, n in told[m].items()}) for m in members if m in told
        }
