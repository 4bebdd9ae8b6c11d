"""Paces: how much longer than normal each inner step of each worker takes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigurationError

__all__ = [
    "DrawPace",
    "DrawnSpeeds",
    "Jitter",
    "Pace",
    "Paces",
    "Speeds",
    "Steady",
    "Stragglers",
]

DrawPace: TypeAlias = Callable[[int], NDArray[np.float64]]
"""Steps of the next round -> time over normal time [steps, workers]."""


class Pace(ABC):
    """A distribution of step times over workers and steps."""

    @abstractmethod
    def bind(self, rng: np.random.Generator, workers: int) -> DrawPace:
        """The paces of one run, drawn from `rng` round by round."""

    @abstractmethod
    def constant(self, workers: int) -> NDArray[np.float64] | None:
        """Time over normal time [workers], if it is known and never changes."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Steady(Pace):
    """All workers take the normal time for every step.

    >>> Steady().constant(3)
    array([1., 1., 1.])
    """

    def bind(self, rng: np.random.Generator, workers: int) -> DrawPace:
        """Ones."""
        del rng
        return lambda steps: np.ones((steps, workers))

    def constant(self, workers: int) -> NDArray[np.float64]:
        """Ones."""
        return np.ones(workers)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds(Pace):
    """Every worker has a speed of its own: a step takes 1 / speed of the normal time.

    Args:
        of: a speed for each worker; 1 is normal.

    Raises:
        ConfigurationError: a speed that is not above 0; not one for each worker, when a run begins.

    >>> Speeds(of=(1, 0.5)).constant(2)
    array([1., 2.])
    """

    of: tuple[float, ...]

    def __post_init__(self) -> None:
        for speed in self.of:
            _check(0 < speed < math.inf, f"a worker of speed {speed:g}", "a speed above 0")

    def bind(self, rng: np.random.Generator, workers: int) -> DrawPace:
        """The same in every step."""
        del rng
        factors = self.constant(workers)
        return lambda steps: np.broadcast_to(factors, (steps, workers))

    def constant(self, workers: int) -> NDArray[np.float64]:
        """1 / speed."""
        if len(self.of) != workers:
            raise ConfigurationError(
                f"give {len(self.of)} speeds to {workers} workers",
                because="every worker has one",
                do=f"pass {workers} speeds",
            )
        return 1 / np.asarray(self.of, dtype=np.float64)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnSpeeds(Pace):
    """Every worker has a speed of its own, drawn once: ln(time / normal time) ~ N(0, sigma^2).

    Args:
        sigma: 0.1 means about 10 % more or less.

    Raises:
        ConfigurationError: a sigma that is negative or infinite.
    """

    sigma: float

    def __post_init__(self) -> None:
        _check(0 <= self.sigma < math.inf, f"sigma={self.sigma:g}", "sigma of 0 or more")

    def bind(self, rng: np.random.Generator, workers: int) -> DrawPace:
        """The same in every step."""
        factors = np.exp(self.sigma * rng.standard_normal(workers))
        return lambda steps: np.broadcast_to(factors, (steps, workers))

    def constant(self, workers: int) -> None:
        """Not known before it is drawn."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Jitter(Pace):
    """Every step of every worker differs a little: log-normal, with the normal time as its mean.

    Args:
        sigma: of the logarithm; 0.1 means about 10 % more or less.

    Raises:
        ConfigurationError: a sigma that is negative or infinite.
    """

    sigma: float

    def __post_init__(self) -> None:
        _check(0 <= self.sigma < math.inf, f"sigma={self.sigma:g}", "sigma of 0 or more")

    def bind(self, rng: np.random.Generator, workers: int) -> DrawPace:
        """Independent draws."""

        def draw(steps: int) -> NDArray[np.float64]:
            exponents = rng.standard_normal((steps, workers))
            exponents *= self.sigma
            exponents -= self.sigma**2 / 2
            return np.exp(exponents, out=exponents)

        return draw

    def constant(self, workers: int) -> None:
        """It changes with every step."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Stragglers(Pace):
    """In every round a worker is, with some probability, slower by a factor for the whole round.

    Args:
        probability: that a worker is slow in a round.
        slowdown: time of its steps over normal time.

    Raises:
        ConfigurationError: no probability, or a slowdown that is not above 0.
    """

    probability: float
    slowdown: float

    def __post_init__(self) -> None:
        p, factor = self.probability, self.slowdown
        _check(0 <= p <= 1, f"a straggler with probability {p:g}", "a probability from 0 to 1")
        _check(0 < factor < math.inf, f"a slowdown of {factor:g}", "a slowdown above 0")

    def bind(self, rng: np.random.Generator, workers: int) -> DrawPace:
        """One draw a round and worker."""

        def draw(steps: int) -> NDArray[np.float64]:
            slow = rng.random(workers) < self.probability
            return np.broadcast_to(np.where(slow, self.slowdown, 1.0), (steps, workers))

        return draw

    def constant(self, workers: int) -> None:
        """It changes with every round."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Paces(Pace):
    """Several reasons to be slow, which multiply.

    >>> Paces(of=(Speeds(of=(1, 0.5)), Steady())).constant(2)
    array([1., 2.])
    """

    of: tuple[Pace, ...]

    def bind(self, rng: np.random.Generator, workers: int) -> DrawPace:
        """The product of what each draws."""
        draws = [pace.bind(rng, workers) for pace in self.of]

        def draw(steps: int) -> NDArray[np.float64]:
            product = np.ones((steps, workers))
            for each in draws:
                product *= each(steps)
            return product

        return draw

    def constant(self, workers: int) -> NDArray[np.float64] | None:
        """The product, if none of them changes."""
        product = np.ones(workers)
        for pace in self.of:
            factors = pace.constant(workers)
            if factors is None:
                return None
            product = product * factors
        return product


def _check(holds: object, what: str, do: str) -> None:
    if not holds:
        raise ConfigurationError(
            f"plan with {what}", because="no worker can be like that", do=f"pass {do}"
        )
