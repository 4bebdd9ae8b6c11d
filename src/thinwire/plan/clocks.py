"""Clocks: where every worker is in time, and what it has spent its time on so far.

`Lone` stands for any number of workers that never differ: it counts in plain floats. `Crowd` keeps
a clock for each in an array. Both give the same answers where both apply.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from thinwire.plan.link import Crossing
from thinwire.plan.patience import Patience

__all__ = ["Clocks", "Crowd", "Lone", "Sent", "Spent"]

Times = NDArray[np.float64]


@final
@dataclass(kw_only=True, slots=True)  # state: sums
class Spent:
    """Seconds of all workers together, by what they went by with."""

    compute_s: float = 0.0
    coding_s: float = 0.0
    slowest_s: float = 0.0
    bandwidth_s: float = 0.0
    latency_s: float = 0.0

    def wait(self, for_others_s: float, for_answer_s: float, crossing: Crossing) -> None:
        """Count a wait, of which the latter part has the composition of `crossing`."""
        self.slowest_s += for_others_s
        if for_answer_s > 0:
            scale = for_answer_s / crossing.total_s if crossing.total_s else 0.0
            self.bandwidth_s += scale * crossing.transfer_s
            self.latency_s += scale * crossing.latency_s
            self.coding_s += scale * crossing.coding_s

    @property
    def total_s(self) -> float:
        """All of it."""
        waits_s = self.slowest_s + self.bandwidth_s + self.latency_s
        return self.compute_s + self.coding_s + waits_s


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """An exchange that was begun.

    Args:
        met_s: when all it needs were ready; of each worker, where workers meet in pairs.
        done_s: when the answer is there.
        crossing: what it takes.
    """

    met_s: Any
    done_s: Any
    crossing: Crossing


class Clocks(ABC):
    """The workers' clocks; `spent` is what they show, sorted.

    `worker_steps` are the inner steps of all workers together.
    """

    def __init__(self) -> None:
        self.spent = Spent()
        self.worker_steps = 0.0

    @abstractmethod
    def train(self, share: float) -> None:
        """Compute a share of the current inner step."""

    @abstractmethod
    def code(self, seconds: float) -> None:
        """Encode or decode."""

    @abstractmethod
    def meet(self, exchange: str, crossing: Crossing) -> tuple[Sent, float, float]:
        """Begin an exchange when its workers are ready for it and the link is free.

        Returns:
            The exchange; when the first bit left and when the link was free again (if workers meet
            in pairs: the first of all pairs, and the last).
        """

    @abstractmethod
    def wait(self, sent: Sent) -> float:
        """Stand still until the answer is there; for how long, in the mean."""

    @abstractmethod
    def latest_s(self) -> float:
        """What the last clock shows."""


@final
class Lone(Clocks):
    """One clock for workers that are all alike.

    Args:
        step_s: of every inner step.
        workers: how many it stands for.
    """

    def __init__(self, step_s: float, workers: int) -> None:
        super().__init__()
        self._step_s, self._workers = step_s, workers
        self._now_s = self._free_s = 0.0

    def train(self, share: float) -> None:
        """Compute a share of the current inner step."""
        seconds = share * self._step_s
        self._now_s += seconds
        self.spent.compute_s += seconds * self._workers
        self.worker_steps += share * self._workers

    def code(self, seconds: float) -> None:
        """Encode or decode."""
        self._now_s += seconds
        self.spent.coding_s += seconds * self._workers

    def meet(self, exchange: str, crossing: Crossing) -> tuple[Sent, float, float]:
        """Begin an exchange when its workers are ready for it and the link is free."""
        del exchange  # pairs of equal workers meet as all of them do
        begun_s = max(self._now_s, self._free_s)
        self._free_s = begun_s + crossing.held_s
        done_s = self._free_s + crossing.lag_s
        sent = Sent(met_s=self._now_s, done_s=done_s, crossing=crossing)
        return sent, begun_s, self._free_s

    def wait(self, sent: Sent) -> float:
        """Stand still until the answer is there."""
        waited_s = sent.done_s - self._now_s
        if waited_s <= 0:
            return 0.0
        self._now_s = sent.done_s
        self.spent.wait(0.0, waited_s * self._workers, sent.crossing)
        return waited_s

    def latest_s(self) -> float:
        """What the last clock shows."""
        return self._now_s


@final
class Crowd(Clocks):
    """A clock for each worker that is there.

    Args:
        workers: K, with those that are away.
        patience: for how many an exchange waits.
        rng: pairs are drawn from it.
    """

    def __init__(self, workers: int, patience: Patience, rng: np.random.Generator) -> None:
        super().__init__()
        self._workers, self._patience, self._rng = workers, patience, rng
        self._there = np.arange(workers)
        self._now_s: Times = np.zeros(workers)
        self._free_s: Times = np.zeros(workers)
        self._step_s: Times = np.zeros(workers)

    def convene(self, there: NDArray[np.intp], *, notice_s: float, heal_s: float) -> None:
        """Go on with the workers `there`; those that come have the latest clock and heal first."""
        stays = np.isin(self._there, there, assume_unique=True)
        came = ~np.isin(there, self._there, assume_unique=True)
        if not stays.all():
            lost = self._now_s[stays]
            self._now_s[stays] = lost + notice_s
            self.spent.slowest_s += notice_s * len(lost)
        latest_s = self.latest_s()
        for name in ("_now_s", "_free_s"):
            clock: Times = getattr(self, name)
            whole = np.full(self._workers, latest_s)
            whole[self._there] = clock
            setattr(self, name, whole[there])
        self._now_s[came] += heal_s
        self._there = there

    def begin_step(self, step_s: Times) -> None:
        """The seconds that the next inner step takes on each worker of the run."""
        self._step_s = step_s if len(step_s) == len(self._there) else step_s[self._there]

    def train(self, share: float) -> None:
        """Compute a share of the current inner step."""
        seconds = self._step_s if share == 1.0 else share * self._step_s
        self._now_s = self._now_s + seconds
        self.spent.compute_s += float(seconds.sum())
        self.worker_steps += share * len(seconds)

    def code(self, seconds: float) -> None:
        """Encode or decode."""
        self._now_s = self._now_s + seconds
        self.spent.coding_s += seconds * len(self._now_s)

    def meet(self, exchange: str, crossing: Crossing) -> tuple[Sent, float, float]:
        """Begin an exchange when its workers are ready for it and the link is free."""
        if exchange == "pairs":
            return self._meet_in_pairs(crossing)
        met_s = self._patience.begin_s(self._now_s)
        self._give_up(met_s)
        begun_s = max(met_s, float(self._free_s.max()))
        free_s = begun_s + crossing.held_s
        self._free_s = np.full_like(self._now_s, free_s)
        sent = Sent(met_s=met_s, done_s=free_s + crossing.lag_s, crossing=crossing)
        return sent, begun_s, free_s

    def _give_up(self, met_s: float) -> None:
        """Whoever is not ready by then leaves the rest of its work undone."""
        late_s = np.maximum(self._now_s - met_s, 0.0)
        undone_s = float(late_s.sum())
        if undone_s > 0:
            self._now_s = np.minimum(self._now_s, met_s)
            self.spent.compute_s -= undone_s
            self.worker_steps -= float((late_s / self._step_s).sum())

    def _meet_in_pairs(self, crossing: Crossing) -> tuple[Sent, float, float]:
        workers = len(self._now_s)
        order, half = self._rng.permutation(workers), workers // 2
        partner = np.arange(workers)
        one, other = order[:half], order[half : 2 * half]
        partner[one], partner[other] = other, one
        met_s = np.maximum(self._now_s, self._now_s[partner])
        begun_s = np.maximum(met_s, np.maximum(self._free_s, self._free_s[partner]))
        # Of an odd number one has no partner, and nothing to wait for.
        paired = partner != np.arange(workers)
        self._free_s = np.where(paired, begun_s + crossing.held_s, self._free_s)
        done_s = np.where(paired, self._free_s + crossing.lag_s, self._now_s)
        sent = Sent(met_s=self._of_run(met_s), done_s=self._of_run(done_s), crossing=crossing)
        if not half:
            return sent, float(begun_s.max()), float(begun_s.max())
        return sent, float(begun_s[paired].min()), float(self._free_s[paired].max())

    def _of_run(self, times: Times) -> Times:
        """`times` of those that are there, among those of the run: they may soon be others."""
        whole = np.full(self._workers, -np.inf)
        whole[self._there] = times
        return whole

    def wait(self, sent: Sent) -> float:
        """Stand still until the answer is there."""
        now_s, met_s, done_s = self._now_s, sent.met_s, sent.done_s
        if isinstance(done_s, np.ndarray):
            met_s, done_s = met_s[self._there], done_s[self._there]
        waited_s = float(np.maximum(done_s - now_s, 0.0).sum())
        if waited_s == 0:
            return 0.0
        others_s = float(np.maximum(np.minimum(met_s, done_s) - now_s, 0.0).sum())
        self._now_s = np.maximum(now_s, done_s)
        self.spent.wait(others_s, waited_s - others_s, sent.crossing)
        return waited_s / len(now_s)

    def latest_s(self) -> float:
        """What the last clock shows."""
        return float(self._now_s.max())
