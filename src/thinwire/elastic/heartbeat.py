"""A worker's heartbeats to the registry, and what it learns from the answers."""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from thinwire.elastic.quorum import Member
from thinwire.elastic.registry_server import RefusedError, RegistryClient, RegistryReply
from thinwire.errors import ExchangeError, MismatchError, ThinwireError
from thinwire.membership import Progress

_LOG = logging.getLogger(__name__)
# Heartbeats into a round after which every peer has sent one of the same round, too.
_STALE_HEARTBEATS = 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatCallbacks:
    """What heartbeats ask of a worker, and tell it; called from the thread of the heartbeats.

    Args:
        members: returns the names of the members of this worker's round.
        lenient_s: returns how long this worker waits for others before it says so.
        on_awaited: called while other members say that they wait for this worker.
        on_gone: called with the names of members that are not there any more.
        on_refused: called with a line for each worker that the registry refused.
    """

    members: Callable[[], frozenset[str]]
    lenient_s: Callable[[], float]
    on_awaited: Callable[[], None]
    on_gone: Callable[[frozenset[str]], None]
    on_refused: Callable[[str], None]


class Heartbeat:
    """Tells the registry every `every_s` that this worker is there, until it is closed.

    Args:
        registry: which this worker has joined.
        position: returns how far it has come; called from the thread of the heartbeats.
        joined: what the registry answered to joining.
        every_s: between two heartbeats.
        callbacks: see there.

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
        callbacks: HeartbeatCallbacks,
    ) -> None:
        self._registry, self._position = registry, position
        self.peers, self.registry_age_s, self.run = joined.peers, joined.age_s, joined.run
        self.refusal: ThinwireError | None = None
        self._callbacks = callbacks
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

    def send(self) -> tuple[Member, ...]:
        """Send a heartbeat now, if the registry can be reached; returns `peers`."""
        self._send()
        return self.peers

    def with_dealt_shares(self, position: Progress) -> Progress:
        """Add to `position` the data shares that the others are known to have dealt meanwhile.

        A worker that missed the start of a round would otherwise deal the same shares again.
        """
        known = (peer.position.dealt for peer in self.peers)
        return dataclasses.replace(position, dealt=max(position.dealt, self.run.dealt, *known))

    def finish(self) -> None:
        """Tell the registry that this worker has taken all its steps."""
        self._registry.finish()

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
                self._send()
            except Exception:
                # Without heartbeats all others would take this worker for gone, until it ends.
                _LOG.exception("a heartbeat failed")

    def _send(self) -> None:
        # One at a time, and its answer with it: neither may undo what a later one said.
        with self._sending:
            since = self._waiting_since
            reply = self._ask(since)
            if reply is None:
                return
            self.peers, self.registry_age_s, self.run = reply.peers, reply.age_s, reply.run
            if reply.rejoined:
                # The registry had forgotten all workers: the others have yet to join again.
                self._seen = frozenset()
            gone = self._take_gone(frozenset(peer.name for peer in reply.peers))
        if gone:
            self._callbacks.on_gone(gone)
        for line in reply.refused:
            self._callbacks.on_refused(line)
        if since is None:
            self._check_awaited()

    def _ask(self, since: float | None) -> RegistryReply | None:
        """The registry's answer; None if it says nothing about the other workers."""
        waiting_s = 0.0 if since is None else time.monotonic() - since - self._callbacks.lenient_s()
        try:
            reply = self._registry.heartbeat(self._position(), waiting_s=max(0.0, waiting_s))
        except RefusedError as error:
            self.refusal = error
            return None
        except (ExchangeError, MismatchError):
            # Gone, or another program that listens there for a moment: the peers known last are
            # still the best guess.
            return None
        self.refusal = None
        return reply

    def _take_gone(self, here: frozenset[str]) -> frozenset[str]:
        gone = (self._seen & self._callbacks.members()) - here
        self._seen = here
        return gone

    def _check_awaited(self) -> None:
        # A worker that is not in the round waits for the next one, however fast this one ends.
        members = self._callbacks.members()
        waits = (p.waiting_s for p in self.peers if p.name in members and not p.finished)
        # Until all have sent a heartbeat, what they say is of a wait that is over.
        training_s = time.monotonic() - self._training_since
        if training_s > _STALE_HEARTBEATS * self._every_s and max(waits, default=0.0) > 0:
            with self._ending_round:
                # Meanwhile this worker may have come to the end of its round, too.
                if self._waiting_since is None:
                    self._callbacks.on_awaited()
