"""Kernels compiled by numba for the CPU: a row stays in a core's cache until nothing is left to do.

Rows are given to as many threads as torch uses.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.bits import no_indices
from thinwire.codecs.kernels import RowKernel
from thinwire.codecs.kernels import numba_dense as dense
from thinwire.codecs.kernels import numba_topk as topk
from thinwire.codecs.levels import MAX_STEPS, Linear, MidRise, Statistical
from thinwire.codecs.quantise import E3M0, Quantise
from thinwire.codecs.row_format import GroupedCodec
from thinwire.codecs.sparse import TopK
from thinwire.codecs.values import SignLevels
from thinwire.fragments.layout import CHUNK

NAME = f"numba {numba.__version__}"

_F = np.float32
_T = TypeVar("_T")
_FEW = 32  # rows that are not worth a second thread
_NO_ROWS = np.empty((0, CHUNK), np.float32)

# By grid: the kernels' number for it, and for each number of bits the factor of its step.
_GRIDS: dict[type, tuple[int, dict[int, float]]] = {
    MidRise: (dense.MID_RISE, MAX_STEPS),
    Linear: (dense.LINEAR, {bits: 1.0 / (2**bits - 1) for bits in MAX_STEPS}),
    Statistical: (dense.STATISTICAL, {bits: 6.0 / 2**bits for bits in MAX_STEPS}),
}


def supports(device: torch.device) -> bool:
    """True for CPUs, on which the kernels run.

    >>> supports(torch.device("cuda"))
    False
    """
    return device.type == "cpu"


@cache
def build(codec: GroupedCodec) -> RowKernel | None:
    """The kernel for a codec, compiled, or None if numba has no kernel for it."""
    match codec:
        case TopK(k=k, values=values) if k <= topk.MOST:
            settings = (k, 2 if isinstance(values, SignLevels) else 1)
            return _kernel(codec, topk.encode, topk.add, settings, settings, topk.largest)
        case E3M0():
            return _kernel(codec, dense.e3m0_encode, dense.e3m0_add, (), ())
        case Quantise(bits=bits, grid=grid) if type(grid) in _GRIDS:
            number, factors = _GRIDS[type(grid)]
            to_encode = (bits, number, _F(factors[bits]))
            return _kernel(codec, dense.encode, dense.add, to_encode, (bits,))
        case _:
            return None


def _kernel(
    codec: GroupedCodec,
    run_encode: Any,
    run_add: Any,
    to_encode: tuple[Any, ...],
    to_add: tuple[Any, ...],
    run_largest: Any = None,
) -> RowKernel:
    """Compiled functions with the settings of a codec."""
    nbytes = codec.record_nbytes(CHUNK)

    def encode(x: Tensor, out: Tensor, delta: Tensor | None, decay: float) -> None:
        numbers, records = x.numpy(), out.numpy()
        added = _NO_ROWS if delta is None else delta.numpy()

        def some_rows(first: int, last: int) -> None:
            rows = slice(first, last)
            run_encode(numbers[rows], added[rows], _F(decay), records[rows], *to_encode)

        _over_rows(len(records), some_rows)

    def add(out: Tensor, records: Sequence[Tensor], weight: float, counts: Tensor | None) -> None:
        numbers, counted = out.numpy(), _NO_ROWS if counts is None else counts.numpy()
        addresses = np.array([r.data_ptr() for r in records], np.int64)

        def some_rows(first: int, last: int) -> int:
            starts = addresses + first * nbytes
            rows = slice(first, last)
            return run_add(numbers[rows], counted[rows], starts, nbytes, _F(weight), *to_add)

        refuse(_over_rows(len(numbers), some_rows))

    def largest(records: Tensor) -> Tensor:
        wrong, bits = run_largest(records.numpy(), *to_add)
        refuse([wrong])
        return torch.tensor(bits, dtype=torch.int32).view(torch.float32)

    def refuse(wrong: Sequence[int]) -> None:
        if any(wrong):  # only of Top-k
            raise no_indices(CHUNK, to_add[0], wrong_number=topk.WRONG_NUMBER in wrong)

    # Compiled now, and not in the middle of the first round.
    rows, records = torch.empty(0, CHUNK), torch.empty(0, nbytes, dtype=torch.uint8)
    encode(rows, records, None, 1.0)
    add(rows, [records], 1.0, None)
    if run_largest is None:  # a few levels a row are read as fast by torch
        return RowKernel(encode, add)
    largest(records)
    return RowKernel(encode, add, largest)


@cache
def _helpers(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads beside the caller's; of this process, for a forked one has none of its parent's."""
    del process
    return ThreadPoolExecutor(threads, thread_name_prefix="thinwire-kernel")


def _over_rows(rows: int, work: Callable[[int, int], _T]) -> list[_T]:
    """What `work(first, last)` returns for ranges that together are all rows, in any order."""
    helpers = min(torch.get_num_threads(), rows // _FEW) - 1
    if helpers < 1:
        return [work(0, rows)]
    step = max(_FEW, -(-rows // (4 * (helpers + 1))))
    ranges = deque((first, min(rows, first + step)) for first in range(0, rows, step))

    def take() -> list[_T]:
        found: list[_T] = []
        while True:
            try:
                first, last = ranges.popleft()
            except IndexError:
                return found
            found.append(work(first, last))

    pool = _helpers(os.getpid(), torch.get_num_threads() - 1)
    others = [pool.submit(take) for _ in range(helpers)]
    found = take()
    # Nothing is left: a helper that other workers' threads kept from beginning is not waited for.
    return found + [each for other in others if not other.cancel() for each in other.result()]
