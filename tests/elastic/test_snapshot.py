"""Snapshots as bytes."""

import json
import struct

import pytest
import torch
from torch import Tensor

from thinwire.elastic.snapshot import snapshot_parts, unpack
from thinwire.errors import ConfigurationError, ExchangeError, MismatchError, ThinwireError
from thinwire.membership import Snapshot

TENSORS = {
    "none": torch.empty(0),
    "none of rows": torch.empty(0, 7, dtype=torch.bfloat16),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "one": torch.ones(1, dtype=torch.int64),
    "prime": torch.randn(13).bfloat16(),
    "strided": torch.arange(30.0).view(5, 6)[:, ::2],
    "transposed": torch.arange(6, dtype=torch.int16).view(2, 3).t(),
    "bytes": torch.arange(11, dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
    "not finite": torch.tensor([float("nan"), float("inf"), -0.0]),
    "ü": torch.randn(2, 1, 3).half(),
}


SNAPSHOT = Snapshot(facts={"version": 7, "schedule": [1, 2.5, None, "ü"]}, tensors=TENSORS)


def pack(snapshot: Snapshot) -> bytes:
    return b"".join(snapshot_parts(snapshot))


def bits(tensor: Tensor) -> tuple[torch.dtype, list[int], bytes]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, list(tensor.shape), raw


def all_bits(tensors: dict) -> dict:
    return {name: bits(tensor) for name, tensor in tensors.items()}


def test_a_snapshot_comes_back_bit_for_bit_and_its_format_is_that_of_safetensors() -> None:
    from safetensors.torch import load, save

    found = unpack(pack(SNAPSHOT))
    assert found.facts == SNAPSHOT.facts
    assert all_bits(found.tensors) == all_bits(load(pack(SNAPSHOT))) == all_bits(TENSORS)
    contiguous = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    texts = {"format": "thinwire snapshot 1", "facts": '{"version": 1}'}
    assert all_bits(unpack(save(contiguous, metadata=texts)).tensors) == all_bits(TENSORS)
    assert unpack(pack(Snapshot(facts={"version": 0}, tensors={}))).tensors == {}


def test_an_unpacked_snapshot_of_constant_bytes_can_be_written_to() -> None:
    data = pack(Snapshot(facts={"version": 0}, tensors={"w": torch.zeros(3)}))
    unpack(data).tensors["w"].fill_(1)
    assert unpack(data).tensors["w"].tolist() == [0, 0, 0]


# Written by thinwire 0.1 before files were read by the safetensors library.
OLD_SNAPSHOT = (
    b"\x28\x01\0\0\0\0\0\0"
    b'{"__metadata__": {"format": "thinwire snapshot 1", "facts": "{\\"version\\": 7, \\"why\\": '
    b'\\"\\\\u00fc\\"}"}, "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, '
    b'"h": {"dtype": "BF16", "shape": [1], "data_offsets": [24, 26]}, '
    b'"b": {"dtype": "U8", "shape": [3], "data_offsets": [26, 29]}}   '
    + struct.pack("<6f", *range(6))
    + b"\x80\x3f\0\1\2"
)


def test_files_written_before_are_read_and_written_the_same() -> None:
    tensors = {
        "b": torch.arange(3, dtype=torch.uint8),
        "w": torch.arange(6.0).view(2, 3),
        "h": torch.ones(1, dtype=torch.bfloat16),
    }
    snapshot = Snapshot(facts={"version": 7, "why": "ü"}, tensors=tensors)
    assert pack(snapshot) == OLD_SNAPSHOT
    found = unpack(OLD_SNAPSHOT)
    assert found.facts == snapshot.facts
    assert all_bits(found.tensors) == all_bits(tensors)


def test_what_cannot_be_packed_is_refused() -> None:
    complex_one = Snapshot(facts={"version": 1}, tensors={"w": torch.zeros(1).cfloat()})
    with pytest.raises(ConfigurationError, match=r"'w' is torch\.complex64"):
        pack(complex_one)


def file(header: object, body: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw) if length is None else length) + raw + body


TEXTS = {"format": "thinwire snapshot 1", "facts": '{"version": 1}'}


def given(known: dict, **changes: object) -> dict:
    """`known` with `changes`, of which None leaves out."""
    return {key: value for key, value in {**known, **changes}.items() if value is not None}


def with_texts(**texts: object) -> dict:
    return {"__metadata__": given(TEXTS, **texts)}


def described(**changes: object) -> dict:
    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    return {**with_texts(), "w": given(one, **changes)}


def u8(**changes: object) -> dict:
    return {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **changes}


def test_the_file_that_is_damaged_below_is_good() -> None:
    assert unpack(file(described(), bytes(8))).tensors["w"].tolist() == [0, 0]


TWO = {**described(), "v": u8(data_offsets=[4, 8])}
DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "cannot read it"),
        (bytes(7), "cannot read it"),
        (bytes(8), "invalid JSON"),
        (file(described(), bytes(8), length=2**64 - 1), "cannot read it"),
        (file(described(), bytes(8), length=2**40), "cannot read it"),
        (file(with_texts(), length=4096), "cannot read it"),
        (file(b" " * ((16 << 20) + 8)), "cannot read it"),
        (struct.pack("<Q", 2) + b"{}", "cannot read it"),
        (file(b"\xff\xfe{}"), "invalid UTF-8"),
        (file(b"{}".decode().encode("utf-16")), "invalid UTF-8"),
        (file(DEEP), "invalid JSON"),
        (file(b"9" * 10_000), "out of range"),
        (file({"__metadata__": 3}), "invalid JSON"),
        (file({}), "cannot read it"),
        (file(with_texts(format=None)), "it says that it is"),
        (file(with_texts(format="thinwire snapshot 2")), "it says that it is"),
        (file(with_texts(facts=None)), "cannot read it"),
        (file(with_texts(facts="{")), "cannot read it"),
        (file(with_texts(facts="[" * 100_000)), "cannot read it"),
        (file(with_texts(), b"left over"), "not fully covered"),
        (file(described(), bytes(7)), "not fully covered"),
        (file(described(), bytes(9)), "not fully covered"),
        (file(described(data_offsets=None), bytes(8)), "invalid JSON"),
        (file(described(dtype="F33"), bytes(8)), "invalid JSON"),
        (file(described(dtype="F64"), bytes(8)), "invalid shape"),
        (file(described(shape=[-2]), bytes(8)), "invalid JSON"),
        (file(described(shape=[True, 2]), bytes(8)), "invalid JSON"),
        (file(described(shape=[2**40, 2**40, 0], data_offsets=[0, 0])), "overflow"),
        (file(described(shape=[2**50], data_offsets=[0, 2**52]), bytes(8)), "not fully covered"),
        (file(described(data_offsets=[8, 0]), bytes(8)), "invalid offset"),
        (file(described(data_offsets=[8, 16]), bytes(16)), "invalid offset"),
        (file(TWO, bytes(8)), "invalid offset"),
    ],
)
def test_a_file_that_is_no_snapshot_is_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises((ExchangeError, MismatchError), match=why):
        unpack(data)


def test_damage_ends_in_a_thinwire_error_or_a_snapshot() -> None:
    data = bytearray(pack(SNAPSHOT))
    for end in range(len(data)):
        with pytest.raises(ExchangeError):
            unpack(bytes(data[:end]))
    header = 8 + int.from_bytes(data[:8], "little")
    refused = 0
    for place in range(header):
        for flip in (0x01, 0x10, 0x80):
            damaged = bytearray(data)
            damaged[place] ^= flip
            try:
                unpack(damaged)
            except ThinwireError:
                refused += 1
    assert refused > header  # a letter of a name, or a digit of a fact, may be another
