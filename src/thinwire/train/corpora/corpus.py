"""A corpus once it is found: text, tokens or a stream, in two sides that share nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from datasets import IterableDataset

__all__ = ["SEPARATOR", "StreamCorpus", "TextCorpus", "TokenCorpus", "fingerprint"]

SEPARATOR = b"\0"
"""What follows every document of a text corpus."""

_WHOLE_BYTES = 256 * 2**20
_BLOCK_BYTES = 64 * 2**10
_BLOCKS = 64


@final
@dataclass(frozen=True, kw_only=True)
class TextCorpus:
    """Documents as bytes, each followed by one zero byte.

    Args:
        name: what the user asked for.
        train: uint8, [bytes].
        validation: uint8, [bytes], of documents that `train` does not hold.
    """

    name: str
    train: npt.NDArray[np.uint8]
    validation: npt.NDArray[np.uint8]


@final
@dataclass(frozen=True, kw_only=True)
class TokenCorpus:
    """Shards that somebody has tokenised before.

    Args:
        name: what the user asked for.
        train: uint16 arrays, [tokens] each, memory-mapped.
        validation: likewise.
    """

    name: str
    train: Sequence[npt.NDArray[Any]]
    validation: Sequence[npt.NDArray[Any]]


@final
@dataclass(frozen=True, kw_only=True)
class StreamCorpus:
    """Rows with a column "text" that arrive one after the other.

    Args:
        name: what the user asked for.
        train: the rows to train on.
        validation: rows held out by whoever published them; None where there are none.
    """

    name: str
    train: IterableDataset
    validation: IterableDataset | None


def fingerprint(arrays: Iterable[npt.NDArray[Any]]) -> str:
    """SHA-256 of arrays, hexadecimal: equal contents in equal order, equal fingerprint.

    Above 256 MiB in all it reads sizes and 64 evenly spaced blocks of 64 KiB an array: shards of
    tens of gigabytes are told apart without being read.

    >>> fingerprint([np.arange(3, dtype=np.uint8)])[:16]
    'c571a8d02cea1db4'
    """
    arrays = list(arrays)
    whole = sum(array.nbytes for array in arrays) <= _WHOLE_BYTES
    digest = hashlib.sha256()
    for array in arrays:
        raw = np.ascontiguousarray(array).view(np.uint8)
        digest.update(f"{array.dtype.str} {array.size};".encode())
        for block in [raw] if whole else _blocks(raw):
            digest.update(block.data)
    return digest.hexdigest()


def _blocks(raw: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
    last = max(0, raw.size - _BLOCK_BYTES)
    for block in range(_BLOCKS):
        start = last * block // (_BLOCKS - 1)
        yield raw[start : start + _BLOCK_BYTES]
