"""Codecs of rows: each row becomes a record, whose size depends on the row's length alone.

This module is the reference for `thinwire.codecs.kernels`, which produce the same bytes for rows
of 4096.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.blocks import VectorPart, block_numel
from thinwire.codecs.base import BoundCodec, Codec, PiecewiseCodec, squared_norm_of
from thinwire.codecs.bits import bytes_of, floats, saturating_cast
from thinwire.codecs.grouping import Grouping, RowBatch
from thinwire.codecs.kernels import RowKernel, find_kernel
from thinwire.codecs.levels import RoundKey
from thinwire.codecs.transforms import Transform
from thinwire.fragments.layout import CHUNK, Layout


class Decoded(NamedTuple):
    """The decoded records of a batch.

    Args:
        values: the numbers in the records, fp32 [rows, k].
        places: their columns, int64 [rows, k], distinct in a row; None if `values` are whole rows.
    """

    values: Tensor
    places: Tensor | None = None

    def add_to(self, out: Tensor, *, weight: float | None) -> None:
        """out += weight * numbers, the product rounded first; without one, += numbers != 0.

        Args:
            out: fp32 [rows, columns].
            weight: factor of the numbers; None counts those that are not zero.
        """
        terms = (self.values != 0).float() if weight is None else self.values * weight
        if self.places is None:
            out += terms
        else:
            # Places of a row are distinct, so the order in which a device adds does not matter.
            out.scatter_add_(1, self.places, terms)


class GroupedCodec(Codec):
    """Writes one record per row of a grouping, which a transform may change first."""

    groups: Grouping
    transform: Transform | None

    record_id: str
    """The name of a record's format, part of the codec's id."""

    verbatim: torch.dtype = torch.bfloat16
    """Type in which a row's numbers are sent as they are if a record would not be smaller."""

    has_kernel: bool = False
    """True if kernels may encode rows of 4096 numbers."""

    @abstractmethod
    def record_nbytes(self, columns: int) -> int:
        """Size in bytes of the record of a row of `columns` numbers."""

    @abstractmethod
    def write(self, x: Tensor, key: RoundKey) -> Tensor:
        """`x` [rows, columns] (fp32, finite) as uint8 [rows, nbytes]."""

    @abstractmethod
    def read(self, records: Sequence[Tensor], columns: int, key: RoundKey) -> Iterator[Decoded]:
        """Decode the records, uint8 [rows, nbytes], of each worker in turn; of one at least.

        Raises:
            ExchangeError: a record is invalid.
        """

    def largest(self, records: Tensor, columns: int, key: RoundKey) -> Tensor:
        """A bound on the magnitudes in one worker's `records`, fp32 []; by default the largest.

        Raises:
            ExchangeError: a record is invalid.
        """
        (numbers,) = self.read([records], columns, key)
        return numbers.values.abs().amax()

    @property
    def id(self) -> str:
        """The record's id, then the grouping's, then the transform's if there is one."""
        parts = (self.record_id, self.groups.id, *([self.transform.id] if self.transform else []))
        return "/".join(parts)

    @property
    def sharding_loss(self) -> str | None:
        """With `Tensors`, each shard's piece of a tensor gets a record of its own."""
        if not self.groups.spans_tensors:
            return None
        return "scales or places of a whole tensor are chosen anew for each shard's piece of it"

    def bind(self, layout: Layout, *, device: torch.device | None = None) -> BoundCodec:
        """Gather the rows of every parameter into batches."""
        codecs: list[tuple[VectorPart, BoundCodec]] = []
        row = 0
        for batch in self.groups.batches(layout, block_numel(device)):
            codecs.append((batch.part, _RowsCodec(self, batch, row)))
            row += batch.rows
        return PiecewiseCodec(self.id, layout, codecs)


class _RowsCodec(BoundCodec):
    """The rows of one batch, one record after the other."""

    def __init__(self, codec: GroupedCodec, batch: RowBatch, row: int) -> None:
        self._codec, self._transform, self._batch, self._row = codec, codec.transform, batch, row
        nbytes, plain = codec.record_nbytes(batch.columns), batch.columns * codec.verbatim.itemsize
        self._is_plain = nbytes >= plain
        self._kernels: dict[str, RowKernel | None] = {}
        super().__init__(codec.id, Layout.vector(batch.part.numel), batch.rows * min(nbytes, plain))

    def prepare(self, device: torch.device) -> None:
        self._kernel(device)

    def _kernel(self, device: torch.device) -> RowKernel | None:
        if device.type not in self._kernels:
            has_any = self._batch.columns == CHUNK and not self._is_plain
            self._kernels[device.type] = find_kernel(self._codec, device) if has_any else None
        return self._kernels[device.type]

    def encode_to(self, out: Tensor, x: Tensor, round: int = 0) -> None:
        rows, kernel, codec = self._batch.rows_of(x), self._kernel(x.device), self._codec
        records, transform = out.view(self._batch.rows, -1), self._transform
        if transform is not None:
            rows = transform.forward(rows, self._batch.shape)
        if kernel is not None:
            # A kernel overwrites its rows with the error.
            kernel.encode(rows.clone() if transform is None else rows, records, None, 1.0)
        elif self._is_plain:
            records.copy_(bytes_of(saturating_cast(rows, codec.verbatim)))
        else:
            records.copy_(codec.write(rows, RoundKey(round, self._row)))

    def encode_feedback_to(
        self, out: Tensor, residual: Tensor, delta: Tensor | None, *, decay: float, round: int = 0
    ) -> None:
        batch, kernel, transform = self._batch, self._kernel(residual.device), self._transform
        if kernel is not None and transform is None:
            rows, added = batch.rows_of(residual), None if delta is None else batch.rows_of(delta)
            kernel.encode(rows, out.view(batch.rows, -1), added, decay)
            batch.put_rows(residual, rows)
        elif transform is None:
            super().encode_feedback_to(out, residual, delta, decay=decay, round=round)
        else:
            if delta is not None:
                residual.mul_(decay).add_(delta)
            self.encode_to(out, residual, round)
            residual -= self.decode(out, round)

    def add_to(
        self, out: Tensor, payloads: Sequence[Tensor], *, weight: float, round: int = 0
    ) -> None:
        self._add([out], payloads, weight, round)

    def add_and_count(
        self, out: Tensor, counts: Tensor, payloads: Sequence[Tensor], weight: float, round: int
    ) -> None:
        self._add([out, counts], payloads, weight, round)

    def _add(
        self, totals: list[Tensor], payloads: Sequence[Tensor], weight: float, round: int
    ) -> None:
        if not payloads:
            return
        kernel, rows = self._kernel(totals[0].device), list(map(self._coefficient_rows, totals))
        if kernel is not None:
            kernel.add(rows[0], self._records(payloads), weight, (*rows, None)[1])
        else:
            for numbers in self._read(payloads, round):
                for total, factor in zip(rows, (weight, None), strict=False):
                    numbers.add_to(total, weight=factor)
        if self._transform is None:
            for total, its_rows in zip(totals, rows, strict=True):
                self._batch.put_rows(total, its_rows)

    def largest(self, payload: Tensor, round: int = 0) -> Tensor:
        kernel, (records,) = self._kernel(payload.device), self._records([payload])
        if kernel is not None and kernel.largest is not None:
            return kernel.largest(records)
        if self._is_plain:
            return floats(records, self._codec.verbatim).abs().amax()
        return self._codec.largest(records, self._batch.columns, RoundKey(round, self._row))

    def squared_norm(self, payload: Tensor, round: int = 0) -> Tensor:
        (numbers,) = self._read([payload], round)
        return squared_norm_of(numbers.values)

    def to_vector(self, coefficients: Tensor) -> Tensor:
        if self._transform is not None:
            rows = self._coefficient_rows(coefficients)
            self._batch.put_rows(coefficients, self._transform.inverse(rows, self._batch.shape))
        return coefficients

    def _coefficient_rows(self, x: Tensor) -> Tensor:
        """The rows of coefficients in `x`: those of a transform are stored record by record."""
        return x.view(self._batch.rows, -1) if self._transform else self._batch.rows_of(x)

    def _read(self, payloads: Sequence[Tensor], round: int) -> Iterator[Decoded]:
        records = self._records(payloads)
        if self._is_plain:
            return (Decoded(floats(r, self._codec.verbatim)) for r in records)
        return self._codec.read(records, self._batch.columns, RoundKey(round, self._row))

    def _records(self, payloads: Sequence[Tensor]) -> list[Tensor]:
        return [payload.view(self._batch.rows, -1) for payload in payloads]
