"""Dense codecs of 1, 2, 4 and 8 bits a number: tables of levels, lines, and FP4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from thinwire.codecs.bits import pack, packed_nbytes, unpack
from thinwire.codecs.cast import saturating_cast
from thinwire.codecs.grouping import Chunks, Grouping
from thinwire.codecs.kernels.base import AffineSpec, E3M0Spec, TableSpec
from thinwire.codecs.levels import FAR, TINY, Levels, MidRise, bin_means, steps
from thinwire.codecs.rounding import Nearest, Rounding
from thinwire.codecs.row_format import (
    DenseRows,
    GroupedCodec,
    RoundKey,
    RowFormat,
    bytes_of,
    floats,
)
from thinwire.codecs.transforms import Transform
from thinwire.errors import ConfigurationError
from thinwire.fragments.layout import CHUNK


def _place(grid: Levels, x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The grid's origin and step [rows, 1], within reach of fp32 arithmetic.

    Where the step is too small to divide by, all codes are 0. Their level is then the point of the
    grid nearest to zero: its first level may lie several times farther out than the numbers do.
    """
    origin, step = grid.place(x, bits)
    top = 2**bits - 1
    flat = (step > 0) & (step <= TINY)
    nearest = origin.clamp(min=0) + (origin + top * step).clamp(max=0)
    origin = torch.where(flat, nearest, origin).clamp(-FAR, FAR)
    return origin, step.masked_fill(flat, 0.0).clamp(max=FAR / top)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TableRows(RowFormat):
    """The levels of all codes in bf16, then planar codes."""

    bits: int
    grid: Levels
    rounding: Rounding

    @property
    def id(self) -> str:
        return f"table-{self.bits}"

    def nbytes(self, columns: int) -> int:
        return 2 * 2**self.bits + packed_nbytes(columns, self.bits)

    def kernel_spec(self) -> TableSpec | None:
        if not isinstance(self.rounding, Nearest):
            return None
        return TableSpec(nbytes=self.nbytes(CHUNK), bits=self.bits, grid=self.grid)

    def write(self, x: Tensor, key: RoundKey) -> tuple[Tensor, DenseRows]:
        origin, step = _place(self.grid, x, self.bits)
        top = 2**self.bits - 1
        places = steps(x, origin, step).add_(self.rounding.offsets(x, key))
        codes = places.clamp_(0, top).to(torch.uint8)
        levels = origin + step * torch.arange(top + 1, device=x.device)
        if self.grid.means and not self.rounding.unbiased:
            levels = bin_means(x, codes, levels)
        coded = saturating_cast(levels, torch.bfloat16)
        return torch.cat([bytes_of(coded), pack(codes, self.bits)], 1), _look_up(coded, codes)

    def read(self, records: Sequence[Tensor], columns: int, key: RoundKey) -> Iterator[DenseRows]:
        del key
        split = 2 * 2**self.bits
        for r in records:
            codes = unpack(r[:, split:], self.bits, columns)
            yield _look_up(floats(r[:, :split]), codes)

    def largest(self, records: Tensor, columns: int, key: RoundKey) -> Tensor:
        del columns, key
        return floats(records[:, : 2 * 2**self.bits]).abs().amax()


def _look_up(levels: Tensor, codes: Tensor) -> DenseRows:
    return DenseRows(values=levels.float().gather(1, codes.to(torch.int64)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _AffineRows(RowFormat):
    """Origin and step in fp32, then a byte a number."""

    grid: Levels
    rounding: Rounding

    id = "affine-8"

    def nbytes(self, columns: int) -> int:
        return 8 + columns

    def kernel_spec(self) -> AffineSpec | None:
        if not isinstance(self.rounding, Nearest):
            return None
        return AffineSpec(nbytes=self.nbytes(CHUNK), grid=self.grid)

    def write(self, x: Tensor, key: RoundKey) -> tuple[Tensor, DenseRows]:
        origin, step = _place(self.grid, x, 8)
        places = steps(x, origin, step).add_(self.rounding.offsets(x, key))
        codes = places.clamp_(0, 255).to(torch.uint8)
        affine = torch.cat([origin, step], 1)
        return torch.cat([bytes_of(affine), codes], 1), _on_line(affine, codes)

    def read(self, records: Sequence[Tensor], columns: int, key: RoundKey) -> Iterator[DenseRows]:
        del columns, key
        for r in records:
            yield _on_line(floats(r[:, :8], torch.float32), r[:, 8:])

    def largest(self, records: Tensor, columns: int, key: RoundKey) -> Tensor:
        del columns, key
        origin, step = floats(records[:, :8], torch.float32).unbind(1)
        return torch.maximum(origin.abs(), (origin + 255 * step).abs()).amax()


def _on_line(affine: Tensor, codes: Tensor) -> DenseRows:
    """origin + code * step, in two operations, so that no machine fuses them."""
    return DenseRows(values=(codes.float() * affine[:, 1:]).add_(affine[:, :1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantise(GroupedCodec):
    """1, 2, 4 or 8 bits a number, on a grid of levels for each row.

    Up to 4 bits a record holds the level of every code (bf16), so one format serves all grids; with
    8 bits it holds the first level and the step (fp32).

    Args:
        bits: of a code.
        grid: `MidRise`, `Statistical` or `Linear`.
        groups: rows: `Chunks`, `Blocks`, `Rows` or `Tensors`.
        rounding: `Nearest` or `Stochastic`.
        transform: of rows: `DCT` or `Hadamard`; then coefficients are quantised.

    Raises:
        ConfigurationError: another number of bits.

    Source: MuLoCo (arXiv 2505.23725).

    Differs: with 8 bits levels are the grid's own, not bin means.

    >>> 8 * Quantise(bits=2).nbytes(4096) / 4096
    2.015625
    """

    bits: int
    grid: Levels = field(default_factory=MidRise)
    groups: Grouping = field(default_factory=Chunks)
    rounding: Rounding = field(default_factory=Nearest)
    transform: Transform | None = field(default=None, metadata={"describe_default": False})

    def __post_init__(self) -> None:
        if self.bits not in (1, 2, 4, 8):
            raise ConfigurationError(
                f"quantise to {self.bits} bits",
                because="a byte must hold a whole number of codes",
                do="pass bits = 1, 2, 4 or 8, or use CastBF16 for 16",
            )

    def row_format(self) -> RowFormat:
        """A table of levels (8 bits: first level and step), then codes."""
        if self.bits == 8:
            return _AffineRows(grid=self.grid, rounding=self.rounding)
        return _TableRows(bits=self.bits, grid=self.grid, rounding=self.rounding)


_MAGNITUDES = (0.0, *(2.0**-e for e in range(6, -1, -1)))
_ZERO = 120  # the biased exponent that would be code 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _E3M0Rows(RowFormat):
    """A scale in bf16, then planar codes of a sign and three bits of exponent."""

    rounding: Rounding

    id = "e3m0"

    def nbytes(self, columns: int) -> int:
        return 2 + packed_nbytes(columns, 4)

    def kernel_spec(self) -> E3M0Spec | None:
        return E3M0Spec(nbytes=self.nbytes(CHUNK)) if isinstance(self.rounding, Nearest) else None

    def largest(self, records: Tensor, columns: int, key: RoundKey) -> Tensor:
        del columns, key
        return floats(records[:, :2]).abs().amax()

    def write(self, x: Tensor, key: RoundKey) -> tuple[Tensor, DenseRows]:
        scale = saturating_cast(x.abs().amax(1, keepdim=True), torch.bfloat16)
        step = scale.float()
        magnitudes = steps(x.abs(), torch.zeros_like(step), step)
        exponents = self._exponents(magnitudes.clamp_(max=1.0), key)
        codes = exponents | (x.signbit().to(torch.uint8) << 3)
        return torch.cat([bytes_of(scale), pack(codes, 4)], 1), _powers(step, codes)

    def read(self, records: Sequence[Tensor], columns: int, key: RoundKey) -> Iterator[DenseRows]:
        del key
        for r in records:
            codes = unpack(r[:, 2:], 4, columns)
            yield _powers(floats(r[:, :2]), codes)

    def _exponents(self, magnitudes: Tensor, key: RoundKey) -> Tensor:
        """The code of the level below each magnitude, or of the one above.

        Code c > 0 is the level 2^(c - 7), whose biased exponent is c + 120; code 0 is the level 0.
        """
        below = (magnitudes.view(torch.int32) >> 23).sub_(_ZERO).clamp_(0, 6)
        level = ((below + _ZERO) << 23).view(torch.float32).mul_(below > 0)
        # The first two levels, 0 and 2^-6, lie as far apart as the second and the third.
        inverse_gap = ((254 - _ZERO) - below.clamp(min=1) << 23).view(torch.float32)
        part = (magnitudes - level).mul_(inverse_gap)
        # 1 + r may round to 2, and the code after the largest magnitude is minus zero.
        up = part.add_(self.rounding.offsets(magnitudes, key)).floor_().clamp_(max=1.0)
        return below.add_(up.to(torch.int32)).to(torch.uint8)


@cache
def _signed_magnitudes(device: torch.device) -> Tensor:
    """The levels of all codes for a scale of 1."""
    return torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], device=device)


def _powers(scale: Tensor, codes: Tensor) -> DenseRows:
    signed = _signed_magnitudes(codes.device)
    levels = torch.where(signed == 0, signed, signed * scale)  # 0 also of a scale of NaN
    return DenseRows(values=levels.gather(1, codes.to(torch.int64)))


@dataclass(frozen=True, kw_only=True, slots=True)
class E3M0(GroupedCodec):
    """FP4 without mantissa: 0 and +-scale * 2^-6 ... 2^0; 4 bits a number and a scale for each row.

    The scale is the row's largest magnitude in bf16. A number goes to the nearest level by value
    (below scale * 2^-7: to 0), or stochastically to one of its neighbours.

    Args:
        groups: rows: `Chunks`, `Blocks`, `Rows` or `Tensors`.
        rounding: `Nearest` or `Stochastic`.
        transform: of rows: `DCT` or `Hadamard`; then coefficients are quantised.

    Source: Streaming DiLoCo (arXiv 2501.18512), FP4 payloads. Differs: the paper leaves scale and
    rounding open; both are ours.

    >>> E3M0().decode(E3M0().encode(torch.tensor([1.0, 0.3] * 8)), 16)[:2]
    tensor([1.0000, 0.2500])
    """

    groups: Grouping = field(default_factory=Chunks)
    rounding: Rounding = field(default_factory=Nearest)
    transform: Transform | None = field(default=None, metadata={"describe_default": False})

    def row_format(self) -> RowFormat:
        """A scale, then codes."""
        return _E3M0Rows(rounding=self.rounding)
