"""The envelope of a payload: who sent what, for which round, from which anchor, and is it whole.

A message is a header of 64 bytes and a body, the codec's payload. All numbers are little-endian.
docs/wire-format.md is the specification.
"""

import hashlib
import struct
import zlib
from dataclasses import dataclass, fields, replace
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.errors import ExchangeError, MismatchError
from thinwire.rejection import Rejection, RejectReason

__all__ = ["HEADER_NBYTES", "Header", "Kind", "anchor_digest", "examine", "open_message", "seal"]

HEADER_NBYTES = 64
_MAGIC, _VERSION = b"TWIR", 1
# magic, version, header bytes, codec, fragment, kind, shard, round, sender, body checksum,
# elements, anchor; the header's own checksum follows.
_FIELDS = struct.Struct("<4sHH8sIHHQIIQ8s")
_CHECKSUM = struct.Struct("<I")
_SUMS = 1024


@final
class Kind:
    """What a body holds."""

    WHOLE = 0
    """A worker's pseudo-gradient."""
    SHARD = 1
    """A worker's pseudo-gradient, one shard of it."""
    MEAN = 2
    """What a shard's owner made of all workers' shards."""
    NOTHING = 3
    """No pseudo-gradient: the sender has just come and did not take part; the body is zeros."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a message says of its body.

    Args:
        codec: its id; eight bytes of its SHA-256 travel.
        fragment: index of the fragment.
        kind: of `Kind`.
        shard: which shard; 0 for a whole pseudo-gradient.
        round: number of the exchange.
        sender: rank.
        elements: numbers in the body.
        anchor: digest of the outer parameters that the sender started from, 8 bytes.
    """

    codec: str
    fragment: int
    kind: int
    shard: int
    round: int
    sender: int
    elements: int
    anchor: bytes


def anchor_digest(flat: Tensor) -> bytes:
    """Eight bytes that tell two vectors apart: equal on any device, at the speed of its memory.

    The bytes of the vector, filled up with zeros to a multiple of 8192, are 64-bit words in rows of
    1024. The columns are summed mod 2^64; the digest is the first 8 bytes of the SHA-256 of the
    1024 sums.

    Args:
        flat: fp32 [numel].

    >>> anchor_digest(torch.ones(3)) == anchor_digest(torch.tensor([1.0, 1.0, 2.0]))
    False
    """
    # A view as int64 needs aligned memory.
    flat = flat.clone() if flat.storage_offset() % 2 else flat.contiguous()
    per_row = 2 * _SUMS
    whole = len(flat) // per_row * per_row
    rest = F.pad(flat[whole:], (0, per_row - (len(flat) - whole)))
    sums = flat[:whole].view(torch.int64).view(-1, _SUMS).sum(0) + rest.view(torch.int64)
    return hashlib.sha256(sums.cpu().numpy().tobytes()).digest()[:8]


def seal(body: Tensor, header: Header) -> Tensor:
    """A message: uint8 [64 + len(body)], on the device of `body`.

    >>> header = Header(codec="identity/f32", fragment=0, kind=Kind.WHOLE, shard=0, round=1,
    ...     sender=0, elements=1, anchor=bytes(8))
    >>> len(seal(torch.zeros(4, dtype=torch.uint8), header))
    68
    """
    start = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        HEADER_NBYTES,
        _codec_digest(header.codec),
        header.fragment,
        header.kind,
        header.shard,
        header.round,
        header.sender,
        _checksum(body),
        header.elements,
        header.anchor,
    )
    start = start.ljust(HEADER_NBYTES - _CHECKSUM.size, b"\0")
    start += _CHECKSUM.pack(zlib.crc32(start))
    head = torch.frombuffer(bytearray(start), dtype=torch.uint8)
    return torch.cat([head.to(body.device), body])


def open_message(message: Tensor, expected: Header, *, body_nbytes: int) -> Tensor:
    """The body of `message`, which shares its memory, if it is what was expected.

    Args:
        message: uint8 [n]; bytes after the body are ignored.
        expected: what the header must say.
        body_nbytes: of the codec, for that many elements.

    Raises:
        ExchangeError: it is truncated, damaged, foreign, or belongs elsewhere.
        MismatchError: the sender's anchor is another one: replicas have drifted.
    """
    whose = f"use the message of worker {expected.sender} for round {expected.round}"
    if message.dtype != torch.uint8 or message.dim() != 1:
        dtype = str(message.dtype).removeprefix("torch.")
        raise _refused(whose, f"it is {dtype} {list(message.shape)}, not a vector of uint8")
    truncated = f"it has {len(message)} bytes of {HEADER_NBYTES + body_nbytes}"
    if len(message) < HEADER_NBYTES:
        raise _refused(whose, truncated)
    head = message[:HEADER_NBYTES].cpu().numpy().tobytes()
    body = message[HEADER_NBYTES : HEADER_NBYTES + body_nbytes]
    _check_form(whose, head)
    found = _FIELDS.unpack_from(head)
    # First the place: who lags by a fragment sends another one's size, and should hear why.
    _check_place(whose, found, expected)
    if len(message) < HEADER_NBYTES + body_nbytes:
        raise _refused(whose, truncated)
    if found[9] != _checksum(body):
        raise _refused(whose, "its body does not match its checksum")
    if found[11] != expected.anchor:
        raise MismatchError(
            f"{whose}: replicas have drifted",
            because=f"its outer parameters have digest {found[11].hex()}, not "
            f"{expected.anchor.hex()}",
            do="resume all workers from one checkpoint; report it if nobody touched the weights",
        )
    return body


def examine(message: Tensor, expected: Header, *, body_nbytes: int) -> Rejection | None:
    """What keeps `message` from being used as `expected`; None if nothing does.

    Where `open_message` raises, this returns. A newcomer's message is in order, and still not used.
    """
    try:
        open_message(message, expected, body_nbytes=body_nbytes)
    except MismatchError as error:
        return Rejection(fault=RejectReason.DRIFTED, detail=error.because)
    except ExchangeError as error:
        nothing = replace(expected, kind=Kind.NOTHING)
        if expected.kind != Kind.MEAN and _opens(message, nothing, body_nbytes):
            return Rejection(fault=RejectReason.NOTHING)
        return Rejection(fault=RejectReason.DAMAGED, detail=error.because)
    return None


def _opens(message: Tensor, expected: Header, body_nbytes: int) -> bool:
    try:
        open_message(message, expected, body_nbytes=body_nbytes)
    except (ExchangeError, MismatchError):
        return False
    return True


def _check_form(whose: str, head: bytes) -> None:
    magic, version, length = _FIELDS.unpack_from(head)[:3]
    if magic != _MAGIC:
        raise _refused(whose, f"it is no thinwire message: it starts with {magic!r}")
    if version != _VERSION:
        raise _refused(whose, f"its format is version {version}, not {_VERSION}")
    if length != HEADER_NBYTES:
        raise _refused(whose, f"its header has {length} bytes, not {HEADER_NBYTES}")
    checked = HEADER_NBYTES - _CHECKSUM.size
    if zlib.crc32(head[:checked]) != _CHECKSUM.unpack_from(head, checked)[0]:
        raise _refused(whose, "its header does not match its checksum")


def _check_place(whose: str, found: tuple[object, ...], expected: Header) -> None:
    if found[3] != _codec_digest(expected.codec):
        raise _refused(whose, f"it was written by another codec than {expected.codec!r}")
    places = {"fragment": 4, "kind": 5, "shard": 6, "round": 7, "sender": 8, "elements": 10}
    for field in fields(Header):
        if field.name in places:
            mine, theirs = getattr(expected, field.name), found[places[field.name]]
            if mine != theirs:
                raise _refused(whose, f"its {field.name} is {theirs}, not {mine}")


def _codec_digest(id: str) -> bytes:
    return hashlib.sha256(id.encode()).digest()[:8]


def _checksum(body: Tensor) -> int:
    return zlib.crc32(body.cpu().contiguous().numpy().data)


def _refused(whose: str, because: str) -> ExchangeError:
    return ExchangeError(
        whose,
        because=because,
        do="check the link and that all workers run the same method and thinwire version; nothing "
        "of it was used",
    )
