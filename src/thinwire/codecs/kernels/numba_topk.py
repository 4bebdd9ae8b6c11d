"""Top-k with sign-mean or sign-levels values: rows of 4096 numbers, k up to 2048.

`bits` is the size of a value's code: 1 for sign-mean (a sign), 2 for sign-levels (a level and a
sign). It is also the number of levels. `low_bits`, `high`, `low`: `elias_fano_sizes` of k places.
"""
# pyright: basic

import numpy as np

from thinwire.codecs.kernels.numba_rows import (
    add_feedback,
    bits_of,
    compiled,
    get_bf16,
    put_bf16,
    trailing_zeros,
)

MOST = 2048
"""The largest k with a kernel: beyond it, places have no low bits."""

_F, _I = np.float32, np.int32
_N = 4096
_GROUPS = 512  # of 8 numbers each, strided
_MAGNITUDE = np.int32(0x7FFFFFFF)


# -- which places ----------------------------------------------------------------------------------


@compiled
def _bits(value):
    """Bits of the magnitude of `value`, ordered as magnitudes are, with NaN the largest."""
    return bits_of(value) & _MAGNITUDE


@compiled
def _maxima(x, groups):
    """Store `_bits` of the largest magnitude of each group, and return the largest of all."""
    n = _GROUPS
    a, b, c, d = x[:n], x[n : 2 * n], x[2 * n : 3 * n], x[3 * n : 4 * n]
    e, f, g, h = x[4 * n : 5 * n], x[5 * n : 6 * n], x[6 * n : 7 * n], x[7 * n : 8 * n]
    for j in range(_GROUPS):
        low = max(max(_bits(a[j]), _bits(b[j])), max(_bits(c[j]), _bits(d[j])))
        high = max(max(_bits(e[j]), _bits(f[j])), max(_bits(g[j]), _bits(h[j])))
        groups[j] = max(low, high)
    most = _I(0)
    for j in range(_GROUPS):
        most = max(most, groups[j])
    return most


@compiled
def _cut(bits, k, most, slack):
    """A threshold that k to k + slack of `bits` reach.

    With slack 0, or with ties across the cut, it is the k-th largest.
    """
    low, high = _I(0), most
    t = _I(most - _I(4 << 23))  # the k-th is usually more than a sixteenth of the largest
    while low < high:
        if t <= low:
            t = _I(high - ((high - low) >> _I(1)))
        c = _I(0)
        for i in range(len(bits)):
            c += _I(bits[i] >= t)
        if k <= c <= k + slack:
            return t
        if c >= k:
            low = t
        else:
            high = _I(t - _I(1))
        t = _I(0)
    return low


@compiled
def _select(x, k, places, groups, found, where, marks):
    """Store the places of the k largest magnitudes of a row, ascending; ties to the lowest."""
    most = _maxima(x, groups)
    # The k largest lie in groups whose maximum is at least the k-th largest maximum.
    t = _cut(groups, k, most, k // 8) if k <= _GROUPS else _I(0)
    # Store always and advance sometimes: a branch on such numbers would be mispredicted.
    few = n = 0
    for j in range(_GROUPS):
        places[few] = _I(j)
        few += np.int64(groups[j] >= t)
    for i in range(few):
        at = np.uint32(places[i])
        for _ in range(_N // _GROUPS):
            a = _bits(x[at])
            found[n], where[n] = a, _I(at)
            n += np.int64(a >= t)
            at += np.uint32(_GROUPS)
    exact = _cut(found[:n], k, most, 0)
    for w in range(_N // 64):
        marks[w] = np.uint64(0)
    above = at_cut = 0
    for i in range(n):
        if found[i] > exact:
            above += 1
            marks[where[i] >> 6] |= np.uint64(1) << np.uint64(where[i] & 63)
        elif found[i] == exact:
            where[at_cut] = where[i]
            at_cut += 1
    # Candidates come group by group: sort them only where some have to be dropped.
    chosen = where[:at_cut] if at_cut == k - above else np.sort(where[:at_cut])[: k - above]
    for place in chosen:
        marks[place >> 6] |= np.uint64(1) << np.uint64(place & 63)
    o = 0
    for w in range(_N // 64):
        word = marks[w]
        while word:
            places[o] = _I(w << 6) + _I(trailing_zeros(word))
            o += 1
            word &= word - np.uint64(1)


# -- records ---------------------------------------------------------------------------------------


@compiled
def _put_places(record, places, k, low_bits, high, low):
    """Write the Elias-Fano code of `places`: `high` bytes of bitmap, then `low` of low bits."""
    for j in range(high + low):
        record[j] = np.uint8(0)
    first = bit = 0  # of the bitmap's plane that holds the place; a division would be slow
    for i in range(k):
        p = (places[i] >> low_bits) + i
        while p >= first + high:
            first, bit = first + high, bit + 1
        record[p - first] |= np.uint8(1 << bit)
    # Bit i of plane p is the q-th, q = p k + i; it goes to byte q mod low, in runs without a wrap.
    at = bit = 0
    for plane in range(low_bits):
        i = 0
        while i < k:
            n = min(k - i, low - at)
            part, some = record[high + at : high + at + n], places[i : i + n]
            for j in range(n):
                part[j] |= np.uint8(((some[j] >> plane) & 1) << bit)
            i, at = i + n, at + n
            if at == low:
                at, bit = 0, bit + 1


@compiled
def _get_places(record, places, k, low_bits, high, low):
    """Read a record's places; True if they are invalid. `places` has room for 8 * high + 1."""
    n = 0
    for plane in range(8):
        for j in range(high):
            places[n] = _I((plane * high + j - n) << low_bits)
            n += np.int64(record[j] >> plane & 1)
    if n != k:
        return True
    at = bit = 0
    for plane in range(low_bits):
        i = 0
        while i < k:
            n = min(k - i, low - at)
            part, some = record[high + at : high + at + n], places[i : i + n]
            for j in range(n):
                some[j] |= _I((part[j] >> bit & 1) << plane)
            i, at = i + n, at + n
            if at == low:
                at, bit = 0, bit + 1
    wrong = places[k - 1] >= _N
    for i in range(1, k):
        wrong |= places[i] <= places[i - 1]
    return wrong


@compiled
def _sum(x, n):
    """Sum by halves of the first n numbers of `x`, which it overwrites; n is a power of two."""
    while n > 1:
        n //= 2
        a, b = x[:n], x[n : 2 * n]
        for j in range(n):
            a[j] += b[j]
    return x[0] + _F(0)


@compiled
def _put_values(x, record, places, k, bits, scaled, masked):
    """Write levels and codes of the kept numbers, and subtract what they decode to from x."""
    per, share = _F(1.0 / k), _F(k)
    n = 1
    while n < k:
        n *= 2
    for i in range(k):
        scaled[i] = masked[i] = abs(x[places[i]]) * per
    for i in range(k, n):
        masked[i] = _F(0)
    total = _sum(masked, n)
    for j in range(len(record)):
        record[j] = np.uint8(0)
    bound, count = _F(np.inf), 0
    if bits == 1:
        low_level = high_level = put_bf16(record, 0, total)
    else:
        bound = total * per
        for i in range(k):
            high = scaled[i] >= bound
            count += np.int64(high)
            masked[i] = scaled[i] if high else _F(0)
        for i in range(k, n):
            masked[i] = _F(0)
        above = _sum(masked, n)
        low_share = _F(1) / _F(max(k - count, 1)) * share
        high_share = _F(1) / _F(max(count, 1)) * share
        low_level = put_bf16(record, 0, max((total - above) * low_share, _F(0)))
        high_level = put_bf16(record, 2, max(above * high_share, _F(0)))
    m = (bits * k + 7) // 8
    for plane in range(8 // bits):
        for i in range(plane * m, min((plane + 1) * m, k)):
            value = x[places[i]]
            negative, high = np.int64(bits_of(value) < 0), np.int64(scaled[i] >= bound)
            code = high | negative << (bits - 1)
            record[2 * bits + i - plane * m] |= np.uint8(code << (bits * plane))
            level = high_level if high else low_level
            x[places[i]] = value + (level if negative else -level)


# -- entry points ----------------------------------------------------------------------------------


@compiled
def encode(x, delta, decay, out, k, bits, low_bits, high, low):
    """Encode rows; see `RowKernel`. An empty `delta` adds nothing."""
    places, where = np.empty(_N, np.int32), np.empty(_N + 1, np.int32)
    groups, found = np.empty(_GROUPS, np.int32), np.empty(_N + 1, np.int32)
    marks = np.empty(_N // 64, np.uint64)
    scaled, masked = np.empty(MOST, np.float32), np.empty(MOST, np.float32)
    for row in range(len(x)):
        if len(delta):
            add_feedback(x[row], delta[row], decay)
        _select(x[row], k, places, groups, found, where, marks)
        record = out[row]
        _put_places(record, places, k, low_bits, high, low)
        _put_values(x[row], record[high + low :], places, k, bits, scaled, masked)


@compiled
def add(out, counts, records, weight, k, bits, low_bits, high, low):
    """Add the numbers of records, and count in rows of `counts`; True if a record is invalid."""
    places, levels = np.empty(8 * high + 1, np.int32), np.empty((2, 4), np.float32)
    m, mask = (bits * k + 7) // 8, (1 << bits) - 1
    for row in range(len(out)):
        record = records[row]
        if _get_places(record, places, k, low_bits, high, low):
            return True
        values = record[high + low :]
        for code in range(2 * bits):  # those of negative values come last
            level = get_bf16(values, 2 * (code % bits))
            signed = level if code < bits else -level
            levels[0, code], levels[1, code] = signed * weight, _F(level != 0)
        codes = values[2 * bits :]
        for what in range(2 if len(counts) else 1):
            x, terms = (counts if what else out)[row], levels[what]
            for plane in range(8 // bits):
                for j in range(min(m, k - plane * m)):
                    code = codes[j] >> (bits * plane) & mask
                    x[places[plane * m + j]] += terms[code]
    return False


@compiled
def largest(records, k, bits, low_bits, high, low):
    """Whether a record is invalid, and the bits of the largest magnitude of a level."""
    places, most = np.empty(8 * high + 1, np.int32), _I(0)
    for row in range(len(records)):
        record = records[row]
        if _get_places(record, places, k, low_bits, high, low):
            return True, most
        for level in range(bits):
            most = max(most, _bits(get_bf16(record, high + low + 2 * level)))
    return False, most
