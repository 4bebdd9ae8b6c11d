"""Which windows worker k of K reads at step t: its block of rows of one global batch.

Sample g of a run is a pure function of the seed: epoch e = g // windows, and in it the window
permutation(seed, e)[g % windows]. Step t of a global batch of B rows takes samples t*B to
(t+1)*B - 1, of which worker k takes the k-th block of B/K. Thus all numbers of workers see equal
global batches, and where a run stands is one number, t.
"""

import functools
import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thinwire.errors import ConfigurationError, MismatchError


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


def rows_per_worker(worker: int, workers: int, global_batch: int) -> int:
    """B/K.

    Raises:
        ConfigurationError: B is not a positive multiple of K, or k is not in 0..K-1.

    >>> rows_per_worker(0, 4, 8)
    2
    """
    if not 0 <= worker < workers:
        raise ConfigurationError(
            f"read the batches of worker {worker}",
            because=f"there are {workers} workers, counted from 0",
            do=f"pass a worker from 0 to {workers - 1}",
        )
    if global_batch < 1 or global_batch % workers:
        raise ConfigurationError(
            f"split a global batch of {global_batch} among {workers} workers",
            because=f"{global_batch} is not a positive multiple of {workers}",
            do=f"pass a multiple of {workers}",
        )
    return global_batch // workers


def check_matches(state: dict[str, Any], expected: dict[str, int]) -> None:
    """Raise `MismatchError` if a state was taken from other batches than it is loaded into."""
    for name, value in expected.items():
        if state.get(name) != value:
            raise MismatchError(
                "go on with the batches of the checkpoint",
                because=f"{name} was {state.get(name)} there and is {value} here",
                do=f"resume with the {name} of the checkpoint, or start afresh",
            )
