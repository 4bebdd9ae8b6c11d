"""Whom a worker should meet before it begins a round."""

import math
import time
from collections.abc import Callable
from typing import final

from thinwire.elastic.heartbeat import Heartbeat
from thinwire.elastic.options import ElasticOptions
from thinwire.elastic.quorum import Member, Quorum
from thinwire.errors import ExchangeError
from thinwire.transport.base import Phase

__all__ = ["PeerPolicy"]

_LINGER_ROUNDS = 3.0
_SHORTEST_LINGER_S = 30.0
_PAUSE_S = 0.2


@final
class PeerPolicy:
    """Those with whom a worker was in a round, and whether it would now begin one without them.

    Args:
        terms: how many have to be there, and how long they are waited for.
        attendance: says who is there.
        is_new: whether the lighthouse was found so lately that others may still look for it.
    """

    def __init__(
        self, terms: ElasticOptions, attendance: Heartbeat, is_new: Callable[[], bool]
    ) -> None:
        self._terms, self._attendance, self._is_new = terms, attendance, is_new
        self.names: frozenset[str] = frozenset()
        self._alone_since_s: float | None = None
        self._lost_at_s = -math.inf

    def met(self, names: frozenset[str]) -> None:
        """A round is begun with `names`."""
        if self.names - names:
            self._lost_at_s = time.monotonic()
        self.names, self._alone_since_s = names, None

    def awaited(self) -> tuple[str, ...]:
        """Who has to be there, though a new lighthouse may not have heard of them yet."""
        return tuple(sorted(self.names)) if self._is_new() else ()

    def lacks_somebody(self, team: Quorum) -> bool:
        """Whether `team` should begin no round: all of it conclude alike, or wait for this one."""
        return (
            len(team.members) < self._terms.min_workers
            or _lacks_awaited(team.members)
            or self._is_behind(team)
            or self._begins_anew(team)
        )

    def check_alone(self) -> None:
        """Raise `ExchangeError` once too few have been at the door for too long."""
        now_s = time.monotonic()
        if 1 + len(self._attendance.peers) >= self._terms.min_workers:
            self._alone_since_s = None
            return
        self._alone_since_s = self._alone_since_s or now_s
        alone_s = now_s - self._alone_since_s
        if alone_s > self._terms.give_up_s:
            raise ExchangeError(
                "begin a round",
                because=f"it needs min_workers={self._terms.min_workers} and there have been "
                f"{1 + len(self._attendance.peers)} for {alone_s:.0f} s",
                do="start the others, or ask for fewer workers",
            )

    def linger(self, round_s: float, *, to_come_back_s: float) -> None:
        """Wait until all others have finished, too, for they may need what this worker has.

        Args:
            round_s: the usual length of a round.
            to_come_back_s: how long somebody who was just lost is given to be there again.
        """
        now_s = time.monotonic()
        until_s = now_s + max(_SHORTEST_LINGER_S, _LINGER_ROUNDS * round_s)
        just_lost = now_s - self._lost_at_s < to_come_back_s + round_s
        least_s = now_s + (to_come_back_s if just_lost else 0.0)
        while self._is_needed(least_s) and time.monotonic() < until_s:
            time.sleep(_PAUSE_S)

    def _is_needed(self, least_s: float) -> bool:
        unfinished = any(not peer.finished for peer in self._attendance.ask())
        return unfinished or time.monotonic() < least_s

    def _begins_anew(self, team: Quorum) -> bool:
        """Whether a run that goes on elsewhere would be begun a second time here."""
        if team.occasion != Phase.ENTER.value:
            return False
        if team.position.version == 0:
            return False
        here = {member.identity for member in team.members}
        return any(p.identity not in here and not p.finished for p in self._attendance.peers)

    def _is_behind(self, team: Quorum) -> bool:
        """Whether somebody has come further, who may have finished meanwhile."""
        furthest = max((peer.position.version for peer in self._attendance.peers), default=0)
        return furthest > team.position.version


def _lacks_awaited(members: tuple[Member, ...]) -> bool:
    here = {member.name for member in members}
    return any(not here.issuperset(member.awaits) for member in members)
