"""Presence: which workers take part in which round."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigurationError

__all__ = ["Always", "Churn", "Presence"]


class Presence(ABC):
    """A distribution of comings and goings."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, rounds: int, workers: int) -> NDArray[np.bool_] | None:
        """Who is there [rounds, workers], at least one in each round; None if all always are."""

    @property
    @abstractmethod
    def is_constant(self) -> bool:
        """Whether nobody ever comes or goes."""

    @property
    @abstractmethod
    def notice_s(self) -> float:
        """How long the others stand still in a round that somebody has left."""

    @property
    @abstractmethod
    def heal_s(self) -> float:
        """How long somebody who comes takes to get what the others have; they do not wait."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Always(Presence):
    """Everyone takes part in every round.

    >>> Always().notice_s
    0.0
    """

    def draw(self, rng: np.random.Generator, rounds: int, workers: int) -> None:
        """Nobody is ever away."""

    @property
    def is_constant(self) -> bool:
        """Yes."""
        return True

    @property
    def notice_s(self) -> float:
        """Nobody leaves."""
        return 0.0

    @property
    def heal_s(self) -> float:
        """Nobody comes."""
        return 0.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Churn(Presence):
    """Workers leave at random before a round, and come back at random before a later one.

    Of those that are away or there in the long run, leave / (leave + come_back) are away. If the
    last one were to leave, nobody does.

    Args:
        leave: probability that a worker that was there is not in the next round.
        come_back: probability that one that was away is.
        notice: seconds that the others lose before they go on without it.
        heal: seconds that one that comes back needs to get the others' state.

    Raises:
        ConfigurationError: no probability, or a time that is negative or infinite.

    >>> rng = np.random.default_rng(0)
    >>> Churn(leave=0.5, come_back=1).draw(rng, 2, 3)
    array([[ True,  True,  True],
           [ True, False, False]])
    """

    leave: float
    come_back: float
    notice: float = 0.0
    heal: float = 0.0

    def __post_init__(self) -> None:
        for name, value, most in (
            ("leave", self.leave, 1),
            ("come_back", self.come_back, 1),
            ("notice", self.notice, math.inf),
            ("heal", self.heal, math.inf),
        ):
            if not (0 <= value <= most and value < math.inf):
                raise ConfigurationError(
                    f"plan with {name}={value:g}",
                    because="leave and come_back are probabilities, notice and heal seconds",
                    do="pass a probability from 0 to 1, or a time of 0 s or more",
                )

    def draw(self, rng: np.random.Generator, rounds: int, workers: int) -> NDArray[np.bool_]:
        """All are there in the first round."""
        present = np.ones((rounds, workers), dtype=np.bool_)
        for before, now in pairwise(present):
            chance = rng.random(workers)
            now[:] = np.where(before, chance >= self.leave, chance < self.come_back)
            if not now.any():
                now[:] = before
        return present

    @property
    def is_constant(self) -> bool:
        """If nobody leaves."""
        return self.leave == 0

    @property
    def notice_s(self) -> float:
        """As given."""
        return self.notice

    @property
    def heal_s(self) -> float:
        """As given."""
        return self.heal
