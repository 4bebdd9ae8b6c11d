"""The header of a payload: sender, fragment, round, anchor and checksums.

A message is a header of 64 bytes and a body, the codec's payload. All numbers are little-endian.
docs/wire-format.md is the specification.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.checksums import checksum
from thinwire.errors import ExchangeError, MismatchError
from thinwire.rejection import Kind, Rejection, RejectReason
from thinwire.storage import StatePlacement

HEADER_NBYTES = 64
_MAGIC, _VERSION = b"TWIR", 2
# Old checkpoints hold messages of version 1, whose body checksum is the body's own CRC-32.
_READABLE = (1, _VERSION)
# Magic, version, length of the header, codec, `Header` up to the sender, checksum of the body,
# elements, anchor; the header's own checksum follows.
_FIELDS = struct.Struct("<4sHH8sIHHQIIQ8s")
_CHECKSUM = struct.Struct("<I")
_CHECKED = HEADER_NBYTES - _CHECKSUM.size
_ABSENT = "it did not come in time, or was forged"


class Header(NamedTuple):
    """The description of a message's body.

    Args:
        fragment: index of the fragment.
        kind: a value of `Kind`.
        shard: index of the shard; 0 for a whole pseudo-gradient.
        round: number of the exchange.
        sender: rank of the sender.
        elements: how many numbers the body encodes.
        anchor: digest of the outer parameters that the sender started from, 8 bytes; zeros where
            every worker has its own.
        codec: the codec's id; only eight bytes of its SHA-256 travel, so a header read back has "".
    """

    fragment: int
    kind: int
    shard: int
    round: int
    sender: int
    elements: int
    anchor: bytes
    codec: str


def blank_message(body_nbytes: int, storage: StatePlacement) -> Tensor:
    """Memory for a header and a body, uint8 [64 + body_nbytes], with undefined contents."""
    return storage.buffers.take(HEADER_NBYTES + body_nbytes, storage.device)


def seal(message: Tensor, header: Header, body_checksum: int | None = None) -> Tensor:
    """Write the header of `message`, uint8 [64 + n], whose body is in place; return the message.

    Args:
        message: header and body.
        header: contents of the header.
        body_checksum: checksum of the body; computed by default.

    >>> header = Header(codec="identity/f32", fragment=0, kind=Kind.WHOLE, shard=0, round=1,
    ...     sender=0, elements=1, anchor=bytes(8))
    >>> bytes(seal(torch.zeros(68, dtype=torch.uint8), header)[:4].tolist())
    b'TWIR'
    """
    if body_checksum is None:
        body_checksum = checksum(message[HEADER_NBYTES:])
    head = (_MAGIC, _VERSION, HEADER_NBYTES, _codec_digest(header.codec))
    start = _FIELDS.pack(*head, *header[:5], body_checksum, *header[5:7]).ljust(_CHECKED, b"\0")
    start += _CHECKSUM.pack(zlib.crc32(start))
    head_bytes = torch.frombuffer(bytearray(start), dtype=torch.uint8)
    # CUDA has read unpinned memory by the time the call returns.
    message[:HEADER_NBYTES].copy_(head_bytes, non_blocking=message.is_cuda)
    return message


def read_origin(message: Tensor) -> Header:
    """Read the header of `message` (uint8 [n]), without checking its body.

    For a receiver that does not know which message comes next; `open_message` must follow.

    Raises:
        ExchangeError: the header is incomplete or damaged.
    """
    *_, header = _read_fields("read where a message comes from", message, HEADER_NBYTES)
    return header


def open_message(message: Tensor, expected: Header, *, body_nbytes: int) -> Tensor:
    """The body of `message`, which shares its memory, if it is what was expected.

    Args:
        message: uint8 [n]; bytes after the body are ignored.
        expected: what the header must say.
        body_nbytes: the codec's payload size for that many elements.

    Raises:
        ExchangeError: it is truncated, damaged, foreign, or belongs elsewhere.
        MismatchError: the sender's anchor differs: replicas have drifted.
    """
    whose = f"use the message of worker {expected.sender} for round {expected.round}"
    nbytes = HEADER_NBYTES + body_nbytes
    version, codec, body_checksum, found = _read_fields(whose, message, nbytes)
    body = message[HEADER_NBYTES:nbytes]
    arrived = zlib.crc32(body.cpu().contiguous().numpy().data) if version == 1 else checksum(body)
    # Anchor and codec have errors of their own.
    places = zip(Header._fields[:6], expected, found, strict=False)
    _check(
        whose,
        (
            codec == _codec_digest(expected.codec),
            f"it was written by another codec than {expected.codec!r}",
        ),
        # Before the length: a worker that lags by a fragment sends a message of another length, and
        # the error should say which fragment it is of.
        *[(theirs == mine, f"its {name} is {theirs}, not {mine}") for name, mine, theirs in places],
        (len(message) >= nbytes, f"it has {len(message)} bytes of {nbytes}"),
        (body_checksum == arrived, "its body does not match its checksum"),
    )
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
    """Return why `message` cannot be used as `expected`, or None if it can.

    `open_message` would raise that as an error. A newcomer's message is sound, yet not used.
    """
    if not message.numel():
        return Rejection(reason=RejectReason.DAMAGED, detail=_ABSENT, is_absent=True)
    try:
        open_message(message, expected, body_nbytes=body_nbytes)
    except MismatchError as error:
        return Rejection(reason=RejectReason.DRIFTED, detail=error.because)
    except ExchangeError as error:
        empty = expected._replace(kind=Kind.NOTHING)
        is_own = expected.kind not in (Kind.MEAN, Kind.NOTHING)
        if is_own and examine(message, empty, body_nbytes=body_nbytes) is None:
            return Rejection(reason=RejectReason.EMPTY)
        return Rejection(reason=RejectReason.DAMAGED, detail=error.because)
    return None


def _read_fields(whose: str, message: Tensor, nbytes: int) -> tuple[int, bytes, int, Header]:
    """Version, digest of the codec, checksum of the body, and header of `message`.

    Args:
        whose: what it is read for, for the error message.
        message: the message as it arrived.
        nbytes: its size if it is whole.
    """
    is_vector = message.dtype == torch.uint8 and message.dim() == 1
    form = f"{str(message.dtype).removeprefix('torch.')} {list(message.shape)}"
    _check(
        whose,
        (is_vector, f"it is {form}, not a vector of uint8"),
        (len(message) >= HEADER_NBYTES, f"it has {len(message)} bytes of {nbytes}"),
    )
    head = message[:HEADER_NBYTES].cpu().numpy().tobytes()
    magic, version, size, codec, *place, body_checksum, elements, anchor = _FIELDS.unpack_from(head)
    is_whole = zlib.crc32(head[:_CHECKED]) == _CHECKSUM.unpack_from(head, _CHECKED)[0]
    _check(
        whose,
        (magic == _MAGIC, f"it is not a thinwire message: it starts with {magic!r}"),
        (version in _READABLE, f"its format is version {version}, not {_VERSION}"),
        (size == HEADER_NBYTES, f"its header has {size} bytes, not {HEADER_NBYTES}"),
        (is_whole, "its header does not match its checksum"),
    )
    return version, codec, body_checksum, Header._make((*place, elements, anchor, ""))


def _codec_digest(id: str) -> bytes:
    return hashlib.sha256(id.encode()).digest()[:8]


def _check(whose: str, *reasons: tuple[bool, str]) -> None:
    for ok, because in reasons:
        if not ok:
            raise ExchangeError(
                whose,
                because=because,
                do="check the link, and that all workers run the same method and thinwire version; "
                "the message was not used",
            )
