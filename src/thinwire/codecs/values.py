"""What a sparse codec keeps of a row: which numbers (the k largest, or k at random), and how they
are written."""

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

    One more than k is selected: where it equals the k-th, values alone do not decide, and those few
    rows are done again with the index as second key. A GPU takes that key for all rows.

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
    # Of non-negative floats the bits have the order of the numbers, and comparing them is faster.
    bits = x.abs().view(torch.int32)
    if not x.is_cpu:  # to look for ties would be to wait for the device
        return _largest_with_ties(bits, k).sort(1).values
    values, indices = _top(bits, k + 1)
    least, where = values.min(1, keepdim=True)
    tied = ((values == least).sum(1) > 1).nonzero()[:, 0]
    chosen = indices.scatter(1, where, indices[:, k:])[:, :k]
    if len(tied):
        chosen[tied] = _largest_with_ties(bits[tied], k)
    return chosen.sort(1).values


def largest_reference(x: Tensor, k: int) -> Tensor:
    """What `largest` computes, by sorting every row.

    >>> largest_reference(torch.tensor([[1.0, -3.0, 3.0, 3.0]]), 2).tolist()
    [[1, 2]]
    """
    order = torch.sort(x.abs(), dim=1, descending=True, stable=True).indices
    return order[:, :k].sort(1).values


def _top(bits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row with their indices, in any order.

    They are in the k groups with the largest maxima: two small selections replace a large one.
    """
    rows, columns = bits.shape
    groups = columns // _PER_GROUP
    if columns % _PER_GROUP or 2 * k > groups:
        return bits.topk(k, sorted=False)
    grouped = bits.view(rows, _PER_GROUP, groups)
    group = grouped.amax(1).topk(k, sorted=False).indices
    candidates = grouped.gather(2, group[:, None, :].expand(rows, _PER_GROUP, k))
    values, place = candidates.view(rows, _PER_GROUP * k).topk(k, sorted=False)
    member = torch.div(place, k, rounding_mode="floor")
    return values, member * groups + group.gather(1, place - member * k)


def _largest_with_ties(bits: Tensor, k: int) -> Tensor:
    columns = bits.shape[1]
    from_the_end = torch.arange(columns - 1, -1, -1, device=bits.device)
    keys = (bits.to(torch.int64) << 32) | from_the_end
    return keys.topk(k, sorted=False).indices


def random_places(*, columns: int, k: int, seed: int, round_number: int) -> Tensor:
    """k places out of `columns`, ascending: those whose hash is smallest, ties to the lowest.

    The hash of place i is the output of SplitMix64 for the state s + (i + 1) g, where
    g = 0x9E3779B97F4A7C15 and s is its output for the state seed + (round + 1) g; all mod 2^64.

    Returns:
        int64 [k], the same on every machine.

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
    """A format for the k kept values of a row."""

    id: str
    """Part of the codec's id."""

    verbatim: torch.dtype = torch.bfloat16
    """Type of the plain numbers of rows whose sparse record would not be smaller."""

    spans_rows: bool = False
    """True if the kept values of all rows of a tensor are written as one."""

    @abstractmethod
    def nbytes(self, k: int) -> int:
        """Bytes of k values."""

    @abstractmethod
    def write(self, values: Tensor) -> Tensor:
        """Encode `values`, fp32 [rows, k], as uint8 [rows, nbytes]."""

    @abstractmethod
    def read(self, packed: Tensor, k: int) -> Tensor:
        """Decode `packed`, uint8 [rows, nbytes], to fp32 [rows, k]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignMean(Values):
    """A bit each: +-m, where m is the mean magnitude of the row's kept values, in bf16.

    Top-k's values are nearly equal in size: of their energy this loses 0.4 %.

    >>> SignMean().nbytes(64)
    10
    """

    id = "sign-mean"

    def nbytes(self, k: int) -> int:
        """The level, then k bits."""
        return 2 + packed_nbytes(k, 1)

    def write(self, values: Tensor) -> Tensor:
        """Write the level, then a bit for each value: 1 if it is negative."""
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
    """Two bits each: a sign and one of two magnitudes.

    Magnitudes at or above their mean are "high", others "low"; each class has its own mean, in
    bf16, as its level.

    >>> SignLevels().nbytes(64)
    20
    """

    id = "sign-levels"

    def nbytes(self, k: int) -> int:
        """The low level, the high level, then k codes of 2 bits."""
        return 4 + packed_nbytes(k, 2)

    def write(self, values: Tensor) -> Tensor:
        """Write both levels, then a code for each value: bit 0 is high, bit 1 is negative."""
        k = values.shape[1]
        scaled, negative = values.abs() * (1.0 / k), values.signbit()
        total = sum_by_halves(scaled)
        high = scaled >= total * (1.0 / k)
        count = high.sum(1, keepdim=True).float()
        above = sum_by_halves(scaled * high)
        # k (1 / count) times a sum of terms / k: this order keeps every number in range.
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
    """Two bits each: one of four levels that the kept values of a whole tensor share, in fp32.

    code = clamp(round((x - mean) / step + 2), 0, 3) with step = 6 sigma / 4; a level is the mean of
    its code's numbers. It reproduces the published code: bins lie off centre, one of them around
    the mean, where Top-k keeps few numbers. `SignLevels`, with levels for each row, loses less.

    Source: SparseLoCo (arXiv 2508.15706), its released code; sigma is over n - 1. Differs: the
    leftovers of all tensors, which share chunks, share levels, too.

    >>> TensorLevels().nbytes(1024)
    272
    """

    id = "tensor-levels"

    spans_rows = True

    def nbytes(self, k: int) -> int:
        """Four levels, then k codes of 2 bits."""
        return 16 + packed_nbytes(k, 2)

    def write(self, values: Tensor) -> Tensor:
        """Write a table for each row of `values`, which holds all kept values of a tensor."""
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
    """Numbers one after the other, of the type `verbatim`."""

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
    """Sixteen bits each: rounded to nearest even, saturating.

    >>> BF16().nbytes(64)
    128
    """

    id = "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class F32(_Floats):
    """Thirty-two bits each: kept values are exact.

    >>> F32().nbytes(64)
    256
    """

    id = "f32"

    verbatim: ClassVar[torch.dtype] = torch.float32
