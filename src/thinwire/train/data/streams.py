"""Batches from a stream: documents that arrive one after the other, packed end to end.

A stream has no length and no index, so step t of it is no pure function of (seed, t): worker k
reads its own share of the rows (`datasets.distributed.split_dataset_by_node`), in the order in
which they were published, over and over. K workers do not see the global batches that one would.
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
from thinwire.train.data.batches import Restarting, WorkerBatches, check_matches, worker_batches

if TYPE_CHECKING:
    from datasets import IterableDataset

    from thinwire.train.data.batches import Shares

Encode = Callable[[bytes], npt.NDArray[Any]]

_END = b"\0"


@dataclass(frozen=True, slots=True)
class StreamWindows:
    """Windows of `sequence_length + 1` tokens from the documents of a stream.

    Args:
        stream: rows with a column "text".
        encode: bytes to token ids; a zero byte ends a document.
        sequence_length: inputs are a window's first so many tokens, targets its last.
        held_out: `text_digest`s of the validation documents, which training leaves out wherever
            they appear. Skipping the first N rows would not do: after a split by node, `skip`
            counts the rows of each share.
    """

    stream: IterableDataset
    encode: Encode
    sequence_length: int
    held_out: frozenset[bytes]

    def batches(self, worker: int, workers: int, global_batch: int, seed: int) -> WorkerBatches:
        """Endless batches of worker `worker` of `workers`: int64, [B/K, sequence_length + 1].

        Args:
            worker: k, from 0.
            workers: K.
            global_batch: B, rows over all workers; a multiple of K.
            seed: unused: a stream comes in its own order.

        Raises:
            CorpusError: a row has no text, or this worker's share has no row; raised by the batch.
        """
        del seed
        identity = {"worker": worker, "workers": workers, "rows": global_batch // workers}
        return worker_batches(Restarting(lambda: _Packed(self, identity)), batch_size=None)

    def shares(self, rows: int, sync_every: int, seed: int) -> Shares:
        """Raise `ConfigurationError`: a stream has no numbered shares."""
        del rows, sync_every, seed
        raise ConfigurationError(
            "join a run on a stream",
            because="workers that join and leave read shares of the data, and a stream has none",
            do="download the corpus and pass its files",
        )


class _Packed(Iterator[Tensor]):
    """Holds an epoch's stream, and the tokens of the last document that no batch has used yet."""

    def __init__(self, windows: StreamWindows, identity: dict[str, int]) -> None:
        self._windows = windows
        self._identity = identity
        self._pending = np.empty(0, dtype=np.int64)
        self._start_epoch()

    def __next__(self) -> Tensor:
        rows, width = self._identity["rows"], self._windows.sequence_length + 1
        parts, size = [self._pending], self._pending.size
        while size < rows * width:
            parts.append(self._next_document())
            size += parts[-1].size
        tokens = np.concatenate(parts, dtype=np.int64)
        batch, self._pending = np.split(tokens, [rows * width])
        return torch.from_numpy(batch.reshape(rows, width))

    def _next_document(self) -> npt.NDArray[Any]:
        for restart in (False, True):
            if restart:
                self._start_epoch()
            for text in self._texts:
                if text_digest(text) not in self._windows.held_out:
                    return self._windows.encode(text + _END)
        worker, workers = self._identity["worker"], self._identity["workers"]
        raise CorpusError(
            f"stream text to worker {worker} of {workers}",
            because="its share of the stream holds no document outside of validation",
            do="use fewer workers, fewer validation sequences, or a larger corpus",
        )

    def _start_epoch(self, state: dict[str, Any] | None = None) -> None:
        from datasets.distributed import split_dataset_by_node

        # A new stream for every epoch: a resumed one would start each epoch where it was resumed.
        self._stream = split_dataset_by_node(
            self._windows.stream, self._identity["worker"], self._identity["workers"]
        )
        if state is not None:
            self._stream.load_state_dict(state)
        self._texts = _texts(self._stream)

    def state_dict(self) -> dict[str, Any]:
        pending = torch.from_numpy(self._pending)
        return {"stream": self._stream.state_dict(), "pending": pending, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_matches(state, self._identity)
        self._pending = state["pending"].numpy()
        self._start_epoch(state["stream"])


def first_documents(
    stream: IterableDataset, encode: Encode, tokens: int
) -> tuple[npt.NDArray[Any], frozenset[bytes]]:
    """The first documents, until they hold `tokens` tokens: these tokens, and their digests.

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
        parts.append(encode(text + _END))
        digests.add(text_digest(text))
        size += parts[-1].size
    return np.concatenate(parts), frozenset(digests)


def text_digest(text: bytes) -> bytes:
    """16 bytes by which a document is recognised.

    >>> text_digest(b"once").hex()
    'f4323a87ed2b0d8832bdb0bf6c846221'
    """
    return hashlib.blake2b(text, digest_size=16).digest()


def _texts(rows: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    for row in rows:
        text = row.get("text")
        if not isinstance(text, str):
            raise CorpusError(
                "read a row of the stream",
                because=f'its columns are {sorted(row)} and "text" is {text!r:.40}',
                do='name a corpus whose rows have a string "text"',
            )
        if text:
            yield text.encode()
