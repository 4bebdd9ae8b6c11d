"""Rounding of a number that lies between two levels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.row_format import RoundKey


class Rounding(ABC):
    """The r of floor(t + r), where t is a number in steps of the grid."""

    unbiased: bool
    """Whether rounding is right on average; then levels must stay on the grid."""

    @abstractmethod
    def offsets(self, like: Tensor, key: RoundKey) -> Tensor | float:
        """r for every number of `like`: fp32 of its shape, or one for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nearest(Rounding):
    """r = 1/2: to the nearest level, ties upwards.

    >>> Nearest().offsets(torch.zeros(2), RoundKey())
    0.5
    """

    unbiased = False

    def offsets(self, like: Tensor, key: RoundKey) -> float:
        """One half."""
        del like, key
        return 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Stochastic(Rounding):
    """r uniform in [0, 1), from a seed that all workers share and the round.

    Levels then stay on the grid: bin means would bring the bias back. Numbers beyond the grid are
    still clamped.

    Args:
        seed: shared by all workers.

    >>> r = Stochastic(seed=3).offsets(torch.zeros(2), RoundKey(round=1))
    >>> bool((r == Stochastic(seed=3).offsets(torch.zeros(2), RoundKey(round=1))).all())
    True
    """

    seed: int = 0

    unbiased = True

    def offsets(self, like: Tensor, key: RoundKey) -> Tensor:
        """One number for each, drawn on the host so that every device draws the same."""
        state = (self.seed * 1_000_003 + key.round) * 1_000_003 + key.row
        draws = torch.rand(like.shape, generator=torch.Generator().manual_seed(state % 2**63))
        return draws.to(like.device)
