"""Row formats: a row of numbers as a record, bytes of a size that depends on its length alone.

They are the reference of `thinwire.codecs.kernels`, which give the same bytes for rows of 4096.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.blocks import block_numel
from thinwire.codecs.base import (
    BoundCodec,
    Codec,
    CodecPiece,
    PiecewiseCodec,
    check_payload,
    squared_norm_of,
)
from thinwire.codecs.cast import saturating_cast
from thinwire.codecs.grouping import Grouping, RowBatch
from thinwire.codecs.kernels import find_kernel
from thinwire.codecs.kernels.base import KernelSpec, RowKernel
from thinwire.codecs.transforms import Transform
from thinwire.fragments.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundKey:
    """The seed of a batch's shared random numbers, which all workers draw alike.

    Args:
        round: number of the exchange.
        row: index of the batch's first record in the payload.
    """

    round: int = 0
    row: int = 0


class Decoded(ABC):
    """The numbers that the records of a batch stand for.

    Args:
        values: those that are in the records, fp32.
    """

    values: Tensor

    @abstractmethod
    def add_to(self, out: Tensor, *, weight: float) -> None:
        """out += weight * numbers; `out` is fp32 [rows, columns]."""

    @abstractmethod
    def count_to(self, senders: Tensor) -> None:
        """senders += 1 where a number is not zero; `senders` is fp32 [rows, columns]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseRows(Decoded):
    """All numbers of the rows: fp32 [rows, columns]."""

    values: Tensor

    def add_to(self, out: Tensor, *, weight: float) -> None:
        """Scaled first, then added."""
        out += self.values * weight

    def count_to(self, senders: Tensor) -> None:
        """By comparing every number."""
        senders += self.values != 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseRows(Decoded):
    """`values` (fp32) at `indices` (int64), both [rows, k]; no index twice in a row."""

    indices: Tensor
    values: Tensor

    def add_to(self, out: Tensor, *, weight: float) -> None:
        """Indices of a row are distinct, so the order in which a device adds does not matter."""
        out.scatter_add_(1, self.indices, self.values * weight)

    def count_to(self, senders: Tensor) -> None:
        """Only at the places that were sent."""
        senders.scatter_add_(1, self.indices, (self.values != 0).float())


class RowFormat(ABC):
    """A format for rows of `columns` numbers."""

    id: str
    """Part of the codec's id."""

    @property
    def verbatim(self) -> RowFormat:
        """The format of rows whose record would not be smaller than their plain numbers."""
        return Raw(number="bf16")

    @abstractmethod
    def nbytes(self, columns: int) -> int:
        """Bytes of a record."""

    def kernel_spec(self) -> KernelSpec | None:
        """What a kernel for rows of 4096 numbers has to do; by default no kernel can."""
        return None

    @abstractmethod
    def write(self, x: Tensor, key: RoundKey) -> tuple[Tensor, Decoded]:
        """`x` [rows, columns] (fp32, finite) as uint8 [rows, nbytes], and its decoded numbers."""

    @abstractmethod
    def read(self, records: Sequence[Tensor], columns: int, key: RoundKey) -> Iterator[Decoded]:
        """The numbers of one worker's uint8 [rows, nbytes] after the other's.

        Raises:
            ExchangeError: the bytes are not such records.
        """

    def largest(self, records: Tensor, columns: int, key: RoundKey) -> Tensor:
        """A bound on the magnitudes in one worker's `records`, fp32 []; by default the largest.

        Raises:
            ExchangeError: the bytes are not such records.
        """
        (numbers,) = self.read([records], columns, key)
        return numbers.values.abs().amax()

    def for_columns(self, columns: int) -> RowFormat:
        """This format, or plain numbers where they are not larger."""
        plain = self.verbatim
        return self if self.nbytes(columns) < plain.nbytes(columns) else plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Raw(RowFormat):
    """The numbers themselves, one after the other.

    Args:
        number: how one is written, "bf16" or "f32".

    >>> Raw(number="bf16").nbytes(3)
    6
    """

    number: Literal["bf16", "f32"]

    @property
    def id(self) -> str:
        """bf16 or f32."""
        return self.number

    @property
    def dtype(self) -> torch.dtype:
        """As torch has it."""
        return torch.bfloat16 if self.number == "bf16" else torch.float32

    def nbytes(self, columns: int) -> int:
        """2 or 4 for each number."""
        return columns * (2 if self.number == "bf16" else 4)

    def write(self, x: Tensor, key: RoundKey) -> tuple[Tensor, Decoded]:
        """Rounded to nearest even, saturating."""
        del key
        cast = saturating_cast(x, self.dtype).clone()
        return bytes_of(cast), DenseRows(values=cast.float())

    def read(self, records: Sequence[Tensor], columns: int, key: RoundKey) -> Iterator[Decoded]:
        """Widened exactly."""
        del columns, key
        for r in records:
            yield DenseRows(values=floats(r, self.dtype))


def bytes_of(x: Tensor) -> Tensor:
    """Rows of numbers as rows of bytes: [rows, n] to uint8 [rows, n * itemsize]."""
    return x.contiguous().view(torch.uint8)


def floats(records: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rows of bytes as rows of numbers in fp32; copied, because a view needs aligned memory.

    Args:
        records: uint8, [rows, n].
        dtype: of the numbers; default bf16.
    """
    copied = records.clone(memory_format=torch.contiguous_format)
    return copied.view(dtype or torch.bfloat16).float()


class _RowsCodec(BoundCodec):
    """The rows of one batch, one record after the other."""

    def __init__(self, codec: GroupedCodec, batch: RowBatch, row: int) -> None:
        self._format = codec.row_format().for_columns(batch.columns)
        self._transform, self._batch, self._row = codec.transform, batch, row
        self._kernels: dict[str, RowKernel | None] = {}
        nbytes = batch.rows * self._format.nbytes(batch.columns)
        super().__init__(codec.id, Layout.vector(batch.part.numel), nbytes)

    def prepare(self, device: torch.device) -> None:
        self._kernel(device)

    def _kernel(self, device: torch.device) -> RowKernel | None:
        if device.type not in self._kernels:
            self._kernels[device.type] = find_kernel(self._format, self._batch.columns, device)
        return self._kernels[device.type]

    def encode_to(self, out: Tensor, x: Tensor, round: int = 0) -> None:
        rows, kernel = self._batch.rows_of(x), self._kernel(x.device)
        if self._transform is not None:
            rows = self._transform.forward(rows, self._batch.shape)
        elif kernel is not None and rows.data_ptr() == x.data_ptr():
            rows = rows.clone()  # a kernel leaves the error behind
        self._write(out, rows, round)

    def encode_residual_to(self, out: Tensor, x: Tensor, round: int = 0) -> None:
        if self._transform is None:
            self._write_residual(out, x, None, 1.0, round)
            return
        rows = self._batch.rows_of(x)
        coefficients = self._transform.forward(rows, self._batch.shape)
        decoded, sent = self._write(out, coefficients, round), torch.zeros_like(rows)
        if decoded is None:
            self._add(sent, [out], 1.0, round)
        else:
            decoded.add_to(sent, weight=1.0)
        rows -= self._transform.inverse(sent, self._batch.shape)
        self._batch.put_rows(x, rows)

    def encode_feedback_to(
        self, out: Tensor, residual: Tensor, delta: Tensor, *, decay: float, round: int = 0
    ) -> None:
        if self._transform is not None:
            super().encode_feedback_to(out, residual, delta, decay=decay, round=round)
            return
        self._write_residual(out, residual, delta, decay, round)

    def _write(self, out: Tensor, rows: Tensor, round: int) -> Decoded | None:
        """Encode `rows`; what was sent, or None of a kernel, which overwrites them."""
        kernel = self._kernel(rows.device)
        if kernel is not None:
            kernel.encode(rows, out.view(self._batch.rows, -1), delta=None, decay=1.0)
            return None
        records, sent = self._format.write(rows, self._key(round))
        out.view(self._batch.rows, -1).copy_(records)
        return sent

    def _write_residual(
        self, out: Tensor, x: Tensor, delta: Tensor | None, decay: float, round: int
    ) -> None:
        """x = decay x + delta; encode it and leave the error."""
        batch, kernel = self._batch, self._kernel(x.device)
        if kernel is not None:
            records, shape = out.view(batch.rows, -1), (batch.rows, batch.columns)
            numbers, added = x.view(shape), None if delta is None else delta.view(shape)
            if batch.across:
                kernel.encode_blocks(numbers, records, batch.across, delta=added, decay=decay)
            else:
                kernel.encode(numbers, records, delta=added, decay=decay)
            return
        if delta is not None:
            x.mul_(decay).add_(delta)
        rows = batch.rows_of(x)
        records, sent = self._format.write(rows, self._key(round))
        out.view(batch.rows, -1).copy_(records)
        sent.add_to(rows, weight=-1.0)
        batch.put_rows(x, rows)

    def add_to(
        self, out: Tensor, payloads: Sequence[Tensor], *, weight: float, round: int = 0
    ) -> None:
        part = self._coefficient_rows(out)
        self._add(part, payloads, weight, round)
        self._put_coefficients(out, part)

    def _add(self, rows: Tensor, payloads: Sequence[Tensor], weight: float, round: int) -> None:
        kernel = self._kernel(rows.device)
        if kernel is not None:
            kernel.add_to(rows, self._records(payloads), weight=weight)
            return
        for numbers in self._read(payloads, round):
            numbers.add_to(rows, weight=weight)

    def add_counted(
        self,
        out: Tensor,
        senders: Tensor,
        payloads: Sequence[Tensor],
        *,
        weight: float,
        round: int = 0,
    ) -> None:
        part, counted = self._coefficient_rows(out), self._coefficient_rows(senders)
        kernel = self._kernel(out.device)
        if kernel is not None:
            kernel.add_counted(part, counted, self._records(payloads), weight=weight)
        else:
            for numbers in self._read(payloads, round):
                numbers.add_to(part, weight=weight)
                numbers.count_to(counted)
        self._put_coefficients(out, part)
        self._put_coefficients(senders, counted)

    def largest(self, payload: Tensor, round: int = 0) -> Tensor:
        kernel, (records,) = self._kernel(payload.device), self._records([payload])
        if kernel is not None:
            return kernel.largest(records)
        return self._format.largest(records, self._batch.columns, self._key(round))

    def squared_norm(self, payload: Tensor, round: int = 0) -> Tensor:
        (numbers,) = self._read([payload], round)
        return squared_norm_of(numbers.values)

    def to_vector(self, coefficients: Tensor) -> Tensor:
        if self._transform is None:
            return coefficients
        rows = self._coefficient_rows(coefficients)
        self._batch.put_rows(coefficients, self._transform.inverse(rows, self._batch.shape))
        return coefficients

    def _coefficient_rows(self, x: Tensor) -> Tensor:
        """The rows of coefficients in `x`: those of a transform lie record by record."""
        return x.view(self._batch.rows, -1) if self._transform else self._batch.rows_of(x)

    def _put_coefficients(self, x: Tensor, rows: Tensor) -> None:
        if self._transform is None:
            self._batch.put_rows(x, rows)

    def _read(self, payloads: Sequence[Tensor], round: int) -> Iterator[Decoded]:
        return self._format.read(self._records(payloads), self._batch.columns, self._key(round))

    def _records(self, payloads: Sequence[Tensor]) -> list[Tensor]:
        for payload in payloads:
            check_payload(self, payload)
        return [payload.view(self._batch.rows, -1) for payload in payloads]

    def _key(self, round: int) -> RoundKey:
        return RoundKey(round=round, row=self._row)


class GroupedCodec(Codec):
    """A codec that writes one record per row of a grouping, as it is or after a transform."""

    groups: Grouping
    transform: Transform | None

    @abstractmethod
    def row_format(self) -> RowFormat:
        """The format of a row."""

    def payload_nbytes(self, layout: Layout) -> int:
        """Rows times the bytes of a record, which depend on the length of a row alone."""
        written = self.row_format()
        return sum(
            rows * written.for_columns(columns).nbytes(columns)
            for section in self.groups.row_counts(layout)
            for rows, columns in section
        )

    @property
    def id(self) -> str:
        """The row format's id, then the grouping's, then the transform's if there is one."""
        plain = f"{self.row_format().id}/{self.groups.id}"
        return plain if self.transform is None else f"{plain}/{self.transform.id}"

    @property
    def sharding_loss(self) -> str | None:
        """With `Tensors`, a shard's piece of a tensor gets a record of its own."""
        if not self.groups.spans_tensors:
            return None
        return "scales or places of a whole tensor are chosen anew for each shard's piece of it"

    def bind(self, layout: Layout, *, device: torch.device | None = None) -> BoundCodec:
        """Lay the rows of every parameter into batches."""
        pieces: list[CodecPiece] = []
        end = row = 0
        for batch in self.groups.batches(layout, block_numel(device)):
            codec = _RowsCodec(self, batch, row)
            begin, end, row = end, end + codec.nbytes, row + batch.rows
            pieces.append(CodecPiece(part=batch.part, codec=codec, where=slice(begin, end)))
        return PiecewiseCodec(self.id, layout, pieces)
