"""Tests of many contrasts of few seeds: pooled deviations, Student's t, and Holm's correction.

    effect_s = sum_a w_a loss_as                                    a: arms, s: n seeds
    t = (mean_s effect_s - margin) / (sd sqrt(sum_a w_a^2 / n))     two-sided, Holm within a paper

sd is the deviation of a loss once the means of arms and seeds are removed: runs of one seed share
initial weights and data. It is pooled over all arms of the same kind, because a deviation from
three seeds may be off by a factor of two either way. A contrast of two kinds has its own: a seed
moves all arms with AdamW inside one way, and those with Muon another.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

Losses = Mapping[int, float]
"""Losses by seed."""
UNSTEADY = 3
"""An arm with more than this many times the median deviation of its kinds is not pooled."""


class Deviation(NamedTuple):
    """A standard deviation and its degrees of freedom."""

    value: float
    degrees: int


def residuals(
    arms: Mapping[str, Losses], middle: Callable[[list[float]], float] = statistics.fmean
) -> dict[str, list[float]]:
    """x_as - mean_a - mean_s + mean, over the seeds that all arms have.

    `middle` over the arms gives the effect of a seed; with the median, no single arm moves it.

    >>> residuals({"a": {0: 1.0, 1: 3.0}, "b": {0: 2.0, 1: 2.0}})
    {'a': [-0.5, 0.5], 'b': [0.5, -0.5]}
    """
    seeds = sorted(set[int].intersection(*(set(losses) for losses in arms.values())))
    of_arm = {arm: statistics.fmean(its[s] for s in seeds) for arm, its in arms.items()}
    of_seed = [middle([its[s] - of_arm[arm] for arm, its in arms.items()]) for s in seeds]
    return {
        arm: [its[s] - of_arm[arm] - each for s, each in zip(seeds, of_seed, strict=True)]
        for arm, its in arms.items()
    }


def pooled(arms: Mapping[str, Losses]) -> tuple[Deviation, Collection[str]]:
    """The deviation of a loss of these arms, and the arms too unsteady to be pooled.

    sd^2 = sum_as residual_as^2 / ((A - 1) (n - 1))
    """
    # Unsteady arms move the mean of a seed, and with it the residuals of all others.
    own = {a: math.hypot(*each) for a, each in residuals(arms, statistics.median).items()}
    usual = statistics.median(own.values())
    steady = {arm: arms[arm] for arm, each in own.items() if each <= UNSTEADY * usual}
    left = residuals(steady)
    degrees = (len(left) - 1) * (len(next(iter(left.values()))) - 1)
    squares = sum(each**2 for its in left.values() for each in its)
    return Deviation(math.sqrt(squares / degrees), degrees), own.keys() - left.keys()


def own_deviation(effects: Sequence[float], weights: Collection[float]) -> Deviation:
    """The deviation of a loss, from the effects of one contrast alone."""
    return Deviation(statistics.stdev(effects) / math.hypot(*weights), len(effects) - 1)


def two_sided(t: float, degrees: int) -> float:
    """P(|T| >= |t|) of Student's t: the finite series for whole degrees of freedom.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.

    >>> [round(two_sided(t, n), 4) for t, n in ((12.706, 1), (4.303, 2), (3.182, 3), (2.042, 30))]
    [0.05, 0.05, 0.05, 0.05]
    """
    angle, odd = math.atan(abs(t) / math.sqrt(degrees)), degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0 if degrees == 1 else term
    for j in range(odd + 1, degrees - 2, 2):
        term *= j / (j + 1) * math.cos(angle) ** 2
        total += term
    inside = math.sin(angle) * total
    return max(0.0, 1 - ((angle + inside) * 2 / math.pi if odd else inside))


def quantile(degrees: int, tail: float = 0.05) -> float:
    """The t that |T| exceeds with probability `tail`, by bisection.

    >>> [round(quantile(n), 3) for n in (1, 2, 4, 10, 30, 120)]
    [12.706, 4.303, 2.776, 2.228, 2.042, 1.98]
    """
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, degrees) > tail else (low, middle)
    return high


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted
