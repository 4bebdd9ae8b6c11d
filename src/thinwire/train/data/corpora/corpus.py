"""A corpus once it is found: text, tokens or a stream, in two sides that share nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thinwire.errors import CorpusError

if TYPE_CHECKING:
    from datasets import IterableDataset

SEPARATOR = b"\0"
"""What follows every document of a text corpus."""

_WHOLE_BYTES = 256 * 2**20
_BLOCK_BYTES = 64 * 2**10
_BLOCKS = 64


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


@dataclass(frozen=True, kw_only=True)
class TokenCorpus:
    """Shards of text that was tokenised before.

    Args:
        name: what the user asked for.
        train: uint16 arrays, [tokens] each, memory-mapped.
        validation: likewise.
    """

    name: str
    train: Sequence[npt.NDArray[Any]]
    validation: Sequence[npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class StreamCorpus:
    """Rows with a column "text" that arrive one after the other.

    Args:
        name: what the user asked for.
        train: the rows to train on.
        validation: rows that the publisher held out; None without any.
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


_ONE_IN = 20


def is_validation(key: str) -> bool:
    """Whether the document called `key` is held out: md5(key) mod 20 = 0, about 5 %.

    >>> [is_validation(key) for key in ("abc.py", "os.py", "opcode.py")]
    [False, False, False]
    """
    # Not `hash()`: that one is salted in every process, and workers must agree.
    return int(hashlib.md5(key.encode(), usedforsecurity=False).hexdigest(), 16) % _ONE_IN == 0


def tail(length: int) -> int:
    """Where the last 5 % of `length` items begin; at least one item is in them.

    >>> tail(100), tail(1)
    (95, 0)
    """
    return length - max(1, length // _ONE_IN)


def split_documents(name: str, documents: Iterable[tuple[str, bytes]]) -> TextCorpus:
    """Sorts (key, text) pairs into train and validation.

    Where the hash leaves one side empty (few documents), the last 5 % of the bytes of the whole
    are validation.

    Raises:
        CorpusError: there is no text at all.
    """
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for key, text in documents:
        sides[is_validation(key)].extend((text, SEPARATOR))
    train, validation = (np.frombuffer(b"".join(side), dtype=np.uint8) for side in sides)
    if not train.size and not validation.size:
        raise CorpusError(
            f"read corpus {name!r}", because="it is empty", do="name a corpus that holds text"
        )
    if not train.size or not validation.size:
        train, validation = _cut(train if train.size else validation)
    return TextCorpus(name=name, train=train, validation=validation)


def _cut(
    text: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    cut = tail(text.size)
    # 10xxxxxx continues a UTF-8 sequence: a character belongs to one side as a whole. It has at
    # most three of them; bytes that are not UTF-8 may have any number in a row.
    for _ in range(3):
        cut += int(cut < text.size and (text[cut] & 0xC0) == 0x80)
    return text[:cut], text[cut:]
