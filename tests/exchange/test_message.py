import dataclasses
from hashlib import sha256

import pytest
import torch

from exchanges import sealed
from thinwire.errors import ExchangeError, MismatchError
from thinwire.exchange.message import (
    HEADER_NBYTES,
    Header,
    Kind,
    anchor_digest,
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
        (4, "its format is version 0, not 1"),
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


# -- anchor digest ---------------------------------------------------------------------------------

LENGTHS = [1, 2, 2047, 2048, 2049, 4099]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]


def vector(numel: int) -> torch.Tensor:
    return torch.arange(1, numel + 1, dtype=torch.float32) / 64


@pytest.mark.parametrize("numel", [0, *LENGTHS])
def test_equal_vectors_have_equal_digests(numel: int) -> None:
    x = vector(numel)
    assert len(anchor_digest(x)) == 8
    assert anchor_digest(x) == anchor_digest(x.clone())


@pytest.mark.parametrize("numel", LENGTHS)
def test_a_single_ulp_changes_the_digest(numel: int) -> None:
    x = vector(numel)
    for place in {0, numel // 2, numel - 1}:
        y = x.clone()
        y[place] = torch.nextafter(y[place], torch.tensor(torch.inf))
        assert anchor_digest(y) != anchor_digest(x)


@pytest.mark.parametrize("numel", LENGTHS)
def test_a_sign_changes_the_digest(numel: int) -> None:
    x = vector(numel)
    for place in {0, numel // 2, numel - 1}:
        y = x.clone()
        y[place] = -y[place]
        assert anchor_digest(y) != anchor_digest(x)


@pytest.mark.parametrize("numel", LENGTHS[1:])
def test_neighbours_that_swap_change_the_digest(numel: int) -> None:
    x = vector(numel)
    for place in {0, numel // 2 - 1, numel - 2}:
        y = x.clone()
        y[place], y[place + 1] = x[place + 1], x[place]
        assert anchor_digest(y) != anchor_digest(x)


def by_hand(raw: bytes) -> bytes:
    """The specification, a word at a time."""
    sums = [0] * 1024
    for place in range(0, len(raw), 8):
        sums[place // 8 % 1024] += int.from_bytes(raw[place : place + 8], "little")
    return sha256(b"".join((s % 2**64).to_bytes(8, "little") for s in sums)).digest()[:8]


def random_bits(numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    if dtype is torch.bool:
        return torch.randint(2, (numel,), generator=generator).bool()
    size = numel * dtype.itemsize
    return torch.randint(256, (size,), generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 1023, 2048, 2049, 8192, 10_007])
def test_the_digest_is_that_of_the_words(numel: int, dtype: torch.dtype) -> None:
    """Words of all bits, NaN among them, so that most columns overflow."""
    x = random_bits(numel, dtype)
    assert anchor_digest(x) == by_hand(x.view(torch.uint8).numpy().tobytes())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("numel", [0, 1, 10_007])
def test_a_gpu_has_the_same_digest(numel: int) -> None:
    x = random_bits(numel, torch.float32)
    assert anchor_digest(x.cuda()) == anchor_digest(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_a_digest_does_not_depend_on_where_a_vector_lies(offset: int, dtype: torch.dtype) -> None:
    x = random_bits(5003, dtype)
    assert anchor_digest(x[offset:]) == anchor_digest(x[offset:].clone())
    assert anchor_digest(x[::offset]) == anchor_digest(x[::offset].clone())


def test_the_limits_of_the_digest_are_those_that_the_specification_states() -> None:
    x = vector(3 * 2048)
    rows = x.view(3, 2048)
    assert anchor_digest(rows[[1, 0, 2]].reshape(-1)) == anchor_digest(x)
    assert anchor_digest(torch.cat([x, torch.zeros(5)])) == anchor_digest(x)


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
