"""What a benchmark finds, and how it is taken on a machine that others use too."""

import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchTable:
    """Text in rows and columns; tables of one title are one table.

    Args:
        title: what was measured, and how.
        columns: their headings.
        rows: a text for each column.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class BenchReport(ABC):
    """What a benchmark found."""

    name: str

    @abstractmethod
    def tables(self) -> Sequence[BenchTable]:
        """Tables for a terminal."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Everything, all repetitions included, as JSON-able data."""


@dataclass(frozen=True, kw_only=True)
class BenchResult(BenchReport):
    """`ours` against `baseline`, both in seconds per repetition.

    Args:
        name: what was measured.
        ours: description of what is judged.
        baseline: description of what it is judged against.
        ours_s: seconds of each repetition.
        baseline_s: seconds of each repetition, taken in turns with the other.
    """

    name: str
    ours: str
    baseline: str
    ours_s: list[float]
    baseline_s: list[float]

    @property
    def speed_ratio(self) -> float:
        """Speed of ours over speed of the baseline: the median over the pairs of repetitions."""
        return statistics.median(
            base / mine for base, mine in zip(self.baseline_s, self.ours_s, strict=True)
        )

    def tables(self) -> Sequence[BenchTable]:
        """A table of one row."""
        ours_ms, baseline_ms = (
            f"{1000 * statistics.median(s):.1f}" for s in (self.ours_s, self.baseline_s)
        )
        ratio = f"{self.speed_ratio:.2f}"
        return [
            BenchTable(
                title="speed against a baseline, median of paired repetitions",
                columns=("benchmark", "ours", "baseline", "ratio", "ours ms", "baseline ms"),
                rows=((self.name, self.ours, self.baseline, ratio, ours_ms, baseline_ms),),
            )
        ]

    def describe(self) -> dict[str, Any]:
        """The fields and the ratio."""
        return asdict(self) | {"speed_ratio": self.speed_ratio}


def compare_alternating(
    ours: Callable[[], object], baseline: Callable[[], object], *, repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds of each, in turns, after one unmeasured call of both.

    >>> mine, base = compare_alternating(lambda: None, lambda: None, repeats=3)
    >>> len(mine), len(base)
    (3, 3)
    """
    ours()
    baseline()
    pairs = [(seconds(ours), seconds(baseline)) for _ in range(repeats)]
    return [mine for mine, _ in pairs], [base for _, base in pairs]


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes.

    >>> seconds(lambda: None) >= 0
    True
    """
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What a call took.

    Args:
        cpu_s: of all threads of this process: other load on the machine hardly changes it.
        wall_s: on the clock.
    """

    cpu_s: float
    wall_s: float


def spent(work: Callable[[], object]) -> Spent:
    """What one call takes.

    >>> spent(lambda: None).wall_s >= 0
    True
    """
    started_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Spent(cpu_s=time.process_time() - cpu_s, wall_s=time.perf_counter() - started_s)


@contextmanager
def threads(count: int) -> Generator[None]:
    """Have torch compute on `count` threads.

    >>> with threads(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_core() -> Generator[None]:
    """Have this process compute on one core, with one thread; where it cannot choose, on any core.

    Threads that begin inside stay there.

    >>> with one_core():
    ...     torch.get_num_threads()
    1
    """
    with threads(1):
        if not hasattr(os, "sched_setaffinity"):
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)
