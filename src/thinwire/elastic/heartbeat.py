"""A worker's heartbeats to the registry, what it learns from the answers, and for whom it waits."""

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable

from thinwire.elastic.quorum import Member, Quorum
from thinwire.elastic.registry import RoundRefusal
from thinwire.elastic.registry_server import RefusedError, RegistryClient, RegistryReply
from thinwire.elastic.timeouts import ElasticOptions
from thinwire.errors import ExchangeError, MismatchError, ThinwireError, check
from thinwire.membership import Phase, Progress

_LOG = logging.getLogger(__name__)
# Heartbeats into a round after which every peer has sent one of the same round, too.
_STALE_HEARTBEATS = 2.5
_LINGER_ROUNDS = 3.0
_SHORTEST_LINGER_S = 30.0
_PAUSE_S = 0.2


class Heartbeat:
    """Tells the registry every `every_s` that this worker is there, until it is closed.

    Args:
        registry: which this worker has joined.
        position: returns how far it has come; called from the thread of the heartbeats.
        joined: what the registry answered to joining.
        every_s: between two heartbeats.
        members: returns the names of the members of this worker's round.
        lenient_s: returns how long this worker waits for others before it says so.
        on_awaited: called while other members say that they wait for this worker.
        on_gone: called with the names of members that are not there any more.
        on_refused: called with a line for each worker that the registry refused.

    Attributes:
        peers: the other workers, by the last answer.
        registry_age_s: since when the registry ran then.
        run: how far the run was then.
        refusal: why the registry refuses this worker, if it does.
    """

    def __init__(
        self,
        registry: RegistryClient,
        position: Callable[[], Progress],
        joined: RegistryReply,
        *,
        every_s: float,
        members: Callable[[], frozenset[str]],
        lenient_s: Callable[[], float],
        on_awaited: Callable[[], object],
        on_gone: Callable[[frozenset[str]], object],
        on_refused: Callable[[str], object],
    ) -> None:
        self._registry, self._position = registry, position
        self.peers, self.registry_age_s, self.run = joined.peers, joined.age_s, joined.run
        self.refusal: ThinwireError | None = None
        self._members, self._lenient_s = members, lenient_s
        self._on_awaited, self._on_gone, self._on_refused = on_awaited, on_gone, on_refused
        self._waiting_since: float | None = None
        self._training_since = time.monotonic()
        self._seen: frozenset[str] = frozenset()
        self._closed = threading.Event()
        self._every_s = every_s
        self._sending, self._ending_round = threading.Lock(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="thinwire-heartbeat", daemon=True)
        self._thread.start()

    def wait_begins(self) -> None:
        """Note that this worker has come to the end of its round and waits for the others."""
        with self._ending_round:
            self._waiting_since = time.monotonic()

    def wait_ends(self) -> None:
        """Note that the next round has begun."""
        self._waiting_since, self._training_since = None, time.monotonic()

    def with_dealt_shares(self, position: Progress) -> Progress:
        """Add to `position` the data shares that the others are known to have dealt meanwhile.

        A worker that missed the start of a round would otherwise deal the same shares again.
        """
        known = (peer.position.dealt for peer in self.peers)
        return dataclasses.replace(position, dealt=max(position.dealt, self.run.dealt, *known))

    def close(self) -> None:
        """Stop sending heartbeats and tell the registry that this worker leaves."""
        self._closed.set()
        self._thread.join(self._every_s + 5.0)
        # A registry that cannot be reached now will miss this worker soon enough.
        with contextlib.suppress(ExchangeError, MismatchError):
            self._registry.leave()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                self.send()
            except Exception:
                # Without heartbeats all others would take this worker for gone, until it ends.
                _LOG.exception("a heartbeat failed")

    def send(self) -> tuple[Member, ...]:
        """Send a heartbeat now, if the registry can be reached; returns `peers`."""
        # One at a time, and its answer with it: neither may undo what a later one said.
        with self._sending:
            since = self._waiting_since
            waiting_s = 0.0 if since is None else time.monotonic() - since - self._lenient_s()
            try:
                reply = self._registry.heartbeat(self._position(), waiting_s=max(0.0, waiting_s))
            except RefusedError as error:
                self.refusal = error
                return self.peers
            except (ExchangeError, MismatchError):
                # Gone, or another program that listens there for a moment: the peers known last
                # are still the best guess.
                return self.peers
            self.refusal = None
            self.peers, self.registry_age_s, self.run = reply.peers, reply.age_s, reply.run
            here = frozenset(peer.name for peer in reply.peers)
            # A registry that had forgotten all workers: the others have yet to join again.
            gone = frozenset[str]() if reply.rejoined else (self._seen & self._members()) - here
            self._seen = here
        if gone:
            self._on_gone(gone)
        for line in reply.refused:
            self._on_refused(line)
        if since is None:
            self._check_awaited()
        return self.peers

    def _check_awaited(self) -> None:
        # A worker that is not in the round waits for the next one, however fast this one ends.
        members = self._members()
        waits = (p.waiting_s for p in self.peers if p.name in members and not p.finished)
        # Until all have sent a heartbeat, what they say is of a wait that is over.
        training_s = time.monotonic() - self._training_since
        if training_s > _STALE_HEARTBEATS * self._every_s and max(waits, default=0.0) > 0:
            with self._ending_round:
                # Meanwhile this worker may have come to the end of its round, too.
                if self._waiting_since is None:
                    self._on_awaited()


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
        identities = {member.identity for member in quorum.members}
        peers, version = self._heartbeat.peers, quorum.position.version
        # Would a run that goes on elsewhere be begun a second time here?
        begins_anew = quorum.phase == Phase.JOIN.value and version > 0
        return (
            len(quorum.members) < self._options.min_workers
            or any(not here.issuperset(member.awaits) for member in quorum.members)
            # Another worker that has come further may have finished meanwhile.
            or any(peer.position.version > version for peer in peers)
            or (begins_anew and any(p.identity not in identities and not p.finished for p in peers))
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
        check(
            alone_s <= self._options.give_up_s,
            "begin a round",
            because=f"it needs min_workers={self._options.min_workers}, and only {registered} "
            f"registered for {alone_s:.0f} s",
            do="start the others, or ask for fewer workers",
            kind=ExchangeError,
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
        while time.monotonic() < until_s:
            unfinished = any(not peer.finished for peer in self._heartbeat.send())
            if not unfinished and time.monotonic() >= least_s:
                return
            time.sleep(_PAUSE_S)
