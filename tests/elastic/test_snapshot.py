"""Snapshots as bytes."""

import struct

import pytest
import torch
from safetensors.torch import load, save
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


def pack(snapshot: Snapshot) -> bytearray:
    return bytearray().join(snapshot_parts(snapshot))


def all_bits(tensors: dict[str, Tensor]) -> dict:
    raw = {n: t.contiguous().reshape(-1).view(torch.uint8).tolist() for n, t in tensors.items()}
    return {name: (t.dtype, t.shape, raw[name]) for name, t in tensors.items()}


def test_a_snapshot_comes_back_bit_for_bit_and_its_format_is_that_of_safetensors() -> None:
    found = unpack(pack(SNAPSHOT))
    assert found.facts == SNAPSHOT.facts
    assert all_bits(found.tensors) == all_bits(load(bytes(pack(SNAPSHOT)))) == all_bits(TENSORS)
    contiguous = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    texts = {"format": "thinwire snapshot 1", "facts": '{"version": 1}'}
    assert all_bits(unpack(bytearray(save(contiguous, metadata=texts))).tensors) == all_bits(
        TENSORS
    )
    assert unpack(pack(Snapshot(facts={"version": 0}, tensors={}))).tensors == {}


# Written by thinwire 0.1.
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
    found = unpack(bytearray(OLD_SNAPSHOT))
    assert found.facts == snapshot.facts
    assert all_bits(found.tensors) == all_bits(tensors)


def test_a_snapshot_that_is_read_is_in_memory_once() -> None:
    file = pack(Snapshot(facts={}, tensors={"w": torch.zeros(3), "none": torch.zeros(0)}))
    found = unpack(file)
    found.tensors["w"].fill_(1)
    assert unpack(file).tensors["w"].tolist() == [1, 1, 1]


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'w' is torch\.complex64"):
        pack(Snapshot(facts={"version": 1}, tensors={"w": torch.zeros(1).cfloat()}))


DEEP = {"format": "thinwire snapshot 1", "facts": "[" * 100_000}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is not a safetensors file"),
        (struct.pack("<Q", 2**40) + OLD_SNAPSHOT[8:], "is not a safetensors file"),
        (OLD_SNAPSHOT[:-1], "invalid for input of size"),
        (OLD_SNAPSHOT + b"left over", "do not fill it"),
        (save({}, metadata=DEEP), "is not a safetensors file"),
        (save({}), "is not a safetensors file"),
        *(
            (OLD_SNAPSHOT.replace(old, new), why)
            for old, new, why in (
                (b"snapshot 1", b"snapshot 2", "it says that it is"),
                (b"format", b"farmat", "it says that it is"),
                (b"facts", b"fasts", "is not a safetensors file"),
                (b'"{', b'"[', "is not a safetensors file"),
                (b"[2, 3]", b"[3, 3]", "invalid for input of size"),
                (b"F32", b"F33", "KeyError: .F33"),
                (b"[24, 26]", b"[25, 26]", "buffer length"),
            )
        ),
    ],
    # Not the bytes: the order of what safetensors writes differs between processes.
    ids=lambda value: value if isinstance(value, str) else "data",
)
def test_a_file_that_is_no_snapshot_is_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises((ExchangeError, MismatchError), match=why):
        unpack(bytearray(data))


def test_damage_ends_in_a_thinwire_error_or_a_snapshot() -> None:
    data = bytearray(pack(SNAPSHOT))
    for end in range(len(data)):
        with pytest.raises(ExchangeError):
            unpack(data[:end])
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
