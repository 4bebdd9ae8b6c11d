"""Corpora on the Hugging Face hub, streamed through `datasets`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from thinwire.errors import CorpusError
from thinwire.train.corpora.corpus import StreamCorpus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from datasets import IterableDataset

__all__ = ["hub_corpus", "is_hub_name", "stream_corpus"]

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
