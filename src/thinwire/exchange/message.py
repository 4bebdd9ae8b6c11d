"""The envelope of a payload: who sent what, for which round, from which anchor, and is it whole.

A message is a header of 64 bytes and a body, the codec's payload. All numbers are little-endian.
docs/wire-format.md is the specification.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.checksums import checksum
from thinwire.codecs import BoundCodec
from thinwire.errors import ExchangeError, MismatchError
from thinwire.rejection import Rejection, RejectReason
from thinwire.storage import StatePlacement

HEADER_NBYTES = 64
_MAGIC, _VERSION = b"TWIR", 2
# Of version 1, whose body checksum is the CRC-32 of the body itself, are messages in checkpoints.
_READABLE = (1, _VERSION)
# `_Fields` in order; the header's own checksum follows.
_FIELDS = struct.Struct("<4sHH8sIHHQIIQ8s")
_CHECKSUM = struct.Struct("<I")


class _Fields(NamedTuple):
    """The fields of a header, in the order in which they lie in a message."""

    magic: bytes
    version: int
    header_nbytes: int
    codec: bytes
    fragment: int
    kind: int
    shard: int
    round: int
    sender: int
    body_checksum: int
    elements: int
    anchor: bytes


class Kind:
    """Codes for what the body of a message holds."""

    WHOLE = 0
    """A worker's pseudo-gradient."""
    SHARD = 1
    """A worker's pseudo-gradient, one shard of it."""
    MEAN = 2
    """What a shard's owner made of all workers' shards."""
    NOTHING = 3
    """No pseudo-gradient: the sender has just joined the run; the body is zeros."""
    ANCHOR = 4
    """The outer parameters, from a server to a worker that starts from them."""


class Origin(NamedTuple):
    """What a message says of where it comes from, before anything else in it is believed.

    Args:
        sender: rank.
        round: number of the exchange.
        anchor: digest of the outer parameters that the sender started from, 8 bytes.
    """

    sender: int
    round: int
    anchor: bytes


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
        anchor: digest of the outer parameters that the sender started from, 8 bytes; zeros where
            every worker has its own.
    """

    codec: str
    fragment: int
    kind: int
    shard: int
    round: int
    sender: int
    elements: int
    anchor: bytes


def header_of(
    codec: BoundCodec,
    *,
    fragment: int,
    round: int,
    sender: int,
    kind: int,
    anchor: bytes,
    shard: int = 0,
) -> Header:
    """What the message of `sender` must say in exchange `round`."""
    return Header(
        codec=codec.id,
        fragment=fragment,
        kind=kind,
        shard=shard,
        round=round,
        sender=sender,
        elements=codec.layout.numel,
        anchor=anchor,
    )


def blank_message(body_nbytes: int, storage: StatePlacement) -> Tensor:
    """Room for a header and a body, uint8 [64 + body_nbytes]: its contents are undefined."""
    return storage.buffers.take(HEADER_NBYTES + body_nbytes, storage.device)


def seal(message: Tensor, header: Header, body_checksum: int | None = None) -> Tensor:
    """Write the header before the body that is in `message`, uint8 [64 + n], and return it.

    Args:
        message: header and body.
        header: what it says.
        body_checksum: of the body; by default it is computed.

    >>> header = Header(codec="identity/f32", fragment=0, kind=Kind.WHOLE, shard=0, round=1,
    ...     sender=0, elements=1, anchor=bytes(8))
    >>> bytes(seal(torch.zeros(68, dtype=torch.uint8), header)[:4].tolist())
    b'TWIR'
    """
    if body_checksum is None:
        body_checksum = checksum(message[HEADER_NBYTES:])
    start = _FIELDS.pack(
        *_Fields(
            magic=_MAGIC,
            version=_VERSION,
            header_nbytes=HEADER_NBYTES,
            codec=_codec_digest(header.codec),
            fragment=header.fragment,
            kind=header.kind,
            shard=header.shard,
            round=header.round,
            sender=header.sender,
            body_checksum=body_checksum,
            elements=header.elements,
            anchor=header.anchor,
        )
    )
    start = start.ljust(HEADER_NBYTES - _CHECKSUM.size, b"\0")
    start += _CHECKSUM.pack(zlib.crc32(start))
    message[:HEADER_NBYTES] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
    return message


def read_origin(message: Tensor) -> Origin:
    """Where `message` (uint8 [n]) says that it comes from; its body is not looked at.

    For a receiver that does not know which message comes next; `open_message` must follow.

    Raises:
        ExchangeError: it has no whole header, or a damaged one.
    """
    whose = "read where a message comes from"
    _check_vector(whose, message)
    if len(message) < HEADER_NBYTES:
        raise _refused(whose, f"it has {len(message)} bytes, and a header {HEADER_NBYTES}")
    found = _read_form(whose, message[:HEADER_NBYTES].cpu().numpy().tobytes())
    return Origin(sender=found.sender, round=found.round, anchor=found.anchor)


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
    _check_vector(whose, message)
    truncated = f"it has {len(message)} bytes of {HEADER_NBYTES + body_nbytes}"
    if not len(message):
        truncated += ": it was forged or changed on its way"
    if len(message) < HEADER_NBYTES:
        raise _refused(whose, truncated)
    head = message[:HEADER_NBYTES].cpu().numpy().tobytes()
    body = body_of(message, body_nbytes)
    found = _read_form(whose, head)
    # Before the length: a worker that lags by a fragment sends a message of another length, and the
    # error should say which fragment it is of.
    _check_place(whose, found, expected)
    if len(message) < HEADER_NBYTES + body_nbytes:
        raise _refused(whose, truncated)
    mine = checksum(body) if found.version > 1 else zlib.crc32(body.cpu().contiguous().numpy().data)
    if found.body_checksum != mine:
        raise _refused(whose, "its body does not match its checksum")
    if found.anchor != expected.anchor:
        raise MismatchError(
            f"{whose}: replicas have drifted",
            because=f"its outer parameters have digest {found.anchor.hex()}, not "
            f"{expected.anchor.hex()}",
            do="resume all workers from one checkpoint; report it if the weights were not changed "
            "from outside",
        )
    return body


def body_of(message: Tensor, body_nbytes: int) -> Tensor:
    """The body of a message that was examined before; it shares the message's memory."""
    return message[HEADER_NBYTES : HEADER_NBYTES + body_nbytes]


def examine(message: Tensor, expected: Header, *, body_nbytes: int) -> Rejection | None:
    """What keeps `message` from being used as `expected`; None if nothing does.

    Where `open_message` raises, this returns. A newcomer's message is in order, and still not used.
    """
    try:
        open_message(message, expected, body_nbytes=body_nbytes)
    except MismatchError as error:
        return Rejection(reason=RejectReason.DRIFTED, detail=error.because)
    except ExchangeError as error:
        empty = replace(expected, kind=Kind.NOTHING)
        if expected.kind != Kind.MEAN and _opens(message, empty, body_nbytes):
            return Rejection(reason=RejectReason.EMPTY)
        return Rejection(reason=RejectReason.DAMAGED, detail=error.because)
    return None


def _opens(message: Tensor, expected: Header, body_nbytes: int) -> bool:
    try:
        open_message(message, expected, body_nbytes=body_nbytes)
    except (ExchangeError, MismatchError):
        return False
    return True


def _check_vector(whose: str, message: Tensor) -> None:
    if message.dtype != torch.uint8 or message.dim() != 1:
        dtype = str(message.dtype).removeprefix("torch.")
        raise _refused(whose, f"it is {dtype} {list(message.shape)}, not a vector of uint8")


def _read_form(whose: str, head: bytes) -> _Fields:
    found = _Fields(*_FIELDS.unpack_from(head))
    if found.magic != _MAGIC:
        raise _refused(whose, f"it is not a thinwire message: it starts with {found.magic!r}")
    if found.version not in _READABLE:
        raise _refused(whose, f"its format is version {found.version}, not {_VERSION}")
    if found.header_nbytes != HEADER_NBYTES:
        raise _refused(whose, f"its header has {found.header_nbytes} bytes, not {HEADER_NBYTES}")
    checked = HEADER_NBYTES - _CHECKSUM.size
    if zlib.crc32(head[:checked]) != _CHECKSUM.unpack_from(head, checked)[0]:
        raise _refused(whose, "its header does not match its checksum")
    return found


def _check_place(whose: str, found: _Fields, expected: Header) -> None:
    if found.codec != _codec_digest(expected.codec):
        raise _refused(whose, f"it was written by another codec than {expected.codec!r}")
    for name in ("fragment", "kind", "shard", "round", "sender", "elements"):
        mine, theirs = getattr(expected, name), getattr(found, name)
        if mine != theirs:
            raise _refused(whose, f"its {name} is {theirs}, not {mine}")


def _codec_digest(id: str) -> bytes:
    return hashlib.sha256(id.encode()).digest()[:8]


def _refused(whose: str, because: str) -> ExchangeError:
    return ExchangeError(
        whose,
        because=because,
        do="check the link, and that all workers run the same method and thinwire version; the "
        "message was not used",
    )
