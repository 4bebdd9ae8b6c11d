"""docs/wire-format.md against the code, an independent decoder and golden bytes.

`PYTHONPATH=tests python tests/codecs/test_wire_format.py` writes golden/payloads.json anew. Do
that for a new id, never to make a test pass: an id must always name the same bytes.
"""

import base64
import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import wire_reference as reference
from exchanges import sealed
from thinwire import codecs
from thinwire.aggregate import MeanOverWorkers, Payloads
from thinwire.checksums import anchor_digest
from thinwire.codecs.bits import saturating_cast
from thinwire.codecs.levels import bin_means, mean_and_sigma, root_mean_square
from thinwire.codecs.values import random_places
from thinwire.errors import ExchangeError
from thinwire.exchange.message import Header, Kind, open_message
from thinwire.fragments.layout import Layout, wire_order

_BF16 = torch.bfloat16
_ROOT = Path(__file__).parents[2]
GOLDEN = _ROOT / "tests" / "golden"
SPECIFICATION = _ROOT / "docs" / "wire-format.md"

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "ragged": {"w": (65, 128), "norm": (7,), "e": (64, 64), "s": ()},
    "tiles": {"w": (130, 129), "b": (3,)},
    "short": {"a": (8,), "b": (9,), "c": (3,)},
    "tiny": {"w": (3, 5), "none": (0, 4), "b": (7,), "s": ()},
}
ROLES = {"e": "embedding"}
GROUPS = ("tensor", "row", "chunk", "block")
VALUES = ("sign-mean", "sign-levels", "bf16", "f32")
DENSE = ("table-1", "table-2", "table-4", "affine-8", "e3m0")
SPARSE = ("topk-64", "randomk-64-seed-7")

CASES: list[tuple[str, str]] = [
    *((id, "tiny") for id in ("identity/f32", "cast/bf16", "cast/fp16")),
    *((f"{r}/{g}", "ragged") for r, g in itertools.product(DENSE, GROUPS)),
    *((f"{r}/{v}/{g}", "ragged") for r, v, g in itertools.product(SPARSE, VALUES, GROUPS)),
    *((f"topk-64/tensor-levels/{g}", "ragged") for g in GROUPS),
    ("topk-128/tensor-levels/block", "tiles"),
    ("topk-100/tensor-levels/chunk", "short"),  # with its table a section is larger than plain
    ("topk-1/sign-levels/chunk", "ragged"),
    ("topk-100/f32/row", "ragged"),
    ("topk-4096/sign-mean/chunk", "ragged"),
    ("topk-64/sign-levels/block", "tiles"),
    ("table-1/block", "tiles"),
    ("affine-8/tensor", "short"),  # of 8 numbers the record is as large as they are: plain
    ("randomk-4096-seed-1/bf16/tensor", "short"),
    ("topk-64/f32/chunk", "tiny"),
    ("e3m0/row", "tiny"),
    ("topk-64/f32/block/dct", "ragged"),
    ("topk-64/bf16/block/dct", "tiles"),
    ("topk-64/f32/chunk/dct", "tiny"),
    ("randomk-64-seed-7/f32/tensor/dct", "ragged"),
    ("topk-64/bf16/chunk/hadamard", "ragged"),
    ("e3m0/row/hadamard", "tiny"),
    ("per-role(default=topk-64/f32/block/dct,vector=cast/bf16)", "ragged"),
    ("per-role(default=identity/f32,vector=cast/bf16)", "tiny"),
    (
        "per-role(default=table-1/block,embedding=randomk-64-seed-0/bf16/row,vector=identity/f32)",
        "ragged",
    ),
    (
        "per-role(default=per-role(default=topk-64/sign-levels/block,head=e3m0/chunk),"
        "embedding=topk-32/sign-mean/chunk,head=cast/bf16,vector=cast/fp16)",
        "ragged",
    ),
]
ROUND = 3
SALT = 1


_NAMED: dict[str, Any] = {
    part.id: part
    for part in (
        *(codecs.Identity(), codecs.CastBF16(), codecs.CastFP16()),
        *(codecs.Tensors(), codecs.Rows(), codecs.Chunks(), codecs.Blocks()),
        *(codecs.SignMean(), codecs.SignLevels(), codecs.TensorLevels()),
        *(codecs.BF16(), codecs.F32(), codecs.DCT(), codecs.Hadamard()),
    )
}


def codec_of(id: str) -> codecs.Codec:
    if id in _NAMED:
        return _NAMED[id]
    if id.startswith("per-role("):
        of_roles = reference.roles_of(id)
        return codecs.PerRole(**{role: codec_of(each) for role, each in of_roles.items()})
    f = reference.parse(id)
    transform = {"transform": _NAMED[f.transform]} if f.transform else {}
    options: dict[str, Any] = {"groups": _NAMED[f.groups], **transform}
    if f.family == "topk":
        return codecs.TopK(k=f.number, values=_NAMED[f.values], **options)
    if f.family == "randomk":
        return codecs.RandomK(k=f.number, seed=f.seed, values=_NAMED[f.values], **options)
    if f.family == "e3m0":
        return codecs.E3M0(**options)
    return codecs.Quantise(bits=f.number, **options)


def layout_of(name: str) -> Layout:
    return Layout.of(SHAPES[name], {n: r for n, r in ROLES.items() if n in SHAPES[name]})


def reference_layout(layout: Layout) -> reference.Layout:
    segments = [reference.Segment(s.shape, s.role, s.start) for s in layout.segments]
    return reference.Layout(segments, layout.numel)


def hashes(count: int) -> np.ndarray:
    """64 bits for each of 0 .. count - 1, by integer arithmetic alone."""
    with np.errstate(over="ignore"):
        z = np.arange(SALT, count + SALT, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        return z ^ (z >> np.uint64(29))


def exact_input(numel: int) -> Tensor:
    """a b c / 1024 with integers of at most 5: sums of it and of its squares are exact in fp32."""
    h = hashes(numel)
    factors = [((h >> np.uint64(s)) % np.uint64(11)).astype(np.int64) - 5 for s in (8, 24, 40)]
    product = factors[0] * factors[1] * factors[2]
    return torch.from_numpy(product.astype(np.float32)) / 1024


def bit_patterns(numel: int) -> Tensor:
    """Finite floats of all sizes; zeros of both signs, subnormals and the largest come first."""
    bits = (hashes(numel) >> np.uint64(17)).astype(np.uint32)
    bits = np.where(bits & np.uint32(0x7F800000) == 0x7F800000, bits ^ np.uint32(1 << 28), bits)
    first = [
        *(0x80000000, 0, 1, 0x807FFFFF, 0x7F7FFFFF, 0xFF7FFFFF),
        *(0x3F808000, 0x3F818000, 0x477FEFFF),
    ]
    bits[: len(first)] = first
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def input_for(name: str) -> Tensor:
    make = bit_patterns if name == "tiny" else exact_input
    return make(layout_of(name).numel)


def raw(x: Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


def lengthen(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def write_golden() -> None:
    lines = []
    for id, name in CASES:
        coder = codec_of(id).bind(layout_of(name))
        payload = coder.encode(input_for(name), ROUND)
        decoded = hashlib.sha256(raw(coder.decode(payload, ROUND))).hexdigest()
        short = base64.b64encode(zlib.compress(raw(payload), 9)).decode()
        case = {"id": id, "layout": name, "payload": short, "decoded": decoded}
        lines.append(json.dumps(case))
    (GOLDEN / "payloads.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


def case_id(case: dict[str, str]) -> str:
    return f"{case['id']}@{case['layout']}"


# -- golden bytes ----------------------------------------------------------------------------------

STORED: list[dict[str, str]] = json.loads((GOLDEN / "payloads.json").read_text())


def test_every_case_is_stored() -> None:
    assert [(case["id"], case["layout"]) for case in STORED] == CASES


@pytest.mark.parametrize("case", STORED, ids=case_id)
def test_golden_bytes_are_made_and_decode_alike_here_and_by_the_specification(
    case: dict[str, str],
) -> None:
    x, layout = input_for(case["layout"]), layout_of(case["layout"])
    codec, payload = codec_of(case["id"]), lengthen(case["payload"])
    coder = codec.bind(layout)
    assert codec.id == case["id"]
    assert raw(coder.encode(x, ROUND)) == payload
    assert raw(coder.encode_residual(x, ROUND)) == payload
    ours = raw(coder.decode(torch.frombuffer(bytearray(payload), dtype=torch.uint8), ROUND))
    theirs = reference.decode(case["id"], reference_layout(layout), payload, ROUND)
    assert hashlib.sha256(ours).hexdigest() == case["decoded"]
    assert theirs.tobytes() == ours


@pytest.mark.parametrize(
    "id",
    [
        *("table-2/row", "affine-8/block", "e3m0/chunk", "topk-64/sign-levels/chunk"),
        *("topk-64/tensor-levels/block", "topk-64/tensor-levels/row"),
        *("randomk-64-seed-7/f32/tensor", "topk-64/f32/block/dct"),
        "per-role(default=topk-64/f32/row,vector=identity/f32)",
    ],
)
def test_a_mean_is_what_the_specification_says(id: str) -> None:
    layout, x = layout_of("ragged"), input_for("ragged")
    coder = codec_of(id).bind(layout)
    payloads = [coder.encode(x * scale, ROUND) for scale in (1.0, 0.013, 0.37)]
    ours = MeanOverWorkers().combine(Payloads(coder=coder, payloads=payloads, round=ROUND))
    bodies = [raw(payload) for payload in payloads]
    theirs = reference.mean(id, reference_layout(layout), bodies, ROUND)
    assert theirs.tobytes() == raw(ours)
    other_order = reference.mean(id, reference_layout(layout), bodies[::-1], ROUND)
    assert other_order.tobytes() != raw(ours)


# -- levels ----------------------------------------------------------------------------------------


def rows_of(columns: int) -> Tensor:
    """Ordinary numbers, heavy tails, numbers of all sizes, zeros of both signs."""
    draws = torch.Generator().manual_seed(columns)
    x = torch.randn(columns, generator=draws)
    small = bit_patterns(max(9, columns))[-columns:] * 2.0**-13  # so that sums of them stay finite
    return torch.stack([x, 1e-3 * x**5, small, torch.zeros(columns), torch.zeros(columns) * -1.0])


@pytest.mark.parametrize("columns", [1, 2, 3, 64, 811, 4096])
def test_levels_are_sums_by_halves_as_the_specification_says(columns: int) -> None:
    x = rows_of(columns)
    rows = [row.numpy() for row in x]
    codes = torch.randint(0, 4, x.shape, generator=torch.Generator().manual_seed(1))
    mean, sigma = mean_and_sigma(x)
    means = bin_means(x, codes.to(torch.uint8), torch.full((len(x), 4), torch.nan))
    expected = [
        [reference.bin_mean(row, c, code) if code in c else np.nan for code in range(4)]
        for row, c in zip(rows, codes.tolist(), strict=True)
    ]
    assert raw(root_mean_square(x)) == raw_of(map(reference.root_mean_square, rows))
    assert raw(mean) == raw_of(map(reference.mean_of, rows))
    assert raw(sigma) == raw_of(map(reference.sigma_of, rows))
    assert np.array_equal(means.numpy(), np.array(expected, np.float32), equal_nan=True)
    assert torch.equal(x, rows_of(columns))


def test_the_root_mean_square_of_the_largest_numbers_is_finite() -> None:
    largest = torch.finfo(torch.float32).max
    found = root_mean_square(torch.tensor([[largest, -largest], [torch.inf, 1.0]]))
    assert float(found[0]) == pytest.approx(largest, rel=2.0**-22)
    assert not found[1].isfinite()


@pytest.mark.parametrize("k", [1, 2, 3, 64, 811, 1000])
def test_levels_of_kept_values_are_those_of_the_specification(k: int) -> None:
    x = rows_of(k)
    one = saturating_cast(torch.tensor([reference.mean_of(abs(v.numpy())) for v in x]), _BF16)
    two = saturating_cast(torch.tensor([reference.sign_levels(v.numpy()) for v in x]), _BF16)
    assert raw(codecs.SignMean().write(x)[:, :2]) == raw(one.view(torch.uint8))
    assert raw(codecs.SignLevels().write(x)[:, :4]) == raw(two.view(torch.uint8))


def raw_of(numbers: Iterable[np.float32]) -> bytes:
    return np.array(list(numbers), np.float32).tobytes()


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "kind", "shard", "sender", "padding"),
    [("whole", Kind.WHOLE, 0, 2, b""), ("mean", Kind.MEAN, 1, 1, bytes(16))],
)
def test_a_golden_message_is_made_and_read(
    which: str, kind: Kind, shard: int, sender: int, padding: bytes
) -> None:
    """A whole pseudo-gradient, and the mean of a shard with padding behind it."""
    golden = bytes.fromhex(json.loads((GOLDEN / "messages.json").read_text())[which])
    layout, x = layout_of("ragged"), input_for("ragged")
    numbers: dict[str, Any] = {"fragment": 0x01020304, "round": 0x0102030405060708}
    numbers["anchor"] = anchor_digest(x)
    if kind is Kind.MEAN:
        start, layout = layout.cut(3)[shard]
        x = x[start : start + layout.numel]
    id, numbers["elements"] = "topk-64/sign-levels/chunk", layout.numel
    header = Header(codec=id, kind=kind, shard=shard, sender=sender, **numbers)
    coder = codec_of(id).bind(layout)
    assert raw(sealed(coder.encode(x), header)) + padding == golden
    found = reference.read_header(golden)
    assert found.codec == reference.codec_digest(id)
    for name in ("kind", "shard", "sender", *numbers):
        assert getattr(found, name) == getattr(header, name)
    message = torch.frombuffer(bytearray(golden), dtype=torch.uint8)
    body = open_message(message, header, body_nbytes=coder.nbytes)
    assert reference.read_body(golden, coder.nbytes) == raw(body)
    theirs = reference.decode(id, reference_layout(layout), raw(body))
    assert theirs.tobytes() == raw(coder.decode(body))


# -- layouts ---------------------------------------------------------------------------------------

ODD_SHAPES: list[dict[str, tuple[int, ...]]] = [
    *SHAPES.values(),
    {},
    {"one": ()},
    {"conv": (70, 3, 5, 5), "thin": (4096, 1), "wide": (1, 4097), "b": (64,)},
    {"square": (64, 64), "tall": (193, 64), "low": (63, 130), "narrow": (200, 63)},
]
SIZE_IDS = [
    *("identity/f32", "cast/bf16", "table-1/chunk", "table-4/row", "affine-8/row", "e3m0/block"),
    *("topk-64/sign-levels/block", "topk-32/f32/row", "topk-77/bf16/tensor"),
    *("topk-4096/sign-mean/chunk", "randomk-3-seed-1/f32/chunk"),
    *(f"topk-{k}/tensor-levels/{g}" for k, g in itertools.product((1, 128, 4096), GROUPS)),
    "per-role(default=table-2/block,vector=identity/f32)",
    *("topk-32/sign-levels/block/dct", "table-1/chunk/hadamard"),
]


@pytest.mark.parametrize("shapes", ODD_SHAPES, ids=lambda shapes: "+".join(shapes) or "none")
def test_sizes_shards_and_order_are_those_of_the_specification(shapes: dict[str, Any]) -> None:
    layout = Layout.of(shapes)
    for id in SIZE_IDS:
        nbytes = reference.nbytes(id, reference_layout(layout))
        assert (codec_of(id).id, codec_of(id).bind(layout).nbytes) == (id, nbytes)
    assert list(wire_order(shapes)) == reference.wire_order(shapes)
    for workers in (1, 2, 3, 7):
        ours = [(start, reference_layout(piece)) for start, piece in layout.cut(workers)]
        assert ours == reference.cut(reference_layout(layout), workers)


def test_the_tables_of_the_specification_are_right() -> None:
    row = re.compile(r"^\| `([a-z0-9/-]+)` \|.*?(\d+) \| ([\d.]+) \|$", re.MULTILINE)
    rows = row.findall(SPECIFICATION.read_text())
    assert len(rows) == 11
    for id, nbytes, bits in rows:
        assert codec_of(f"{id}/chunk").nbytes(4096) == int(nbytes)
        assert int(nbytes) * 8 / 4096 == float(bits)
    example = Layout.of({"e": (64, 64), "w": (65, 130), "norm": (7,), "s": ()})
    worked = codec_of("topk-64/sign-levels/chunk").bind(example).nbytes
    words = " ".join(SPECIFICATION.read_text().split())
    assert f"Body: 3 * 84 + 10 = {worked} bytes; message: {64 + worked}." in words
    shared = codec_of("topk-64/tensor-levels/chunk").bind(example).nbytes
    assert f"Body: 96 + 176 + 22 = {shared} bytes." in words


@pytest.mark.parametrize(("n", "k"), [(1, 1), (10, 3), (4096, 64), (4096, 4096)])
def test_random_places_are_those_of_the_specification(n: int, k: int) -> None:
    for seed, round_number in ((0, 0), (7, 3), (2**63 - 1, 2**40)):
        ours = random_places(columns=n, k=k, seed=seed, round_number=round_number)
        assert ours.tolist() == reference.random_places(n, k, seed, round_number)


# k = 3 of n = 33: l = 3, a bitmap of 8 bits and 9 low bits in two bytes. k = 2 of n = 17 has 5
# places in a bitmap of 5 bits, so three spare ones.
@pytest.mark.parametrize(
    ("n", "k", "broken"),
    [
        pytest.param(33, 3, [0b1111, 0, 0], id="too many"),
        pytest.param(33, 3, [0b11, 0, 0], id="too few"),
        pytest.param(17, 2, [0b10000001, 0], id="spare"),
        pytest.param(33, 3, [0b111, 0, 0], id="not ascending"),
        pytest.param(33, 3, [0b10000011, 0b11111111, 0b11111111], id="beyond"),
    ],
)
def test_places_that_cannot_be_are_refused(n: int, k: int, broken: list[int]) -> None:
    id, layout = f"topk-{-(-k * 4096 // n)}/f32/chunk", Layout.vector(n)
    assert reference.kept(reference.parse(id).number, n) == k
    body = bytes(broken) + bytes(4 * k)
    with pytest.raises(reference.Refused):
        reference.decode(id, reference_layout(layout), body)
    with pytest.raises(ExchangeError):
        codec_of(id).bind(layout).decode(torch.tensor(list(body), dtype=torch.uint8))


def test_a_row_with_too_many_places_does_not_make_up_for_one_with_too_few() -> None:
    # Two chunks with k = 1: a bitmap of two bits in a byte, 12 low bits in two, a value in four.
    coder = codec_of("topk-1/f32/chunk").bind(Layout.vector(8192))
    payload = torch.zeros(2, 7, dtype=torch.uint8)
    payload[0, 0] = 0b11
    with pytest.raises(ExchangeError, match="another number of indices"):
        coder.decode(payload.view(-1))


if __name__ == "__main__":
    write_golden()
