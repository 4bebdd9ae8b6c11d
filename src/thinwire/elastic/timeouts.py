"""How long to wait for other workers, from how long they took so far."""

import statistics
from collections import deque

_KEPT = 20
_SLACK = 3.0
_SLOWEST_BYTES_PER_S = 125_000  # 1 Mbit/s, until a link has shown what it can do
_LONGEST_S = 3600.0
_LONGEST_CONNECT = 8.0


class Timeouts:
    """How long an elastic worker waits, in seconds.

        exchange(n) = floor + patience round + 3 max(seconds, n seconds per byte)

    over the last 20 exchanges; doubled with each one that times out, until one succeeds. Before any
    was measured, a link is assumed to carry 1 Mbit/s.

    Args:
        floor_s: the heartbeat timeout; a lost worker is not noticed sooner.
        patience: share of a round for which a slow worker is waited for.
        unmeasured_s: length of a round that is assumed before one was measured.
        fixed_s: replaces `exchange`; None derives it.

    >>> timeouts = Timeouts(floor_s=5.0, patience=0.5, unmeasured_s=60, fixed_s=None)
    >>> timeouts.exchanged(1000, seconds=0.2)
    >>> timeouts.finished_round(10.0)
    >>> timeouts.exchange(1000), timeouts.late()
    (10.6, 5.0)
    """

    def __init__(
        self, *, floor_s: float, patience: float, unmeasured_s: float, fixed_s: float | None
    ) -> None:
        self.floor_s = floor_s
        self._patience, self._unmeasured_s, self._fixed_s = patience, unmeasured_s, fixed_s
        self._exchanges: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self._rounds: deque[float] = deque(maxlen=_KEPT)
        self._factor = self._connect_factor = 1.0

    @property
    def round_s(self) -> float | None:
        """The usual length of a round; None before one was measured."""
        return statistics.median(self._rounds) if self._rounds else None

    def late(self) -> float:
        """How long others wait for a slow worker before it is left out.

        Not less than the floor, however short rounds are: no worker is missed sooner.
        """
        round_s = self.round_s
        if round_s is None:
            return self._unmeasured_s
        return max(self.floor_s, self._patience * round_s)

    def lenient(self) -> float:
        """How long others wait for a slow worker before it stops its heartbeats.

        The lighthouse takes the floor to miss them.
        """
        return self.late() - self.floor_s

    def exchange(self, nbytes: int) -> float:
        """How long an exchange may take in which `nbytes` reach this worker."""
        if self._fixed_s is not None:
            return self._fixed_s
        if not self._exchanges:
            travel_s = nbytes / _SLOWEST_BYTES_PER_S
        else:
            seconds = max(s for _, s in self._exchanges)
            largest = max(n for n, _ in self._exchanges)
            travel_s = _SLACK * seconds * max(1.0, nbytes / max(1, largest))
        return min(_LONGEST_S, self._factor * (self.floor_s + self.late() + travel_s))

    def connect(self) -> float:
        """How long the workers of a round may take to connect to each other."""
        return min(_LONGEST_S, self._connect_factor * self.floor_s)

    def connected(self) -> None:
        """Note that the workers of a round have connected: the next gets the usual time for it."""
        self._connect_factor = 1.0

    def not_connected(self) -> None:
        """Note that the workers of a round could not connect: the next try gets twice the time."""
        self._connect_factor = min(_LONGEST_CONNECT, 2.0 * self._connect_factor)

    def exchanged(self, nbytes: int, *, seconds: float) -> None:
        """An exchange of `nbytes` took `seconds`."""
        self._exchanges.append((nbytes, seconds))
        self._factor = 1.0

    def timed_out(self) -> None:
        """An exchange took longer than it was allowed."""
        self._factor *= 2.0

    def finished_round(self, seconds: float) -> None:
        """A round took `seconds`, from its beginning to that of the next."""
        self._rounds.append(seconds)
