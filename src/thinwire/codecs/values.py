"""How the values that a sparse codec keeps are written."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs.bits import pack, packed_nbytes, unpack
from thinwire.codecs.cast import saturating_cast
from thinwire.codecs.levels import bin_means, mean_and_sigma, steps
from thinwire.codecs.row_format import Raw, RowFormat, bytes_of, floats
from thinwire.codecs.sums import sum_by_halves


class Values(ABC):
    """A format for the k kept values of a row."""

    id: str
    """Part of the codec's id."""

    verbatim: RowFormat = Raw(number="bf16")
    """The format of whole rows whose sparse record would not be smaller."""

    spans_rows: bool = False
    """Whether the kept values of all rows of a tensor are written as one: by default not."""

    @abstractmethod
    def nbytes(self, k: int) -> int:
        """Bytes of k values."""

    @abstractmethod
    def write(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 [rows, k] as uint8 [rows, nbytes], and decoded again, fp32 [rows, k]."""

    @abstractmethod
    def read(self, packed: Tensor, k: int) -> Tensor:
        """`packed` decoded, fp32 [rows, k]: the second result of `write`."""


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

    def write(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Bit 1 is negative."""
        k = values.shape[1]
        negative = values.signbit()
        # Scaled before it is summed: values near the float range must not overflow.
        level = _level(sum_by_halves(values.abs() * (1.0 / k)))
        packed = torch.cat([bytes_of(level), pack(negative.to(torch.uint8), 1)], 1)
        return packed, _signed(level.float(), negative)

    def read(self, packed: Tensor, k: int) -> Tensor:
        """The level, with signs."""
        return _signed(floats(packed[:, :2]), unpack(packed[:, 2:], 1, k).bool())


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

    def write(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Bit 0 of a code is high, bit 1 is negative."""
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
        levels = _level(torch.cat(means, 1).clamp(min=0))
        codes = high.to(torch.uint8) | (negative.to(torch.uint8) << 1)
        return torch.cat([bytes_of(levels), pack(codes, 2)], 1), _pick(levels.float(), codes)

    def read(self, packed: Tensor, k: int) -> Tensor:
        """One of two levels with a sign."""
        return _pick(floats(packed[:, :4]), unpack(packed[:, 4:], 2, k))


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

    def write(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """One table for each row of `values`, which holds all kept values of a tensor."""
        k = values.shape[1]
        mean, sigma = mean_and_sigma(values)
        step = sigma * (6.0 / 4 * math.sqrt(k / max(1, k - 1)))
        codes = (steps(values, mean, step) + 2.0).round_().clamp_(0, 3).to(torch.uint8)
        levels = bin_means(values, codes, mean.expand(-1, 4))
        return torch.cat([bytes_of(levels), pack(codes, 2)], 1), _look_up(levels, codes)

    def read(self, packed: Tensor, k: int) -> Tensor:
        """One of four levels."""
        return _look_up(floats(packed[:, :16], torch.float32), unpack(packed[:, 16:], 2, k))


@dataclass(frozen=True, kw_only=True, slots=True)
class BF16(Values):
    """Sixteen bits each.

    >>> BF16().nbytes(64)
    128
    """

    id = "bf16"

    def nbytes(self, k: int) -> int:
        """2 k."""
        return 2 * k

    def write(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Rounded to nearest even, saturating."""
        cast = _level(values)
        return bytes_of(cast), cast.float()

    def read(self, packed: Tensor, k: int) -> Tensor:
        """Widened exactly."""
        del k
        return floats(packed)


@dataclass(frozen=True, kw_only=True, slots=True)
class F32(Values):
    """Thirty-two bits each: kept values are exact.

    >>> F32().nbytes(64)
    256
    """

    id = "f32"

    verbatim: ClassVar[RowFormat] = Raw(number="f32")

    def nbytes(self, k: int) -> int:
        """4 k."""
        return 4 * k

    def write(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Their bytes."""
        return bytes_of(values), values

    def read(self, packed: Tensor, k: int) -> Tensor:
        """Their bytes as numbers."""
        del k
        return floats(packed, torch.float32)


def _level(x: Tensor) -> Tensor:
    return saturating_cast(x, torch.bfloat16)


def _look_up(levels: Tensor, codes: Tensor) -> Tensor:
    return levels.gather(1, codes.to(torch.int64))


def _signed(magnitudes: Tensor, negative: Tensor) -> Tensor:
    return torch.where(negative, -magnitudes, magnitudes)


def _pick(levels: Tensor, codes: Tensor) -> Tensor:
    magnitudes = torch.where((codes & 1).bool(), levels[:, 1:], levels[:, :1])
    return _signed(magnitudes, (codes & 2).bool())
