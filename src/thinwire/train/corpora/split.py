"""Train or validation: a hash of where a document stands decides, on all machines alike."""

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from thinwire.errors import CorpusError
from thinwire.train.corpora.corpus import SEPARATOR, TextCorpus

__all__ = ["is_validation", "split_documents", "tail"]

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
    # most three of them; in bytes that are not UTF-8 we would walk on for ever.
    for _ in range(3):
        cut += int(cut < text.size and (text[cut] & 0xC0) == 0x80)
    return text[:cut], text[cut:]
