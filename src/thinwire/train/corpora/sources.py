"""The Python source on this machine: real text, everywhere, without a network."""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from thinwire.errors import CorpusError
from thinwire.train.corpora.corpus import TextCorpus
from thinwire.train.corpora.split import split_documents

__all__ = ["python_stdlib", "site_packages", "source_corpus"]

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
    return split_documents(name, _documents(name, roots, without | _TABLES))


def _documents(
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
