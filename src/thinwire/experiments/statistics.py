"""What several seeds say: a mean, its standard error, and differences paired by seed."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from thinwire.errors import ConfigurationError

__all__ = ["Estimate", "estimate", "paired_difference", "standard_error"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over seeds, and how far it can be trusted.

    Args:
        mean: over the seeds.
        standard_error: of the mean; None where there is one seed, which says nothing about it.
        seeds: over which.
    """

    mean: float
    standard_error: float | None
    seeds: tuple[int, ...]

    def describe(self) -> dict[str, Any]:
        """As JSON-able data."""
        return {
            "mean": self.mean,
            "standard_error": self.standard_error,
            "seeds": list(self.seeds),
        }


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean; None for a single value.

    s / sqrt(n),  s^2 = sum_i (x_i - mean)^2 / (n - 1)

    Args:
        values: [n].

    >>> standard_error([1.0, 3.0])
    1.0
    >>> standard_error([1.0]) is None
    True
    """
    if len(values) < 2:
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def estimate(by_seed: Mapping[int, float]) -> Estimate:
    """Mean and standard error of one value per seed.

    Args:
        by_seed: seed to value; at least one.

    Raises:
        ConfigurationError: there is no seed.

    >>> estimate({0: 1.0, 1: 3.0})
    Estimate(mean=2.0, standard_error=1.0, seeds=(0, 1))
    """
    if not by_seed:
        raise ConfigurationError(
            "average over seeds", because="there is no run", do="pass at least one"
        )
    values = [by_seed[seed] for seed in sorted(by_seed)]
    return Estimate(
        mean=statistics.fmean(values),
        standard_error=standard_error(values),
        seeds=tuple(sorted(by_seed)),
    )


def paired_difference(by_seed: Mapping[int, float], base: Mapping[int, float]) -> Estimate | None:
    """Mean of x_s - b_s over the seeds that both have; None if there is none.

    Runs of one seed share initial weights and data, so that their difference varies less than they
    do.

    Args:
        by_seed: seed to x_s.
        base: seed to b_s.

    >>> paired_difference({0: 2.0, 1: 4.0}, {0: 1.0, 1: 1.0, 2: 9.0})
    Estimate(mean=2.0, standard_error=1.0, seeds=(0, 1))
    """
    common = by_seed.keys() & base.keys()
    return estimate({seed: by_seed[seed] - base[seed] for seed in common}) if common else None
