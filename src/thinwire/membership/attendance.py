"""A worker's presence at the door: its beats, whom it sees there, and whether it is late."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import final

from thinwire.errors import ExchangeError, MismatchError, ThinwireError
from thinwire.membership.door import DoorClient
from thinwire.membership.register import Peer
from thinwire.membership.ward import Position

__all__ = ["Attendance"]


@final
class Attendance:
    """Beats at the door in a thread of its own, until it is closed.

    Args:
        door: joined already.
        position: where this worker stands; called from that thread.
        peers: known so far.
        every_s: between two beats.
        team: names of those with whom this worker is in a round.
        lenient_s: how long this worker waits for others before it says so.
        floor_s: how long they may have said so before this worker counts as late.
        on_awaited: called while they say so.
        on_late: called once in a round, when this worker is late, with how long they have said so.
        on_gone: told the names of those of the team who are not there any more.
        on_refused: told who was refused at the door, and why.
    """

    def __init__(
        self,
        door: DoorClient,
        position: Callable[[], Position],
        peers: Sequence[Peer],
        *,
        every_s: float,
        team: Callable[[], frozenset[str]],
        lenient_s: Callable[[], float],
        floor_s: float,
        on_awaited: Callable[[], None],
        on_late: Callable[[float], None],
        on_gone: Callable[[frozenset[str]], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self._door, self._position = door, position
        self.peers = tuple(peers)
        self.refusal: ThinwireError | None = None
        self._team, self._lenient_s, self._floor_s = team, lenient_s, floor_s
        self._on_awaited, self._on_late = on_awaited, on_late
        self._on_gone, self._on_refused = on_gone, on_refused
        self._waiting_since: float | None = None
        self._going_since = time.monotonic()
        self._told = False
        self._met: frozenset[str] = frozenset()
        self._closed = threading.Event()
        self._every_s = every_s
        self._asking = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="thinwire-door", daemon=True)
        self._thread.start()

    def wait_begins(self) -> None:
        """This worker stands at the end of its round."""
        self._waiting_since, self._told = time.monotonic(), False

    def wait_ends(self) -> None:
        """It goes on."""
        self._waiting_since, self._going_since = None, time.monotonic()

    def ask(self) -> tuple[Peer, ...]:
        """Beat now, if the door can be reached; returns the others that are known to be there."""
        self._beat()
        return self.peers

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
            self._beat()

    def _beat(self) -> None:
        since = self._waiting_since
        waiting_s = 0.0 if since is None else time.monotonic() - since - self._lenient_s()
        try:
            with self._asking:
                beat = self._door.beat(self._position(), waiting_s=max(0.0, waiting_s))
        except ExchangeError:
            return  # those known last are still the best guess
        except MismatchError as error:
            self.refusal = error
            return
        self.peers = beat.peers
        for line in beat.refused:
            self._on_refused(line)
        self._miss(frozenset(f"{p.identity}:{p.nonce}" for p in beat.peers), again=beat.again)
        if since is None:
            self._consider_lateness()

    def _miss(self, here: frozenset[str], *, again: bool) -> None:
        # A door that has forgotten this worker has forgotten the others, too, who come in again.
        met = frozenset() if again else self._met & self._team()
        self._met = here
        if met - here:
            self._on_gone(met - here)

    def _consider_lateness(self) -> None:
        # Whoever is not in the round waits for the next one, however fast this one ends.
        team = self._team()
        waits = (
            p.waiting_s for p in self.peers if f"{p.identity}:{p.nonce}" in team and not p.finished
        )
        # What they said before this worker went on was of a wait that is over.
        waits_s = min(max(waits, default=0.0), time.monotonic() - self._going_since)
        if waits_s > 0:
            self._on_awaited()
        if not self._told and waits_s > self._floor_s:
            self._told = True
            self._on_late(waits_s)
