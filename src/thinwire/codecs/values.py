"""Sparse rows: selection of the k largest numbers or of k random places, and formats of values."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.codecs.bits import (
    bytes_of,
    floats,
    look_up,
    pack,
    packed_nbytes,
    saturating_cast,
    unpack,
)
from thinwire.codecs.levels import bin_means, mean_and_sigma, steps, sum_by_halves

_PER_GROUP = 8


def largest(x: Tensor, k: int) -> Tensor:
    """Indices of the k numbers of largest magnitude of each row, ascending; ties to the lowest.

    Args:
        x: fp32 [rows, columns].
        k: 1 <= k <= columns.

    Returns:
        int64 [rows, k].

    >>> largest(torch.tensor([[1.0, -3.0, 3.0, 3.0]]), 2).tolist()
    [[1, 2]]
    """
    rows, columns = x.shape
    if k == columns:
        return torch.arange(k, device=x.device).repeat(rows, 1)
    # Non-negative floats sort as their bits do; of equal ones, the low half lets lower places win.
    from_the_end = torch.arange(columns - 1, -1, -1, device=x.device)
    keys = (x.abs().view(torch.int32).to(torch.int64) << 32) | from_the_end
    groups = columns // _PER_GROUP
    if columns % _PER_GROUP == 0 and 2 * k <= groups:
        # The largest keys are in the k groups with the largest maxima: a small selection first.
        grouped = keys.view(rows, _PER_GROUP, groups)
        group = grouped.amax(1).topk(k, sorted=False).indices
        keys = grouped.gather(2, group[:, None, :].expand(rows, _PER_GROUP, k)).flatten(1)
    chosen = keys.topk(k, sorted=False).values
    return (columns - 1 - (chosen & 0xFFFFFFFF)).sort(1).values


def random_places(*, columns: int, k: int, seed: int, round_number: int) -> Tensor:
    """Choose the k of `columns` places whose hash is smallest; ties to the lowest.

    The hash of place i is the output of SplitMix64 for the state s + (i + 1) g, where
    g = 0x9E3779B97F4A7C15 and s is its output for the state seed + (round + 1) g; all mod 2^64.

    Returns:
        int64 [k], ascending; the same on every machine.

    Source: G. Steele, D. Lea, C. Flood (2014), Fast splittable pseudorandom number generators.

    >>> random_places(columns=10, k=3, seed=0, round_number=1).tolist()
    [1, 3, 9]
    """
    import numpy as np  # slow to import, and only random places need it

    state = _splitmix(np.uint64(seed % 2**64), np.uint64(round_number + 1))[0]
    hashes = _splitmix(state, np.arange(1, columns + 1, dtype=np.uint64))
    order = np.argsort(hashes, kind="stable")[:k]
    return torch.from_numpy(np.sort(order))


def _splitmix(state: Any, steps: Any) -> Any:
    import numpy as np

    with np.errstate(over="ignore"):
        z = state + np.atleast_1d(steps) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


class Values(ABC):
    """Byte format of the k values kept from a row."""

    id: str
    """Part of the codec's id."""

    verbatim: torch.dtype = torch.bfloat16
    """Type in which a row's numbers are sent as they are if a record would not be smaller."""

    spans_rows: bool = False
    """True if the kept values of all rows of a tensor are encoded together."""

    @abstractmethod
    def nbytes(self, k: int) -> int:
        """Number of bytes of k values."""

    @abstractmethod
    def write(self, values: Tensor) -> Tensor:
        """Encode `values`, fp32 [rows, k], as uint8 [rows, nbytes]."""

    @abstractmethod
    def read(self, packed: Tensor, k: int) -> Tensor:
        """Decode `packed`, uint8 [rows, nbytes], to fp32 [rows, k]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignMean(Values):
    """One bit per value: its sign. The magnitude is the mean of the row's kept values, in bf16.

    The values of Top-k have nearly equal magnitudes: 0.4 % of their energy is lost.

    >>> SignMean().nbytes(64)
    10
    """

    id = "sign-mean"

    def nbytes(self, k: int) -> int:
        """Two bytes of level, then one bit per value."""
        return 2 + packed_nbytes(k, 1)

    def write(self, values: Tensor) -> Tensor:
        """Encode the level, then one bit per value: 1 if it is negative."""
        # Scaled before it is summed: values near the float range must not overflow.
        mean = sum_by_halves(values.abs() * (1.0 / values.shape[1]))
        level = saturating_cast(mean, torch.bfloat16)
        return torch.cat([bytes_of(level), pack(values.signbit().to(torch.uint8), 1)], 1)

    def read(self, packed: Tensor, k: int) -> Tensor:
        """Return the level with the sign of each value."""
        level, negative = floats(packed[:, :2]), unpack(packed[:, 2:], 1, k).bool()
        return torch.where(negative, -level, level)


@dataclass(frozen=True, kw_only=True, slots=True)
class SignLevels(Values):
    """Two bits per value: its sign and one of two magnitudes.

    Magnitudes at or above their mean are "high", others "low". The level of each class is its mean,
    in bf16.

    >>> SignLevels().nbytes(64)
    20
    """

    id = "sign-levels"

    def nbytes(self, k: int) -> int:
        """Two bytes for each level, low and high, then two bits per value."""
        return 4 + packed_nbytes(k, 2)

    def write(self, values: Tensor) -> Tensor:
        """Encode both levels, then a code per value: bit 0 is set if high, bit 1 if negative."""
        k = values.shape[1]
        scaled, negative = values.abs() * (1.0 / k), values.signbit()
        total = sum_by_halves(scaled)
        high = scaled >= total * (1.0 / k)
        count = high.sum(1, keepdim=True).float()
        above = sum_by_halves(scaled * high)
        # A sum of terms / k, times k (1 / count): in this order every number stays in range.
        means = [
            (total - above) * ((k - count).clamp(min=1).reciprocal() * k),
            above * (count.clamp(min=1).reciprocal() * k),
        ]
        levels = saturating_cast(torch.cat(means, 1).clamp(min=0), torch.bfloat16)
        codes = high.to(torch.uint8) | (negative.to(torch.uint8) << 1)
        return torch.cat([bytes_of(levels), pack(codes, 2)], 1)

    def read(self, packed: Tensor, k: int) -> Tensor:
        """Return one of the two levels, with its sign, for each value."""
        levels = floats(packed[:, :4])
        return look_up(torch.cat([levels, -levels], 1), unpack(packed[:, 4:], 2, k))


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLevels(Values):
    """Two bits per value: one of four levels, in fp32, that all kept values of a tensor share.

    code = clamp(round((x - mean) / step + 2), 0, 3) with step = 6 sigma / 4; a level is the mean of
    the values with its code. This reproduces the published code, whose bins are off centre: one
    surrounds the mean, where Top-k keeps few values. `SignLevels`, with levels for each row, loses
    less.

    Source: SparseLoCo (arXiv 2508.15706), its released code; sigma is over n - 1.

    Differs: the leftovers of all tensors, which share chunks, also share levels.

    >>> TensorLevels().nbytes(1024)
    272
    """

    id = "tensor-levels"

    spans_rows = True

    def nbytes(self, k: int) -> int:
        """Sixteen bytes of levels, then two bits per value."""
        return 16 + packed_nbytes(k, 2)

    def write(self, values: Tensor) -> Tensor:
        """Encode each row of `values`, all kept values of a tensor, with its own levels."""
        k = values.shape[1]
        mean, sigma = mean_and_sigma(values)
        step = sigma * (6.0 / 4 * math.sqrt(k / max(1, k - 1)))
        codes = (steps(values, mean, step) + 2.0).round_().clamp_(0, 3).to(torch.uint8)
        levels = bin_means(values, codes, mean.expand(-1, 4))
        return torch.cat([bytes_of(levels), pack(codes, 2)], 1)

    def read(self, packed: Tensor, k: int) -> Tensor:
        """Return one of the four levels for each value."""
        return look_up(floats(packed[:, :16], torch.float32), unpack(packed[:, 16:], 2, k))


class _Floats(Values):
    """The values themselves, cast to `verbatim`."""

    def nbytes(self, k: int) -> int:
        """Bytes of k numbers."""
        return k * self.verbatim.itemsize

    def write(self, values: Tensor) -> Tensor:
        """Round to nearest even, saturating."""
        return bytes_of(saturating_cast(values, self.verbatim))

    def read(self, packed: Tensor, k: int) -> Tensor:
        """Widen to fp32."""
        return floats(packed, self.verbatim)


@dataclass(frozen=True, kw_only=True, slots=True)
class BF16(_Floats):
    """Sixteen bits per value: rounded to nearest even, saturating.

    >>> BF16().nbytes(64)
    128
    """

    id = "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class F32(_Floats):
    """Thirty-two bits per value: kept values are exact.

    >>> F32().nbytes(64)
    256
    """

    id = "f32"

    verbatim: ClassVar[torch.dtype] = torch.float32
