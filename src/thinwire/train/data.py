"""The trainer's way to its data: a description, and what it loads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from thinwire.errors import ConfigurationError, CorpusError
from thinwire.train.batches import Windows, WorkerBatches, validation_windows
from thinwire.train.corpora import StreamCorpus, TextCorpus, TokenCorpus, fingerprint, resolve
from thinwire.train.shares import Shares
from thinwire.train.streams import StreamWindows, first_documents
from thinwire.train.tokenization import Tokenizer, load_tokenizer, load_vocabulary

__all__ = ["Data", "LoadedData"]

Tokens = npt.NDArray[Any]

_FEWEST_WINDOWS = 4
_NO_TEXT = np.empty(0, dtype=np.uint8)


@final
@dataclass(frozen=True, kw_only=True)
class LoadedData:
    """A corpus as the trainer sees it.

    Args:
        tokenizer: what made the tokens.
        training: windows to train on.
        validation: int64, [n, sequence_length + 1]; no document of it is trained on.
        fingerprint: hexadecimal; equal for equal tokens on both sides. Of a stream, it knows the
            name and the validation side.
    """

    tokenizer: Tokenizer
    training: Windows | StreamWindows
    validation: Tensor
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.tokenizer.vocab_size

    def batches(self, worker: int, workers: int, global_batch: int, seed: int) -> WorkerBatches:
        """The batches of worker `worker` of `workers`, for ever: int64, [B/K, sequence_length + 1].

        They have `state_dict` and `load_state_dict`, and resume bit for bit. The global batch of a
        step does not depend on the number of workers, unless the corpus is a stream.

        Args:
            worker: k, from 0.
            workers: K.
            global_batch: B, rows over all workers; a multiple of K.
            seed: of the order of the windows, the same on all workers.

        Raises:
            ConfigurationError: B is not a multiple of K, or k not one of the workers.
        """
        return self.training.batches(worker, workers, global_batch, seed)

    def shares(self, rows: int, sync_every: int, seed: int) -> Shares:
        """The training side in numbered shares, each to be dealt to one worker.

        Args:
            rows: b, windows in a batch.
            sync_every: H, batches in a share.
            seed: of the order of the windows, the same on all workers.

        Raises:
            ConfigurationError: the corpus is a stream.
        """
        return self.training.shares(rows, sync_every, seed)


@final
@dataclass(frozen=True, kw_only=True)
class Data:
    """What to train on.

    Args:
        corpus: python-stdlib, site-packages, a path (.txt, .jsonl, .parquet, .bin, or a folder of
            them), or a hub name `org/name[:configuration]`.
        tokenizer: "bytes"; "bpe:4096", trained on the corpus; "ids:50304", the vocabulary of token
            shards, for which "bytes" stands when the corpus is `.bin`; or a folder or hub name.
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
                raise ConfigurationError(
                    "describe the data",
                    because=f"{name} is {getattr(self, name)}",
                    do=f"pass {name} >= 1",
                )

    def load(self) -> LoadedData:
        """Finds the corpus, reads and tokenises it.

        Raises:
            CorpusError: it is unknown, empty, unreadable or too short.
            ConfigurationError: the tokenizer does not fit the corpus.
        """
        match resolve(self.corpus):
            case TextCorpus() as corpus:
                return _load_text(self, corpus)
            case TokenCorpus() as corpus:
                return _load_tokens(self, corpus)
            case StreamCorpus() as corpus:
                return load_stream(self, corpus)


def _load_text(data: Data, corpus: TextCorpus) -> LoadedData:
    key = fingerprint([corpus.train])
    tokenizer = load_tokenizer(data.tokenizer, text=corpus.train, key=key)
    train, validation = (
        tokenizer.encode(side.tobytes()) for side in (corpus.train, corpus.validation)
    )
    return _cut(data, tokenizer, [train], [validation])


def _load_tokens(data: Data, corpus: TokenCorpus) -> LoadedData:
    loaded = _cut(data, load_vocabulary(data.tokenizer), corpus.train, corpus.validation)
    _check_vocabulary(data, loaded.validation, loaded.vocab_size)
    return loaded


def load_stream(data: Data, corpus: StreamCorpus) -> LoadedData:
    """What `Data.load` does with a stream.

    Its held-out split validates. Where there is none, its first documents do, and are left out of
    training.

    Raises:
        CorpusError: a row has no text, or there is too little of it.
        ConfigurationError: the tokenizer would have to be trained on the stream.
    """
    if data.tokenizer.startswith("bpe:"):
        raise ConfigurationError(
            f"train tokenizer {data.tokenizer!r} on {corpus.name!r}",
            because="a stream is never there as a whole",
            do="pass 'bytes', a folder or a hub name",
        )
    tokenizer = load_tokenizer(data.tokenizer, text=_NO_TEXT, key="")
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
        raise CorpusError(
            f"cut the {side} side of corpus {data.corpus!r} into windows of {width} tokens",
            because=f"it has {sum(sizes)} tokens and needs {windows * width}",
            do="pass a larger corpus or a smaller sequence_length",
        )


def _check_vocabulary(data: Data, validation: Tensor, vocab_size: int) -> None:
    largest = int(validation.max())
    if largest >= vocab_size:
        raise CorpusError(
            f"read corpus {data.corpus!r} with a vocabulary of {vocab_size}",
            because=f"it holds token {largest}",
            do=f"pass tokenizer 'ids:{largest + 1}' or more, or the one that made the tokens",
        )
