"""How long to wait for others, from how long it took so far."""

import statistics
from collections import deque
from typing import final

__all__ = ["Timeouts"]

_KEPT = 20
_SLACK = 3.0
_SLOWEST_BYTES_PER_S = 125_000  # 1 Mbit/s, until a link has shown what it can do
_LONGEST_S = 3600.0
_LONGEST_CONNECT = 8.0


@final
class Timeouts:
    """The waits of an elastic worker, in seconds.

        exchange(n) = floor + patience round + 3 max(seconds, n seconds per byte)

    over the last 20 exchanges, and doubled after each one that timed out until one succeeds. Before
    any was measured, a link is taken to carry 1 Mbit/s.

    Args:
        floor_s: the heartbeat timeout: nothing is found out sooner.
        patience: share of a round that a slow worker is waited for.
        unmeasured_s: what stands for a round before one was measured.
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
        """How long others are kept waiting before a slow worker is left out.

        Not less than the floor, however short rounds are: so long it takes to miss somebody.
        """
        round_s = self.round_s
        if round_s is None:
            return self._unmeasured_s
        return max(self.floor_s, self._patience * round_s)

    def lenient(self) -> float:
        """How long others are kept waiting before a slow worker sends no heartbeats any more.

        It takes the floor until the lighthouse misses them.
        """
        return self.late() - self.floor_s

    def exchange(self, nbytes: int) -> float:
        """For an exchange in which `nbytes` reach this worker."""
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
        """For the workers of a round to connect to each other."""
        return min(_LONGEST_S, self._connect_factor * self.floor_s)

    def connected(self) -> None:
        """They did."""
        self._connect_factor = 1.0

    def not_connected(self) -> None:
        """They did not: somebody was lost, or the link takes longer."""
        self._connect_factor = min(_LONGEST_CONNECT, 2.0 * self._connect_factor)

    def exchanged(self, nbytes: int, *, seconds: float) -> None:
        """An exchange of `nbytes` took so long."""
        self._exchanges.append((nbytes, seconds))
        self._factor = 1.0

    def timed_out(self) -> None:
        """One took longer than it was given."""
        self._factor *= 2.0

    def finished_round(self, seconds: float) -> None:
        """From one convening to the next."""
        self._rounds.append(seconds)
