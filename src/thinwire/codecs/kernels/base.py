"""What a kernel does for rows of 4096 numbers, and the descriptions by which one is found.

A kernel gives the bytes, residuals and means of its row format's `write` and `read`, bit for bit:
these are the reference. It may not fuse a product with a sum, nor reorder a sum: sums are taken by
halves (`thinwire.codecs.sums`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.levels import Levels

_SIDE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpec(ABC):
    """What a row format does to rows of 4096 numbers, for kernels that do the same.

    Only formats that round to nearest have one.

    Args:
        nbytes: of a record of 4096 numbers.
    """

    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKSpec(KernelSpec):
    """`TopK` with `SignLevels` or `SignMean`.

    Args:
        k: numbers that are kept, of 4096.
        two_levels: `SignLevels`; otherwise `SignMean`.
    """

    k: int
    two_levels: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec(KernelSpec):
    """`Quantise` with 1, 2 or 4 bits.

    Args:
        bits: of a code.
        grid: where the levels lie; `grid.means` says whether they are bin means.
    """

    bits: int
    grid: Levels


@dataclass(frozen=True, kw_only=True, slots=True)
class AffineSpec(KernelSpec):
    """`Quantise` with 8 bits.

    Args:
        grid: where the levels lie.
    """

    grid: Levels


@dataclass(frozen=True, kw_only=True, slots=True)
class E3M0Spec(KernelSpec):
    """`E3M0`."""


class RowKernel(ABC):
    """Encodes rows of 4096 numbers to records, and adds up what records stand for.

    Kernels keep nothing between calls, and threads may call one at the same time. All tensors of a
    call lie on one device. The rows of `x`, `delta`, `out` and `senders` (fp32 [rows, 4096]) and of
    records (uint8 [rows, nbytes]) follow each other without gaps; records may begin at any byte. No
    rows are fine.
    """

    @abstractmethod
    def encode(self, x: Tensor, out: Tensor, *, delta: Tensor | None, decay: float) -> None:
        """x = decay * x + delta; out = records of x; x = x - decode(out).

        The product is rounded before the sum. The caller sees that the sum is finite: a row that is
        not gets any bytes and any residual, but does not disturb other rows.

        Args:
            x: fp32 [rows, 4096], changed in place; numbers that a record does not name stay.
            out: uint8 [rows, nbytes], written over.
            delta: fp32 [rows, 4096]; without one, x stays as it is, whatever the decay.
            decay: rounded to fp32.
        """

    def encode_blocks(
        self, x: Tensor, out: Tensor, across: int, *, delta: Tensor | None, decay: float
    ) -> None:
        """As `encode`, where a row is a block of 64x64 of a matrix that lies row by row.

        By default `x` and `delta` are copied block by block, and what is left of `x` back.

        Args:
            x: fp32 [rows, 4096], the matrix whatever its shape: [rows / across * 64, across * 64].
            out: uint8 [rows, nbytes], of the blocks row by row.
            across: blocks side by side.
            delta: a matrix like `x`.
            decay: rounded to fp32.
        """
        shape = (len(x) // across, _SIDE, across, _SIDE)
        blocks = x.view(shape).transpose(1, 2)
        rows = blocks.clone(memory_format=torch.contiguous_format).view(x.shape)
        added = None if delta is None else delta.view(shape).transpose(1, 2).reshape(x.shape)
        self.encode(rows, out, delta=added, decay=decay)
        blocks.copy_(rows.view(blocks.shape))

    @abstractmethod
    def add_to(self, out: Tensor, records: Sequence[Tensor], *, weight: float) -> None:
        """out += weight * decode(r) for one worker's records `r` after the other's.

        The product is rounded before the sum.

        Args:
            out: fp32 [rows, 4096].
            records: of every worker, uint8 [rows, nbytes] each.
            weight: rounded to fp32.

        Raises:
            ExchangeError: some bytes are no record; `out` is then unusable.
        """

    @abstractmethod
    def add_counted(
        self, out: Tensor, senders: Tensor, records: Sequence[Tensor], *, weight: float
    ) -> None:
        """As `add_to`, and senders += 1 wherever a worker's decoded number is not zero.

        Args:
            out: fp32 [rows, 4096].
            senders: fp32 [rows, 4096].
            records: of every worker, uint8 [rows, nbytes] each.
            weight: rounded to fp32.

        Raises:
            ExchangeError: some bytes are no record; `out` and `senders` are then unusable.
        """

    @abstractmethod
    def largest(self, records: Tensor) -> Tensor:
        """A number that no |decoded number| exceeds, without decoding them: a scalar in fp32.

        It is that of all levels of the records: infinite or NaN if any of them is. 0 for no rows.

        Raises:
            ExchangeError: some bytes are no record.
        """
