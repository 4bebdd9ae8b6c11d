"""What several seeds of one method say, and which of several methods nobody beats."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from thinwire.experiments.statistics import standard_error

__all__ = ["Curve", "Estimate", "estimate", "mean_curve", "pareto_front"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over seeds.

    Args:
        mean: of them.
        error: standard error of the mean; None of one seed, which says nothing about it.
        n: seeds.
    """

    mean: float
    error: float | None
    n: int

    def text(self, form: str) -> str:
        """The mean, and its error if there is one.

        >>> Estimate(mean=1.75, error=0.5, n=2).text(".2f")
        '1.75 ± 0.50'
        """
        mean = format(self.mean, form)
        return mean if self.error is None else f"{mean} ± {format(self.error, form)}"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error; see `standard_error`.

    Args:
        values: [n], n >= 1.

    >>> estimate([1.0, 3.0])
    Estimate(mean=2.0, error=1.0, n=2)
    """
    return Estimate(mean=statistics.fmean(values), error=standard_error(values), n=len(values))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A quantity over the steps of a method, averaged over seeds.

    Args:
        steps: inner steps, rising.
        points: of the quantity.
    """

    steps: tuple[int, ...]
    points: tuple[Estimate, ...]

    @property
    def means(self) -> list[float]:
        """Of the points."""
        return [point.mean for point in self.points]


def mean_curve(records: Sequence[Sequence[Mapping[str, Any]]], name: str) -> Curve:
    """The mean of `name` at every step at which all runs recorded it.

    Args:
        records: of each run.
        name: of a field that may be missing in some of them.

    >>> runs = [[{"step": 1, "x": 2.0}, {"step": 2, "x": 3.0}], [{"step": 2, "x": 5.0}]]
    >>> mean_curve(runs, "x").steps, mean_curve(runs, "x").means
    ((2,), [4.0])
    """
    each = [{r["step"]: float(r[name]) for r in run if name in r} for run in records]
    steps = sorted(set[int].intersection(*(set(run) for run in each))) if each else []
    points = (estimate([run[step] for run in each]) for step in steps)
    return Curve(steps=tuple(steps), points=tuple(points))


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other point is as good as in both and better in one.

    Args:
        points: both of their numbers are better if they are smaller.

    Returns:
        By the rising first number.

    >>> pareto_front([(1, 5), (2, 5), (3, 1), (2, 7)])
    [0, 2]
    """
    front: list[int] = []
    best = math.inf
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        x, y = points[index]
        if y < best or (front and points[front[-1]] == (x, y)):
            front.append(index)
            best = y
    return front
