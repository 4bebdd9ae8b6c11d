"""Options of an asynchronous run, what a worker is assigned, and what the server counts."""

import math
from dataclasses import dataclass, field

from thinwire.errors import check_range


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncOptions:
    """How a server treats workers of different speeds.

    Args:
        dynamic_steps: give a slow worker fewer inner steps (`dynamic_steps`); otherwise all
            workers take H.
        grace_s: seconds to wait for other arrivals after one, so that all of these workers start
            again from the same theta; 0 waits for none.
        lost_after_s: seconds without an answer after which a worker's steps are also given to
            others; a late answer still counts.

    Raises:
        ConfigurationError: a time is negative or not a number.

    Source: Asynchronous Local-SGD (arXiv 2401.09135); `lost_after_s` is ours.

    >>> AsyncOptions().dynamic_steps
    True
    """

    dynamic_steps: bool = True
    grace_s: float = 0.0
    lost_after_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("grace_s", "lost_after_s"):
            check_range(name, getattr(self, name), most=math.inf)


def dynamic_steps(sync_every: int, speed: float, fastest: float) -> int:
    """H_w = max(1, floor(H v_w / max_j v_j)): all workers then take about equally long.

    Args:
        sync_every: H, inner steps of the fastest worker.
        speed: v_w, this worker's inner steps per second.
        fastest: max_j v_j.

    Source: dynamic local updates, Asynchronous Local-SGD (arXiv 2401.09135). Differs:
    at least one step.

    >>> [dynamic_steps(50, v, 4.0) for v in (4.0, 3.0, 1.0, 0.01)]
    [50, 37, 12, 1]
    """
    # The ratio first: it is exactly 1 for the fastest, whose steps are then exactly H.
    return max(1, math.floor(sync_every * (speed / fastest)))


@dataclass(frozen=True, slots=True)
class Assignment:
    """How many inner steps to train from theta.

    Args:
        round: number of the exchange that the answer belongs to, from 1; theta has taken one outer
            step fewer.
        anchor: digest of theta, 8 bytes.
        steps: H_w.
        steps_done: inner steps of all workers in theta so far, for the learning-rate schedule.
    """

    round: int
    anchor: bytes
    steps: int
    steps_done: int


@dataclass(kw_only=True, slots=True)
class AsyncStats:
    """What a server has done so far.

    Args:
        arrivals: pseudo-gradients applied, each an outer step.
        steps_done: inner steps of all workers that are in theta.
        steps_of: inner steps of each worker that are in theta.
        staleness_counts: arrivals by staleness: outer steps between the theta that a worker started
            from and its arrival.
        refused: number of messages that were not applied, by reason.
        received_bytes: size of messages from workers, refused ones included.
        sent_bytes: size of messages with theta to workers.
    """

    arrivals: int = 0
    steps_done: int = 0
    steps_of: dict[int, int] = field(default_factory=dict[int, int])
    staleness_counts: dict[int, int] = field(default_factory=dict[int, int])
    refused: dict[str, int] = field(default_factory=dict[str, int])
    received_bytes: int = 0
    sent_bytes: int = 0

    @property
    def mean_staleness(self) -> float:
        """Mean staleness over arrivals; 0 before the first."""
        return sum(s * n for s, n in self.staleness_counts.items()) / max(1, self.arrivals)

    @property
    def largest_staleness(self) -> int:
        """Largest staleness of an arrival; 0 before the first."""
        return max(self.staleness_counts, default=0)
