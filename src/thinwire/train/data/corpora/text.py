"""Text: the Python source on this machine, and files in .txt, .jsonl and .parquet."""

from __future__ import annotations

import glob
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from thinwire.errors import CorpusError
from thinwire.train.data.corpora.corpus import TextCorpus, split_documents

# Character maps, the help texts that pydoc carries, and generated files above 400 kB are tables
# in the clothes of source: a model learns their format by heart and its loss means nothing.
_TABLES = frozenset({"encodings", "pydoc_data"})
_LARGEST_BYTES = 400_000

# Others install into these; the standard library is what is left.
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
        name: what the corpus is called in errors.
        roots: folders, read one after the other.
        without: names of folders that are left out, with all that is in them.

    Raises:
        CorpusError: there is no such file, or one cannot be read.
    """
    return split_documents(name, _source_files(name, roots, without | _TABLES))


def _source_files(
    name: str, roots: Sequence[Path], without: frozenset[str]
) -> Iterator[tuple[str, bytes]]:
    for root in roots:
        for key in sorted(_keys(root, without)):
            try:
                yield key, (root / key).read_bytes()
            except OSError as error:
                raise CorpusError(
                    f"read corpus {name!r}",
                    because=f"{root / key} cannot be read: {error}",
                    do="make the file readable, or name another corpus",
                ) from error


def _keys(root: Path, without: frozenset[str]) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in without]
        for file in (Path(folder, name) for name in files if name.endswith(".py")):
            # A link that leads nowhere is not a file: editors leave such locks behind.
            if file.is_file() and file.stat().st_size <= _LARGEST_BYTES:
                yield file.relative_to(root).as_posix()


_ROWS = 1_000

_READERS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        ".txt": ("text", {"sample_by": "document"}),
        ".jsonl": ("json", {}),
        # Else it takes the size of the first row group, and fails over a file of no rows.
        ".parquet": ("parquet", {"batch_size": _ROWS}),
    }
)

TEXT_SUFFIXES = frozenset(_READERS)
"""The endings of files that hold text."""


def document_corpus(name: str, root: Path, files: Sequence[Path]) -> TextCorpus:
    """The documents in `files`, split by (file name relative to `root`, row).

    A .txt file is one document; a row of .jsonl or .parquet is one, in its field "text". Empty
    documents are left out.

    Raises:
        CorpusError: a file cannot be read, is not UTF-8 or lacks the field; names the file.
    """
    return split_documents(name, _documents(name, root, files))


def _documents(name: str, root: Path, files: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    for file in files:
        key = file.relative_to(root).as_posix()
        for row, text in enumerate(_texts(name, file)):
            if text:
                yield f"{key}:{row}", text


def _texts(name: str, file: Path) -> Iterator[bytes]:
    try:
        # `datasets` stumbles over files of no bytes: there is no first row to guess columns from.
        for batch in _batches(file) if file.stat().st_size else ():
            yield from _column(name, file, batch)
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreadable(name, file, str(error)) from error


def _batches(file: Path) -> Iterator[dict[str, list[Any]]]:
    module, options = _READERS[file.suffix]
    # The readers below `load_dataset`, because that reports every use to the hub, which is slow
    # without a network and unwanted with one.
    reader: Any = getattr(import_module(f"datasets.io.{module}"), f"{module.title()}DatasetReader")
    # Streaming a local file reads it in place, without a copy that could go stale; all that would
    # stay in the cache is a lock for every file.
    with tempfile.TemporaryDirectory() as cache:
        path = glob.escape(str(file.resolve()))
        rows = reader(path, split="train", streaming=True, cache_dir=cache, **options).read()
        yield from rows.iter(batch_size=_ROWS)


def _column(name: str, file: Path, batch: dict[str, list[Any]]) -> Iterator[bytes]:
    if "text" not in batch:
        raise _unreadable(name, file, f'it has no column "text", only {sorted(batch)}')
    for text in batch["text"]:
        if not isinstance(text, str):
            raise _unreadable(name, file, f'its column "text" holds {text!r}, which is no string')
        yield text.encode()


def _unreadable(name: str, file: Path, why: str) -> CorpusError:
    return CorpusError(
        f"read corpus {name!r}",
        because=f"{file} cannot be read: {why}",
        do='pass UTF-8 text in .txt, or rows with a string "text" in .jsonl or .parquet',
    )
