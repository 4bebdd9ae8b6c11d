"""Windows of a tokenised corpus, and the batches made of them.

Sample g of a run is a pure function of the seed: epoch e = g // windows, and in it the window
permutation(seed, e)[g % windows]. Step t of a global batch of B rows takes samples t*B to
(t+1)*B - 1, of which worker k of K takes the k-th block of B/K. So the global batches do not depend
on the number of workers, and the position of a run is one number, t.

Elastic workers, whose number changes, read numbered shares of the same order instead, each share
exactly once. A worker reads b rows at a step for a round of H steps: the b H samples of share s are
samples s b H to (s + 1) b H - 1. So what is read depends on which shares were assigned, and not on
how many workers there are.
"""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinwire.errors import CorpusError, MismatchError

Tokens = npt.NDArray[Any]


def window_order(start: int, stop: int, windows: int, seed: int) -> npt.NDArray[np.int64]:
    """The windows of samples `start` to `stop - 1`: epoch after epoch, each a permutation.

    >>> sorted(window_order(3, 6, 3, seed=0).tolist())
    [0, 1, 2]
    """
    pieces = [np.empty(0, dtype=np.int64)]
    while start < stop:
        epoch, offset = divmod(start, windows)
        piece = _permutation(windows, seed, epoch)[offset : offset + stop - start]
        pieces.append(piece)
        start += piece.size
    return np.concatenate(pieces)


# Workers in one process walk through the same epoch at the same time, or straddle two.
@functools.lru_cache(maxsize=2)
def _permutation(windows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    # Neighbouring seeds and epochs must not collide as seed + epoch would.
    digest = hashlib.sha256(f"thinwire windows {seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    order = torch.randperm(windows, generator=generator).numpy()
    order.flags.writeable = False
    return order


def check_matches(state: dict[str, Any], expected: dict[str, int]) -> dict[str, Any]:
    """`state`, or raise `MismatchError` if it is of other batches than it is loaded into."""
    # Checkpoints of 0.2 have the state of a torchdata loader around it.
    stream = state.get("fetcher_state") or {}
    state = state.get("_sampler_iter_state") or stream.get("dataset_iter_state") or state
    for name, value in expected.items():
        if state.get(name) != value:
            because = f"{name} was {state.get(name)} and is {value} now"
            do = f"resume with the {name} of the checkpoint, or start afresh"
            raise MismatchError("resume the batches of the checkpoint", because=because, do=do)
    return state


class Windows:
    """Windows of `sequence_length + 1` tokens that do not overlap.

    A window is within one array: the rest at an array's end is dropped.

    Args:
        tokens: an array of token ids, [tokens], or several; memory-mapped ones stay so.
        sequence_length: inputs are a window's first so many tokens, targets its last.

    Raises:
        CorpusError: no array holds a whole window.

    >>> Windows(np.arange(7, dtype=np.uint8), 2)[1]
    tensor([3, 4, 5])
    """

    def __init__(self, tokens: Tokens | Sequence[Tokens], sequence_length: int) -> None:
        arrays = [tokens] if isinstance(tokens, np.ndarray) else tokens
        self.width = sequence_length + 1
        # A view without numpy's memmap class on it: slicing that one costs 5 us.
        self._arrays = [np.asarray(array) for array in arrays]
        self._ends = list(accumulate(array.size // self.width for array in self._arrays))
        if not len(self):
            size = sum(array.size for array in self._arrays)
            what = f"cut windows of {self.width} tokens"
            do = f"pass at least {self.width} tokens, or a shorter sequence_length"
            raise CorpusError(what, because=f"there are {size} tokens", do=do)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        """Windows by their numbers: int64, [len(indices), sequence_length + 1]."""
        out = np.empty((len(indices), self.width), dtype=np.int64)
        for row, index in zip(out, indices, strict=True):
            row[:] = self._window(index)
        return torch.from_numpy(out)

    def _window(self, index: int) -> Tokens:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        shard = bisect_right(self._ends, index)
        start = (index - (self._ends[shard - 1] if shard else 0)) * self.width
        return self._arrays[shard][start : start + self.width]

    def batches(self, worker: int, workers: int, global_batch: int, seed: int) -> WorkerBatches:
        """Endless batches of worker `worker` of `workers`: int64, [B/K, sequence_length + 1].

        Args:
            worker: k, from 0.
            workers: K.
            global_batch: B, rows over all workers; a multiple of K.
            seed: of the order of the windows, the same on all workers.
        """
        rows, first = global_batch // workers, worker * (global_batch // workers)
        return WorkerBatches(self, first=first, rows=rows, global_batch=global_batch, seed=seed)

    def shares(self, rows: int, sync_every: int, seed: int) -> Shares:
        """The same samples in numbered shares, for elastic workers.

        Args:
            rows: b, windows in a batch.
            sync_every: H, batches in a share.
            seed: of the order, the same on all workers.
        """
        return Shares(self, rows=rows, sync_every=sync_every, seed=seed)


class WorkerBatches(Iterator[Tensor]):
    """Endless batches of one worker, with a state from which they resume.

    Args:
        windows: to read.
        first: row of the global batch with which this worker's rows begin.
        rows: of this worker, B/K.
        global_batch: B.
        seed: of the order.
    """

    def __init__(
        self, windows: Windows, *, first: int, rows: int, global_batch: int, seed: int
    ) -> None:
        self._windows, self._first, self._rows, self._step = windows, first, rows, 0
        # Without the number of workers, which may change when a run is resumed.
        self._identity = {"windows": len(windows), "global_batch": global_batch, "seed": seed}

    def __next__(self) -> Tensor:
        start = self._step * self._identity["global_batch"] + self._first
        self._step += 1
        windows, seed = self._identity["windows"], self._identity["seed"]
        order = window_order(start, start + self._rows, windows, seed)
        return self._windows.__getitems__(order.tolist())

    def state_dict(self) -> dict[str, Any]:
        """Number of batches read, and what they depend on."""
        return {"step": self._step, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the batches of `state`.

        Raises:
            MismatchError: it is of other batches, of another seed for example.
        """
        self._step = check_matches(state, self._identity)["step"]


def validation_windows(
    tokens: Tokens | Sequence[Tokens], sequence_length: int, count: int
) -> Tensor:
    """At most `count` windows, evenly spaced: int64, [count, sequence_length + 1].

    Raises:
        CorpusError: there is no whole window.

    >>> validation_windows(np.arange(12, dtype=np.uint8), 1, 3).tolist()
    [[0, 1], [4, 5], [8, 9]]
    """
    windows = Windows(tokens, sequence_length)
    count = min(count, len(windows))
    return windows.__getitems__([number * len(windows) // count for number in range(count)])


class Shares:
    """The batch of step i within share s: samples (s H + i) b to (s H + i + 1) b - 1.

    Args:
        windows: what the samples are.
        rows: b, windows in a batch.
        sync_every: H, batches in a share.
        seed: of the order, the same on all workers.

    >>> shares = Shares(Windows(np.arange(8), 1), rows=2, sync_every=1, seed=0)
    >>> sorted(shares.batch(0, 0)[:, 0].tolist() + shares.batch(1, 0)[:, 0].tolist())
    [0, 2, 4, 6]
    """

    def __init__(self, windows: Windows, *, rows: int, sync_every: int, seed: int) -> None:
        self._windows, self._seed = windows, seed
        self._rows, self.sync_every = rows, sync_every

    def batch(self, share: int, index: int) -> Tensor:
        """Batch `index` of `share`: int64, [b, sequence_length + 1]."""
        start = (share * self.sync_every + index) * self._rows
        order = window_order(start, start + self._rows, len(self._windows), self._seed)
        return self._windows.__getitems__(order.tolist())
