"""A second, read-only implementation of docs/wire-format.md, written from that text alone.

Of encoding it has only the sums, whose order the text fixes.

It imports neither torch nor thinwire, and is plain and slow.
"""

import functools
import hashlib
import itertools
import math
import operator
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Places = list[int]


class Refused(Exception):
    """The bytes do not follow the format."""


class Segment(NamedTuple):
    shape: tuple[int, ...]
    role: str
    first: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        if len(self.shape) < 2:
            return 1, self.numel
        return self.shape[0], math.prod(self.shape[1:])


class Layout(NamedTuple):
    segments: list[Segment]
    numel: int


# -- message ---------------------------------------------------------------------------------------


class Header(NamedTuple):
    codec: bytes
    fragment: int
    kind: int
    shard: int
    round: int
    sender: int
    body_checksum: int
    elements: int
    anchor: bytes


def codec_digest(codec_id: str) -> bytes:
    return hashlib.sha256(codec_id.encode("utf-8")).digest()[:8]


def read_header(message: bytes) -> Header:
    magic, version, header_bytes, *fields, own_checksum = struct.unpack_from(
        "<4sHH8sIHHQIIQ8s4xI", message
    )
    assert (magic, header_bytes) == (b"TWIR", 64)
    assert version in (1, 2)
    assert own_checksum == zlib.crc32(message[:60])
    return Header(*fields)


def read_body(message: bytes, body_nbytes: int) -> bytes:
    body = message[64 : 64 + body_nbytes]
    checked = body if message[4] == 1 else column_sums(body) + struct.pack("<Q", body_nbytes)
    assert zlib.crc32(checked) == read_header(message).body_checksum
    return body


def anchor_digest(vector: Floats) -> bytes:
    return hashlib.sha256(column_sums(vector.astype("<f4").tobytes())).digest()[:8]


def column_sums(raw: bytes) -> bytes:
    words = np.frombuffer(raw + bytes(-len(raw) % 8192), "<u8").reshape(-1, 1024)
    return words.sum(0, dtype="<u8").tobytes()


# -- layout ----------------------------------------------------------------------------------------


def wire_order(shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Names, those of whole chunks first."""
    numels = {name: math.prod(shape) for name, shape in shapes.items()}
    return sorted(shapes, key=lambda name: numels[name] == 0 or numels[name] % 4096 != 0)


def cut(layout: Layout, workers: int) -> list[tuple[int, Layout]]:
    """(first element, layout) of each shard."""
    places = {0}
    for s in layout.segments:
        rows, columns = s.rows_and_columns
        places |= {s.first + r * columns for r in range(0, rows, 64)} | {s.first + s.numel}
    cuts = [0]
    for shard in range(1, workers):
        wanted = layout.numel * shard // workers
        cuts.append(min(places, key=lambda p: (abs(p - wanted), p)))
    cuts.append(layout.numel)
    return [(a, _shard(layout, a, b)) for a, b in itertools.pairwise(cuts)]


def _shard(layout: Layout, begin: int, end: int) -> Layout:
    segments: list[Segment] = []
    for s in layout.segments:
        first, last = max(begin, s.first), min(end, s.first + s.numel)
        if first >= last:
            continue
        shape = s.shape
        if last - first < s.numel:
            shape = ((last - first) // s.rows_and_columns[1], *s.shape[1:])
        segments.append(Segment(shape, s.role, first - begin))
    return Layout(segments, end - begin)


# -- groups: the places of each row ----------------------------------------------------------------


def sections_of(groups: str, segments: Sequence[Segment]) -> list[list[Places]]:
    """The rows of each section; none is empty."""
    split: Callable[[Segment], tuple[list[Places], Places]] = {
        "tensor": lambda s: _runs(s, s.numel),
        "row": lambda s: _runs(s, s.rows_and_columns[1]),
        "chunk": lambda s: _runs(s, 4096),
        "block": _blocks,
    }[groups]
    parts = [split(s) for s in segments if s.numel]
    left = [place for _, rest in parts for place in rest]
    leftovers = [left[begin : begin + 4096] for begin in range(0, len(left), 4096)]
    return [rows for rows in [*(whole for whole, _ in parts), leftovers] if rows]


def _runs(s: Segment, length: int) -> tuple[list[Places], Places]:
    places = list(range(s.first, s.first + s.numel))
    whole = s.numel // length * length
    return [places[i : i + length] for i in range(0, whole, length)], places[whole:]


def _blocks(s: Segment) -> tuple[list[Places], Places]:
    rows, columns = s.rows_and_columns

    def place(row: int, column: int) -> int:
        return s.first + row * columns + column

    down, across = rows // 64, columns // 64
    if across == 0:
        return [], list(range(s.first, s.first + s.numel))
    whole = [
        [place(64 * i + r, 64 * j + c) for r in range(64) for c in range(64)]
        for i in range(down)
        for j in range(across)
    ]
    right = [place(r, c) for r in range(64 * down) for c in range(64 * across, columns)]
    below = [place(r, c) for r in range(64 * down, rows) for c in range(columns)]
    return whole, right + below


# -- records ---------------------------------------------------------------------------------------


def _bf16(raw: bytes) -> Floats:
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


def _f32(raw: bytes) -> Floats:
    return np.frombuffer(raw, "<f4").astype(np.float32)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _codes(raw: bytes, count: int, bits: int) -> list[int]:
    m = _ceil(count * bits, 8)
    return [raw[i % m] >> (bits * (i // m)) & (2**bits - 1) for i in range(count)]


def _values_nbytes(values: str, k: int) -> int:
    return {
        "sign-mean": 2 + _ceil(k, 8),
        "sign-levels": 4 + _ceil(k, 4),
        "tensor-levels": 16 + _ceil(k, 4),
        "bf16": 2 * k,
        "f32": 4 * k,
    }[values]


def _values(values: str, raw: bytes, k: int) -> Floats:
    if values == "bf16":
        return _bf16(raw)
    if values == "f32":
        return _f32(raw)
    if values == "tensor-levels":
        return _f32(raw[:16])[_codes(raw[16:], k, 2)]
    if values == "sign-mean":
        (level,) = _bf16(raw[:2])
        kept = [-level if code else level for code in _codes(raw[2:], k, 1)]
    else:
        levels = _bf16(raw[:4])
        kept = [-levels[c & 1] if c & 2 else levels[c & 1] for c in _codes(raw[4:], k, 2)]
    return np.array(kept, np.float32)


def kept(big_k: int, n: int) -> int:
    return max(1, (2 * big_k * n + 4096) // 8192)


def _elias_fano(n: int, k: int) -> tuple[int, int]:
    """l and h."""
    low = int(math.log2(n // k))
    return low, k + ((n - 1) >> low) + 1


def _read_places(raw: bytes, n: int, k: int) -> Places:
    low, high = _elias_fano(n, k)
    m = _ceil(high, 8)
    ones = [p for p in range(8 * m) if raw[p % m] >> (p // m) & 1]
    if len(ones) != k:
        raise Refused("bitmap")
    planes = _codes(raw[m:], low * k, 1) if low else []
    places = [
        ((q - i) << low) + sum(planes[bit * k + i] << bit for bit in range(low))
        for i, q in enumerate(ones)
    ]
    if places[-1] >= n or any(b <= a for a, b in itertools.pairwise(places)):
        raise Refused("places")
    return places


_MOD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z %= _MOD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % _MOD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % _MOD
    return z ^ (z >> 31)


def random_places(n: int, k: int, seed: int, round_number: int) -> Places:
    state = _mix(seed + (round_number + 1) * _GOLDEN)
    by_hash = sorted(range(n), key=lambda i: (_mix(state + (i + 1) * _GOLDEN), i))
    return sorted(by_hash[:k])


class Format(NamedTuple):
    """An id with its parts: ("topk", 64, 0, "sign-mean", "chunk", ""), for one."""

    family: str
    number: int
    seed: int
    values: str
    groups: str
    transform: str


def parse(codec_id: str) -> Format:
    head, *rest = codec_id.split("/")
    family, *numbers = head.split("-")
    transform = rest.pop() if rest[-1] in ("dct", "hadamard") else ""
    values = rest[0] if len(rest) == 2 else ""
    number = int(numbers[0]) if numbers else 0
    seed = int(numbers[2]) if family == "randomk" else 0
    return Format(family, number, seed, values, rest[-1], transform)


def plain_nbytes(f: Format, rows: list[Places]) -> int:
    return (4 if f.values == "f32" else 2) * sum(map(len, rows))


def record_nbytes(f: Format, rows: list[Places]) -> int:
    """Size of the record of a row, or of a section's rows; that of plain numbers if no larger."""
    n = sum(map(len, rows))
    if f.family == "table":
        return 2 * 2**f.number + _ceil(n * f.number, 8)
    if f.family == "affine":
        return 8 + n
    if f.family == "e3m0":
        return 2 + _ceil(n, 2)
    named = 0 if f.family == "randomk" else sum(_places_nbytes(f, row) for row in rows)
    return named + _values_nbytes(f.values, sum(kept(f.number, len(row)) for row in rows))


def read_record(
    f: Format, raw: bytes, rows: list[Places], round_number: int, number: int
) -> tuple[Places, Floats]:
    """The places in the vector that record `number` names, and their values."""
    where = list(itertools.chain(*rows))
    n = len(where)
    if record_nbytes(f, rows) >= plain_nbytes(f, rows):
        return where, _f32(raw) if f.values == "f32" else _bf16(raw)
    if f.family == "table":
        split = 2 * 2**f.number
        return where, _bf16(raw[:split])[_codes(raw[split:], n, f.number)]
    if f.family == "affine":
        origin, step = _f32(raw[:8])
        products = np.frombuffer(raw[8:], np.uint8).astype(np.float32) * step
        return where, products + origin
    if f.family == "e3m0":
        return where, _powers(_bf16(raw[:2])[0], _codes(raw[2:], n, 4))
    if f.family == "randomk":
        k = kept(f.number, n)
        places = random_places(n, k, f.seed, round_number)
        return [where[(p + number) % n] for p in places], _values(f.values, raw, k)
    places: Places = []
    for row in rows:
        end = _places_nbytes(f, row)
        named = _read_places(raw[:end], len(row), kept(f.number, len(row)))
        places, raw = places + [row[i] for i in named], raw[end:]
    return places, _values(f.values, raw, len(places))


def _places_nbytes(f: Format, row: Places) -> int:
    k = kept(f.number, len(row))
    low, high = _elias_fano(len(row), k)
    return _ceil(high, 8) + _ceil(low * k, 8)


def _powers(scale: np.float32, codes: list[int]) -> Floats:
    magnitudes = [np.float32(0)] + [scale * np.float32(2.0 ** (c - 7)) for c in range(1, 8)]
    return np.array([-magnitudes[c & 7] if c & 8 else magnitudes[c & 7] for c in codes], np.float32)


# -- how encoders add ------------------------------------------------------------------------------

_F = np.float32


def add_up(numbers: Iterable[np.float32]) -> np.float32:
    left = [_F(x) for x in numbers]
    while len(left).bit_count() != 1:
        left.append(_F(0))
    while len(left) > 1:
        half = len(left) // 2
        left = [a + b for a, b in zip(left[:half], left[half:], strict=True)]
    return left[0] + _F(0)


def mean_of(x: Floats) -> np.float32:
    return add_up(v * _F(1 / len(x)) for v in x)


def root_mean_square(x: Floats) -> np.float32:
    largest = float(max(abs(v) for v in x))
    power = 126 if largest == 0 else min(max(1 - math.frexp(largest)[1], -126), 126)
    squares = [(v * _F(2.0**power)) * (v * _F(2.0**power)) for v in x]
    return np.sqrt(add_up(squares)) * _F(1 / math.sqrt(len(x))) * _F(2.0**-power)


def sigma_of(x: Floats) -> np.float32:
    mean = mean_of(x)
    return _F(2) * root_mean_square(np.array([v * _F(0.5) - mean * _F(0.5) for v in x], _F))


def bin_mean(x: Floats, codes: Sequence[int], code: int) -> np.float32:
    room = _F(2.0 ** (1 + math.floor(math.log2(len(x)))))
    total = add_up(v / room if c == code else _F(0) for v, c in zip(x, codes, strict=True))
    return total / _F(list(codes).count(code)) * room


def sign_levels(values: Floats) -> tuple[np.float32, np.float32]:
    """The low and the high level, before they are rounded to bf16."""
    k = len(values)
    scaled = [abs(v) * _F(1 / k) for v in values]
    total = add_up(scaled)
    is_high = [s >= total * _F(1 / k) for s in scaled]
    above = add_up(s if high else _F(0) for s, high in zip(scaled, is_high, strict=True))
    high = above * (_F(1) / _F(max(1, sum(is_high))) * _F(k))
    low = (total - above) * (_F(1) / _F(max(1, k - sum(is_high))) * _F(k))
    return max(low, _F(0)), high


# -- transforms ------------------------------------------------------------------------------------


@functools.cache
def _matrix(transform: str, n: int) -> list[list[int]]:
    if transform == "dct":
        scales = [math.sqrt((2 if i else 1) / n) for i in range(n)]
        return [
            [
                round(2**25 * scales[i] * math.cos(math.pi * i * (2 * j + 1) / (2 * n)))
                for j in range(n)
            ]
            for i in range(n)
        ]
    out, first = [[0] * n for _ in range(n)], 0
    for size in (2**bit for bit in range(6, -1, -1) if n >> bit & 1):
        for i, j in itertools.product(range(size), repeat=2):
            sign = -1 if (i & j).bit_count() % 2 else 1
            out[first + i][first + j] = sign * round(2**25 / math.sqrt(size))
        first += size
    return out


def _times(numbers: Sequence[float], transform: str) -> list[float]:
    """The numbers that have these coefficients."""
    largest = max(map(abs, numbers))
    if largest == 0:
        return [0.0] * len(numbers)
    e = math.frexp(largest)[1] - 1
    q = [round(math.ldexp(number, 23 - e)) for number in numbers]
    m = _matrix(transform, len(numbers))
    return [
        math.ldexp(sum(map(operator.mul, q, column)), e - 48) for column in zip(*m, strict=True)
    ]


def _back(transform: str, row: Floats, *, is_block: bool) -> Floats:
    numbers = [float(x) for x in row]
    runs = [_times(numbers[i : i + 64], transform) for i in range(0, len(numbers), 64)]
    if is_block:
        columns = [_times(column, transform) for column in zip(*runs, strict=True)]
        runs = [list(run) for run in zip(*columns, strict=True)]
    largest = float(np.finfo(np.float32).max)
    flat = [min(max(x, -largest), largest) for run in runs for x in run]
    return np.array(flat, np.float64).astype(np.float32)


def to_vector(codec_id: str, layout: Layout, coefficients: Floats) -> Floats:
    """The vector of a sum of the coefficients in bodies."""
    if codec_id.startswith("per-role("):
        named = roles_of(codec_id)
        for role, inner in named.items():
            coefficients = to_vector(inner, _of_role(layout, role, named), coefficients)
        return coefficients
    if codec_id in _ELEMENTWISE or not (f := parse(codec_id)).transform:
        return coefficients
    blocks = sum(len(_blocks(s)[0]) for s in layout.segments) if f.groups == "block" else 0
    out = coefficients.copy()
    for row, where in enumerate(itertools.chain(*sections_of(f.groups, layout.segments))):
        out[where] = _back(f.transform, coefficients[where], is_block=row < blocks)
    return out


# -- bodies ----------------------------------------------------------------------------------------


def roles_of(codec_id: str) -> dict[str, str]:
    """The ids within a per-role id, by role, in order."""
    inside = codec_id.removeprefix("per-role(").removesuffix(")")
    # A comma within parentheses belongs to the id of a codec.
    return dict(part.split("=", 1) for part in re.split(r",(?![^(]*\))", inside))


def _of_role(layout: Layout, role: str, named: dict[str, str]) -> Layout:
    mine = [
        s for s in layout.segments if s.role == role or (role == "default" and s.role not in named)
    ]
    return Layout(mine, layout.numel)


def _f16(raw: bytes) -> Floats:
    return np.frombuffer(raw, "<f2").astype(np.float32)


_ELEMENTWISE = {"identity/f32": (4, _f32), "cast/bf16": (2, _bf16), "cast/fp16": (2, _f16)}


def _parts(
    codec_id: str, layout: Layout, round_number: int = 0
) -> Iterator[tuple[int, Callable[[bytes], tuple[Places, Floats]]]]:
    """The size of each part of a body, and a reader for its places and numbers."""
    if codec_id.startswith("per-role("):
        named = roles_of(codec_id)
        for role, inner in named.items():
            yield from _parts(inner, _of_role(layout, role, named), round_number)
    elif codec_id in _ELEMENTWISE:
        size, read = _ELEMENTWISE[codec_id]
        places = [p for s in layout.segments for p in range(s.first, s.first + s.numel)]
        yield size * len(places), lambda raw: (places, read(raw))
    else:
        f = parse(codec_id)
        sections = sections_of(f.groups, layout.segments)
        shares_values = f.values == "tensor-levels"
        records = sections if shares_values else [[row] for rows in sections for row in rows]
        for number, rows in enumerate(records):
            size = min(record_nbytes(f, rows), plain_nbytes(f, rows))
            given = {"rows": rows, "round_number": round_number, "number": number}
            yield size, functools.partial(read_record, f, **given)


def nbytes(codec_id: str, layout: Layout) -> int:
    return sum(size for size, _ in _parts(codec_id, layout))


def terms(
    codec_id: str, layout: Layout, body: bytes, round_number: int = 0
) -> tuple[Places, Floats]:
    """Every place that a body names, and its number; no place twice."""
    if len(body) != nbytes(codec_id, layout):
        raise Refused("size")
    places: Places = []
    numbers: list[Floats] = [np.zeros(0, np.float32)]
    begin = 0
    for size, read in _parts(codec_id, layout, round_number):
        p, v = read(body[begin : begin + size])
        places, numbers, begin = places + p, [*numbers, v], begin + size
    return places, np.concatenate(numbers)


def decode(codec_id: str, layout: Layout, body: bytes, round_number: int = 0) -> Floats:
    places, numbers = terms(codec_id, layout, body, round_number)
    if codec_id in _ELEMENTWISE:
        return numbers
    out = np.zeros(layout.numel, np.float32)
    out[places] += numbers
    return to_vector(codec_id, layout, out)


def mean(codec_id: str, layout: Layout, bodies: Sequence[bytes], round_number: int = 0) -> Floats:
    """The mean of all workers' bodies, in rank order."""
    weight = np.float32(1.0 / len(bodies))
    out = np.zeros(layout.numel, np.float32)
    for body in bodies:
        places, numbers = terms(codec_id, layout, body, round_number)
        out[places] += numbers * weight
    return to_vector(codec_id, layout, out)
