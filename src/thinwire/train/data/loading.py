"""Description of the training data, loaded when a run begins."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from thinwire.errors import ConfigurationError, CorpusError
from thinwire.train.data.batches import Tokens, Windows, validation_windows
from thinwire.train.data.corpora import StreamCorpus, TextCorpus, TokenCorpus, fingerprint, resolve
from thinwire.train.data.streams import StreamWindows, first_documents
from thinwire.train.data.tokenization import Tokenizer, load_tokenizer

_FEWEST_WINDOWS = 4
_NO_TEXT = np.empty(0, dtype=np.uint8)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Description of the training data.

    Args:
        corpus: python-stdlib, site-packages, a path (.txt, .jsonl, .parquet, .bin, or a folder of
            them), or a hub name `org/name[:configuration]`.
        tokenizer: "bytes", which is "ids:50304" for a corpus of `.bin`; "bpe:4096", trained on the
            corpus; "ids:N", the vocabulary of token shards; or a folder or hub name.
        sequence_length: T, tokens; windows have one more.
        validation_sequences: windows to validate on, at most.

    Raises:
        ConfigurationError: a number is below 1.
    """

    corpus: str = "python-stdlib"
    tokenizer: str = "bytes"
    sequence_length: int = 128
    validation_sequences: int = 512

    def __post_init__(self) -> None:
        for name in ("sequence_length", "validation_sequences"):
            if getattr(self, name) < 1:
                what, because = "describe the data", f"{name} is {getattr(self, name)}"
                raise ConfigurationError(what, because=because, do=f"pass {name} >= 1")

    def load(self) -> LoadedData:
        """Find the corpus, read and tokenise it.

        Raises:
            CorpusError: it is unknown, empty, unreadable or too short.
            ConfigurationError: the tokenizer does not fit the corpus.
        """
        match resolve(self.corpus):
            case TextCorpus() as corpus:
                key = fingerprint([corpus.train])
                tokenizer = load_tokenizer(self.tokenizer, text=corpus.train, key=key)
                train = tokenizer.encode(corpus.train.tobytes())
                validation = tokenizer.encode(corpus.validation.tobytes())
                return _cut(self, tokenizer, [train], [validation])
            case TokenCorpus() as corpus:
                tokenizer = load_tokenizer(self.tokenizer, text=None)
                loaded = _cut(self, tokenizer, corpus.train, corpus.validation)
                if (largest := int(loaded.validation.max())) >= loaded.vocab_size:
                    what = f"read corpus {self.corpus!r} with a vocabulary of {loaded.vocab_size}"
                    do = f"pass tokenizer 'ids:{largest + 1}' or more"
                    raise CorpusError(what, because=f"it holds token {largest}", do=do)
                return loaded
            case StreamCorpus() as corpus:
                return load_stream(self, corpus)


@dataclass(frozen=True, kw_only=True)
class LoadedData:
    """A corpus, tokenised and cut into windows.

    Args:
        tokenizer: of the tokens.
        training: windows to train on; workers read its `batches` or `shares`.
        validation: int64, [n, sequence_length + 1], of documents that are not trained on.
        fingerprint: hexadecimal; equal for equal tokens on both sides. That of a stream depends
            on its name and validation side only.
    """

    tokenizer: Tokenizer
    training: Windows | StreamWindows
    validation: Tensor
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.tokenizer.vocab_size


def load_stream(data: Data, corpus: StreamCorpus) -> LoadedData:
    """Load a stream.

    Validates on its held-out split; without one, on its first documents, which are then left out of
    training.

    Raises:
        CorpusError: a row has no text, or there is too little of it.
        ConfigurationError: the tokenizer would have to be trained on the stream.
    """
    if data.tokenizer.startswith("bpe:"):
        what = f"train tokenizer {data.tokenizer!r} on {corpus.name!r}"
        because = "a stream is read piece by piece, and a BPE is trained on the whole text"
        raise ConfigurationError(what, because=because, do="pass 'bytes', a folder or a hub name")
    tokenizer = load_tokenizer(data.tokenizer, text=_NO_TEXT)
    needed = data.validation_sequences * (data.sequence_length + 1)
    rows = corpus.train if corpus.validation is None else corpus.validation
    validation, held_out = first_documents(rows, tokenizer.encode, needed)
    _require(data, "validation", [validation], 1)
    digest = hashlib.sha256(f"{corpus.name} {fingerprint([validation])}".encode()).hexdigest()
    return LoadedData(
        tokenizer=tokenizer,
        training=StreamWindows(corpus.train, tokenizer.encode, data.sequence_length, held_out),
        validation=validation_windows(validation, data.sequence_length, data.validation_sequences),
        fingerprint=digest,
    )


def _cut(
    data: Data, tokenizer: Tokenizer, train: Sequence[Tokens], validation: Sequence[Tokens]
) -> LoadedData:
    _require(data, "training", train, _FEWEST_WINDOWS)
    _require(data, "validation", validation, 1)
    length = data.sequence_length
    return LoadedData(
        tokenizer=tokenizer,
        training=Windows(train, length),
        validation=validation_windows(validation, length, data.validation_sequences),
        fingerprint=fingerprint([*train, *validation]),
    )


def _require(data: Data, side: str, arrays: Iterable[Tokens], windows: int) -> None:
    width = data.sequence_length + 1
    sizes = [array.size for array in arrays]
    if sum(size // width for size in sizes) < windows:
        what = f"cut the {side} side of corpus {data.corpus!r} into windows of {width} tokens"
        because = f"it has {sum(sizes)} tokens and needs {windows * width}"
        do = "pass a larger corpus or a smaller sequence_length"
        raise CorpusError(what, because=because, do=do)
