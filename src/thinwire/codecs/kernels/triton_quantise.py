"""Tables of 1, 2 and 4 bits and lines of 8 bits for GPUs: one kernel a call.

The grid of a row, the codes of its numbers, the bin means and the residual come from one reading of
it: a program keeps the row in registers.
"""

# The bodies of kernels are Triton's language, whose types Python's do not describe.
# pyright: reportMissingParameterType=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.codecs.kernels.base import AffineSpec, TableSpec
from thinwire.codecs.kernels.triton_dense import WARPS, DenseKernel
from thinwire.codecs.kernels.triton_ops import (
    bf16_bits,
    by_halves,
    inverse,
    is_tiny,
    largest_magnitude,
    launch,
    load_bf16,
    load_row,
    store_bytes,
)
from thinwire.codecs.levels import FAR, MAX_STEPS, Levels, Linear, MidRise, Statistical
from thinwire.codecs.row_format import floats

_FAR = tl.constexpr(FAR)


@triton.constexpr_function
def _max_step(bits):
    return MAX_STEPS[bits]


@triton.jit
def _root_mean_square(x):
    """Of x [4096]: squares are taken of numbers scaled by a power of two to below 2."""
    magnitude = tl.abs(x)
    most = tl.max(magnitude, 0).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(254 - (most >> 23), 1), 253)
    scaled = magnitude * (exponent << 23).to(tl.float32, bitcast=True)
    total = by_halves(scaled * scaled, 4096)
    back = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.sqrt_rn(total) * (1.0 / 64) * back


@triton.jit
def _mid_rise(x, bits: tl.constexpr):
    step = _root_mean_square(x) * _max_step(bits)
    if bits == 8:
        step = tl.maximum(step, tl.max(tl.abs(x), 0) * (2.0 / 255))
    return step * (0.5 - 2 ** (bits - 1)), step


@triton.jit
def _statistical(x, bits: tl.constexpr):
    mean = by_halves(x * (1.0 / 4096), 4096)
    sigma = 2.0 * _root_mean_square(x * 0.5 - mean * 0.5)
    step = sigma * (6.0 / 2**bits)
    return mean - step * 2 ** (bits - 1), step


@triton.jit
def _linear(x, bits: tl.constexpr):
    low, high = tl.min(x, 0) + 0.0, tl.max(x, 0) + 0.0  # -0 + 0 is +0
    share: tl.constexpr = 1.0 / (2.0**bits - 1.0)
    return low, high * share - low * share


@triton.jit
def _within_reach(origin, step, bits: tl.constexpr):
    """Origin and step such that all levels are finite; for a tiny step, one level for all."""
    top: tl.constexpr = 2.0**bits - 1.0
    flat = (step > 0) & is_tiny(step)
    nearest = tl.maximum(origin, 0.0) + tl.minimum(origin + top * step, 0.0)
    origin = tl.minimum(tl.maximum(tl.where(flat, nearest, origin), -_FAR), _FAR)
    return origin, tl.minimum(tl.where(flat, 0.0, step), _FAR / top)


@triton.jit
def _codes(x, origin, step, bits: tl.constexpr):
    """floor((x - origin) / step + 1/2), clamped."""
    per_step = inverse(step)
    steps = x * per_step - origin * per_step + 0.5
    return tl.minimum(tl.maximum(steps, 0.0), 2.0**bits - 1.0).to(tl.int32)


@triton.jit
def _level_of(record, code):
    # The levels of a row are in one line of the cache.
    return load_bf16(record + 2 * code)


@triton.jit
def _encode_table(
    x,
    delta,
    decay,
    out,
    bits: tl.constexpr,
    place: tl.constexpr,
    means: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = row * 4096 + tl.arange(0, 4096)
    per_byte: tl.constexpr = 8 // bits
    nbytes: tl.constexpr = 512 * bits
    record = out + row * (2 * 2**bits + nbytes)
    number = load_row(x, delta, decay, i)
    origin, step = place(number, bits)
    origin, step = _within_reach(origin, step, bits)
    codes = _codes(number, origin, step, bits)
    scaled = number * (1.0 / 8192)
    for code in range(2**bits):
        level = origin + step * code
        here = codes == code
        if means:
            count = tl.sum(here.to(tl.int32), 0).to(tl.float32)
            mean = by_halves(tl.where(here, scaled, 0.0), 4096)
            mean = tl.div_rn(mean, tl.maximum(count, 1.0)) * 8192.0
            level = tl.where(count > 0, mean, level)
        store_bytes(record + 2 * code, bf16_bits(level), 2)
    plane = tl.arange(0, per_byte)[:, None]
    packed = tl.sum(tl.reshape(codes, (per_byte, nbytes)) << (bits * plane), 0)
    tl.store(record + 2 * 2**bits + tl.arange(0, nbytes), packed.to(tl.uint8))
    # Levels are read again from where they were written: kept, they would take a register a number.
    tl.debug_barrier()
    tl.store(x + i, number - _level_of(record, codes))


@triton.jit
def _encode_affine(x, delta, decay, out, place: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, 4096)
    record = out + row * 4104
    number = load_row(x, delta, decay, row * 4096 + column)
    origin, step = place(number, 8)
    origin, step = _within_reach(origin, step, 8)
    codes = _codes(number, origin, step, 8)
    store_bytes(record, origin.to(tl.int32, bitcast=True), 4)
    store_bytes(record + 4, step.to(tl.int32, bitcast=True), 4)
    tl.store(record + 8 + column, codes.to(tl.uint8))
    tl.store(x + row * 4096 + column, number - (codes.to(tl.float32) * step + origin))


@triton.jit
def _load_float(where):
    """The fp32 number at an address that may be odd."""
    bits = tl.load(where).to(tl.int32) | (tl.load(where + 1).to(tl.int32) << 8)
    bits |= tl.load(where + 2).to(tl.int32) << 16
    return (bits | (tl.load(where + 3).to(tl.int32) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _point_of(record, code):
    return code.to(tl.float32) * _load_float(record + 4) + _load_float(record)


def _placing(grid: Levels) -> Any:
    """The device function that places a grid of one of our classes."""
    match grid:
        case MidRise():
            return _mid_rise
        case Statistical():
            return _statistical
        case Linear():
            return _linear
        case _:
            return None


def supports_grid(grid: Levels) -> bool:
    """Whether levels lie where a kernel knows to put them: not with a grid of another package."""
    return _placing(grid) is not None


class TritonTable(DenseKernel):
    """`Quantise` with 1, 2 or 4 bits.

    Args:
        spec: of the format.
    """

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(head=2 * 2**spec.bits, bits=spec.bits, value_of=_level_of)
        self._spec = spec

    def encode(self, x: Tensor, out: Tensor, *, delta: Tensor | None, decay: float) -> None:
        """Grid, codes and bin means of a row that is read once."""
        launch(
            _encode_table,
            len(x),
            *(x, delta, decay, out),
            bits=self._spec.bits,
            place=_placing(self._spec.grid),
            means=self._spec.grid.means,
            num_warps=WARPS,
        )

    def largest(self, records: Tensor) -> Tensor:
        """The largest level, whether a code names it or not."""
        return largest_magnitude(floats(records[:, : 2 * 2**self._spec.bits]))


class TritonAffine(DenseKernel):
    """`Quantise` with 8 bits.

    Args:
        spec: of the format.
    """

    def __init__(self, spec: AffineSpec) -> None:
        super().__init__(head=8, bits=8, value_of=_point_of)
        self._spec = spec

    def encode(self, x: Tensor, out: Tensor, *, delta: Tensor | None, decay: float) -> None:
        """Origin, step and codes of a row that is read once."""
        place = _placing(self._spec.grid)
        launch(_encode_affine, len(x), x, delta, decay, out, place=place, num_warps=WARPS)

    def largest(self, records: Tensor) -> Tensor:
        """The farther end of all lines."""
        origin, step = floats(records[:, :8], torch.float32).split(1, 1)
        return largest_magnitude(torch.cat([origin, 255.0 * step + origin], 1))
