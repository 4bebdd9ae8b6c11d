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
        team: identities of those with whom this worker is in a round.
        late_s: how long they are kept waiting before this worker tells them to go on.
        on_late: called once in a round, when that is over, with how long they have waited.
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
        late_s: Callable[[], float],
        on_late: Callable[[float], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self._door, self._position = door, position
        self.peers = tuple(peers)
        self.refusal: ThinwireError | None = None
        self._team, self._late_s = team, late_s
        self._on_late, self._on_refused = on_late, on_refused
        self._waiting_since: float | None = None
        self._told = False
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
        self._waiting_since = None

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
        waiting_s = 0.0 if since is None else time.monotonic() - since
        try:
            with self._asking:
                beat = self._door.beat(self._position(), waiting_s=waiting_s)
        except ExchangeError:
            return  # those known last are still the best guess
        except MismatchError as error:
            self.refusal = error
            return
        self.peers = beat.peers
        for line in beat.refused:
            self._on_refused(line)
        if since is None:
            self._consider_lateness()

    def _consider_lateness(self) -> None:
        # Whoever is not in the round waits for the next one, however fast this one ends.
        team = self._team()
        waits = (p.waiting_s for p in self.peers if p.identity in team and not p.finished)
        waits_s = max(waits, default=0.0)
        if not self._told and waits_s > self._late_s():
            self._told = True
            self._on_late(waits_s)
