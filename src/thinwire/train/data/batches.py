"""Windows of a tokenised corpus, and the batches made of them.

Sample g of a run is a pure function of the seed: in epoch e = g // windows it is the window
permutation(seed, e)[g % windows]. Step t of a global batch of B rows takes samples t*B to
(t+1)*B - 1, of which worker k of K takes the k-th block of B/K. So the global batches do not depend
on the number of workers, and the position of a run is one number, t.

Elastic workers, whose number changes, read numbered shares of the same order instead, each share
exactly once. A worker reads b rows per step for a round of H steps: share s consists of samples
s b H to (s + 1) b H - 1, and step i takes the i-th b of them. So what is read depends on which
shares are assigned, and not on the number of workers.
"""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinwire.errors import MismatchError

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
    order = torch.randperm(windows, generator=generator, device="cpu").numpy()
    order.flags.writeable = False
    return order


def check_matches(state: dict[str, Any], expected: dict[str, int]) -> dict[str, Any]:
    """Return `state`; raise `MismatchError` if it belongs to other batches than `expected`."""
    # Checkpoints of 0.2 wrap it in the state of a torchdata loader.
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

    Each window lies within one array; the rest at an array's end is dropped.

    Args:
        arrays: arrays of token ids, [tokens] each, at least one long enough for a window;
            memory-mapped ones stay mapped.
        sequence_length: inputs are a window's first this many tokens, targets its last.

    >>> Windows([np.arange(7, dtype=np.uint8)], 2).rows([1])
    tensor([[3, 4, 5]])
    """

    def __init__(self, arrays: Sequence[Tokens], sequence_length: int) -> None:
        self.width = sequence_length + 1
        # A view without numpy's memmap class: slicing a memmap costs 5 us.
        self._arrays = [np.asarray(array) for array in arrays]
        self._ends = list(accumulate(array.size // self.width for array in self._arrays))

    def __len__(self) -> int:
        return self._ends[-1]

    def rows(self, numbers: Iterable[int]) -> Tensor:
        """Windows by their numbers: int64, [len(numbers), sequence_length + 1]."""
        rows: list[Tokens] = []
        for number in numbers:
            shard = bisect_right(self._ends, number)
            start = (number - (self._ends[shard - 1] if shard else 0)) * self.width
            rows.append(self._arrays[shard][start : start + self.width])
        return torch.from_numpy(np.stack(rows, dtype=np.int64))

    def samples(self, start: int, count: int, seed: int) -> Tensor:
        """Samples `start` to `start + count - 1`: int64, [count, sequence_length + 1].

        Args:
            start: number of the first sample; there is no last one.
            count: number of samples.
            seed: seed of their order, the same on all workers.
        """
        return self.rows(window_order(start, start + count, len(self), seed).tolist())

    def batches(self, worker: int, workers: int, global_batch: int, seed: int) -> WorkerBatches:
        """Endless batches of worker `worker` of `workers`: int64, [B/K, sequence_length + 1].

        Args:
            worker: k, from 0.
            workers: K.
            global_batch: B, rows over all workers; a multiple of K.
            seed: seed of the order of the windows, the same on all workers.
        """
        return WorkerBatches(self, worker, workers, global_batch, seed)


class WorkerBatches(Iterator[Tensor]):
    """Endless batches of one worker, with a state from which they resume.

    Args:
        windows: the windows to read.
        worker: k.
        workers: K.
        global_batch: B.
        seed: seed of their order.
    """

    def __init__(
        self, windows: Windows, worker: int, workers: int, global_batch: int, seed: int
    ) -> None:
        self._windows, self._rows, self._step = windows, global_batch // workers, 0
        self._first = worker * self._rows
        # Without the number of workers, which may change when a run is resumed.
        self._identity = {"windows": len(windows), "global_batch": global_batch, "seed": seed}

    def __next__(self) -> Tensor:
        start = self._step * self._identity["global_batch"] + self._first
        self._step += 1
        return self._windows.samples(start, self._rows, self._identity["seed"])

    def state_dict(self) -> dict[str, Any]:
        """Number of batches read, and what they depend on."""
        return {"step": self._step, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the batches of `state`.

        Raises:
            MismatchError: `state` is from other batches, for example of another seed.
        """
        self._step = check_matches(state, self._identity)["step"]
