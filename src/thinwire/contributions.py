"""Counts of contributions that were rejected or scaled down, by member and reason."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from thinwire.rejection import Consequence, Rejection, RejectReason

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
        member: returns the name of the worker of a rank.

    Attributes:
        left_out: number of means without a worker, by rank.

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
        # The checkpoints of earlier versions have no reasons.
        saved: Mapping[str, Any] = state.get("contributions", {})
        self._kinds.clear()
        for member in map(self._member, range(workers)):
            self._kinds[member].update({k: int(n) for k, n in saved.get(member, {}).items()})
