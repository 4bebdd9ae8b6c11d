"""How long to wait for other workers."""

import statistics
from collections import deque
from dataclasses import asdict, dataclass

from thinwire.errors import check

_KEPT = 20
_SLACK = 3.0
SLOWEST_BYTES_PER_S = 125_000
"""1 Mbit/s: the assumed speed of a link before an exchange was measured."""
_LONGEST_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticOptions:
    """How long a worker waits for others, and how many it needs.

    Args:
        min_workers: with fewer, no round begins.
        patience: how long to wait for a slow worker, as a share of a round.
        timeout_s: timeout of an exchange; None derives it from those measured so far.
        give_up_s: how long to wait for a store that does not answer, or for enough workers.

    Raises:
        ConfigurationError: a number is not above 0.

    >>> ElasticOptions(min_workers=2).patience
    0.5
    """

    min_workers: int = 1
    patience: float = 0.5
    timeout_s: float | None = None
    give_up_s: float = 300.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check(
                value is None or value > 0,
                f"join an elastic run with {name}={value}",
                because="it must be above 0",
                do=f"pass {name} > 0",
            )


class Timeouts:
    """How long an elastic worker waits, in seconds.

        exchange(n) = floor + patience round + 3 max(seconds, n seconds per byte)

    over the last 20 exchanges; doubled with each one that times out, until one succeeds. Before any
    was measured, a link is assumed to carry 1 Mbit/s. The first round counts as long as this worker
    has trained in it.

    Args:
        floor_s: least wait before a worker counts as lost.
        patience: how long to wait for a slow worker, as a share of a round.
        unmeasured_s: least wait for a slow worker before a round was measured.
        fixed_s: timeout of every exchange; None derives it.

    >>> timeouts = Timeouts(floor_s=5.0, patience=0.5, unmeasured_s=60, fixed_s=None)
    >>> timeouts.exchanged(1000, seconds=0.2)
    >>> timeouts.round_began(now_s=100.0); timeouts.round_began(now_s=110.0)
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
        self._round_began_s: float | None = None
        self._factor = 1.0

    @property
    def round_s(self) -> float | None:
        """The usual length of a round; None before one was measured."""
        return statistics.median(self._rounds) if self._rounds else None

    def late(self) -> float:
        """How long others wait for a slow worker before it is left out.

        Never less than the floor, however short rounds are.
        """
        round_s = self.round_s
        if round_s is None:
            return self._unmeasured_s
        return max(self.floor_s, self._patience * round_s)

    def trained(self, now_s: float) -> None:
        """Note that this worker trained until now."""
        if self._round_began_s is not None:
            so_far_s = self._patience * (now_s - self._round_began_s)
            self._unmeasured_s = max(self._unmeasured_s, so_far_s)

    def exchange(self, nbytes: int) -> float:
        """How long an exchange may take that moves `nbytes` to and from this worker."""
        if self._fixed_s is not None:
            return self._fixed_s
        if not self._exchanges:
            travel_s = nbytes / SLOWEST_BYTES_PER_S
        else:
            seconds = max(s for _, s in self._exchanges)
            largest = max(n for n, _ in self._exchanges)
            travel_s = _SLACK * seconds * max(1.0, nbytes / max(1, largest))
        return min(_LONGEST_S, self._factor * (self.floor_s + self.late() + travel_s))

    def exchanged(self, nbytes: int, *, seconds: float) -> None:
        """Note an exchange of `nbytes` that took `seconds`."""
        self._exchanges.append((nbytes, seconds))
        self._factor = 1.0

    def timed_out(self) -> None:
        """Double the timeout of exchanges: one took longer than allowed."""
        self._factor *= 2.0

    def finished_round(self, seconds: float) -> None:
        """Note a round of `seconds`, from its beginning to the next one's."""
        self._rounds.append(seconds)

    def round_began(self, now_s: float) -> None:
        """Note that a round begins now, and so how long the one before it took."""
        if self._round_began_s is not None:
            self.finished_round(now_s - self._round_began_s)
        self._round_began_s = now_s
