"""Tables of 1, 2 and 4 bits, affine codes of 8 bits and E3M0 for GPUs: one kernel a call.

A program keeps a row in registers, and computes its grid, codes, bin means and residual from a
single read. One kernel adds the records of all workers.
"""

# The bodies of kernels are Triton's language, whose types Python's do not describe.
# pyright: reportMissingParameterType=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from thinwire.codecs.kernels.triton_ops import (
    bf16_bits,
    bf16_to_float,
    by_halves,
    inverse,
    is_tiny,
    load_bf16,
    load_row,
    store_bytes,
)
from thinwire.codecs.levels import FAR

_FAR = tl.constexpr(FAR)


@triton.jit(do_not_specialize=["workers"])
def add(
    out, records, workers, weight, head: tl.constexpr, bits: tl.constexpr, value_of: tl.constexpr
):
    """Add records of `head` bytes, then planar codes, which `value_of` decodes by the head.

    Without a weight, count the numbers that are not zero.
    """
    row = tl.program_id(0).to(tl.int64)
    nbytes: tl.constexpr = 512 * bits
    plane, byte = tl.arange(0, 8 // bits)[:, None], tl.arange(0, nbytes)[None, :]
    place = row * 4096 + plane * nbytes + byte
    total = tl.load(out + place)
    for worker in range(workers):
        record = tl.load(records + worker).to(tl.pointer_type(tl.uint8)) + row * (head + nbytes)
        codes = tl.load(record + head + byte).to(tl.int32) >> (bits * plane)
        value = value_of(record, codes & (2**bits - 1))
        if weight is None:
            total += (value != 0).to(tl.float32)
        else:
            total += value * weight
    tl.store(out + place, total)


@triton.jit
def _root_mean_square(x):
    """sqrt(mean(x^2)) of x [4096], scaled by a power of two to below 2 before it is squared."""
    magnitude = tl.abs(x)
    most = tl.max(magnitude, 0).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(254 - (most >> 23), 1), 253)
    scaled = magnitude * (exponent << 23).to(tl.float32, bitcast=True)
    total = by_halves(scaled * scaled, 4096)
    back = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.sqrt_rn(total) * (1.0 / 64) * back


@triton.jit
def _mid_rise(x, bits: tl.constexpr, sigmas: tl.constexpr):
    step = _root_mean_square(x) * sigmas
    if bits == 8:
        step = tl.maximum(step, tl.max(tl.abs(x), 0) * (2.0 / 255))
    return step * (0.5 - 2 ** (bits - 1)), step


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
def level_of(record, code):
    """The numbers that table codes stand for; the levels of a table share a cache line."""
    return load_bf16(record + 2 * code)


@triton.jit
def encode(x, delta, decay, out, bits: tl.constexpr, sigmas: tl.constexpr):
    """A table of levels or, for 8 bits, origin and step; then the codes."""
    row = tl.program_id(0).to(tl.int64)
    i = row * 4096 + tl.arange(0, 4096)
    per_byte: tl.constexpr = 8 // bits
    nbytes: tl.constexpr = 512 * bits
    head: tl.constexpr = 8 if bits == 8 else 2 * 2**bits
    record = out + row * (head + nbytes)
    number = load_row(x, delta, decay, i)
    origin, step = _mid_rise(number, bits, sigmas)
    origin, step = _within_reach(origin, step, bits)
    codes = _codes(number, origin, step, bits)
    plane = tl.arange(0, per_byte)[:, None]
    packed = tl.sum(tl.reshape(codes, (per_byte, nbytes)) << (bits * plane), 0)
    if bits == 8:
        store_bytes(record, origin.to(tl.int32, bitcast=True), 4)
        store_bytes(record + 4, step.to(tl.int32, bitcast=True), 4)
        tl.store(record + head + tl.arange(0, nbytes), packed.to(tl.uint8))
        tl.store(x + i, number - (codes.to(tl.float32) * step + origin))
    else:
        scaled = number * (1.0 / 8192)
        for code in range(2**bits):
            level = origin + step * code
            here = codes == code
            count = tl.sum(here.to(tl.int32), 0).to(tl.float32)
            mean = by_halves(tl.where(here, scaled, 0.0), 4096)
            mean = tl.div_rn(mean, tl.maximum(count, 1.0)) * 8192.0
            level = tl.where(count > 0, mean, level)
            store_bytes(record + 2 * code, bf16_bits(level), 2)
        tl.store(record + head + tl.arange(0, nbytes), packed.to(tl.uint8))
        # Levels are read back from memory: kept, they would take a register for each number.
        tl.debug_barrier()
        tl.store(x + i, number - level_of(record, codes))


@triton.jit
def _load_float(where):
    """The fp32 number at an address that may be unaligned."""
    bits = tl.load(where).to(tl.int32) | (tl.load(where + 1).to(tl.int32) << 8)
    bits |= tl.load(where + 2).to(tl.int32) << 16
    return (bits | (tl.load(where + 3).to(tl.int32) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def point_of(record, code):
    """The numbers that affine codes stand for."""
    return code.to(tl.float32) * _load_float(record + 4) + _load_float(record)


@triton.jit
def _power(code, scale):
    """+-scale * 2^(code - 7) with the sign of bit 3, and 0 for code 0, even if scale is NaN."""
    magnitude = code & 7
    power = ((magnitude + 120) << 23).to(tl.float32, bitcast=True)
    value = tl.where(magnitude > 0, power * scale, 0.0).to(tl.int32, bitcast=True)
    return (value ^ ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def encode_e3m0(x, delta, decay, out):
    """The scale, then the codes."""
    row = tl.program_id(0).to(tl.int64)
    # Two planes: byte j has the codes j and j + 2048.
    plane, column = tl.arange(0, 2)[:, None], tl.arange(0, 2048)[None, :]
    place = row * 4096 + plane * 2048 + column
    number = load_row(x, delta, decay, place)
    bits = number.to(tl.int32, bitcast=True)
    most = tl.max(tl.max(bits & 0x7FFFFFFF, 1), 0)
    scale_bits = bf16_bits(most.to(tl.float32, bitcast=True))
    scale = bf16_to_float(scale_bits)
    magnitude = tl.minimum(tl.abs(number) * inverse(scale), 1.0)
    # The exponent gives the level below, 2^(below - 7); the next is twice that, or 2^-6 after 0.
    below = tl.minimum(tl.maximum((magnitude.to(tl.int32, bitcast=True) >> 23) - 120, 0), 6)
    level = tl.where(below > 0, ((below + 120) << 23).to(tl.float32, bitcast=True), 0.0)
    inverse_width = ((134 - tl.maximum(below, 1)) << 23).to(tl.float32, bitcast=True)
    up = ((magnitude - level) * inverse_width + 0.5 >= 1.0).to(tl.int32)
    code = (below + up) | ((bits >> 28) & 8)
    record = out + row * 2050
    store_bytes(record, scale_bits, 2)
    packed = tl.sum(code << (4 * plane), 0).to(tl.uint8)
    tl.store(record + 2 + tl.arange(0, 2048), packed)
    tl.store(x + place, number - _power(code, scale))


@triton.jit
def power_of(record, code):
    """The numbers that E3M0 codes stand for."""
    return _power(code, load_bf16(record))
