"""Functions shared by Triton kernels: sums by halves, bf16 by integers, launches.

Triton's interpreter hides two things that would change bits on a GPU. A plain `/` compiles
to an approximate division, so kernels write `tl.div_rn` and `tl.sqrt_rn`; and a product is fused
with a sum unless a kernel is launched with `enable_fp_fusion=False`, as `launch` does. bf16 is
rounded by integers, because the interpreter rounds ties up.

A program of a kernel handles one row. Row numbers are int64: payloads may have over 2^31 bytes.
"""

# The bodies of kernels are Triton's language, whose types Python's do not describe.
# pyright: reportMissingParameterType=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from typing import Any

import torch
import triton
import triton.language as tl

from thinwire.codecs.levels import TINY

_TINY = tl.constexpr(TINY)


@triton.constexpr_function
def log2(n):
    """The logarithm of a power of two."""
    return n.bit_length() - 1


@triton.jit
def by_halves(x, n: tl.constexpr):
    """The sum of x [n], n a power of two: x[:n/2] + x[n/2:] until one number is left.

    A sum of two numbers has no order, so any reduction of a pair gives its bits.
    """
    for i in tl.static_range(log2(n)):
        x = tl.sum(tl.reshape(x, (2, n >> (i + 1))), 0)
    return tl.sum(x, 0) + 0.0  # -0 + 0 is +0


@triton.jit
def bf16_bits(x):
    """The bits of x (fp32) in bf16 as int32: to nearest even, saturating."""
    largest = 3.3895313892515355e38
    bits = tl.minimum(tl.maximum(x, -largest), largest).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def bf16_to_float(bits):
    """The inverse of `bf16_bits`, for those bits that stand for a number."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def is_tiny(step):
    """Whether a reciprocal may be infinite. A constant this small would not be fp32 by itself."""
    return step <= tl.full((), _TINY, tl.float32)


@triton.jit
def inverse(step):
    """1 / step, or 0 if step is tiny."""
    return tl.where(is_tiny(step), 0.0, tl.div_rn(1.0, step))


@triton.jit
def load_bf16(where):
    """The bf16 numbers at addresses that may be unaligned, in fp32."""
    low = tl.load(where).to(tl.int32)
    return bf16_to_float(low | (tl.load(where + 1).to(tl.int32) << 8))


@triton.jit
def store_bytes(where, bits, count: tl.constexpr):
    """Store the lowest `count` (2 or 4) bytes of an int32 at an address that may be unaligned."""
    byte = tl.arange(0, count)
    tl.store(where + byte, (bits >> (8 * byte)).to(tl.uint8))


@triton.jit
def load_row(x, delta, decay, place):
    """decay * x + delta at `place`, the product rounded first; x alone without a delta."""
    row = tl.load(x + place)
    if delta is not None:
        row = decay * row + tl.load(delta + place)
    return row


WARPS = 4
"""For a row of 4096 numbers: 32 a lane, and sums by halves cross warps in two of twelve steps."""


def launch(
    kernel: Any, rows: int, *arguments: Any, num_warps: int = WARPS, **constants: Any
) -> None:
    """Start one program per row, on the device of the first argument and on its current stream."""
    if not rows:
        return
    with torch.cuda.device_of(arguments[0]):
        kernel[(rows,)](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=False)
