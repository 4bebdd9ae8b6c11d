"""Levels of a quantiser: sums of rows, grids (linear, statistical, mid-rise) and rounding.

A grid gives each row an origin and a step, and may replace levels by bin means; then

    code  = clamp(floor((x - origin) / step + r), 0, 2^bits - 1)     r = 1/2, or uniform in [0, 1)
    value = origin + code * step, or the mean of the row's numbers with that code

Levels are sums, and a library may add in any order: another processor or another version would give
other bytes. The sum of two numbers is unambiguous, so adding two at a time in a fixed order leaves
nothing open.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# J. Max, Quantizing for minimum distortion (1960), table II.
MAX_STEPS = {1: 1.596, 2: 0.9957, 4: 0.3352, 8: 0.0308}
"""By bits: the step, in sigmas, of the uniform quantiser with least squared error on a Gaussian."""

TINY = 3e-39
"""The reciprocal of anything smaller is not finite."""

FAR = 0.5 * torch.finfo(torch.float32).max
"""An origin and all steps together stay finite if neither is larger."""


# -- sums ----------------------------------------------------------------------------------------


def sum_by_halves(x: Tensor) -> Tensor:
    """The sum of each row, by adding its second half to its first until one number is left.

    A row is padded with zeros to a power of two. A sum of zeros is +0.

    Args:
        x: fp32 [rows, n] with n >= 1.

    Returns:
        fp32 [rows, 1].

    >>> sum_by_halves(torch.tensor([[1e8, 1.0, -1e8, 1.0, 3.0]]))  # (1e8 + 3 - 1e8) + (1 + 1)
    tensor([[2.]])
    """
    n = x.shape[1]
    half = 1 << max(0, (n - 1).bit_length() - 1)
    if n == 2 * half:
        total = x[:, :half] + x[:, half:]
    else:
        total = x[:, :half].clone()
        total[:, : n - half].add_(x[:, half:])
    while half > 1:
        half //= 2
        total[:, :half].add_(total[:, half : 2 * half])
    return total[:, :1] + 0.0  # -0 + 0 is +0


def root_mean_square(x: Tensor) -> Tensor:
    """sqrt(mean(x^2)) of each row, for fp32 numbers of any magnitude.

    With n numbers and s = 2^-floor(log2(max |x|)), within 2^-126 .. 2^126:

        sqrt(sum_by_halves((s x)^2)) * (1 / sqrt(n)) / s

    Args:
        x: fp32 [rows, n] with n >= 1.

    Returns:
        fp32 [rows, 1].

    >>> root_mean_square(torch.tensor([[3e30, 4e30], [0.0, 0.0]]))
    tensor([[3.5355e+30],
            [0.0000e+00]])
    """
    scaled = x.abs()
    exponent = (254 - (scaled.amax(1, keepdim=True).view(torch.int32) >> 23)).clamp_(1, 253)
    scale, inverse = ((e << 23).view(torch.float32) for e in (exponent, 254 - exponent))
    total = sum_by_halves(scaled.mul_(scale).square_())
    # torch's root in fp32 may be an ulp off (Intel's VML); taken in fp64 it is correctly rounded.
    root = total.double().sqrt_().float()
    return root.mul_(1.0 / math.sqrt(x.shape[1])).mul_(inverse)


def mean_and_sigma(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (over n) of each row, [rows, 1]."""
    mean = sum_by_halves(x * (1.0 / x.shape[1]))
    # Halved: a number and the mean may be at opposite ends of the range of fp32.
    half = x * 0.5 - mean * 0.5
    return mean, 2.0 * root_mean_square(half)


def steps(x: Tensor, origin: Tensor, step: Tensor) -> Tensor:
    """(x - origin) / step, and 0 where the step is too small to divide by."""
    inverse = torch.where(step > TINY, 1.0 / step, torch.zeros_like(step))
    # Scaled separately: x - origin may overflow where x / step and origin / step do not.
    return x * inverse - origin * inverse


def bin_means(x: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
    """The mean of each code's numbers, or its level if no number has the code: [rows, 2^bits].

    One masked sum per code: a scatter would add in an order that differs from run to run on a GPU.
    """
    placed, inside = codes.to(torch.float32), torch.empty_like(x)
    # A sum of numbers near the float range must not overflow; a power of two costs no precision.
    room = 2.0 ** x.shape[1].bit_length()
    scaled = x * (1.0 / room)
    # Counted exactly, whatever the order: fp32 has no odd numbers beyond 2^24.
    counter = torch.float32 if x.shape[1] <= 2**24 else torch.float64
    means: list[Tensor] = []
    for code in range(levels.shape[1]):
        torch.eq(placed, code, out=inside)
        count = inside.sum(1, keepdim=True, dtype=counter).float()
        mean = sum_by_halves(inside.mul_(scaled)) / count.clamp(min=1) * room
        means.append(torch.where(count > 0, mean, levels[:, code : code + 1]))
    return torch.cat(means, 1)


# -- grids ---------------------------------------------------------------------------------------


class Levels(ABC):
    """A rule for the levels of a row."""

    means: bool
    """True if a level is the mean of the numbers in its bin."""

    @abstractmethod
    def place(self, x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """Origin (the level of code 0) and step, fp32 [rows, 1], for the rows of `x`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear(Levels):
    """Levels spaced evenly from the smallest to the largest number of the row.

    Source: MuLoCo (arXiv 2505.23725), linear quantisation.

    >>> Linear().place(torch.tensor([[0.0, 3.0]]), 2)
    (tensor([[0.]]), tensor([[1.]]))
    """

    means = False

    def place(self, x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """The row's minimum, and (max - min) / (2^bits - 1)."""
        # In a row with zeros of both signs a machine may take either: + 0 makes it +0.
        low, high = (extreme + 0.0 for extreme in x.aminmax(dim=1, keepdim=True))
        # A product, because a GPU divides by a constant that way; and high - low may overflow.
        share = 1.0 / (2**bits - 1)
        return low, high * share - low * share


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistical(Levels):
    """Bins of 6 sigma / 2^bits around mean + k bins: off centre, as published.

    code = round((x - mean) / step + 2^bits / 2), so the middle of the row lies on a level and there
    is one more level below it than above. With 2 bits half of the numbers get one code.

    Source: SparseLoCo (arXiv 2508.15706) and MuLoCo (arXiv 2505.23725), their released code.

    >>> Statistical().place(torch.tensor([[-1.0, 1.0]]), 2)[1]
    tensor([[1.5000]])
    """

    means = True

    def place(self, x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """mean - 2^bits / 2 steps, and the step."""
        mean, sigma = mean_and_sigma(x)
        step = sigma * (6.0 / 2**bits)
        return mean - step * 2 ** (bits - 1), step


@dataclass(frozen=True, kw_only=True, slots=True)
class MidRise(Levels):
    """Bins on both sides of zero, with the step that suits a Gaussian best; levels are bin means.

    A pseudo-gradient has no mean worth sending, so sigma is its root mean square. The step of 8
    bits is widened until nothing is clipped: clipped parts would pile up in the feedback.

    Source: J. Max (1960) for the steps; ours.

    >>> MidRise().place(torch.tensor([[-1.0, 1.0]]), 1)
    (tensor([[-0.7980]]), tensor([[1.5960]]))
    """

    means = True

    def place(self, x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """The middle of the lowest bin, and the step."""
        step = root_mean_square(x) * MAX_STEPS[bits]
        if bits == 8:
            step = torch.maximum(step, x.abs().amax(1, keepdim=True) * (2.0 / 255))
        return step * (0.5 - 2 ** (bits - 1)), step


# -- rounding ------------------------------------------------------------------------------------


class RoundKey(NamedTuple):
    """Seed of a batch's random numbers, which are the same for all workers.

    Args:
        round: number of the exchange.
        row: index of the batch's first record in the payload.
    """

    round: int = 0
    row: int = 0


class Rounding(ABC):
    """A rule for r in floor(t + r), where t is a number in steps of the grid."""

    unbiased: bool
    """True if rounding has no bias; then levels must stay on the grid."""

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
        draws = torch.rand(
            like.shape,
            generator=torch.Generator().manual_seed(state % 2**63),
            dtype=torch.float32,
            device="cpu",
        )
        return draws.to(like.device)
