"""Which other workers should be there before a worker begins a round."""

import math
import time
from collections.abc import Callable

from thinwire.elastic.heartbeat import Heartbeat
from thinwire.elastic.known_run import RoundRefusal
from thinwire.elastic.options import ElasticOptions
from thinwire.elastic.quorum import Quorum
from thinwire.errors import ExchangeError, MismatchError
from thinwire.membership import Phase

_LINGER_ROUNDS = 3.0
_SHORTEST_LINGER_S = 30.0
_PAUSE_S = 0.2


class PeerPolicy:
    """Decides whether a worker goes on with the others that are there, or waits for more.

    Args:
        options: how many have to be there, and how long they are waited for.
        heartbeat: knows which workers are there.
        is_new: whether the lighthouse was found so lately that others may still look for it.
    """

    def __init__(
        self, options: ElasticOptions, heartbeat: Heartbeat, is_new: Callable[[], bool]
    ) -> None:
        self._options, self._heartbeat, self._is_new = options, heartbeat, is_new
        self.names: frozenset[str] = frozenset()
        self._alone_since_s: float | None = None
        self._lost_at_s, self._refused_since_s = -math.inf, math.inf

    def met(self, names: frozenset[str]) -> None:
        """A round is begun with `names`."""
        if self.names - names:
            self._lost_at_s = time.monotonic()
        self.names, self._alone_since_s = names, None

    def awaited(self) -> tuple[str, ...]:
        """Workers that have to be there, though a new lighthouse may not know them yet."""
        return tuple(sorted(self.names)) if self._is_new() else ()

    def lacks_members(self, quorum: Quorum) -> bool:
        """Whether `quorum` should begin no round yet.

        Either all of its members conclude this alike, or the others wait for this one.
        """
        here = {member.name for member in quorum.members}
        return (
            len(quorum.members) < self._options.min_workers
            or any(not here.issuperset(member.awaits) for member in quorum.members)
            or self._is_behind(quorum)
            or self._begins_anew(quorum)
        )

    def check_alone(self) -> None:
        """Raise `ExchangeError` once too few workers have been registered for too long."""
        now_s = time.monotonic()
        registered = 1 + len(self._heartbeat.peers)
        if registered >= self._options.min_workers:
            self._alone_since_s = None
            return
        self._alone_since_s = self._alone_since_s or now_s
        alone_s = now_s - self._alone_since_s
        if alone_s > self._options.give_up_s:
            raise ExchangeError(
                "begin a round",
                because=f"it needs min_workers={self._options.min_workers}, and only {registered} "
                f"registered for {alone_s:.0f} s",
                do="start the others, or ask for fewer workers",
            )

    def may_begin(self, refusal: RoundRefusal | None) -> bool:
        """Whether the registry lets this worker begin a round; if not, it is to ask again.

        Args:
            refusal: the registry's, if any.

        Raises:
            MismatchError: the run is over.
            ExchangeError: for too long, no worker had what this one lacks.
        """
        now_s = time.monotonic()
        if refusal is None:
            self._refused_since_s = math.inf
            return True
        self._refused_since_s = min(self._refused_since_s, now_s)
        if refusal.is_final or now_s - self._refused_since_s > self._options.give_up_s:
            kind = MismatchError if refusal.is_final else ExchangeError
            raise kind("go on with the run", because=refusal.reason, do=refusal.do)
        return False

    def linger(self, round_s: float, *, to_come_back_s: float) -> None:
        """Wait until all others have finished, too: they may need what this worker has.

        Args:
            round_s: the usual length of a round.
            to_come_back_s: how long a worker that was just lost is given to be there again.
        """
        now_s = time.monotonic()
        until_s = now_s + max(_SHORTEST_LINGER_S, _LINGER_ROUNDS * round_s)
        just_lost = now_s - self._lost_at_s < to_come_back_s + round_s
        least_s = now_s + (to_come_back_s if just_lost else 0.0)
        while self._is_needed(least_s) and time.monotonic() < until_s:
            time.sleep(_PAUSE_S)

    def _is_needed(self, least_s: float) -> bool:
        unfinished = any(not peer.finished for peer in self._heartbeat.send())
        return unfinished or time.monotonic() < least_s

    def _begins_anew(self, quorum: Quorum) -> bool:
        """Whether a run that goes on elsewhere would be begun a second time here."""
        if quorum.phase != Phase.JOIN.value or quorum.position.version == 0:
            return False
        here = {member.identity for member in quorum.members}
        return any(p.identity not in here and not p.finished for p in self._heartbeat.peers)

    def _is_behind(self, quorum: Quorum) -> bool:
        """Whether another worker has come further; it may have finished meanwhile."""
        furthest = max((peer.position.version for peer in self._heartbeat.peers), default=0)
        return furthest > quorum.position.version
