"""Token shards: `.bin` files as nanoGPT and modded-nanogpt write them, memory-mapped."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.errors import CorpusError

ONE_IN = 20
"""One document, or item, in so many is validation."""

_MAGIC = 20240520
_VERSION = 1
_HEADER_INTS = 256
_HEADER_BYTES = 4 * _HEADER_INTS
_FIELDS = 3

_TOKEN = np.dtype("<u2")


@dataclass(frozen=True, kw_only=True)
class TokenCorpus:
    """Shards of tokens.

    Args:
        name: as the user wrote it.
        train: uint16 arrays, [tokens] each, memory-mapped.
        validation: uint16 arrays, [tokens] each, memory-mapped.
    """

    name: str
    train: Sequence[npt.NDArray[Any]]
    validation: Sequence[npt.NDArray[Any]]


def tail(length: int) -> int:
    """Start of the last 5 % of `length` items, of which there is at least one.

    >>> tail(100), tail(1)
    (95, 0)
    """
    return length - max(1, length // ONE_IN)


def shard_corpus(name: str, root: Path, files: Sequence[Path]) -> TokenCorpus:
    """The tokens in `files`: names with "train" are for training, names with "val" for validation.

    Without a name with "train", all without "val" are for training; otherwise files with neither,
    such as a test set, are left out. Without a name with "val", the last 5 % of the last shard are
    for validation.

    Raises:
        CorpusError: a shard is malformed, or all of them are validation.
    """
    validation = [file for file in files if "val" in file.name and "train" not in file.name]
    rest = [file for file in files if file not in validation]
    train = [file for file in rest if "train" in file.name] or rest
    if not train:
        raise _malformed(root, 'every shard is named "val"', "add a shard to train on")
    shards = [read_shard(file) for file in train]
    if validation:
        held_out = [read_shard(file) for file in validation]
    else:
        cut = tail(shards[-1].size)
        shards[-1], held_out = shards[-1][:cut], [shards[-1][cut:]]
    return TokenCorpus(name=name, train=shards, validation=held_out)


def read_shard(file: Path) -> npt.NDArray[Any]:
    """The tokens of one shard: uint16, [tokens], memory-mapped.

    nanoGPT: nothing but little-endian uint16. modded-nanogpt: 256 int32 before them, the first
    three are the magic number 20240520, version 1 and the number of tokens.

    Raises:
        CorpusError: the header, or the size, is not that of a shard; names the file.
    """
    try:
        size = file.stat().st_size
        raw = np.asarray(np.memmap(file, dtype=np.uint8, mode="r")) if size else None
    except OSError as error:
        raise _malformed(file, f"it cannot be read: {error}", "make it readable") from error
    if raw is None or size % _TOKEN.itemsize:
        raise _malformed(file, f"it has {size} bytes", "pass a whole shard of uint16 tokens")
    header = raw[:_HEADER_BYTES].view("<i4") if size >= _HEADER_BYTES else None
    # Files of nanoGPT have no magic number, so a wrong one looks like tokens; but 253 zeros behind
    # three numbers are no text in any vocabulary.
    if header is None or not (int(header[0]) == _MAGIC or not header[_FIELDS:].any()):
        return raw.view(_TOKEN)
    tokens = raw[_HEADER_BYTES:].view(_TOKEN)
    magic, version, count = (int(field) for field in header[:_FIELDS])
    if magic != _MAGIC:
        raise _malformed(file, f"its magic number is {magic}, not {_MAGIC}", _REWRITE)
    if version != _VERSION:
        raise _malformed(file, f"its version is {version}, not {_VERSION}", _REWRITE)
    if count != tokens.size:
        promised = f"its header promises {count} tokens and it has {tokens.size}"
        raise _malformed(file, promised, "fetch it again")
    return tokens


_REWRITE = "write it as modded-nanogpt does (uint16 tokens), or without a header as nanoGPT does"


def _malformed(file: Path, why: str, do: str) -> CorpusError:
    return CorpusError(f"read token shards in {str(file)!r}", because=why, do=do)
