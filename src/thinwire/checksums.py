"""Checksums at the speed of memory, on the device where the bytes are.

They tell damage and drift, not an adversary: for that there is SHA-256.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any, final

from thinwire.blocks import VectorPart
from thinwire.lazy_torch import F, Tensor, torch

__all__ = ["BlockSums", "anchor_digest", "checksum", "column_sums"]

_COLUMNS = 1024
_ROW_NBYTES = 8 * _COLUMNS


def column_sums(values: Tensor) -> Any:
    """The bytes of `values`, filled up with zeros, as 64-bit words in rows of 1024, added up.

    sums[j] = sum_i words[1024 i + j] mod 2^64, little-endian

    Args:
        values: [numel], of any dtype and on any device.

    Returns:
        numpy int64 [1024]: the same on every device, since sums of whole numbers have no order.

    >>> column_sums(torch.tensor([1, 2], dtype=torch.int64))[:3].tolist()
    [1, 2, 0]
    """
    raw = values.detach().contiguous().view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()  # a view as int64 needs aligned memory
    whole = len(raw) // _ROW_NBYTES * _ROW_NBYTES
    rows, rest = raw[:whole].view(torch.int64).view(-1, _COLUMNS), raw[whole:]
    if raw.is_cpu:
        # numpy adds row to row, as they lie in memory: 2.5 times the speed of torch's columns.
        import numpy as np  # slow to import for what only describes

        last = np.frombuffer(rest.numpy().tobytes().ljust(_ROW_NBYTES, b"\0"), np.int64)
        return np.add.reduce(rows.numpy(), axis=0) + last
    last = F.pad(rest, (0, _ROW_NBYTES - len(rest))).view(torch.int64)
    return (rows.sum(0) + last).cpu().numpy()


def anchor_digest(flat: Tensor) -> bytes:
    """Eight bytes that tell two vectors apart: of the SHA-256 of their column sums.

    Args:
        flat: [numel]; fp32, or of any other dtype.

    >>> anchor_digest(torch.ones(3)) == anchor_digest(torch.tensor([1.0, 1.0, 2.0]))
    False
    """
    return _digest_of(column_sums(flat))


def _digest_of(sums: Any) -> bytes:
    return hashlib.sha256(sums.tobytes()).digest()[:8]


@final
class BlockSums:
    """The column sums of a vector of fp32 that comes in parts.

    >>> from thinwire.blocks import Span
    >>> whole, sums = torch.arange(5.0), BlockSums()
    >>> for part in (Span(3, 5), Span(0, 3)):
    ...     sums.add(part, part.read(whole))
    >>> sums.digest() == anchor_digest(whole), sums.numel
    (True, 5)
    """

    def __init__(self) -> None:
        self._sums: Any = 0
        self.numel = 0

    def add(self, part: VectorPart, values: Tensor) -> None:
        """Add the numbers of a part, fp32 [part.numel], that has not been added yet."""
        ranges = part.ranges
        if ranges is None:
            return
        for (start, stop), run in zip(
            ranges, values.split([b - a for a, b in ranges]), strict=True
        ):
            # A run that does not begin a row has zeros before it.
            before = start * values.itemsize % _ROW_NBYTES // values.itemsize
            self._sums = self._sums + column_sums(F.pad(run, (before, 0)) if before else run)
            self.numel += stop - start

    def digest(self) -> bytes:
        """The `anchor_digest` of the vector, once all of it was added."""
        return _digest_of(self._sums)


def checksum(body: Tensor) -> int:
    """Four bytes that tell whether a message is whole.

    The CRC-32 of its body's column sums, followed by its length as 64 bits: sums do not see zeros.

    Args:
        body: uint8 [n].

    >>> checksum(torch.zeros(3, dtype=torch.uint8)) == checksum(torch.ones(3, dtype=torch.uint8))
    False
    """
    return zlib.crc32(column_sums(body).tobytes() + len(body).to_bytes(8, "little"))
