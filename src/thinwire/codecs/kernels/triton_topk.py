"""Top-k for GPUs: two kernels choose and write, one kernel per worker adds.

Bisection on the bits of the numbers, which sort as magnitudes do, finds the k-th magnitude.
Running counts of the numbers above it and of those equal to it then give each kept number its rank
(of equal ones the lowest places first), and with it its place in the Elias-Fano code.

A reader uses one lane per bit of the bitmap, two for each number: the rank of a set bit locates the
other bits of its number, so that no number has to be moved to its place in a list.

`bits` is the size of a value's code: 1 for sign-mean (a sign), 2 for sign-levels (a level and a
sign).
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
    load_bf16,
    load_row,
    log2,
    store_bytes,
)


@triton.jit
def choose(x, delta, decay, places, kept, k: tl.constexpr):
    """x = decay * x + delta; store the k largest of the row in the order of their places."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, 4096)
    number = load_row(x, delta, decay, row * 4096 + i)
    if delta is not None:
        tl.store(x + row * 4096 + i, number)
    bits = number.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # At least k numbers reach `low`, and fewer than k reach `high` + 1.
    high = tl.max(bits, 0)
    low = high * 0
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        count = tl.sum((bits >= middle).to(tl.int32), 0)
        low = tl.where(count >= k, middle, low)
        # Exactly k of them are enough: the k-th itself need not be known.
        high = tl.where(count == k, middle, tl.where(count > k, high, middle - 1))
    above, equal = bits > low, bits == low
    wanted = k - tl.sum(above.to(tl.int32), 0)
    # Both running counts in one: each is at most 4096.
    counts = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    equal_so_far = counts >> 16
    keep = above | (equal & (equal_so_far <= wanted))
    rank = (counts & 0xFFFF) + tl.minimum(equal_so_far, wanted) - 1
    tl.store(places + row * k + rank, i, mask=keep)
    tl.store(kept + row * k + rank, number, mask=keep)


@triton.jit
def _store_places(record, place, places, k: tl.constexpr):
    """Write the Elias-Fano code of `place` [k], which is also in memory at `places`."""
    low: tl.constexpr = 12 - log2(k)
    high_nbytes: tl.constexpr = k // 4
    low_nbytes: tl.constexpr = low * k // 8
    # A bitmap of 2k bits, of which each place sets one: its histogram, in eight planes. Lanes keep
    # a register for every 32 bins, so that at most 512 are counted at a time.
    plane = tl.arange(0, 8)
    bins: tl.constexpr = min(2 * k, 512)
    planes: tl.constexpr = bins // high_nbytes
    high = tl.zeros((high_nbytes,), tl.int32)
    for first in range(0, 8, planes):
        bit = (place >> low) + tl.arange(0, k) - first * high_nbytes
        bitmap = tl.histogram(bit, bins, mask=(bit >= 0) & (bit < bins))
        shift = first + tl.arange(0, planes)[:, None]
        high += tl.sum(tl.reshape(bitmap, (planes, high_nbytes)) << shift, 0)
    tl.store(record + tl.arange(0, high_nbytes), high.to(tl.uint8))
    # Low bits: the q-th, bit q // k of place q % k, is in byte q mod low_nbytes.
    byte = tl.arange(0, triton.next_power_of_2(low_nbytes))
    q = byte[:, None] + low_nbytes * plane[None, :]
    inside = byte < low_nbytes
    bit = (tl.load(places + q % k, mask=inside[:, None], other=0) >> (q // k)) & 1
    packed = tl.sum(bit << plane[None, :], 1).to(tl.uint8)
    tl.store(record + high_nbytes + byte, packed, mask=inside)


@triton.jit
def write(x, out, places, kept, k: tl.constexpr, bits: tl.constexpr):
    """Write the record of a row's kept numbers, and subtract from x what it decodes to."""
    row = tl.program_id(0).to(tl.int64)
    code_nbytes: tl.constexpr = k * bits // 8
    values_at: tl.constexpr = k // 4 + (12 - log2(k)) * k // 8
    record = out + row * (values_at + 2 * bits + code_nbytes)
    j = tl.arange(0, k)
    place = tl.load(places + row * k + j)
    number = tl.load(kept + row * k + j)
    _store_places(record, place, places + row * k, k)
    negative = (number.to(tl.int32, bitcast=True) >> 31) & 1
    scaled = tl.abs(number) * (1.0 / k)
    total = by_halves(scaled, k)
    if bits == 2:
        is_high = scaled >= total * (1.0 / k)
        count = tl.sum(is_high.to(tl.int32), 0)
        above = by_halves(tl.where(is_high, scaled, 0.0), k)
        high_share = tl.div_rn(1.0, tl.maximum(count, 1).to(tl.float32)) * k
        low_share = tl.div_rn(1.0, tl.maximum(k - count, 1).to(tl.float32)) * k
        low_level = bf16_bits(tl.maximum((total - above) * low_share, 0.0))
        high_level = bf16_bits(tl.maximum(above * high_share, 0.0))
        store_bytes(record + values_at, low_level | (high_level << 16), 4)
        level = tl.where(is_high, high_level, low_level)
        code = is_high.to(tl.int32) | (negative << 1)
    else:
        level = bf16_bits(total)
        store_bytes(record + values_at, level, 2)
        code = negative
    plane = tl.arange(0, 8 // bits)[:, None]
    planes = tl.reshape(code, (8 // bits, code_nbytes)) << (bits * plane)
    codes_at = record + values_at + 2 * bits
    tl.store(codes_at + tl.arange(0, code_nbytes), tl.sum(planes, 0).to(tl.uint8))
    value = bf16_to_float(level | (negative << 15))
    tl.store(x + row * 4096 + place, number - value)


@triton.jit
def _bit_of(packed, q, nbytes: tl.constexpr, mask):
    """Return bit q of planar codes of one bit in `nbytes` bytes."""
    return (tl.load(packed + q % nbytes, mask=mask, other=0).to(tl.int32) >> (q // nbytes)) & 1


@triton.jit
def _low_bits(packed, rank, k: tl.constexpr, mask):
    """Return the low bits of the places with the given ranks."""
    bits = rank * 0
    for p in tl.static_range(12 - log2(k)):
        bits |= _bit_of(packed, p * k + rank, (12 - log2(k)) * k // 8, mask) << p
    return bits


@triton.jit
def _load_places(record, wrong, k: tl.constexpr):
    """Return for each bit of the bitmap its place, its rank, and a mask of the bits that name one.

    A record with another number of places, or places out of order, is marked in `wrong`.
    """
    high_nbytes: tl.constexpr = k // 4
    bit = tl.arange(0, 2 * k)
    is_set = _bit_of(record, bit, high_nbytes, bit >= 0)
    follows_set = _bit_of(record, bit - (bit > 0).to(tl.int32), high_nbytes, bit > 0)
    rank = tl.cumsum(is_set, 0) - 1
    named = (is_set > 0) & (rank < k)
    low = _low_bits(record + high_nbytes, rank, k, named)
    place = ((bit - rank) << (12 - log2(k))) | low
    # Only neighbouring bits have the same high part; all others ascend.
    pair = named & (follows_set > 0)
    descends = pair & (low <= _low_bits(record + high_nbytes, rank - 1, k, pair))
    wrong_number = tl.sum(is_set, 0) != k
    wrong_places = tl.sum((named & (descends | (place >= 4096))).to(tl.int32), 0) > 0
    tl.store(wrong, 1, mask=wrong_number | wrong_places)
    return place, rank, named & (place < 4096)


@triton.jit
def _load_values(packed, rank, named, k: tl.constexpr, bits: tl.constexpr):
    """Return the numbers with the given ranks."""
    if bits == 2:
        # Of planar codes of 2 bits, code c is at bits 2 (c // m) and up of byte c mod m.
        nbytes: tl.constexpr = k // 4
        byte = tl.load(packed + 4 + rank % nbytes, mask=named, other=0).to(tl.int32)
        code = byte >> (2 * (rank // nbytes))
        level = tl.where((code & 1) > 0, load_bf16(packed + 2), load_bf16(packed))
        negative = (code >> 1) & 1
    else:
        negative = _bit_of(packed + 2, rank, k // 8, named)
        level = tl.where(named, load_bf16(packed), 0.0)
    return (level.to(tl.int32, bitcast=True) ^ (negative << 31)).to(tl.float32, bitcast=True)


@triton.jit
def check(records, wrong, nbytes, k: tl.constexpr):
    """Mark in `wrong` that the places of a record are invalid."""
    row = tl.program_id(0).to(tl.int64)
    _load_places(records + row * nbytes, wrong, k)


@triton.jit
def add(out, records, wrong, weight, k: tl.constexpr, bits: tl.constexpr):
    """Add the numbers of one worker's records, or count them without a weight."""
    row = tl.program_id(0).to(tl.int64)
    values_at: tl.constexpr = k // 4 + (12 - log2(k)) * k // 8
    record = records + row * (values_at + 2 * bits + k * bits // 8)
    place, rank, named = _load_places(record, wrong, k)
    value = _load_values(record + values_at, rank, named, k, bits)
    where = out + row * 4096 + place
    term = (value != 0).to(tl.float32) if weight is None else value * weight
    tl.store(where, tl.load(where, mask=named, other=0.0) + term, mask=named)
