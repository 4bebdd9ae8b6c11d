import zlib

import pytest
import torch

from exchanges import flipped, sealed
from thinwire.errors import ExchangeError, MismatchError
from thinwire.exchange.message import HEADER_NBYTES, Header, Kind, open_message, read_origin

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
    return sealed(BODY, HEADER._replace(**changes))


def test_what_was_sealed_is_opened_without_a_copy() -> None:
    message = sealed(BODY, HEADER)
    body = opened(message)
    assert body.tolist() == BODY.tolist() == list(range(12))
    assert len(message) == HEADER_NBYTES + len(BODY)
    assert body.untyped_storage().data_ptr() == message.untyped_storage().data_ptr()
    assert open_message(sealed(BODY[:0], HEADER), HEADER, body_nbytes=0).tolist() == []
    strided = torch.arange(24, dtype=torch.uint8)[::2]
    assert opened(sealed(strided, HEADER)).tolist() == strided.tolist()
    assert opened(torch.stack([message] * 2, 1)[:, 1]).tolist() == BODY.tolist()
    # What follows the body is ignored, and no part of it.
    padded = torch.cat([message, torch.zeros(9, dtype=torch.uint8)])
    assert opened(padded).tolist() == BODY.tolist()
    with pytest.raises(ExchangeError, match="its body does not match its checksum"):
        open_message(padded, HEADER, body_nbytes=len(BODY) + 1)


@pytest.mark.parametrize("byte", range(HEADER_NBYTES + len(BODY)))
def test_any_bit_that_flips_is_noticed(byte: int) -> None:
    message = sealed(BODY, HEADER)
    for bit in range(8):
        damaged = flipped(message, byte, bit)
        of_body = byte >= HEADER_NBYTES
        with pytest.raises(ExchangeError, match="its body does not match" if of_body else None):
            opened(damaged)
        if not of_body and bit == 3:
            with pytest.raises(ExchangeError, match="where a message comes from"):
                read_origin(damaged)


FIELDS = {"fragment": 4, "kind": Kind.MEAN, "shard": 0, "round": 5, "sender": 8, "elements": 7}


@pytest.mark.parametrize(
    ("message", "because"),
    [
        *((lambda m, n=n: m[:n], f"it has {n} bytes of 76") for n in (0, 1, 63, 64, 75)),
        (lambda m: flipped(m, 0, 0), "it is not a thinwire message: it starts with b'UWIR'"),
        (lambda m: flipped(m, 4, 0), "its format is version 3, not 2"),
        (lambda m: flipped(m, 6, 0), "its header has 65 bytes, not 64"),
        *((lambda m, n=n: flipped(m, n, 0), "its header does not match") for n in (24, 56, 60)),
        *((lambda _, f=f: sealed_with(**dict([f])), f"its {f[0]} is {f[1]}, not ")
          for f in FIELDS.items()),
        (lambda _: sealed_with(codec="cast/fp16"), "by another codec than 'cast/bf16'"),
        (lambda _: flipped(sealed_with(anchor=b"anchor!?"), -1, 0), "its body does not match"),
        *((lambda m, d=d: m.to(d), "not a vector of uint8") for d in (torch.int8, torch.float32)),
        (lambda m: m.view(1, 76), "not a vector of uint8"),
    ],
)  # fmt: skip
def test_a_message_that_is_damaged_or_belongs_elsewhere_says_why(message, because: str) -> None:
    with pytest.raises(ExchangeError, match="worker 7 for round 1099511627781") as caught:
        opened(message(sealed(BODY, HEADER)))
    assert because in caught.value.because


def test_another_anchor_is_drift_and_no_damage() -> None:
    with pytest.raises(MismatchError, match="replicas have drifted") as caught:
        opened(sealed_with(anchor=b"anchor!?"))
    assert b"anchor!?".hex() in caught.value.because
    assert b"ANCHOR!?".hex() in caught.value.because
    assert not isinstance(caught.value, ExchangeError)


def test_where_a_message_comes_from_is_read_before_it_is_opened() -> None:
    message = sealed(BODY, HEADER)
    assert read_origin(message[:HEADER_NBYTES]) == HEADER._replace(codec="")
    for none in (message[:63], message[:0], torch.zeros(64), message.view(2, -1)):
        with pytest.raises(ExchangeError, match="where a message comes from"):
            read_origin(none)


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
