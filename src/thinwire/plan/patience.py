"""Patience: how many workers an exchange waits for."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigurationError

__all__ = ["Everyone", "Patience", "Quorum"]


class Patience(ABC):
    """A rule for when an exchange begins.

    Who is left out gives up the rest of its round and goes on with the others; what it did is in
    its error feedback or in its next pseudo-gradient.
    """

    @abstractmethod
    def begin_s(self, ready_s: NDArray[np.float64]) -> float:
        """When an exchange begins whose workers are ready at `ready_s`."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Everyone(Patience):
    """The slowest worker is waited for.

    >>> Everyone().begin_s(np.array([1.0, 3.0, 2.0]))
    3.0
    """

    def begin_s(self, ready_s: NDArray[np.float64]) -> float:
        """When the last one is ready."""
        return float(ready_s.max())


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Quorum(Patience):
    """A share of the workers is waited for.

    Args:
        share: of those present, rounded up.

    Raises:
        ConfigurationError: no share above 0.

    >>> Quorum(share=0.6).begin_s(np.array([1.0, 3.0, 2.0]))
    2.0
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigurationError(
                f"wait for {self.share:g} of the workers",
                because="an exchange needs somebody, and can wait for no more than all",
                do="pass a share above 0 and up to 1",
            )

    def begin_s(self, ready_s: NDArray[np.float64]) -> float:
        """When so many are ready."""
        last = math.ceil(self.share * len(ready_s) - 1e-9) - 1
        return float(np.partition(ready_s, last)[last])
