import dataclasses
import zlib

import pytest
import torch

from exchanges import sealed
from thinwire.errors import ExchangeError, MismatchError
from thinwire.exchange.message import (
    HEADER_NBYTES,
    Header,
    Kind,
    open_message,
    read_origin,
)

BODY = torch.arange(12, dtype=torch.uint8)
HEADER = Header(
    codec="cast/bf16",
    fragment=3,
    kind=Kind.SHARD,
    shard=2,
    round=2**40 + 5,
    sender=7,
    elements=6,
    anchor=b"ANCHOR!?",
)


def opened(message: torch.Tensor, expected: Header = HEADER) -> torch.Tensor:
    return open_message(message, expected, body_nbytes=len(BODY))


def sealed_with(**changes: object) -> torch.Tensor:
    return sealed(BODY, dataclasses.replace(HEADER, **changes))


def flipped(message: torch.Tensor, byte: int, bit: int) -> torch.Tensor:
    damaged = message.clone()
    damaged[byte] ^= 1 << bit
    return damaged


def test_what_was_sealed_is_opened() -> None:
    message = sealed(BODY, HEADER)
    body = opened(message)
    assert body.tolist() == BODY.tolist()
    assert len(message) == HEADER_NBYTES + len(BODY)
    assert body.untyped_storage().data_ptr() == message.untyped_storage().data_ptr()
    assert BODY.tolist() == list(range(12))


def test_an_empty_body_travels() -> None:
    message = sealed(BODY[:0], HEADER)
    assert len(message) == HEADER_NBYTES
    assert open_message(message, HEADER, body_nbytes=0).tolist() == []


def test_a_body_need_not_be_contiguous() -> None:
    strided = torch.arange(24, dtype=torch.uint8)[::2]
    body = opened(sealed(strided, HEADER))
    assert body.tolist() == list(range(0, 24, 2))


def test_a_message_need_not_be_contiguous() -> None:
    message = torch.stack([sealed(BODY, HEADER)] * 2, 1)[:, 1]
    assert opened(message).tolist() == BODY.tolist()


def test_bytes_after_the_body_are_ignored() -> None:
    padded = torch.cat([sealed(BODY, HEADER), torch.full((9,), 255, dtype=torch.uint8)])
    assert opened(padded).tolist() == BODY.tolist()


@pytest.mark.parametrize("left", [0, 1, 63, 64, 75])
def test_a_truncated_message_is_refused(left: int) -> None:
    with pytest.raises(ExchangeError, match=f"it has {left} bytes of 76"):
        opened(sealed(BODY, HEADER)[:left])


def test_a_longer_body_than_was_sent_is_refused() -> None:
    padded = torch.cat([sealed(BODY, HEADER), torch.zeros(9, dtype=torch.uint8)])
    with pytest.raises(ExchangeError, match="its body does not match its checksum"):
        open_message(padded, HEADER, body_nbytes=len(BODY) + 1)


@pytest.mark.parametrize("byte", range(HEADER_NBYTES))
def test_any_bit_of_the_header_that_flips_is_noticed(byte: int) -> None:
    message = sealed(BODY, HEADER)
    for bit in range(8):
        with pytest.raises(ExchangeError):
            opened(flipped(message, byte, bit))


@pytest.mark.parametrize("byte", range(HEADER_NBYTES, HEADER_NBYTES + len(BODY)))
def test_any_bit_of_the_body_that_flips_is_noticed(byte: int) -> None:
    message = sealed(BODY, HEADER)
    for bit in range(8):
        with pytest.raises(ExchangeError, match="its body does not match its checksum"):
            opened(flipped(message, byte, bit))


@pytest.mark.parametrize(
    ("byte", "because"),
    [
        (0, "it is not a thinwire message: it starts with b'UWIR'"),
        (4, "its format is version 3, not 2"),
        (6, "its header has 65 bytes, not 64"),
        (24, "its header does not match its checksum"),
        (56, "its header does not match its checksum"),
        (60, "its header does not match its checksum"),
    ],
)
def test_a_foreign_or_damaged_header_says_what_is_wrong(byte: int, because: str) -> None:
    with pytest.raises(ExchangeError) as caught:
        opened(flipped(sealed(BODY, HEADER), byte, 0))
    assert caught.value.because == because


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("fragment", 4),
        ("kind", Kind.MEAN),
        ("shard", 0),
        ("round", 2**40 + 4),
        ("sender", 8),
        ("elements", 7),
    ],
)
def test_a_message_that_belongs_elsewhere_is_refused_by_name(field: str, theirs: int) -> None:
    with pytest.raises(ExchangeError, match="worker 7 for round 1099511627781") as caught:
        opened(sealed_with(**{field: theirs}))
    assert caught.value.because == f"its {field} is {theirs}, not {getattr(HEADER, field)}"


def test_another_codec_is_refused_by_name() -> None:
    with pytest.raises(ExchangeError, match="it was written by another codec than 'cast/bf16'"):
        opened(sealed_with(codec="cast/fp16"))


def test_another_anchor_is_drift_and_no_damage() -> None:
    with pytest.raises(MismatchError, match="replicas have drifted") as caught:
        opened(sealed_with(anchor=b"anchor!?"))
    assert b"anchor!?".hex() in caught.value.because
    assert b"ANCHOR!?".hex() in caught.value.because
    assert not isinstance(caught.value, ExchangeError)


def test_damage_is_not_taken_for_drift() -> None:
    with pytest.raises(ExchangeError, match="its body does not match"):
        opened(flipped(sealed_with(anchor=b"anchor!?"), -1, 0))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float32])
def test_a_message_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ExchangeError, match=r"\[76\], not a vector of uint8"):
        opened(sealed(BODY, HEADER).to(dtype))


@pytest.mark.parametrize("shape", [(1, 76), (76, 1)])
def test_a_message_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ExchangeError, match="not a vector of uint8"):
        opened(sealed(BODY, HEADER).view(shape))


# -- origin --------------------------------------------------------------------------------------


def test_where_a_message_comes_from_is_read_before_it_is_opened() -> None:
    assert read_origin(sealed_with()) == (7, 2**40 + 5, b"ANCHOR!?")
    assert read_origin(sealed_with()[:HEADER_NBYTES]).sender == 7


@pytest.mark.parametrize("byte", range(HEADER_NBYTES))
def test_where_a_damaged_header_comes_from_is_not_believed(byte: int) -> None:
    with pytest.raises(ExchangeError, match="where a message comes from"):
        read_origin(flipped(sealed_with(), byte, 3))


def test_where_no_header_comes_from_is_not_read() -> None:
    for message in (
        sealed_with()[:63],
        sealed_with()[:0],
        torch.zeros(64),
        sealed_with().view(2, -1),
    ):
        with pytest.raises(ExchangeError, match="where a message comes from"):
            read_origin(message)


def test_a_message_of_the_first_version_is_read() -> None:
    """Checkpoints hold messages that were under way."""
    old = sealed(BODY, HEADER)
    old[4] = 1
    old[36:40] = as_bytes(zlib.crc32(bytes(BODY.tolist())))
    old[60:64] = as_bytes(zlib.crc32(bytes(old[:60].tolist())))
    assert torch.equal(opened(old), BODY)
    with pytest.raises(ExchangeError, match="its body does not match its checksum"):
        opened(flipped(old, 70, 0))


def as_bytes(number: int) -> torch.Tensor:
    return torch.tensor(list(number.to_bytes(4, "little")), dtype=torch.uint8)
