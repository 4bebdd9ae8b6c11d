"""E3M0 for GPUs: one kernel a call."""

# The bodies of kernels are Triton's language, whose types Python's do not describe.
# pyright: reportMissingParameterType=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl
from torch import Tensor

from thinwire.codecs.kernels.triton_dense import WARPS, DenseKernel
from thinwire.codecs.kernels.triton_ops import (
    bf16_bits,
    bf16_to_float,
    inverse,
    largest_magnitude,
    launch,
    load_bf16,
    load_row,
    store_bytes,
)
from thinwire.codecs.row_format import floats


@triton.jit
def _value(code, scale):
    """+-scale * 2^(code - 7) with the sign of bit 3, and 0 for code 0, also of a scale of NaN."""
    magnitude = code & 7
    power = ((magnitude + 120) << 23).to(tl.float32, bitcast=True)
    value = tl.where(magnitude > 0, power * scale, 0.0).to(tl.int32, bitcast=True)
    return (value ^ ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _encode(x, delta, decay, out):
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
    # The level below, 2^(below - 7), by the exponent; the next one is 2^-6 or as much farther on.
    below = tl.minimum(tl.maximum((magnitude.to(tl.int32, bitcast=True) >> 23) - 120, 0), 6)
    level = tl.where(below > 0, ((below + 120) << 23).to(tl.float32, bitcast=True), 0.0)
    inverse_width = ((134 - tl.maximum(below, 1)) << 23).to(tl.float32, bitcast=True)
    up = ((magnitude - level) * inverse_width + 0.5 >= 1.0).to(tl.int32)
    code = (below + up) | ((bits >> 28) & 8)
    record = out + row * 2050
    store_bytes(record, scale_bits, 2)
    packed = tl.sum(code << (4 * plane), 0).to(tl.uint8)
    tl.store(record + 2 + tl.arange(0, 2048), packed)
    tl.store(x + place, number - _value(code, scale))


@triton.jit
def _value_of(record, code):
    return _value(code, load_bf16(record))


class TritonE3M0(DenseKernel):
    """`E3M0`: one kernel a call."""

    def __init__(self) -> None:
        super().__init__(head=2, bits=4, value_of=_value_of)

    def encode(self, x: Tensor, out: Tensor, *, delta: Tensor | None, decay: float) -> None:
        """By exponents, without a table."""
        launch(_encode, len(x), x, delta, decay, out, num_warps=WARPS)

    def largest(self, records: Tensor) -> Tensor:
        """The largest scale."""
        return largest_magnitude(floats(records[:, :2]))
