"""A byte-level BPE trained on the corpus with `tokenizers`, and kept for the next run."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from thinwire.errors import CorpusError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Bpe

__all__ = ["SEPARATOR", "cache_folder", "cached_bpe", "pieces", "train_bpe"]

Text = npt.NDArray[np.uint8]

SEPARATOR = "\0"
"""What follows every document of a corpus: a token of its own."""

_PIECE_BYTES = 2**20
_SAMPLE_BYTES = 8 * 2**20


def train_bpe(text: Text, vocab_size: int) -> Bpe:
    """A byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) with the zero byte as token 0.

    It is trained on at most some 8 MiB in evenly spaced pieces: equal text, equal tokenizer.

    Args:
        text: uint8, [bytes].
        vocab_size: tokens, with the 256 bytes and the separator; fewer where the text is too
            short for that many merges.
    """
    from tokenizers import Tokenizer as Bpe
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = Bpe(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    step = -(-text.size // _SAMPLE_BYTES)
    sample = itertools.islice(pieces(text.tobytes()), 0, None, max(1, step))
    bpe.train_from_iterator((piece.replace(SEPARATOR, "\n") for piece in sample), trainer)
    return bpe


def cache_folder() -> Path:
    """Where trained tokenizers are kept: $THINWIRE_CACHE, or ~/.cache/thinwire."""
    return Path(os.environ.get("THINWIRE_CACHE") or "~/.cache/thinwire").expanduser()


def cached_bpe(text: Text, vocab_size: int, key: str) -> Bpe:
    """`train_bpe`, or what it returned before for the same `key`.

    Raises:
        CorpusError: the cache cannot be written or read.
    """
    from tokenizers import Tokenizer as Bpe

    path = cache_folder() / f"bpe-{vocab_size}-{key}.json"
    try:
        if not path.exists():
            _write(path, train_bpe(text, vocab_size).to_str())
        return Bpe.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exceptions
        raise CorpusError(
            f"keep a BPE of {vocab_size} tokens",
            because=f"{path} cannot be written or read: {error}",
            do="delete the file, or point THINWIRE_CACHE at a folder that can be written",
        ) from error


def _write(path: Path, contents: str) -> None:
    # Several ranks write the same file at once: each renames a whole one into place.
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(contents)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def pieces(text: bytes) -> Iterator[str]:
    """Cuts after the first end of a line behind every MiB, where no tokenizer merges across."""
    start = 0
    while start < len(text):
        stop = text.find(b"\n", start + _PIECE_BYTES) + 1 or len(text)
        yield text[start:stop].decode(errors="replace")
        start = stop
