"""Dense rows of 4096 numbers: tables of 1, 2 and 4 bits, affine codes of 8 bits, and E3M0."""
# pyright: basic

import numpy as np

from thinwire.codecs.kernels.numba_rows import (
    EIGHTH,
    add_feedback,
    bits_of,
    compiled,
    float_of,
    fold,
    get_bf16,
    get_f32,
    largest_bits,
    put_bf16,
    put_f32,
    root_mean_square,
    sum_of_eighth,
)
from thinwire.codecs.levels import FAR, TINY

_F, _I = np.float32, np.int32
_N = 4096


# -- where levels lie ------------------------------------------------------------------------------


@compiled
def _place(x, bits, sigmas, spare, eighth, scratch):
    """Origin and step of a row, as in `thinwire.codecs.levels`; a step spans `sigmas` sigmas."""
    top, half = _F((1 << bits) - 1), _F(1 << (bits - 1))
    most = largest_bits(x)
    step = root_mean_square(x, most, spare, eighth, scratch) * sigmas
    if bits == 8:
        step = max(step, float_of(most) * _F(2.0 / 255))
    origin = step * (_F(0.5) - half)
    if step > _F(0) and step <= _F(TINY):
        origin = max(origin, _F(0)) + min(origin + top * step, _F(0))
        step = _F(0)
    origin = min(max(origin, _F(-FAR)), _F(FAR))
    return origin, min(step, _F(FAR / ((1 << bits) - 1)))


@compiled
def _codes_of(x, origin, step, top, codes):
    """clamp(floor((x - origin) / step + 1/2), 0, top)."""
    inverse = _F(1) / step if step > _F(TINY) else _F(0)
    shift = origin * inverse
    for i in range(_N):
        t = (x[i] * inverse - shift) + _F(0.5)
        t = t if t > _F(0) else _F(0)  # NaN becomes 0, which `max` does not promise
        codes[i] = _I(t if t < top else top)


@compiled
def _bin_mean(x, codes, code, level, spare, eighth, scratch):
    """The mean of a code's numbers, or `level` if no number has it."""
    count = _I(0)
    for i in range(_N):
        spare[i] = x[i] * _F(1.0 / 8192) if codes[i] == code else _F(0)
        count += _I(codes[i] == code)
    if count == 0:
        return level
    fold(spare, eighth)
    return sum_of_eighth(eighth, scratch) / _F(count) * _F(8192)


# -- tables and affine codes -----------------------------------------------------------------------


@compiled
def _pack(codes, packed, bits):
    """Planar: byte j has the codes j, j + m, j + 2m, ... from its lowest bits up."""
    m = len(packed)
    for j in range(m):
        packed[j] = np.uint8(codes[j])
    for plane in range(1, 8 // bits):
        a, shift = codes[plane * m : (plane + 1) * m], _I(plane * bits)
        for j in range(m):
            packed[j] |= np.uint8(a[j] << shift)


@compiled
def _pick_of_four(q, a, b, c, d):
    """The q-th of four: selections vectorise, where a table would need a gather."""
    low, high = b if q & 1 else a, d if q & 1 else c
    return high if q & 2 else low


@compiled
def _add_sixteen(part, packed, shift, levels):
    """part += levels[packed >> shift & 15]."""
    a, b, c, d = levels[0], levels[1], levels[2], levels[3]
    e, f, g, h = levels[4], levels[5], levels[6], levels[7]
    p, q, r, s = levels[8], levels[9], levels[10], levels[11]
    t, u, v, w = levels[12], levels[13], levels[14], levels[15]
    for j in range(len(part)):
        code = _I(packed[j]) >> shift
        low = _pick_of_four(code, e, f, g, h) if code & 4 else _pick_of_four(code, a, b, c, d)
        high = _pick_of_four(code, t, u, v, w) if code & 4 else _pick_of_four(code, p, q, r, s)
        part[j] += high if code & 8 else low


@compiled
def _add_levels(x, packed, levels, bits):
    """x += levels[codes]."""
    m = len(packed)
    a, b, c, d = levels[0], levels[1], levels[2], levels[3]
    for plane in range(8 // bits):
        part, shift = x[plane * m : (plane + 1) * m], _I(plane * bits)
        if bits == 4:
            _add_sixteen(part, packed, shift, levels)
        elif bits == 2:
            for j in range(m):
                part[j] += _pick_of_four(_I(packed[j]) >> shift, a, b, c, d)
        else:
            for j in range(m):
                part[j] += b if _I(packed[j]) >> shift & 1 else a


@compiled
def encode(x, delta, decay, out, bits, sigmas):
    """Encode rows; see `RowKernel`. An empty `delta` adds nothing."""
    count, head = 1 << bits, 8 if bits == 8 else 2 << bits
    codes, spare = np.empty(_N, np.int32), np.empty(_N, np.float32)
    eighth, scratch = np.empty(EIGHTH, np.float32), np.empty(72, np.float32)
    levels = np.zeros(16, np.float32)
    for row in range(len(x)):
        numbers, record = x[row], out[row]
        if len(delta):
            add_feedback(numbers, delta[row], decay)
        origin, step = _place(numbers, bits, sigmas, spare, eighth, scratch)
        _codes_of(numbers, origin, step, _F(count - 1), codes)
        packed = record[head : head + _N * bits // 8]
        _pack(codes, packed, bits)
        if bits == 8:
            put_f32(record, 0, origin)
            put_f32(record, 4, step)
            for i in range(_N):
                numbers[i] -= _F(codes[i]) * step + origin
            continue
        for code in range(count):
            level = origin + step * _F(code)
            level = _bin_mean(numbers, codes, _I(code), level, spare, eighth, scratch)
            levels[code] = -put_bf16(record, 2 * code, level)
        _add_levels(numbers, packed, levels, bits)


@compiled
def add(out, counts, records, weight, bits):
    """Add the numbers of records, and count in rows of `counts`; False, as no record is invalid."""
    levels, sent = np.zeros(16, np.float32), np.zeros(16, np.float32)
    head = 8 if bits == 8 else 2 << bits
    for row in range(len(out)):
        record, x = records[row], out[row]
        packed = record[head : head + _N * bits // 8]
        if bits < 8:
            for code in range(1 << bits):
                level = get_bf16(record, 2 * code)
                levels[code], sent[code] = level * weight, _F(level != 0)
            _add_levels(x, packed, levels, bits)
            if len(counts):
                _add_levels(counts[row], packed, sent, bits)
            continue
        origin, step = get_f32(record, 0), get_f32(record, 4)
        for i in range(_N):
            x[i] += (_F(packed[i]) * step + origin) * weight
        if len(counts):
            for i in range(_N):
                counts[row, i] += _F(_F(packed[i]) * step + origin != 0)
    return False


# -- E3M0 ------------------------------------------------------------------------------------------


@compiled
def _exponents_of(x, inverse, codes):
    """The nearest of 0 and 2^-6 ... 2^0 times the scale, as its exponent in 3 bits; then the sign.

    Halfway between two powers of two the upper half of the mantissa begins. Halfway from 0 to 2^-6
    is 2^-7, less the half of an ulp that the reference's sum rounds up.
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
    # A damaged record may have a negative scale, whose sign the code then turns.
    return float_of(bits_of(product if magnitude else _F(0)) ^ (code & _I(8)) << _I(28))


@compiled
def e3m0_encode(x, delta, decay, out):
    """Encode rows; see `RowKernel`. An empty `delta` adds nothing."""
    codes = np.empty(_N, np.int32)
    for row in range(len(x)):
        numbers, record = x[row], out[row]
        if len(delta):
            add_feedback(numbers, delta[row], decay)
        scale = put_bf16(record, 0, float_of(largest_bits(numbers)))
        _exponents_of(numbers, _F(1) / scale if scale > _F(TINY) else _F(0), codes)
        _pack(codes, record[2 : 2 + _N // 2], 4)
        for i in range(_N):
            numbers[i] -= _value(codes[i], scale)


@compiled
def e3m0_add(out, counts, records, weight):
    """As `add`."""
    half, levels = _N // 2, np.empty(16, np.float32)
    for row in range(len(out)):
        record = records[row]
        scale, packed = get_bf16(record, 0), record[2 : 2 + half]
        low, high = out[row, :half], out[row, half:]
        if len(counts):
            for code in range(16):
                levels[code] = _F(_value(_I(code), scale) != 0)
            _add_levels(counts[row], packed, levels, 4)
        for j in range(half):
            low[j] += _value(_I(packed[j] & 15), scale) * weight
        for j in range(half):
            high[j] += _value(_I(packed[j] >> 4), scale) * weight
    return False
