"""Statistics over seeds: means, standard errors, and differences paired by seed."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over seeds and its standard error.

    Args:
        mean: mean over the seeds.
        standard_error: standard error of the mean; None for a single seed.
        seeds: seeds that the mean is over.
    """

    mean: float
    standard_error: float | None
    seeds: tuple[int, ...]

    def text(self, form: str) -> str:
        """The mean, and its standard error if there is one.

        >>> Estimate(mean=1.75, standard_error=0.5, seeds=(0, 1)).text(".2f")
        '1.75 ± 0.50'
        >>> Estimate(mean=1.75, standard_error=None, seeds=(0,)).text("+.2f")
        '+1.75'
        """
        mean = format(self.mean, form)
        if self.standard_error is None:
            return mean
        return f"{mean} ± {format(self.standard_error, form.replace('+', ''))}"


def estimate(by_seed: Mapping[int, float]) -> Estimate:
    """Mean and standard error of one value per seed.

    s / sqrt(n),  s^2 = sum_i (x_i - mean)^2 / (n - 1)

    Args:
        by_seed: seed to value; at least one.

    >>> estimate({0: 1.0, 1: 3.0})
    Estimate(mean=2.0, standard_error=1.0, seeds=(0, 1))
    """
    seeds = sorted(by_seed)
    values = [by_seed[seed] for seed in seeds]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(mean=statistics.fmean(values), standard_error=error, seeds=tuple(seeds))


def paired_difference(by_seed: Mapping[int, float], base: Mapping[int, float]) -> Estimate | None:
    """Mean of x_s - b_s over the seeds that both have; None without a common seed.

    Runs of one seed share initial weights and data, so their difference varies less than the runs
    do.

    Args:
        by_seed: seed to x_s.
        base: seed to b_s.

    >>> paired_difference({0: 2.0, 1: 4.0}, {0: 1.0, 1: 1.0, 2: 9.0})
    Estimate(mean=2.0, standard_error=1.0, seeds=(0, 1))
    """
    common = by_seed.keys() & base.keys()
    return estimate({seed: by_seed[seed] - base[seed] for seed in common}) if common else None


def mean_curve(by_seed: Mapping[int, Mapping[int, float]]) -> dict[int, Estimate]:
    """The mean of a quantity over seeds, at each step where all seeds have it, in order.

    Args:
        by_seed: seed to step to value.

    >>> mean_curve({0: {1: 2.0, 2: 3.0}, 1: {2: 5.0}})
    {2: Estimate(mean=4.0, standard_error=1.0, seeds=(0, 1))}
    """
    steps = set[int].intersection(*map(set, by_seed.values())) if by_seed else ()
    return {
        step: estimate({seed: values[step] for seed, values in by_seed.items()})
        for step in sorted(steps)
    }
