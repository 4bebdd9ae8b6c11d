"""From what a user typed to a corpus: a known name, a path, or a name on the hub."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from thinwire.errors import CorpusError
from thinwire.train.corpora.corpus import StreamCorpus, TextCorpus, TokenCorpus
from thinwire.train.corpora.documents import TEXT_SUFFIXES, document_corpus
from thinwire.train.corpora.hub import hub_corpus, is_hub_name
from thinwire.train.corpora.shards import shard_corpus
from thinwire.train.corpora.sources import python_stdlib, site_packages

__all__ = ["KNOWN_CORPORA", "resolve"]

KNOWN_CORPORA: Mapping[str, Callable[[str], TextCorpus]] = MappingProxyType(
    {"python-stdlib": python_stdlib, "site-packages": site_packages}
)
"""The corpora that every machine has, by name."""

_SHARD = ".bin"
_SUFFIXES = TEXT_SUFFIXES | {_SHARD}
_SAY = "a path to .txt, .jsonl, .parquet or .bin, or a hub name org/name[:configuration]"


def resolve(name: str) -> TextCorpus | TokenCorpus | StreamCorpus:
    """The corpus called `name`: one of `KNOWN_CORPORA`, a path, or a hub name, in this order.

    Raises:
        CorpusError: nothing is called so, or what is cannot be read.
    """
    path = Path(name).expanduser()
    if name in KNOWN_CORPORA:
        return KNOWN_CORPORA[name](name)
    if name and path.exists():
        return _read_path(name, path)
    if is_hub_name(name) and path.suffix not in _SUFFIXES:
        return hub_corpus(name)
    raise _unknown(name)


def _read_path(name: str, path: Path) -> TextCorpus | TokenCorpus:
    if path.is_dir():
        root, files = path, [file for file in sorted(path.rglob("*")) if not file.is_dir()]
    else:
        root, files = path.parent, [path]
    shards = [file for file in files if file.suffix == _SHARD]
    texts = [file for file in files if file.suffix in TEXT_SUFFIXES]
    # nanoGPT leaves the text that train.bin was made from next to it: shards come first.
    if shards:
        return shard_corpus(name, root, shards)
    if texts:
        return document_corpus(name, root, texts)
    raise _nothing_known(name, files)


def _nothing_known(name: str, files: Sequence[Path]) -> CorpusError:
    endings = sorted({file.suffix or file.name for file in files})
    found = f"only files ending in {', '.join(endings)}" if endings else "nothing at all"
    return CorpusError(
        f"read corpus {name!r}",
        because=f"there is {found}",
        do=f"pass {_SAY}",
    )


def _unknown(name: str) -> CorpusError:
    close = difflib.get_close_matches(name, KNOWN_CORPORA, n=1)
    guess = f"did you mean {close[0]!r}? otherwise " if close else ""
    known = ", ".join(KNOWN_CORPORA)
    return CorpusError(
        f"find corpus {name!r}",
        because="no corpus and no file is called so",
        do=f"{guess}pass one of {known}; or {_SAY}",
    )
