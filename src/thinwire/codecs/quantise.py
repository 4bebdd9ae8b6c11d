"""Dense codecs of 1, 2, 4 and 8 bits a number: tables of levels, affine codes, and FP4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

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
from thinwire.codecs.grouping import Chunks, Grouping
from thinwire.codecs.levels import (
    FAR,
    TINY,
    Levels,
    MidRise,
    Nearest,
    Rounding,
    RoundKey,
    bin_means,
    steps,
)
from thinwire.codecs.row_format import Decoded, GroupedCodec
from thinwire.codecs.transforms import Transform
from thinwire.errors import check


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantise(GroupedCodec):
    """1, 2, 4 or 8 bits a number, on a grid of levels for each row.

    Up to 4 bits a record holds the level of every code (bf16), so one format serves all grids; with
    8 bits it holds the first level and the step (fp32). Planar codes follow.

    Args:
        bits: size of a code.
        grid: `MidRise`, `Statistical` or `Linear`.
        groups: what forms a row: `Chunks`, `Blocks`, `Rows` or `Tensors`.
        rounding: `Nearest` or `Stochastic`.
        transform: of each row, `DCT` or `Hadamard`; then coefficients are quantised.

    Raises:
        ConfigurationError: bits is not 1, 2, 4 or 8.

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
        check(
            self.bits in (1, 2, 4, 8),
            f"quantise to {self.bits} bits",
            because="a byte must hold a whole number of codes",
            do="pass bits = 1, 2, 4 or 8, or use CastBF16 for 16",
        )

    @property
    def sharding_loss(self) -> str | None:
        """One bit is too little for a mean: four workers lost .08 nats (docs/evidence.md)."""
        if self.bits > 1:
            return super(Quantise, self).sharding_loss
        return "a mean of one-bit numbers has more levels than the two of one bit"

    @property
    def record_id(self) -> str:
        """table-1, table-2, table-4 or affine-8."""
        return f"{'affine' if self.bits == 8 else 'table'}-{self.bits}"

    def record_nbytes(self, columns: int) -> int:
        """Origin and step, or a table; then the codes."""
        return self._head_nbytes() + packed_nbytes(columns, self.bits)

    def _head_nbytes(self) -> int:
        return 8 if self.bits == 8 else 2 * 2**self.bits

    @property
    def has_kernel(self) -> bool:
        """True for rounding to nearest, on mid-rise levels."""
        return isinstance(self.rounding, Nearest) and type(self.grid) is MidRise

    def write(self, x: Tensor, key: RoundKey) -> Tensor:
        """Codes of the grid's levels, or of the means of their bins."""
        origin, step = _place(self.grid, x, self.bits)
        top = 2**self.bits - 1
        places = steps(x, origin, step).add_(self.rounding.offsets(x, key))
        codes = places.clamp_(0, top).to(torch.uint8)
        if self.bits == 8:
            head = torch.cat([origin, step], 1)
        else:
            levels = origin + step * torch.arange(top + 1, device=x.device)
            if self.grid.means and not self.rounding.unbiased:
                levels = bin_means(x, codes, levels)
            head = saturating_cast(levels, torch.bfloat16)
        return torch.cat([bytes_of(head), pack(codes, self.bits)], 1)

    def read(self, records: Sequence[Tensor], columns: int, key: RoundKey) -> Iterator[Decoded]:
        """The level of each code."""
        for r in records:
            head, codes = self._head(r), unpack(r[:, self._head_nbytes() :], self.bits, columns)
            if self.bits < 8:
                yield Decoded(look_up(head, codes))
            else:
                # origin + code * step, in two operations, so that no machine fuses them.
                yield Decoded((codes.float() * head[:, 1:]).add_(head[:, :1]))

    def _head(self, records: Tensor) -> Tensor:
        dtype = torch.float32 if self.bits == 8 else torch.bfloat16
        return floats(records[:, : self._head_nbytes()], dtype)

    def largest(self, records: Tensor, columns: int, key: RoundKey) -> Tensor:
        """The largest level."""
        head = self._head(records)
        if self.bits == 8:
            head = torch.cat([head[:, :1], head[:, :1] + 255 * head[:, 1:]], 1)
        return head.abs().amax()


def _place(grid: Levels, x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The grid's origin and step [rows, 1], within reach of fp32 arithmetic.

    Where the step is too small to divide by, all codes are 0. Their level is then the point of the
    grid nearest to zero: the first level may lie several times farther out than the numbers do.
    """
    origin, step = grid.place(x, bits)
    top = 2**bits - 1
    flat = (step > 0) & (step <= TINY)
    nearest = origin.clamp(min=0) + (origin + top * step).clamp(max=0)
    origin = torch.where(flat, nearest, origin).clamp(-FAR, FAR)
    return origin, step.masked_fill(flat, 0.0).clamp(max=FAR / top)


_ZERO = 120  # the biased exponent that would be code 0


@dataclass(frozen=True, kw_only=True, slots=True)
class E3M0(GroupedCodec):
    """FP4 without mantissa: 0 and +-scale * 2^-6 ... 2^0; 4 bits a number and a scale for each row.

    The scale is the row's largest magnitude in bf16. A number goes to the nearest level by value
    (below scale * 2^-7: to 0), or stochastically to one of its neighbours. Planar codes of a sign
    and three bits of exponent follow the scale.

    Args:
        groups: what forms a row: `Chunks`, `Blocks`, `Rows` or `Tensors`.
        rounding: `Nearest` or `Stochastic`.
        transform: of each row, `DCT` or `Hadamard`; then coefficients are quantised.

    Source: Streaming DiLoCo (arXiv 2501.18512), FP4 payloads. Differs: the paper leaves scale and
    rounding open; both are ours.

    >>> E3M0().decode(E3M0().encode(torch.tensor([1.0, 0.3] * 8)), 16)[:2]
    tensor([1.0000, 0.2500])
    """

    groups: Grouping = field(default_factory=Chunks)
    rounding: Rounding = field(default_factory=Nearest)
    transform: Transform | None = field(default=None, metadata={"describe_default": False})

    record_id = "e3m0"

    def record_nbytes(self, columns: int) -> int:
        """The scale, then half a byte for each number."""
        return 2 + packed_nbytes(columns, 4)

    @property
    def has_kernel(self) -> bool:
        """True for rounding to nearest."""
        return isinstance(self.rounding, Nearest)

    def write(self, x: Tensor, key: RoundKey) -> Tensor:
        """The level below each magnitude, or the one above.

        Code c > 0 is the level 2^(c - 7), whose biased exponent is c + 120; code 0 is the level 0.
        """
        scale = saturating_cast(x.abs().amax(1, keepdim=True), torch.bfloat16)
        step = scale.float()
        magnitudes = steps(x.abs(), torch.zeros_like(step), step).clamp_(max=1.0)
        below = (magnitudes.view(torch.int32) >> 23).sub_(_ZERO).clamp_(0, 6)
        level = ((below + _ZERO) << 23).view(torch.float32).mul_(below > 0)
        # The first two levels, 0 and 2^-6, lie as far apart as the second and the third.
        inverse_gap = ((254 - _ZERO) - below.clamp(min=1) << 23).view(torch.float32)
        part = (magnitudes - level).mul_(inverse_gap)
        # 1 + r may round to 2, and the code after the largest magnitude is minus zero.
        up = part.add_(self.rounding.offsets(magnitudes, key)).floor_().clamp_(max=1.0)
        exponents = below.add_(up.to(torch.int32)).to(torch.uint8)
        codes = exponents | (x.signbit().to(torch.uint8) << 3)
        return torch.cat([bytes_of(scale), pack(codes, 4)], 1)

    def read(self, records: Sequence[Tensor], columns: int, key: RoundKey) -> Iterator[Decoded]:
        """Powers of two times the scale."""
        for r in records:
            signed = _signed_magnitudes(r.device)
            # Code 0 stays 0 even if the scale is NaN.
            levels = torch.where(signed == 0, signed, signed * floats(r[:, :2]))
            yield Decoded(look_up(levels, unpack(r[:, 2:], 4, columns)))

    def largest(self, records: Tensor, columns: int, key: RoundKey) -> Tensor:
        """The largest scale."""
        return floats(records[:, :2]).abs().amax()


@cache
def _signed_magnitudes(device: torch.device) -> Tensor:
    """The levels of all codes for a scale of 1."""
    magnitudes = [0.0, *(2.0**-e for e in range(6, -1, -1))]
    return torch.tensor(
        [*magnitudes, *(-m for m in magnitudes)], dtype=torch.float32, device=device
    )
