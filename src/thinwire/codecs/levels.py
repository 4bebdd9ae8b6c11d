"""Where the levels of a quantiser lie: linear, statistical, mid-rise.

A grid says for each row an origin, a step and whether levels are bin means; then

    code  = clamp(floor((x - origin) / step + r), 0, 2^bits - 1)     r = 1/2, or uniform in [0, 1)
    value = origin + code * step, or the mean of the row's numbers with that code
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.sums import root_mean_square, sum_by_halves

MAX_STEPS = {1: 1.596, 2: 0.9957, 4: 0.3352, 8: 0.0308}
"""By bits: the step, in sigmas, of the uniform quantiser of a Gaussian with least squared error.

Source: J. Max, Quantizing for minimum distortion (1960), table II.
"""

TINY = 3e-39
"""The reciprocal of anything smaller is not finite."""

FAR = 0.5 * torch.finfo(torch.float32).max
"""An origin and all steps together stay finite if neither is larger."""


class Levels(ABC):
    """A rule for the levels of a row."""

    means: bool
    """Whether a level is the mean of the numbers that fell into its bin."""

    @abstractmethod
    def place(self, x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """Origin (the level of code 0) and step, fp32 [rows, 1], for the rows of `x`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear(Levels):
    """Levels evenly from the smallest to the largest number of the row.

    Source: MuLoCo (arXiv 2505.23725), linear quantisation.

    >>> Linear().place(torch.tensor([[0.0, 3.0]]), 2)
    (tensor([[0.]]), tensor([[1.]]))
    """

    means = False

    def place(self, x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """The row's minimum, and (max - min) / (2^bits - 1)."""
        # Of a row's zeros of both signs a machine may take either: + 0 makes both +0.
        low, high = (extreme + 0.0 for extreme in x.aminmax(dim=1, keepdim=True))
        # A product, for a GPU divides by a constant so; and high - low may overflow.
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


def mean_and_sigma(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (over n) of each row, [rows, 1]."""
    mean = sum_by_halves(x * (1.0 / x.shape[1]))
    # Halved: a number and the mean may lie at opposite ends of the range of fp32.
    half = x * 0.5 - mean * 0.5
    return mean, 2.0 * root_mean_square(half)


def steps(x: Tensor, origin: Tensor, step: Tensor) -> Tensor:
    """(x - origin) / step, and 0 where the step is too small to divide by."""
    inverse = torch.where(step > TINY, 1.0 / step, torch.zeros_like(step))
    # Scaled apart: x - origin may overflow where x / step and origin / step do not.
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
