"""Corpora: this machine's Python sources, text files, token shards, and streams from the hub."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thinwire.errors import CorpusError, unknown_name

if TYPE_CHECKING:
    from datasets import IterableDataset

Bytes: TypeAlias = npt.NDArray[np.uint8]
SEPARATOR = b"\0"
"""End of every document of a text corpus."""

ONE_IN = 20
"""One document, or item, in this many is for validation."""

_WHOLE_BYTES = 256 * 2**20
_BLOCK_BYTES = 64 * 2**10
_BLOCKS = 64


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus in memory, or in memory-mapped files.

    Args:
        train: arrays of tokens; for text, one array of bytes: uint8, [bytes].
        validation: arrays held out from training, possibly cut off the end of the last one.
        is_text: whether the arrays hold documents as bytes, each followed by one zero byte.
    """

    train: Sequence[npt.NDArray[Any]]
    validation: Sequence[npt.NDArray[Any]]
    is_text: bool


@dataclass(frozen=True, kw_only=True)
class StreamCorpus:
    """Rows with a column "text" that arrive one after the other.

    Args:
        train: the rows to train on.
        validation: rows that the publisher held out; None without any.
    """

    train: IterableDataset
    validation: IterableDataset | None


def fingerprint(arrays: Iterable[npt.NDArray[Any]]) -> str:
    """SHA-256 of arrays, hexadecimal: equal contents in equal order, equal fingerprint.

    Above 256 MiB in total, it reads only sizes and 64 evenly spaced blocks of 64 KiB of each array:
    it tells shards of tens of gigabytes apart without reading them.

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


def _blocks(raw: Bytes) -> Iterator[Bytes]:
    last = max(0, raw.size - _BLOCK_BYTES)
    for block in range(_BLOCKS):
        start = last * block // (_BLOCKS - 1)
        yield raw[start : start + _BLOCK_BYTES]


def is_validation(key: str) -> bool:
    """True if the document `key` is held out: md5(key) mod 20 = 0, about 5 %.

    >>> [is_validation(key) for key in ("abc.py", "os.py", "opcode.py")]
    [False, False, False]
    """
    # Not `hash()`, which differs between processes: workers must agree.
    return int(hashlib.md5(key.encode(), usedforsecurity=False).hexdigest(), 16) % ONE_IN == 0


def split_documents(name: str, documents: Iterable[tuple[str, bytes]]) -> Corpus:
    """Sort (key, text) pairs into train and validation.

    If the hash leaves one side empty, as it may with few documents, the last 5 % of all bytes are
    for validation.

    Raises:
        CorpusError: there is no text.
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
    return Corpus(train=[train], validation=[validation], is_text=True)


def _cut(text: Bytes) -> tuple[Bytes, Bytes]:
    cut = _tail(text.size)
    # 10xxxxxx continues a UTF-8 sequence: a character belongs to one side as a whole. It has at
    # most three of them; bytes that are not UTF-8 may have any number in a row.
    for _ in range(3):
        cut += int(cut < text.size and (text[cut] & 0xC0) == 0x80)
    return text[:cut], text[cut:]


def _tail(length: int) -> int:
    """Start of the last 5 % of `length` items, of which there is at least one."""
    return length - max(1, length // ONE_IN)


# -- text in files ---------------------------------------------------------------------------------

# Character maps, the help texts of pydoc, and generated files above 400 kB are tables: a model
# memorises their format, and its loss has no meaning.
_TABLES = frozenset({"encodings", "pydoc_data"})
_LARGEST_BYTES = 400_000

KNOWN_CORPORA: Mapping[str, tuple[Sequence[str], frozenset[str]]] = {
    "python-stdlib": (["stdlib"], frozenset({"site-packages", "dist-packages"})),
    "site-packages": (["purelib", "platlib"], frozenset()),
}
"""Corpora of every machine, by name: sysconfig's names of folders, and folders to leave out."""


def source_corpus(name: str) -> Corpus:
    """The .py files of one of `KNOWN_CORPORA` in sorted order, split by their relative path.

    Raises:
        CorpusError: there is no .py file, or one cannot be read.
    """
    places, without = KNOWN_CORPORA[name]
    roots = dict.fromkeys(Path(sysconfig.get_path(place)) for place in places)
    return split_documents(name, _source_files(name, roots, without | _TABLES))


def _source_files(
    name: str, roots: Iterable[Path], without: frozenset[str]
) -> Iterator[tuple[str, bytes]]:
    for root in roots:
        found: dict[str, Path] = {}
        for folder, folders, files in os.walk(root):
            folders[:] = [each for each in folders if each not in without]
            for file in (Path(folder, each) for each in files if each.endswith(".py")):
                # A broken link is not a file: editors leave such locks behind.
                if file.is_file() and file.stat().st_size <= _LARGEST_BYTES:
                    found[file.relative_to(root).as_posix()] = file
        for key in sorted(found):
            try:
                yield key, found[key].read_bytes()
            except OSError as error:
                because = f"{found[key]} cannot be read: {error}"
                do = "make the file readable, or name another corpus"
                raise CorpusError(f"read corpus {name!r}", because=because, do=do) from error


_ROWS = 1_000

_READERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("text", {"sample_by": "document"}),
    ".jsonl": ("json", {}),
    # The default, the size of the first row group, fails for a file without rows.
    ".parquet": ("parquet", {"batch_size": _ROWS}),
}


def document_corpus(name: str, root: Path, files: Sequence[Path]) -> Corpus:
    """The documents in `files`, split by (file name relative to `root`, row).

    A .txt file is one document; a row of .jsonl or .parquet is one, in its field "text". Empty
    documents are left out.

    Raises:
        CorpusError: a file cannot be read, is not UTF-8 or lacks the field; names the file.
    """
    texts = (
        (f"{file.relative_to(root).as_posix()}:{row}", text)
        for file in files
        for row, text in enumerate(_texts(name, file))
        if text
    )
    return split_documents(name, texts)


def _texts(name: str, file: Path) -> Iterator[bytes]:
    try:
        # `datasets` fails for an empty file, which has no first row to infer columns from.
        for batch in _batches(file) if file.stat().st_size else ():
            if "text" not in batch:
                raise ValueError(f'it has no column "text", only {sorted(batch)}')
            for text in batch["text"]:
                if not isinstance(text, str):
                    raise ValueError(f'its column "text" holds {text!r}, which is no string')
                yield text.encode()
    except (OSError, ValueError, RuntimeError) as error:
        what = f"read corpus {name!r}"
        do = 'pass UTF-8 text in .txt, or rows with a string "text" in .jsonl or .parquet'
        raise CorpusError(what, because=f"{file} cannot be read: {error}", do=do) from error


def _batches(file: Path) -> Iterator[dict[str, list[Any]]]:
    module, options = _READERS[file.suffix]
    # Not `load_dataset`, which reports every use to the hub: slow without a network, and unwanted.
    reader: Any = getattr(import_module(f"datasets.io.{module}"), f"{module.title()}DatasetReader")
    # Streaming reads a local file in place, without a copy that could become stale. It leaves a
    # lock per file in the cache, which is therefore temporary.
    with tempfile.TemporaryDirectory() as cache:
        path = glob.escape(str(file.resolve()))
        rows = reader(path, split="train", streaming=True, cache_dir=cache, **options).read()
        yield from rows.iter(batch_size=_ROWS)


# -- token shards: `.bin` files as nanoGPT and modded-nanogpt write them, memory-mapped -----------

_MAGIC = 20240520
_VERSION = 1
_HEADER_BYTES = 4 * 256
_FIELDS = 3

_TOKEN = np.dtype("<u2")


def shard_corpus(root: Path, files: Sequence[Path]) -> Corpus:
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
        cut = _tail(shards[-1].size)
        shards[-1], held_out = shards[-1][:cut], [shards[-1][cut:]]
    return Corpus(train=shards, validation=held_out, is_text=False)


def read_shard(file: Path) -> npt.NDArray[Any]:
    """The tokens of one shard: uint16, [tokens], memory-mapped.

    nanoGPT: nothing but little-endian uint16. modded-nanogpt: 256 int32 before them, of which the
    first three are the magic number 20240520, version 1 and the number of tokens.

    Raises:
        CorpusError: the file, which the error names, has no valid header or size.
    """
    try:
        size = file.stat().st_size
        raw = np.asarray(np.memmap(file, dtype=np.uint8, mode="r")) if size else None
    except OSError as error:
        raise _malformed(file, f"it cannot be read: {error}", "make it readable") from error
    if raw is None or size % _TOKEN.itemsize:
        raise _malformed(file, f"it has {size} bytes", "pass a whole shard of uint16 tokens")
    header = raw[:_HEADER_BYTES].view("<i4") if size >= _HEADER_BYTES else None
    # Files of nanoGPT have no magic number, so a wrong one looks like tokens; but three numbers
    # and 253 zeros are no text in any vocabulary.
    if header is None or not (int(header[0]) == _MAGIC or not header[_FIELDS:].any()):
        return raw.view(_TOKEN)
    tokens = raw[_HEADER_BYTES:].view(_TOKEN)
    magic, version, count = (int(field) for field in header[:_FIELDS])
    if (magic, version) != (_MAGIC, _VERSION):
        why = f"its header begins with {magic}, {version} and not with {_MAGIC}, {_VERSION}"
        raise _malformed(file, why, _REWRITE)
    if count != tokens.size:
        promised = f"its header promises {count} tokens and it has {tokens.size}"
        raise _malformed(file, promised, "fetch it again")
    return tokens


_REWRITE = "write it as modded-nanogpt does (uint16 tokens), or without a header as nanoGPT does"


def _malformed(file: Path, why: str, do: str) -> CorpusError:
    return CorpusError(f"read token shards in {str(file)!r}", because=why, do=do)


# -- names -----------------------------------------------------------------------------------------

_SHARD = ".bin"
_SUFFIXES = _READERS.keys() | {_SHARD}
_SAY = "a path to .txt, .jsonl, .parquet or .bin, or a hub name org/name[:configuration]"


def resolve(name: str) -> Corpus | StreamCorpus:
    """The corpus called `name`: one of `KNOWN_CORPORA`, a path, or a hub name, in this order.

    Raises:
        CorpusError: there is no such corpus, or it cannot be read.
    """
    path = Path(name).expanduser()
    if name in KNOWN_CORPORA:
        return source_corpus(name)
    if name and path.exists():
        return _read_path(name, path)
    if _HUB_NAME.fullmatch(name) and path.suffix not in _SUFFIXES:
        return hub_corpus(name)
    raise unknown_name(
        f"find corpus {name!r}",
        name,
        KNOWN_CORPORA,
        because="no known corpus and no file has that name",
        do=f"pass one of {', '.join(KNOWN_CORPORA)}; or {_SAY}",
        kind=CorpusError,
    )


def _read_path(name: str, path: Path) -> Corpus:
    if path.is_dir():
        root, files = path, [file for file in sorted(path.rglob("*")) if not file.is_dir()]
    else:
        root, files = path.parent, [path]
    shards = [file for file in files if file.suffix == _SHARD]
    texts = [file for file in files if file.suffix in _READERS]
    # nanoGPT leaves the text beside the train.bin made from it, so shards come first.
    if shards:
        return shard_corpus(root, shards)
    if texts:
        return document_corpus(name, root, texts)
    endings = sorted({file.suffix or file.name for file in files})
    found = f"only files ending in {', '.join(endings)}" if endings else "no file"
    raise CorpusError(f"read corpus {name!r}", because=f"it holds {found}", do=f"pass {_SAY}")


# organisation/name, or organisation/name:configuration
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")


def hub_corpus(name: str) -> StreamCorpus:
    """The corpus `organisation/name[:configuration]`, streamed.

    Its split "validation" is for validation, or else "test".

    Raises:
        CorpusError: it cannot be reached, or it has no split to train on.
    """
    from datasets import load_dataset

    repository, _, configuration = name.partition(":")
    try:
        splits: Any = load_dataset(repository, configuration or None, streaming=True)
    except Exception as error:  # the hub, httpx, fsspec and pyarrow have unrelated exceptions
        because = f"the hub did not answer with it: {error}"
        do = "check the name and the network, or name a local corpus such as python-stdlib"
        raise CorpusError(f"stream corpus {name!r}", because=because, do=do) from error
    if "train" not in splits:
        because = f'it has no split "train", only {sorted(splits)}'
        do = "name a corpus, or a configuration of it, that has one"
        raise CorpusError(f"stream corpus {name!r}", because=because, do=do)
    validation = splits.get("validation", splits.get("test"))
    return StreamCorpus(train=splits["train"], validation=validation)
