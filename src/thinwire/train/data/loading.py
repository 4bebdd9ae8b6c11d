"""The description of the training data, and the data loaded from it when a run begins."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from thinwire.errors import ConfigurationError, CorpusError, check_whole
from thinwire.train.data.batches import Tokens, Windows
from thinwire.train.data.corpora import StreamCorpus, fingerprint, resolve
from thinwire.train.data.streams import StreamWindows, first_documents
from thinwire.train.data.tokenization import Tokenizer, load_tokenizer

_FEWEST_WINDOWS = 4


@dataclass(frozen=True, kw_only=True)
class Data:
    """Description of the training data.

    Args:
        corpus: python-stdlib, site-packages, a path (.txt, .jsonl, .parquet, .bin, or a folder of
            them), or a hub name `org/name[:configuration]`.
        tokenizer: "bytes", which is "ids:50304" for a corpus of `.bin`; "bpe:4096", trained on the
            corpus; "ids:N", the vocabulary of token shards; or a folder or hub name.
        sequence_length: T, in tokens; windows have one more.
        validation_sequences: largest number of windows to validate on.

    Raises:
        ConfigurationError: a number is not whole, or below 1.
    """

    corpus: str = "python-stdlib"
    tokenizer: str = "bytes"
    sequence_length: int = 128
    validation_sequences: int = 512

    def __post_init__(self) -> None:
        for name in ("sequence_length", "validation_sequences"):
            check_whole(name, getattr(self, name))

    def load(self) -> LoadedData:
        """Find the corpus, read and tokenise it.

        Raises:
            CorpusError: it is unknown, empty, unreadable or too short.
            ConfigurationError: the tokenizer does not fit the corpus.
        """
        corpus = resolve(self.corpus)
        if isinstance(corpus, StreamCorpus):
            return self._load_stream(corpus)
        train, validation = corpus.train, corpus.validation
        tokenizer = load_tokenizer(self.tokenizer, train[0] if corpus.is_text else None)
        if corpus.is_text:
            train = [tokenizer.encode(train[0].tobytes())]
            validation = [tokenizer.encode(validation[0].tobytes())]
        loaded = LoadedData(
            tokenizer=tokenizer,
            training=self._windows("training", train, _FEWEST_WINDOWS),
            validation=self._spread(validation),
            fingerprint=fingerprint([*train, *validation]),
        )
        if not corpus.is_text and (largest := int(loaded.validation.max())) >= tokenizer.vocab_size:
            what = f"read corpus {self.corpus!r} with a vocabulary of {tokenizer.vocab_size}"
            do = f"pass tokenizer 'ids:{largest + 1}' or more"
            raise CorpusError(what, because=f"it holds token {largest}", do=do)
        return loaded

    def _load_stream(self, corpus: StreamCorpus) -> LoadedData:
        """Validate on the held-out split; without one, on the first documents.

        Training then leaves these out.
        """
        if self.tokenizer.startswith("bpe:"):
            what = f"train tokenizer {self.tokenizer!r} on {self.corpus!r}"
            because = "a stream is read piece by piece, and a BPE is trained on the whole text"
            do = "pass 'bytes', a folder or a hub name"
            raise ConfigurationError(what, because=because, do=do)
        tokenizer = load_tokenizer(self.tokenizer, np.empty(0, dtype=np.uint8))
        needed = self.validation_sequences * (self.sequence_length + 1)
        rows = corpus.train if corpus.validation is None else corpus.validation
        validation, held_out = first_documents(rows, tokenizer.encode, needed)
        identity = f"{self.corpus} {fingerprint([validation])}"
        return LoadedData(
            tokenizer=tokenizer,
            training=StreamWindows(corpus.train, tokenizer.encode, self.sequence_length, held_out),
            validation=self._spread([validation]),
            fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        )

    def _windows(self, side: str, arrays: Sequence[Tokens], least: int) -> Windows:
        windows = Windows(arrays, self.sequence_length)
        if len(windows) < least:
            what = f"cut the {side} side of corpus {self.corpus!r} into windows of "
            tokens = sum(array.size for array in arrays)
            because = f"it has {tokens} tokens and needs {least * windows.width}"
            do = "pass a larger corpus or a smaller sequence_length"
            raise CorpusError(f"{what}{windows.width} tokens", because=because, do=do)
        return windows

    def _spread(self, arrays: Sequence[Tokens]) -> Tensor:
        """Windows to validate on, evenly spaced over `arrays`."""
        windows = self._windows("validation", arrays, 1)
        count = min(self.validation_sequences, len(windows))
        return windows.rows(number * len(windows) // count for number in range(count))


@dataclass(frozen=True, kw_only=True)
class LoadedData:
    """A corpus, tokenised and cut into windows.

    Args:
        tokenizer: the tokenizer of the corpus.
        training: windows to train on; workers read its `batches` or `samples`.
        validation: int64, [n, sequence_length + 1], from documents that are not trained on.
        fingerprint: hexadecimal; equal for equal training and validation tokens. That of a stream
            depends on its name and validation tokens only.
    """

    tokenizer: Tokenizer
    training: Windows | StreamWindows
    validation: Tensor
    fingerprint: str
