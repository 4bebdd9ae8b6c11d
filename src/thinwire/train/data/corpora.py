"""Corpora: Python source files of this machine, files, token shards, and streams of the hub."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thinwire.errors import CorpusError, unknown_name
from thinwire.train.data.shards import ONE_IN, TokenCorpus, shard_corpus, tail

if TYPE_CHECKING:
    from datasets import IterableDataset

Bytes: TypeAlias = npt.NDArray[np.uint8]
SEPARATOR = b"\0"
"""End of every document of a text corpus."""

_WHOLE_BYTES = 256 * 2**20
_BLOCK_BYTES = 64 * 2**10
_BLOCKS = 64


@dataclass(frozen=True, kw_only=True)
class TextCorpus:
    """Documents as bytes, each followed by one zero byte.

    Args:
        name: as the user wrote it.
        train: uint8, [bytes].
        validation: uint8, [bytes], of other documents.
    """

    name: str
    train: Bytes
    validation: Bytes


@dataclass(frozen=True, kw_only=True)
class StreamCorpus:
    """Rows with a column "text" that arrive one after the other.

    Args:
        name: as the user wrote it.
        train: the rows to train on.
        validation: rows that the publisher held out; None without any.
    """

    name: str
    train: IterableDataset
    validation: IterableDataset | None


def fingerprint(arrays: Iterable[npt.NDArray[Any]]) -> str:
    """SHA-256 of arrays, hexadecimal: equal contents in equal order, equal fingerprint.

    Above 256 MiB in total, it reads only sizes and 64 evenly spaced blocks of 64 KiB of each array:
    shards of tens of gigabytes are distinguished without being read.

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


def split_documents(name: str, documents: Iterable[tuple[str, bytes]]) -> TextCorpus:
    """Sorts (key, text) pairs into train and validation.

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
    return TextCorpus(name=name, train=train, validation=validation)


def _cut(text: Bytes) -> tuple[Bytes, Bytes]:
    cut = tail(text.size)
    # 10xxxxxx continues a UTF-8 sequence: a character belongs to one side as a whole. It has at
    # most three of them; bytes that are not UTF-8 may have any number in a row.
    for _ in range(3):
        cut += int(cut < text.size and (text[cut] & 0xC0) == 0x80)
    return text[:cut], text[cut:]


# -- text in files ---------------------------------------------------------------------------------

# Character maps, the help texts of pydoc, and generated files above 400 kB are tables: a model
# memorises their format, and its loss has no meaning.
_TABLES = frozenset({"encodings", "pydoc_data"})
_LARGEST_BYTES = 400_000

# Not part of the standard library.
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def python_stdlib(name: str) -> TextCorpus:
    """The running Python's standard library, with its tests: some 30 MB."""
    return source_corpus(name, [Path(sysconfig.get_path("stdlib"))], without=_INSTALLED)


def site_packages(name: str) -> TextCorpus:
    """Every installed package's source files: hundreds of MB where torch is."""
    folders = dict.fromkeys(Path(sysconfig.get_path(which)) for which in ("purelib", "platlib"))
    return source_corpus(name, list(folders))


def source_corpus(
    name: str, roots: Sequence[Path], *, without: frozenset[str] = frozenset()
) -> TextCorpus:
    """The .py files under `roots` in sorted order, split by their relative path.

    Args:
        name: of the corpus, for errors.
        roots: folders, read one after the other.
        without: names of folders that are left out.

    Raises:
        CorpusError: there is no such file, or one cannot be read.
    """
    return split_documents(name, _source_files(name, roots, without | _TABLES))


def _source_files(
    name: str, roots: Sequence[Path], without: frozenset[str]
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

_READERS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        ".txt": ("text", {"sample_by": "document"}),
        ".jsonl": ("json", {}),
        # The default, the size of the first row group, fails for a file without rows.
        ".parquet": ("parquet", {"batch_size": _ROWS}),
    }
)


def document_corpus(name: str, root: Path, files: Sequence[Path]) -> TextCorpus:
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
    # Streaming reads a local file in place, without a copy that could become stale; only a lock for
    # every file would stay in the cache.
    with tempfile.TemporaryDirectory() as cache:
        path = glob.escape(str(file.resolve()))
        rows = reader(path, split="train", streaming=True, cache_dir=cache, **options).read()
        yield from rows.iter(batch_size=_ROWS)


# -- names -----------------------------------------------------------------------------------------

KNOWN_CORPORA: Mapping[str, Callable[[str], TextCorpus]] = MappingProxyType(
    {"python-stdlib": python_stdlib, "site-packages": site_packages}
)
"""Corpora of every machine, by name."""

_SHARD = ".bin"
_SUFFIXES = _READERS.keys() | {_SHARD}
_SAY = "a path to .txt, .jsonl, .parquet or .bin, or a hub name org/name[:configuration]"


def resolve(name: str) -> TextCorpus | TokenCorpus | StreamCorpus:
    """The corpus called `name`: one of `KNOWN_CORPORA`, a path, or a hub name, in this order.

    Raises:
        CorpusError: there is no such corpus, or it cannot be read.
    """
    path = Path(name).expanduser()
    if name in KNOWN_CORPORA:
        return KNOWN_CORPORA[name](name)
    if name and path.exists():
        return _read_path(name, path)
    if is_hub_name(name) and path.suffix not in _SUFFIXES:
        return hub_corpus(name)
    raise unknown_name(
        f"find corpus {name!r}",
        name,
        KNOWN_CORPORA,
        because="no known corpus and no file has that name",
        do=f"pass one of {', '.join(KNOWN_CORPORA)}; or {_SAY}",
        kind=CorpusError,
    )


def _read_path(name: str, path: Path) -> TextCorpus | TokenCorpus:
    if path.is_dir():
        root, files = path, [file for file in sorted(path.rglob("*")) if not file.is_dir()]
    else:
        root, files = path.parent, [path]
    shards = [file for file in files if file.suffix == _SHARD]
    texts = [file for file in files if file.suffix in _READERS]
    # nanoGPT leaves the text next to the train.bin that it made from it: shards come first.
    if shards:
        return shard_corpus(name, root, shards)
    if texts:
        return document_corpus(name, root, texts)
    endings = sorted({file.suffix or file.name for file in files})
    found = f"only files ending in {', '.join(endings)}" if endings else "no file"
    raise CorpusError(f"read corpus {name!r}", because=f"it holds {found}", do=f"pass {_SAY}")


_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")


def is_hub_name(name: str) -> bool:
    """True if `name` is `organisation/name` or `organisation/name:configuration`.

    >>> is_hub_name("org/data:10BT"), is_hub_name("org"), is_hub_name("../data")
    (True, False, False)
    """
    return _NAME.fullmatch(name) is not None


def hub_corpus(name: str) -> StreamCorpus:
    """The corpus `organisation/name[:configuration]`, streamed.

    Raises:
        CorpusError: it cannot be reached, or it has no split to train on.
    """
    from datasets import load_dataset

    repository, _, configuration = name.partition(":")
    try:
        splits: Any = load_dataset(repository, configuration or None, streaming=True)
    except Exception as error:  # the hub, httpx, fsspec and pyarrow each have a tree of their own
        because = f"the hub did not answer with it: {error}"
        do = "check the name and the network, or name a local corpus such as python-stdlib"
        raise CorpusError(f"stream corpus {name!r}", because=because, do=do) from error
    return stream_corpus(name, splits)


def stream_corpus(name: str, splits: Mapping[str, IterableDataset]) -> StreamCorpus:
    """Picks the splits: "train", and "validation" or "test" where one of them exists.

    Raises:
        CorpusError: there is no split "train".
    """
    if "train" not in splits:
        what = f"stream corpus {name!r}"
        do = "name a corpus, or a configuration of it, that has one"
        raise CorpusError(what, because=f'it has no split "train", only {sorted(splits)}', do=do)
    validation = splits.get("validation", splits.get("test"))
    return StreamCorpus(name=name, train=splits["train"], validation=validation)
