"""A measured ratio, and how it is taken on a machine that others use too."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

__all__ = ["Result", "compare_alternating"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
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
    pairs = [(_seconds(ours), _seconds(baseline)) for _ in range(repeats)]
    return [mine for mine, _ in pairs], [base for _, base in pairs]


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
