"""What a server and its workers say to each other, and how many inner steps a worker is given."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from thinwire.errors import check
from thinwire.rejection import Rejection


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncOptions:
    """How a server treats workers of different speeds.

    Args:
        dynamic_steps: give a slow worker fewer inner steps (`dynamic_steps`); otherwise all
            workers take H.
        grace_s: seconds after an arrival in which others are waited for, so that all of them
            start again from the same theta; 0 waits for none.
        lost_after_s: seconds without an answer after which the steps given to a worker are given
            to others, too; a late answer still counts.

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
        for name, value in (("grace_s", self.grace_s), ("lost_after_s", self.lost_after_s)):
            check(
                value >= 0,
                f"wait for workers with {name}={value}",
                because="it is a number of seconds",
                do=f"pass {name} >= 0",
            )


def dynamic_steps(sync_every: int, speed: float, fastest: float) -> int:
    """H_w = max(1, floor(H v_w / max_j v_j)): all workers then take about equally long.

    Args:
        sync_every: H, inner steps of the fastest worker.
        speed: v_w, inner steps a second of this one.
        fastest: max_j v_j.

    Source: dynamic local updates, Asynchronous Local-SGD (arXiv 2401.09135). Differs:
    at least one step.

    >>> [dynamic_steps(50, v, 4.0) for v in (4.0, 3.0, 1.0, 0.01)]
    [50, 37, 12, 1]
    """
    # The ratio first: it is exactly 1 for the fastest, whose steps are then exactly H.
    return max(1, math.floor(sync_every * (speed / fastest)))


# -- what a server answers a worker that asks for work ---------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Train so many inner steps from this theta.

    Args:
        message: theta in a message of the project's format, uint8.
        round: number of the exchange that the answer belongs to, from 1.
        anchor: digest of theta, 8 bytes.
        steps: H_w.
        steps_done: inner steps of all workers that are in theta, for the learning-rate schedule.
    """

    message: Tensor
    round: int
    anchor: bytes
    steps: int
    steps_done: int


@dataclass(frozen=True, slots=True)
class TryLater:
    """Nothing yet: ask again after `after_s` seconds, for others are waited for."""

    after_s: float


@dataclass(frozen=True, slots=True)
class RunFinished:
    """All steps of the run are in theta."""


# -- what a server answers a worker that sends a pseudo-gradient -----------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What became of a pseudo-gradient.

    Args:
        staleness: outer steps that the server took between handing out the theta it started from
            and this one.
        rejection: why it was not applied; None if it was.
        is_repeated: it had been applied before, and was not applied again.
    """

    staleness: int = 0
    rejection: Rejection | None = None
    is_repeated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncStats:
    """What a server has done so far.

    Args:
        arrivals: pseudo-gradients applied, each an outer step.
        steps_done: inner steps that are in theta, of all workers.
        steps_of: of them, those of each worker.
        staleness_counts: how many arrivals had which staleness.
        refused: messages that were not applied, by the name of the reason.
        repeated: messages that had been applied before.
        received_bytes: of messages from workers, refused ones included.
        sent_bytes: of messages with theta, to workers.
    """

    arrivals: int
    steps_done: int
    steps_of: Mapping[int, int]
    staleness_counts: Mapping[int, int]
    refused: Mapping[str, int]
    repeated: int
    received_bytes: int
    sent_bytes: int

    @property
    def mean_staleness(self) -> float:
        """Mean over arrivals; 0 before the first."""
        return sum(s * n for s, n in self.staleness_counts.items()) / max(1, self.arrivals)

    @property
    def largest_staleness(self) -> int:
        """The most that an arrival had; 0 before the first."""
        return max(self.staleness_counts, default=0)
