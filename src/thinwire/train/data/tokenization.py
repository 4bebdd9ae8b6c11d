"""Text to tokens: bytes as they are, a BPE trained on the corpus, or a published tokenizer."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.errors import ConfigurationError, CorpusError
from thinwire.files import replace_file
from thinwire.train.data.batches import Tokens
from thinwire.train.data.corpora import Bytes, fingerprint

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Bpe

_PIECES_AT_ONCE = 8
_ALPHABET = 256
_GPT2_VOCABULARY = 50304  # 50257, rounded up to a multiple of 64 as nanoGPT does


class Tokenizer:
    """Bytes as they are: every byte is its own token, and a zero byte ends a document.

    Args:
        vocab_size: upper bound of token ids; above 256 if the corpus consists of tokens.

    >>> Tokenizer().encode("hé".encode()).tolist()
    [104, 195, 169]
    """

    def __init__(self, vocab_size: int = _ALPHABET) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: bytes) -> Tokens:
        """The token ids of `text`: uint8, uint16 or int32, [tokens]."""
        return np.frombuffer(text, dtype=np.uint8)

    def save(self, folder: str | Path) -> None:
        """Write the files of `transformers.AutoTokenizer`, if this is such a tokenizer."""


class PretrainedTokenizer(Tokenizer):
    """A tokenizer of `transformers`; its end-of-text token, if it has one, ends a document.

    Args:
        pretrained: the tokenizer.
    """

    def __init__(self, pretrained: Any) -> None:
        super().__init__(len(pretrained))
        self._pretrained = pretrained
        end = pretrained.eos_token_id
        self._end: list[int] = [] if end is None else [int(end)]

    def encode(self, text: bytes) -> Tokens:
        """Token ids: uint16 or int32, [tokens]. Texts above 1 MiB are cut at ends of lines.

        Bytes that are not UTF-8 become U+FFFD.
        """
        dtype = np.uint16 if self.vocab_size <= 2**16 else np.int32
        parts = [np.asarray(ids, dtype) for ids in self._ids(pieces(text))]
        return np.concatenate([np.empty(0, dtype), *parts])

    def _ids(self, texts: Iterator[str]) -> Iterator[list[int]]:
        # Several at a time, which the tokenizer divides among its threads.
        while group := [text.split(SEPARATOR) for text in itertools.islice(texts, _PIECES_AT_ONCE)]:
            documents = [*itertools.chain.from_iterable(group)]
            ids = iter(self._pretrained(documents, add_special_tokens=False)["input_ids"])
            for *ended, _ in group:
                yield from (next(ids) + self._end for _ in ended)
                yield next(ids)

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer as `transformers` does."""
        self._pretrained.save_pretrained(str(folder))


def load_tokenizer(name: str, text: Bytes | None) -> Tokenizer:
    """The tokenizer called `name`, for a corpus of text or of tokens.

    Args:
        name: "bytes", or for a corpus of tokens, which holds no bytes, GPT-2's "ids:50304";
            "bpe:4096" for a BPE of that many tokens, trained on `text` and cached; "ids:50304" for
            a corpus of tokens with a vocabulary of that size; else a folder or a hub name for
            `transformers.AutoTokenizer`.
        text: uint8, [bytes]: the training side of the corpus; None for a corpus of tokens.

    Raises:
        ConfigurationError: the name does not fit a corpus of text, or one of tokens.
        CorpusError: the tokenizer cannot be loaded, or the cache cannot be written.
    """
    kind, _, size = name.partition(":")
    if name == "bytes":
        return Tokenizer() if text is not None else Tokenizer(_GPT2_VOCABULARY)
    if kind == "bpe":
        if text is None:
            do = "name the vocabulary that made the tokens, such as ids:50304"
            raise _unfit(name, "the corpus holds tokens and no text to train it on", do)
        vocab_size = _vocabulary(name, size, at_least=_ALPHABET + 1)
        from transformers import PreTrainedTokenizerFast

        bpe = cached_bpe(text, vocab_size)
        fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=SEPARATOR)
        return PretrainedTokenizer(fast)
    if kind == "ids":
        if text is not None:
            raise _unfit(name, "it names token ids and the corpus is text", "pass 'bytes'")
        return Tokenizer(_vocabulary(name, size, at_least=1))
    from transformers import AutoTokenizer

    try:
        return PretrainedTokenizer(AutoTokenizer.from_pretrained(name))
    except Exception as error:  # transformers, the hub and httpx have unrelated exceptions
        what = f"load tokenizer {name!r}"
        do = "pass 'bytes', 'bpe:4096', a folder with tokenizer.json, or a hub name"
        raise CorpusError(what, because=f"transformers did not find it: {error}", do=do) from error


def _vocabulary(name: str, size: str, *, at_least: int) -> int:
    if not (size.isascii() and size.isdigit()) or int(size) < at_least:
        do = f"write a whole number of at least {at_least} behind the colon"
        raise _unfit(name, f"{size!r} is not a possible size of a vocabulary", do)
    return int(size)


def _unfit(name: str, because: str, do: str) -> ConfigurationError:
    return ConfigurationError(f"use tokenizer {name!r}", because=because, do=do)


SEPARATOR = "\0"
"""Ends every document of a corpus, as one token."""

_PIECE_BYTES = 2**20
_SAMPLE_BYTES = 8 * 2**20


def train_bpe(text: Bytes, vocab_size: int) -> Bpe:
    """A byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) with the zero byte as token 0.

    It is trained on about 8 MiB at most, in evenly spaced pieces: equal text, equal tokenizer.

    Args:
        text: uint8, [bytes].
        vocab_size: number of tokens, including the 256 bytes and the separator; the BPE has fewer
            if the text is too short for that many merges.
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


def cached_bpe(text: Bytes, vocab_size: int) -> Bpe:
    """`train_bpe`, cached in $THINWIRE_CACHE by the contents of `text`.

    Raises:
        CorpusError: the cache cannot be written or read.
    """
    from tokenizers import Tokenizer as Bpe

    folder = Path(os.environ.get("THINWIRE_CACHE") or "~/.cache/thinwire").expanduser()
    path = folder / f"bpe-{vocab_size}-{fingerprint([text])}.json"
    try:
        if not path.exists():
            contents = train_bpe(text, vocab_size).to_str()
            folder.mkdir(parents=True, exist_ok=True)
            # Several ranks write the same file at once: each renames a whole one into place.
            replace_file(
                path,
                lambda own: own.write_text(contents, encoding="utf-8"),
                suffix=f".{uuid.uuid4().hex}.part",
            )
        return Bpe.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exceptions
        because = f"{path} cannot be written or read: {error}"
        do = "delete the file, or point THINWIRE_CACHE at a folder that can be written"
        raise CorpusError(f"keep a BPE of {vocab_size} tokens", because=because, do=do) from error


def pieces(text: bytes) -> Iterator[str]:
    """Cut `text` into pieces of about 1 MiB at ends of lines, across which no tokenizer merges."""
    start = 0
    while start < len(text):
        stop = text.find(b"\n", start + _PIECE_BYTES) + 1 or len(text)
        yield text[start:stop].decode(errors="replace")
        start = stop
