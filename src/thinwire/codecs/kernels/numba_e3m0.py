"""E3M0: rows of 4096 numbers."""
# pyright: basic

import numpy as np

from thinwire.codecs.kernels.numba_rows import (
    add_feedback,
    bits_of,
    compiled,
    float_of,
    get_bf16,
    largest_bits,
    put_bf16,
    records_at,
)
from thinwire.codecs.kernels.numba_table import add_sixteen, pack_nibbles
from thinwire.codecs.levels import TINY

_F, _I = np.float32, np.int32
_N = 4096
_MAGNITUDE = np.int32(0x7FFFFFFF)


@compiled
def _codes_of(x, inverse, codes):
    """The nearest of 0 and 2^-6 ... 2^0 times the scale, as its exponent in 3 bits; then the sign.

    Half of the way between two powers of two is where the upper half of the mantissa begins. Half
    of the way from 0 to 2^-6 is 2^-7, less the half of an ulp that the reference's sum rounds up.
    """
    for i in range(_N):
        t = abs(x[i]) * inverse
        u = bits_of(t if t < _F(1) else _F(1))
        power = ((u + _I(0x400000)) >> _I(23)) - _I(120)
        codes[i] = max(power, _I(u >= _I(0x3BFFFFFF))) | (bits_of(x[i]) >> _I(28) & _I(8))


@compiled
def _value(code, scale):
    """+-2^(c - 7) * scale, or +-0."""
    magnitude = code & _I(7)
    product = float_of((magnitude + _I(120)) << _I(23)) * scale
    return float_of(bits_of(product if magnitude else _F(0)) | (code & _I(8)) << _I(28))


@compiled
def encode(x, delta, decay, out):
    """Encode rows; see `RowKernel.encode`. No row of `delta`: nothing is added."""
    codes = np.empty(_N, np.int32)
    for row in range(len(x)):
        numbers, record = x[row], out[row]
        if len(delta):
            add_feedback(numbers, delta[row], decay)
        scale = put_bf16(record, 0, float_of(largest_bits(numbers)))
        _codes_of(numbers, _F(1) / scale if scale > _F(TINY) else _F(0), codes)
        pack_nibbles(codes, record[2 : 2 + _N // 2])
        for i in range(_N):
            numbers[i] -= _value(codes[i], scale)


@compiled
def _add_row(x, packed, scale, weight):
    a, b = x[: _N // 2], x[_N // 2 : _N]
    for j in range(_N // 2):
        a[j] += _value(_I(packed[j] & 15), scale) * weight
    for j in range(_N // 2):
        b[j] += _value(_I(packed[j] >> 4), scale) * weight


@compiled
def add(out, senders, addresses, nbytes, weight):
    """Add the records at `addresses`; 0, for any bytes are a record.

    No row of `senders`: nothing is counted.
    """
    counts = np.empty(16, np.float32)
    for row in range(len(out)):
        for address in addresses:
            record = records_at(address, len(out), nbytes)[row]
            scale, packed = get_bf16(record, 0), record[2 : 2 + _N // 2]
            _add_row(out[row], packed, scale, weight)
            if len(senders):
                for code in range(16):
                    counts[code] = _F(_value(_I(code), scale) != 0)
                add_sixteen(senders[row, : _N // 2], packed, 0, counts)
                add_sixteen(senders[row, _N // 2 :], packed, 4, counts)
    return 0


@compiled
def largest(records):
    """0, and the bits of the largest magnitude of a scale."""
    most = _I(0)
    for row in range(len(records)):
        most = max(most, bits_of(get_bf16(records[row], 0)) & _MAGNITUDE)
    return 0, most
