"""A worker's presence at the door: its beats, whom it sees there, and whether it is late."""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from thinwire.elastic.registry import Peer
from thinwire.elastic.registry_server import HeartbeatReply, JoinReply, RegistryClient
from thinwire.elastic.shared_state import Progress
from thinwire.errors import ExchangeError, MismatchError, ThinwireError

__all__ = ["Heartbeat", "HeartbeatCallbacks"]

_LOG = logging.getLogger(__name__)
_STALE_BEATS = 2.5
_REFUSALS = 2


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatCallbacks:
    """What a worker wants to know at the door; functions are called from a thread of the door's.

    Args:
        team: names of those with whom this worker is in a round.
        lenient_s: how long this worker waits for others before it says so.
        on_awaited: called while they say so.
        on_gone: told the names of those of the team who are not there any more.
        on_refused: told who was refused at the door, and why.
    """

    team: Callable[[], frozenset[str]]
    lenient_s: Callable[[], float]
    on_awaited: Callable[[], None]
    on_gone: Callable[[frozenset[str]], None]
    on_refused: Callable[[str], None]


@final
class Heartbeat:
    """Beats at the door in a thread of its own, until it is closed.

    Args:
        door: joined already.
        position: where this worker stands; called from that thread.
        welcome: what was learnt when it was joined.
        every_s: between two beats.
        concerns: what it is asked for.
    """

    def __init__(
        self,
        door: RegistryClient,
        position: Callable[[], Progress],
        welcome: JoinReply,
        *,
        every_s: float,
        concerns: HeartbeatCallbacks,
    ) -> None:
        self._door, self._position = door, position
        self.peers, self.door_age_s = welcome.peers, welcome.age_s
        self.refusal: ThinwireError | None = None
        self._concerns = concerns
        self._waiting_since: float | None = None
        self._going_since = time.monotonic()
        self._met: frozenset[str] = frozenset()
        self._closed = threading.Event()
        self._every_s = every_s
        self._asking, self._turn = threading.Lock(), threading.Lock()
        self._refused = 0
        self._thread = threading.Thread(target=self._run, name="thinwire-door", daemon=True)
        self._thread.start()

    def wait_begins(self) -> None:
        """This worker stands at the end of its round."""
        with self._turn:
            self._waiting_since = time.monotonic()

    def wait_ends(self) -> None:
        """It goes on."""
        self._waiting_since, self._going_since = None, time.monotonic()

    def ask(self) -> tuple[Peer, ...]:
        """Beat now, if the door can be reached; returns the others that are known to be there."""
        self._beat()
        return self.peers

    def heard(self, position: Progress) -> Progress:
        """`position`, and the shares that the others are known to have dealt without this worker.

        Whoever did not hear that a round began would deal its shares once more.
        """
        known = (peer.position.dealt for peer in self.peers)
        return dataclasses.replace(position, dealt=max(position.dealt, *known, 0))

    def finish(self) -> None:
        """This worker has taken all its steps."""
        self._door.finish()

    def close(self) -> None:
        """Go."""
        self._closed.set()
        self._thread.join(self._every_s + 5.0)
        # If nobody hears it, it will be missed soon enough.
        with contextlib.suppress(ExchangeError, MismatchError):
            self._door.leave()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                self._beat()
            except Exception:
                # Without beats this worker would be missed by all, for ever.
                _LOG.exception("a beat at the door failed")

    def _beat(self) -> None:
        # One at a time, and its answer with it: neither may undo what a later one said.
        with self._asking:
            since = self._waiting_since
            beat = self._ask(since)
            if beat is None:
                return
            self.peers, self.door_age_s = beat.peers, beat.age_s
            if beat.again:
                # The door had forgotten this worker, and so the others, who come in again.
                self._met = frozenset()
            gone = self._miss(frozenset(f"{p.identity}:{p.nonce}" for p in beat.peers))
        if gone:
            self._concerns.on_gone(gone)
        for line in beat.refused:
            self._concerns.on_refused(line)
        if since is None:
            self._consider_lateness()

    def _ask(self, since: float | None) -> HeartbeatReply | None:
        """What the door says; None if that is nothing to go by."""
        waiting_s = 0.0 if since is None else time.monotonic() - since - self._concerns.lenient_s()
        try:
            beat = self._door.beat(self._position(), waiting_s=max(0.0, waiting_s))
        except ExchangeError:
            return None  # those known last are still the best guess
        except MismatchError as error:
            # One answer may be of somebody else who listens there for a moment.
            self._refused += 1
            self.refusal = error if self._refused >= _REFUSALS else None
            return None
        self._refused, self.refusal = 0, None
        return beat

    def _miss(self, here: frozenset[str]) -> frozenset[str]:
        gone = (self._met & self._concerns.team()) - here
        self._met = here
        return gone

    def _consider_lateness(self) -> None:
        # Whoever is not in the round waits for the next one, however fast this one ends.
        team = self._concerns.team()
        waits = (
            p.waiting_s for p in self.peers if f"{p.identity}:{p.nonce}" in team and not p.finished
        )
        # Until everybody has had a beat, what they say is of a wait that is over.
        going_s = time.monotonic() - self._going_since
        if going_s > _STALE_BEATS * self._every_s and max(waits, default=0.0) > 0:
            with self._turn:
                # Meanwhile it may have come to the end of its round, too.
                if self._waiting_since is None:
                    self._concerns.on_awaited()
