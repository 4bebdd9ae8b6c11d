"""Functions shared by numba kernels: bits of floats, sums by halves, bf16, feedback.

Functions here and in the sister files loop from 0 over rows of constant length: no index can be
negative, so LLVM vectorises them. Nothing is fused or reordered, because no function is compiled
with fastmath. `nogil` lets threads call them concurrently.

numba checks only an entry point's own file to see whether its cache is stale: after a change to
this file, touch the others or delete `__pycache__`.
"""
# pyright: basic

import math
from collections.abc import Callable
from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from numba import njit, types

_intrinsic: Any = numba.extending.intrinsic
_F, _I = np.float32, np.int32
_N = 4096
EIGHTH = 512
"""An eighth of a row: what three halvings leave."""


def compiled(function: Callable[..., Any]) -> Any:
    """`function`, compiled at its first call and cached on disk if a folder is writable."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no folder for its cache
        return njit(**options)(function)


# -- bits ------------------------------------------------------------------------------------------


@_intrinsic
def bits_of(typingctx, x):
    """The bits of a float32 as int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@_intrinsic
def float_of(typingctx, x):
    """The float32 with these bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@_intrinsic
def trailing_zeros(typingctx, x):
    """The number of trailing zeros of a uint64 that is not 0."""

    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), codegen


@compiled
def put_bf16(record, at, value):
    """Write `value` to `record` in bf16 (nearest even, saturating); return what it decodes to."""
    limit = _F(3.3895313892515355e38)
    u = bits_of(min(max(value, -limit), limit))
    u = (u + _I(0x7FFF) + ((u >> _I(16)) & _I(1))) & _I(-65536)
    record[at], record[at + 1] = np.uint8(u >> _I(16)), np.uint8(u >> _I(24))
    return float_of(u)


@compiled
def get_bf16(record, at):
    """The number that two bytes stand for."""
    return float_of(_I(_I(record[at]) << _I(16) | _I(record[at + 1]) << _I(24)))


@compiled
def put_f32(record, at, value):
    """Write `value` to four bytes of `record`."""
    u = bits_of(value)
    for j in range(4):
        record[at + j] = np.uint8(u >> _I(8 * j))


@compiled
def get_f32(record, at):
    """The number that four bytes stand for."""
    u = _I(0)
    for j in range(4):
        u |= _I(_I(record[at + j]) << _I(8 * j))
    return float_of(u)


@compiled
def add_feedback(x, delta, decay):
    """x = decay * x + delta, for a row."""
    for i in range(_N):
        x[i] = decay * x[i] + delta[i]


@compiled
def largest_bits(x):
    """Bits of a row's largest magnitude: at least those of infinity if something is not finite."""
    most = _I(0)
    for i in range(_N):
        most = max(most, bits_of(x[i]) & _I(0x7FFFFFFF))
    return most


# -- sums by halves --------------------------------------------------------------------------------
#
# Three halvings at once: of eight numbers, each an eighth of a row from the next, add those half a
# row apart first.


@compiled
def fold(x, out):
    """out[j] = what three halvings leave at j; `x` is eight times as long as `out`."""
    n = len(out)
    a, b, c, d = x[:n], x[n : 2 * n], x[2 * n : 3 * n], x[3 * n : 4 * n]
    e, f, g, h = x[4 * n : 5 * n], x[5 * n : 6 * n], x[6 * n : 7 * n], x[7 * n : 8 * n]
    for j in range(n):
        even, odd = (a[j] + e[j]) + (c[j] + g[j]), (b[j] + f[j]) + (d[j] + h[j])
        out[j] = even + odd


@compiled
def sum_of_eighth(eighth, scratch):
    """The sum of a row that `fold` has reduced to an eighth; `scratch`: 72 float32."""
    fold(eighth[:EIGHTH], scratch[:64])
    fold(scratch[:64], scratch[64:72])
    s = scratch[64:72]
    return (((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))) + _F(0)


@compiled
def root_mean_square(x, largest, scaled, eighth, scratch):
    """`thinwire.codecs.levels.root_mean_square` of a row; `largest`: its `largest_bits`."""
    exponent = min(max(_I(254) - (largest >> _I(23)), _I(1)), _I(253))
    s, inverse = float_of(exponent << _I(23)), float_of((_I(254) - exponent) << _I(23))
    for i in range(_N):
        scaled[i] = (x[i] * s) * (x[i] * s)
    fold(scaled, eighth)
    root = _F(math.sqrt(sum_of_eighth(eighth, scratch)))
    return root * _F(1.0 / 64) * inverse
