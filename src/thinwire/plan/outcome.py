"""What came of a simulation."""

from dataclasses import dataclass
from typing import final

__all__ = ["Outcome", "Seconds"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """How an average worker spent its time.

    Args:
        compute_s: on inner steps.
        coding_s: on encoding, decoding and the outer step.
        slowest_s: standing still for workers that were not ready.
        bandwidth_s: standing still while bits moved.
        latency_s: standing still while they were on their way.
    """

    compute_s: float
    coding_s: float
    slowest_s: float
    bandwidth_s: float
    latency_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + self.coding_s + self.waiting_s

    @property
    def waiting_s(self) -> float:
        """Standing still."""
        return self.slowest_s + self.bandwidth_s + self.latency_s

    @property
    def utilisation(self) -> float:
        """Share of the time in which inner steps are computed."""
        return self.compute_s / self.total_s if self.total_s else 1.0

    def limit(self, *, satisfied: float = 0.99) -> str:
        """What most of the other time goes to; `compute` from a utilisation of `satisfied` on.

        >>> Seconds(compute_s=6, coding_s=1, slowest_s=0, bandwidth_s=3, latency_s=0).limit()
        'bandwidth'
        """
        if self.utilisation >= satisfied:
            return "compute"
        lost = {
            "coding": self.coding_s,
            "slowest worker": self.slowest_s,
            "bandwidth": self.bandwidth_s,
            "latency": self.latency_s,
        }
        return max(lost, key=lambda reason: lost[reason])


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A simulated run.

    Args:
        steps: inner steps by the schedule.
        worker_steps: inner steps that all workers did together: tokens are these times batch.
        wall_s: from the first step to the end of the last worker.
        seconds: of an average worker; they add up to `wall_s`.
        wait_s: before or in each inner step, and at the end: the mean over workers.
        round_s: the latest clock after every H-th inner step.
        begun_s: when each exchange had the link.
        freed_s: when the next one could have it.
        sent_nbytes: by an average worker, each message counted once; exact if nobody is ever away.
        received_nbytes: by an average worker.
        peak_sent_nbytes_per_step: the most that one worker sent after one step; of what is sent at
            the end, message by message.
        peak_bits_per_s: at which that must leave to be gone within a step.
    """

    steps: int
    worker_steps: float
    wall_s: float
    seconds: Seconds
    wait_s: tuple[float, ...]
    round_s: tuple[float, ...]
    begun_s: tuple[float, ...]
    freed_s: tuple[float, ...]
    sent_nbytes: float
    received_nbytes: float
    peak_sent_nbytes_per_step: float
    peak_bits_per_s: float

    @property
    def compute_s(self) -> float:
        """Of an average worker."""
        return self.seconds.compute_s

    @property
    def utilisation(self) -> float:
        """Share of the time in which an average worker computes inner steps."""
        return self.seconds.utilisation

    @property
    def limit(self) -> str:
        """What most of the other time goes to."""
        return self.seconds.limit()
