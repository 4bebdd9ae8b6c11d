"""Top-k with sign-mean or sign-levels values: rows of 4096 numbers, k up to 2048."""
# pyright: basic

import numpy as np

from thinwire.codecs.kernels.numba_rows import (
    add_feedback,
    bits_of,
    compiled,
    get_bf16,
    put_bf16,
    records_at,
    trailing_zeros,
)

MOST = 2048
"""The largest k: beyond it, places have no low bits."""

WRONG_NUMBER, DESCENDING = 1, 2
"""What may be wrong with a record; 0 if nothing is."""

_F, _I = np.float32, np.int32
_N = 4096
_GROUPS = 512  # of 8 numbers each, strided
_MAGNITUDE = np.int32(0x7FFFFFFF)


# -- which places ----------------------------------------------------------------------------------


@compiled
def _bits(value):
    """Of its magnitude: in the order of the magnitudes, NaN the largest."""
    return bits_of(value) & _MAGNITUDE


@compiled
def _maxima(x, groups):
    """The bits of the largest magnitude of each group; and of all."""
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
def _count(bits, t):
    c = _I(0)
    for i in range(len(bits)):
        c += _I(bits[i] >= t)
    return c


@compiled
def _cut(bits, k, most, slack):
    """A t with k <= |{bits >= t}| <= k + slack; with slack 0, or ties across the cut, the k-th."""
    low, high = _I(0), most
    t = _I(most - _I(4 << 23))  # usually within 16 times of the largest
    while low < high:
        if t <= low:
            t = _I(high - ((high - low) >> _I(1)))
        c = _count(bits, t)
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
    """The k largest places of a row, ascending, ties to the lowest."""
    most = _maxima(x, groups)
    # The k largest lie in groups whose maximum is at least the k-th largest maximum.
    t = _cut(groups, k, most, k // 8) if k <= _GROUPS else _I(0)
    # Written always and counted sometimes: a branch on such numbers would be guessed wrong.
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
    # Candidates come group by group: only where there are too many is their order asked for.
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
def _sizes(k):
    """Low bits of a place, and the bytes of bitmap and of low bits."""
    low_bits = 0
    while (k << (low_bits + 1)) <= _N:
        low_bits += 1
    return low_bits, (k + ((_N - 1) >> low_bits) + 8) // 8, (low_bits * k + 7) // 8


@compiled
def _put_places(record, places, k, low_bits, high, low):
    for j in range(high + low):
        record[j] = np.uint8(0)
    first = bit = 0  # of the plane of the bitmap that the place lies in; divisions would be slow
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
    """What is wrong with a record's places; `places` has room for 8 * high + 1."""
    n = 0
    for plane in range(8):
        for j in range(high):
            places[n] = _I((plane * high + j - n) << low_bits)
            n += np.int64(record[j] >> plane & 1)
    if n != k:
        return WRONG_NUMBER
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
    wrong = np.int64(places[k - 1] >= _N)
    for i in range(1, k):
        wrong |= np.int64(places[i] <= places[i - 1])
    return DESCENDING if wrong else 0


@compiled
def _sum(x, n):
    """The sum by halves of a scratch vector, which is spoilt; n is a power of two."""
    while n > 1:
        n //= 2
        a, b = x[:n], x[n : 2 * n]
        for j in range(n):
            a[j] += b[j]
    return x[0] + _F(0)


@compiled
def _put_values(x, record, places, k, two_levels, scaled, masked):
    """Levels and codes of the kept numbers into `record`; x loses what they stand for."""
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
    if not two_levels:
        level, m = put_bf16(record, 0, total), (k + 7) // 8
        for plane in range(8):
            for j in range(min(m, k - plane * m)):
                place = places[plane * m + j]
                value = x[place]
                negative = np.int64(bits_of(value) < 0)
                record[2 + j] |= np.uint8(negative << plane)
                x[place] = value + (level if negative else -level)
        return
    bound, count = total * per, 0
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
    m = (2 * k + 7) // 8
    for plane in range(4):
        for j in range(min(m, k - plane * m)):
            place = places[plane * m + j]
            value = x[place]
            negative = np.int64(bits_of(value) < 0)
            high = np.int64(scaled[plane * m + j] >= bound)
            level = high_level if high else low_level
            record[4 + j] |= np.uint8((high | negative << 1) << (2 * plane))
            x[place] = value + (level if negative else -level)


# -- entry points ----------------------------------------------------------------------------------


@compiled
def encode(x, delta, decay, out, k, two_levels):
    """Encode rows; see `RowKernel`. No row of `delta`: nothing is added."""
    low_bits, high, low = _sizes(k)
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
        _put_values(x[row], record[high + low :], places, k, two_levels, scaled, masked)


@compiled
def _add_levels(x, places, values, levels, k, two_levels):
    """Add to x at each place the level of its code: bit 0 is the high one, bit 1 negates it."""
    if two_levels:
        m = (2 * k + 7) // 8
        for plane in range(4):
            for j in range(min(m, k - plane * m)):
                x[places[plane * m + j]] += levels[values[4 + j] >> (2 * plane) & 3]
        return
    m = (k + 7) // 8
    for plane in range(8):
        for j in range(min(m, k - plane * m)):
            x[places[plane * m + j]] += levels[(values[2 + j] >> plane & 1) << 1]


@compiled
def add(out, senders, addresses, nbytes, weight, k, two_levels):
    """Add the records at `addresses`; what is wrong with any of them.

    No row of `senders`: nothing is counted.
    """
    low_bits, high, low = _sizes(k)
    places, levels = np.empty(8 * high + 1, np.int32), np.empty(4, np.float32)
    worst = 0
    for row in range(len(out)):
        x = out[row]
        for address in addresses:
            record = records_at(address, len(out), nbytes)[row]
            wrong = _get_places(record, places, k, low_bits, high, low)
            if wrong:
                worst = wrong if worst == 0 else min(worst, wrong)
                continue
            values = record[high + low :]
            a = get_bf16(values, 0)
            b = get_bf16(values, 2) if two_levels else a
            levels[0], levels[1] = a * weight, b * weight
            levels[2], levels[3] = -a * weight, -b * weight
            _add_levels(x, places, values, levels, k, two_levels)
            if len(senders):
                levels[0] = levels[2] = _F(a != 0)
                levels[1] = levels[3] = _F(b != 0)
                _add_levels(senders[row], places, values, levels, k, two_levels)
    return worst


@compiled
def largest(records, k, two_levels):
    """What is wrong with any record, and the largest magnitude of a level, NaN counted as such."""
    low_bits, high, low = _sizes(k)
    places, worst, most = np.empty(8 * high + 1, np.int32), 0, _I(0)
    for row in range(len(records)):
        record = records[row]
        wrong = _get_places(record, places, k, low_bits, high, low)
        if wrong:
            worst = wrong if worst == 0 else min(worst, wrong)
        for level in range(2 if two_levels else 1):
            most = max(most, bits_of(get_bf16(record, high + low + 2 * level)) & _MAGNITUDE)
    return worst, most
