"""From what a user typed to a corpus: a known name, a path, or a name on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from thinwire.errors import CorpusError, unknown_name
from thinwire.train.data.corpora.corpus import StreamCorpus, TextCorpus, TokenCorpus
from thinwire.train.data.corpora.shards import shard_corpus
from thinwire.train.data.corpora.text import (
    TEXT_SUFFIXES,
    document_corpus,
    python_stdlib,
    site_packages,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from datasets import IterableDataset

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
    texts = [file for file in files if file.suffix in TEXT_SUFFIXES]
    # nanoGPT leaves the text that train.bin was made from next to it: shards come first.
    if shards:
        return shard_corpus(name, root, shards)
    if texts:
        return document_corpus(name, root, texts)
    endings = sorted({file.suffix or file.name for file in files})
    found = f"only files ending in {', '.join(endings)}" if endings else "no file"
    raise CorpusError(f"read corpus {name!r}", because=f"it holds {found}", do=f"pass {_SAY}")


_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")


def is_hub_name(name: str) -> bool:
    """Whether `name` reads as `organisation/name` or `organisation/name:configuration`.

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
        raise CorpusError(
            f"stream corpus {name!r}",
            because=f"the hub did not answer with it: {error}",
            do="check the name and the network, or name a local corpus such as python-stdlib",
        ) from error
    return stream_corpus(name, splits)


def stream_corpus(name: str, splits: Mapping[str, IterableDataset]) -> StreamCorpus:
    """Picks the splits: "train", and "validation" or "test" where one of them exists.

    Raises:
        CorpusError: there is no split "train".
    """
    if "train" not in splits:
        raise CorpusError(
            f"stream corpus {name!r}",
            because=f'it has no split "train", only {sorted(splits)}',
            do="name a corpus, or a configuration of it, that has one",
        )
    validation = splits.get("validation", splits.get("test"))
    return StreamCorpus(name=name, train=splits["train"], validation=validation)
