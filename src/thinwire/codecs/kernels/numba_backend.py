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
from thinwire.codecs.kernels import numba_blocks as blocks
from thinwire.codecs.kernels import numba_e3m0 as e3m0
from thinwire.codecs.kernels import numba_table as table
from thinwire.codecs.kernels import numba_topk as topk
from thinwire.codecs.kernels.base import (
    AffineSpec,
    E3M0Spec,
    KernelSpec,
    RowKernel,
    TableSpec,
    TopKSpec,
)
from thinwire.codecs.levels import MAX_STEPS, Levels, Linear, MidRise, Statistical
from thinwire.fragments.layout import CHUNK

NAME = f"numba {numba.__version__}"

_F = np.float32
_T = TypeVar("_T")
_FEW = 32  # rows that are not worth a second thread
_NO_ROWS = np.empty((0, CHUNK), np.float32)
_NO_BLOCKS = np.empty((0, blocks.SIDE, 1, blocks.SIDE), np.float32)


def supports(device: torch.device) -> bool:
    """Whether the kernels run on a device: on CPUs.

    >>> supports(torch.device("cuda"))
    False
    """
    return device.type == "cpu"


def build(spec: KernelSpec, device: torch.device) -> RowKernel | None:
    """The kernel for a row format, compiled, or None if numba has no kernel for it."""
    del device
    return _build(spec)


@cache
def _build(spec: KernelSpec) -> RowKernel | None:
    match spec:
        case TopKSpec() if spec.k <= topk.MOST:
            settings = (spec.k, spec.two_levels)
            return _NumbaKernel(spec, topk, settings, settings)
        case TableSpec() if grid := _grid(spec.grid, spec.bits):
            return _NumbaKernel(spec, table, (spec.bits, *grid), (spec.bits,))
        case AffineSpec() if grid := _grid(spec.grid, 8):
            return _NumbaKernel(spec, _Affine, grid, ())
        case E3M0Spec():
            return _NumbaKernel(spec, e3m0, (), ())
        case _:
            return None


def _grid(grid: Levels, bits: int) -> tuple[int, Any] | None:
    """Which grid it is, and the factor of its step; None if it is another."""
    match grid:
        case MidRise():
            return table.MID_RISE, _F(MAX_STEPS[bits])
        case Linear():
            return table.LINEAR, _F(1.0 / (2**bits - 1))
        case Statistical():
            return table.STATISTICAL, _F(6.0 / 2**bits)
        case _:
            return None


class _Affine:
    encode, add, largest = table.affine_encode, table.affine_add, table.affine_largest


class _NumbaKernel(RowKernel):
    """The functions `encode`, `add` and `largest` of a module, with the settings of a format."""

    def __init__(
        self, spec: KernelSpec, functions: Any, to_encode: tuple[Any, ...], to_add: tuple[Any, ...]
    ) -> None:
        self._spec, self._functions = spec, functions
        self._to_encode, self._to_add = to_encode, to_add
        # Compiled now, and not in the middle of the first round.
        numbers, records = torch.empty(0, CHUNK), torch.empty(0, spec.nbytes, dtype=torch.uint8)
        self.encode_blocks(numbers, records, 1, delta=None, decay=1.0)
        self.encode(numbers, records, delta=None, decay=1.0)
        self.add_to(numbers, [records], weight=1.0)
        self.largest(records)

    def encode(self, x: Tensor, out: Tensor, *, delta: Tensor | None, decay: float) -> None:
        numbers, records = x.numpy(), out.numpy()
        added = _NO_ROWS if delta is None else delta.numpy()

        def some_rows(first: int, last: int) -> None:
            rows = slice(first, last)
            self._functions.encode(
                numbers[rows], added[rows], _F(decay), records[rows], *self._to_encode
            )

        _over_rows(len(numbers), some_rows)

    def encode_blocks(
        self, x: Tensor, out: Tensor, across: int, *, delta: Tensor | None, decay: float
    ) -> None:
        shape = (len(x) // across, blocks.SIDE, across, blocks.SIDE)
        numbers, records = x.view(shape).numpy(), out.numpy()
        added = _NO_BLOCKS if delta is None else delta.view(shape).numpy()

        def some_blocks(first: int, last: int) -> None:
            scratch = np.empty((blocks.AT_ONCE, blocks.SIDE, blocks.SIDE), np.float32)
            for at in range(first, last, blocks.AT_ONCE):
                end = min(at + blocks.AT_ONCE, last)
                some = scratch[: end - at]
                rows = some.reshape(-1, CHUNK)
                blocks.gather(some, numbers, added, _F(decay), at)
                self._functions.encode(rows, _NO_ROWS, _F(1), records[at:end], *self._to_encode)
                blocks.scatter(some, numbers, at)

        _over_rows(len(records), some_blocks)

    def add_to(self, out: Tensor, records: Sequence[Tensor], *, weight: float) -> None:
        self._add(out, _NO_ROWS, records, weight)

    def add_counted(
        self, out: Tensor, senders: Tensor, records: Sequence[Tensor], *, weight: float
    ) -> None:
        self._add(out, senders.numpy(), records, weight)

    def _add(self, out: Tensor, senders: Any, records: Sequence[Tensor], weight: float) -> None:
        numbers, nbytes = out.numpy(), self._spec.nbytes
        addresses = np.array([r.data_ptr() for r in records], np.int64)

        def some_rows(first: int, last: int) -> int:
            starts = addresses + first * nbytes
            return self._functions.add(
                numbers[first:last], senders[first:last], starts, nbytes, _F(weight), *self._to_add
            )

        self._check(_over_rows(len(numbers), some_rows))

    def largest(self, records: Tensor) -> Tensor:
        wrong, bits = self._functions.largest(records.numpy(), *self._to_add)
        self._check([wrong])
        return torch.tensor(bits, dtype=torch.int32).view(torch.float32)

    def _check(self, wrong: Sequence[int]) -> None:
        if any(wrong):
            assert isinstance(self._spec, TopKSpec)
            raise no_indices(CHUNK, self._spec.k, wrong_number=topk.WRONG_NUMBER in wrong)


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
