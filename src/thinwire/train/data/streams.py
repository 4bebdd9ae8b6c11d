"""Batches from a stream: documents that arrive one after the other, packed end to end.

A stream has no length and no index, so step t is no pure function of (seed, t). Worker k reads its
share of the rows (`datasets.distributed.split_dataset_by_node`) in their published order, again and
again. K workers do not see the global batches that one worker would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinwire.errors import ConfigurationError, CorpusError
from thinwire.train.data.batches import check_matches
from thinwire.train.data.corpora import SEPARATOR

if TYPE_CHECKING:
    from datasets import IterableDataset

Encode = Callable[[bytes], npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class StreamWindows:
    """Windows of `sequence_length + 1` tokens from the documents of a stream.

    Args:
        stream: rows with a column "text".
        encode: bytes to token ids; a zero byte ends a document.
        sequence_length: inputs are a window's first this many tokens, targets its last.
        held_out: `text_digest`s of the validation documents, which training leaves out wherever
            they appear. Skipping the first N rows would not do: after a split by node, `skip`
            counts the rows of each share.
    """

    stream: IterableDataset
    encode: Encode
    sequence_length: int
    held_out: frozenset[bytes]

    def batches(self, worker: int, workers: int, global_batch: int, seed: int) -> StreamBatches:
        """Endless batches of worker `worker` of `workers`: int64, [B/K, sequence_length + 1].

        Args:
            worker: k, from 0.
            workers: K.
            global_batch: B, rows over all workers; a multiple of K.
            seed: unused: a stream comes in its own order.

        Raises:
            CorpusError: a row has no text, or this worker's share has no row; raised by the batch.
        """
        identity = {"worker": worker, "workers": workers, "rows": global_batch // workers}
        return StreamBatches(self, identity)

    def samples(self, start: int, count: int, seed: int) -> Tensor:
        """Raise `ConfigurationError`: a stream has no numbered samples."""
        what = "join a run on a stream"
        because = "workers that join and leave read shares of the data, and a stream has none"
        raise ConfigurationError(what, because=because, do="download the corpus and pass its files")


class StreamBatches(Iterator[Tensor]):
    """Endless batches of one worker's share of a stream, with a state from which they resume.

    Args:
        windows: the windows to read.
        identity: worker, workers and rows.
    """

    def __init__(self, windows: StreamWindows, identity: dict[str, int]) -> None:
        self._windows = windows
        self._identity = identity
        # Tokens of the last document that no batch has used yet.
        self._pending = np.empty(0, dtype=np.int64)
        self._start_epoch()

    def __next__(self) -> Tensor:
        rows, width = self._identity["rows"], self._windows.sequence_length + 1
        parts, size = [self._pending], self._pending.size
        while size < rows * width:
            parts.append(self._next_document())
            size += parts[-1].size
        batch, self._pending = np.split(np.concatenate(parts, dtype=np.int64), [rows * width])
        return torch.from_numpy(batch.reshape(rows, width))

    def _next_document(self) -> npt.NDArray[Any]:
        for restart in (False, True):
            if restart:
                self._start_epoch()
            for text in self._texts:
                if text_digest(text) not in self._windows.held_out:
                    return self._windows.encode(text + SEPARATOR)
        worker, workers = self._identity["worker"], self._identity["workers"]
        because = "its share of the stream holds no document outside of validation"
        do = "use fewer workers, fewer validation sequences, or a larger corpus"
        raise CorpusError(f"stream text to worker {worker} of {workers}", because=because, do=do)

    def _start_epoch(self, state: dict[str, Any] | None = None) -> None:
        from datasets.distributed import split_dataset_by_node

        # A new stream per epoch: a resumed one would start every epoch at the resumed place.
        self._stream = split_dataset_by_node(
            self._windows.stream, self._identity["worker"], self._identity["workers"]
        )
        if state is not None:
            self._stream.load_state_dict(state)
        self._texts = _texts(self._stream)

    def state_dict(self) -> dict[str, Any]:
        """Place in the stream, unused tokens, and what the batches depend on."""
        pending = torch.from_numpy(self._pending)
        return {"stream": self._stream.state_dict(), "pending": pending, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the batches of `state`.

        Raises:
            MismatchError: `state` is from other batches.
        """
        state = check_matches(state, self._identity)
        self._pending = state["pending"].numpy().copy()
        self._start_epoch(state["stream"])


def first_documents(
    stream: IterableDataset, encode: Encode, tokens: int
) -> tuple[npt.NDArray[Any], frozenset[bytes]]:
    """Tokens and digests of the first documents that together hold `tokens` tokens.

    Returns:
        All tokens of the documents, [at least `tokens`, unless the stream ends before], and the
        `text_digest`s by which training leaves them out.

    Raises:
        CorpusError: a row has no text.
    """
    parts: list[npt.NDArray[Any]] = [np.empty(0, dtype=np.uint8)]
    digests: set[bytes] = set()
    size = 0
    for text in _texts(stream):
        if size >= tokens:
            break
        parts.append(encode(text + SEPARATOR))
        digests.add(text_digest(text))
        size += parts[-1].size
    return np.concatenate(parts), frozenset(digests)


def text_digest(text: bytes) -> bytes:
    """16 bytes that identify a document.

    >>> text_digest(b"once").hex()
    'f4323a87ed2b0d8832bdb0bf6c846221'
    """
    return hashlib.blake2b(text, digest_size=16).digest()


def _texts(rows: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    for row in rows:
        text = row.get("text")
        if not isinstance(text, str):
            because = f'its columns are {sorted(row)} and "text" is {text!r:.40}'
            do = 'name a corpus whose rows have a string "text"'
            raise CorpusError("read a row of the stream", because=because, do=do)
        if text:
            yield text.encode()
