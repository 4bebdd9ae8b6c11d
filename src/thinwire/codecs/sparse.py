"""Sparse codecs, which send k numbers of every row: the largest, or k at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.blocks import block_numel, joined
from thinwire.codecs.base import (
    BoundCodec,
    CodecPiece,
    PiecewiseCodec,
    check_payload,
    squared_norm_of,
)
from thinwire.codecs.bits import elias_fano_nbytes, pack_indices, unpack_indices
from thinwire.codecs.grouping import Chunks, Grouping, RowBatch
from thinwire.codecs.kernels.base import TopKSpec
from thinwire.codecs.row_format import (
    Decoded,
    GroupedCodec,
    RoundKey,
    RowFormat,
    SparseRows,
)
from thinwire.codecs.selection import largest, random_places
from thinwire.codecs.transforms import Transform
from thinwire.codecs.values import SignLevels, SignMean, Values
from thinwire.errors import ConfigurationError
from thinwire.fragments.layout import CHUNK, Layout


def k_for_density(density: float) -> int:
    """k of every 4096 numbers.

    Raises:
        ConfigurationError: the density is not in (0, 1], or rounds to 0 of 4096.

    >>> k_for_density(1 / 64)
    64
    """
    k = round(density * CHUNK) if 0 < density <= 1 else 0
    if k < 1:
        raise ConfigurationError(
            f"send a density of {density}",
            because=f"that is not between 1 and {CHUNK} of every {CHUNK} numbers",
            do=f"pass a density from 1/{CHUNK} to 1, such as 1/64",
        )
    return k


def _check_k(k: int) -> None:
    if not 1 <= k <= CHUNK:
        raise ConfigurationError(
            f"send k={k} of every {CHUNK} numbers",
            because=f"a chunk has {CHUNK} numbers, and at least one of them must be sent",
            do=f"pass 1 <= k <= {CHUNK}",
        )


def _k_of(k: int, columns: int) -> int:
    """k of 4096, scaled to a row of `columns` numbers: rounded half up, at least 1."""
    return max(1, (2 * k * columns + CHUNK) // (2 * CHUNK))


@dataclass(frozen=True, kw_only=True, slots=True)
class _TopKRows(RowFormat):
    """Elias-Fano coded places of the k largest numbers, then their values."""

    k: int
    values: Values

    @property
    def id(self) -> str:
        return f"topk-{self.k}/{self.values.id}"

    @property
    def verbatim(self) -> RowFormat:
        return self.values.verbatim

    def nbytes(self, columns: int) -> int:
        k = _k_of(self.k, columns)
        return elias_fano_nbytes(columns, k) + self.values.nbytes(k)

    def kernel_spec(self) -> TopKSpec | None:
        if not isinstance(self.values, SignLevels | SignMean):
            return None
        two_levels = isinstance(self.values, SignLevels)
        return TopKSpec(nbytes=self.nbytes(CHUNK), k=self.k, two_levels=two_levels)

    def write(self, x: Tensor, key: RoundKey) -> tuple[Tensor, SparseRows]:
        del key
        columns = x.shape[1]
        indices = largest(x, _k_of(self.k, columns))
        packed, kept = self.values.write(x.gather(1, indices))
        record = torch.cat([pack_indices(indices, columns), packed], 1)
        return record, SparseRows(indices=indices, values=kept)

    def read(self, records: Sequence[Tensor], columns: int, key: RoundKey) -> Iterator[SparseRows]:
        del key
        if not records:
            return
        rows, k = len(records[0]), _k_of(self.k, columns)
        # All workers' records together: they are small, and each call costs some microseconds.
        stacked = torch.cat(list(records))
        split = elias_fano_nbytes(columns, k)
        indices = unpack_indices(stacked[:, :split], columns, k)
        values = self.values.read(stacked[:, split:], k)
        for i, v in zip(indices.split(rows), values.split(rows), strict=True):
            yield SparseRows(indices=i, values=v)


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK(GroupedCodec):
    """The k numbers of largest magnitude of every 4096, exactly, with Elias-Fano coded places.

    A row of another length n sends k n / 4096 of them, rounded, and at least one.

    Args:
        k: of every 4096 numbers.
        values: how the kept numbers are written: `SignMean` (1 bit), `SignLevels` (2 bits),
            `TensorLevels` (2 bits, the published code), `BF16` or `F32`.
        groups: rows: `Chunks`, `Blocks` (64x64) or `Tensors` (global Top-k).
        transform: of rows: `DCT` or `Hadamard`; then k coefficients are sent.

    Raises:
        ConfigurationError: k is not in 1..4096, or values that span rows with a transform.

    Source: SparseLoCo (arXiv 2508.15706), Top-k per chunk.

    Differs: `SignLevels` by default, in place of the 2-bit statistical quantiser over a tensor's
    kept values, which is `TensorLevels`.

    >>> 8 * TopK(k=64).nbytes(4096) / 4096
    0.1640625
    """

    k: int = 64
    values: Values = field(default_factory=SignLevels)
    groups: Grouping = field(default_factory=Chunks)
    transform: Transform | None = field(default=None, metadata={"describe_default": False})

    def __post_init__(self) -> None:
        _check_k(self.k)
        if self.values.spans_rows and self.transform is not None:
            raise ConfigurationError(
                f"send coefficients of {self.transform.id} as {self.values.id}",
                because="such levels are of all rows of a tensor, and a transform is of each row",
                do="take SignLevels, whose levels are of a row, or leave the transform out",
            )

    @property
    def sharding_loss(self) -> str | None:
        """The mean of K workers has up to K k numbers, and only k of them are sent on."""
        if self.k == CHUNK:
            return None
        return (
            f"workers send numbers at different places, and of their mean only {self.k} of every "
            f"{CHUNK} are sent on"
        )

    @property
    def is_sparse(self) -> bool:
        """Whether k is below 4096."""
        return self.k < CHUNK

    def row_format(self) -> RowFormat:
        """Places and values."""
        return _TopKRows(k=self.k, values=self.values)

    def payload_nbytes(self, layout: Layout) -> int:
        """Of each section the smaller: sparse with values of all rows as one, or plain numbers."""
        if not self.values.spans_rows:
            return GroupedCodec.payload_nbytes(self, layout)
        plain = self.values.verbatim
        return sum(
            min(
                sum(rows * plain.nbytes(columns) for rows, columns in section),
                sum(
                    rows * elias_fano_nbytes(columns, _k_of(self.k, columns))
                    for rows, columns in section
                )
                + self.values.nbytes(sum(rows * _k_of(self.k, n) for rows, n in section)),
            )
            for section in filter(None, self.groups.row_counts(layout))
        )

    def bind(self, layout: Layout, *, device: torch.device | None = None) -> BoundCodec:
        """Lay the rows of every parameter into batches."""
        if not self.values.spans_rows:
            return GroupedCodec.bind(self, layout, device=device)
        pieces: list[CodecPiece] = []
        end = 0
        for batches in filter(None, self.groups.sections(layout, block_numel(device))):
            codec = _SectionCodec(self, batches)
            begin, end = end, end + codec.nbytes
            part = joined([batch.part for batch in batches])
            pieces.append(CodecPiece(part=part, codec=codec, where=slice(begin, end)))
        return PiecewiseCodec(self.id, layout, pieces)


class _SectionCodec(BoundCodec):
    """The places of every row of a parameter, then the kept values of all its rows as one."""

    def __init__(self, codec: TopK, batches: Sequence[RowBatch]) -> None:
        self._k, self._values, self._plain = codec.k, codec.values, codec.values.verbatim
        # Each batch, and where it lies in the section's vector.
        self._batches: list[tuple[RowBatch, slice]] = []
        numel = 0
        for batch in batches:
            self._batches.append((batch, slice(numel, numel + batch.part.numel)))
            numel += batch.part.numel
        plain = sum(map(self._plain_nbytes, batches))
        kept = sum(rows * k for rows, k in map(self._shape, batches))
        sparse = sum(map(self._places_nbytes, batches)) + self._values.nbytes(kept)
        self._is_sparse = sparse < plain
        super().__init__(codec.id, Layout.vector(numel), min(sparse, plain))

    def encode_to(self, out: Tensor, x: Tensor, round: int = 0) -> None:
        del round
        self._write(out, x)

    def encode_residual_to(self, out: Tensor, x: Tensor, round: int = 0) -> None:
        del round
        for (batch, where), sent in zip(self._batches, self._write(out, x), strict=True):
            rows = batch.rows_of(x[where])
            sent.add_to(rows, weight=-1.0)
            batch.put_rows(x[where], rows)

    def _write(self, out: Tensor, x: Tensor) -> list[Decoded]:
        rows = [batch.rows_of(x[where]) for batch, where in self._batches]
        records, sent = (self._sparse if self._is_sparse else self._verbatim)(rows)
        torch.cat([record.view(-1) for record in records], out=out)
        return sent

    def _sparse(self, parts: Sequence[Tensor]) -> tuple[list[Tensor], list[Decoded]]:
        places = [largest(part, _k_of(self._k, part.shape[1])) for part in parts]
        pairs = list(zip(parts, places, strict=True))
        chosen = torch.cat([part.gather(1, where).view(1, -1) for part, where in pairs], 1)
        packed, kept = self._values.write(chosen)
        records = [pack_indices(where, part.shape[1]) for part, where in pairs]
        return [*records, packed], self._rows(places, kept)

    def _verbatim(self, parts: Sequence[Tensor]) -> tuple[list[Tensor], list[Decoded]]:
        written = [self._plain.write(part, RoundKey()) for part in parts]
        return [record for record, _ in written], [sent for _, sent in written]

    def add_to(
        self, out: Tensor, payloads: Sequence[Tensor], *, weight: float, round: int = 0
    ) -> None:
        del round
        for payload in payloads:
            for (batch, where), numbers in zip(self._batches, self._read(payload), strict=True):
                rows = batch.rows_of(out[where])
                numbers.add_to(rows, weight=weight)
                batch.put_rows(out[where], rows)

    def largest(self, payload: Tensor, round: int = 0) -> Tensor:
        del round
        return torch.stack([numbers.values.abs().amax() for numbers in self._read(payload)]).amax()

    def squared_norm(self, payload: Tensor, round: int = 0) -> Tensor:
        del round
        norms = [squared_norm_of(numbers.values) for numbers in self._read(payload)]
        return torch.stack(norms).sum()

    def _read(self, payload: Tensor) -> list[Decoded]:
        check_payload(self, payload)
        return self._read_sparse(payload) if self._is_sparse else self._read_verbatim(payload)

    def _read_sparse(self, payload: Tensor) -> list[Decoded]:
        sizes = [self._places_nbytes(batch) for batch, _ in self._batches]
        *records, packed = payload.split([*sizes, len(payload) - sum(sizes)])
        places = [
            unpack_indices(
                record.view(batch.rows, -1), batch.columns, _k_of(self._k, batch.columns)
            )
            for record, (batch, _) in zip(records, self._batches, strict=True)
        ]
        kept = self._values.read(packed[None], sum(p.numel() for p in places))
        return self._rows(places, kept)

    def _read_verbatim(self, payload: Tensor) -> list[Decoded]:
        sizes = [self._plain_nbytes(batch) for batch, _ in self._batches]
        decoded: list[Decoded] = []
        for (batch, _), record in zip(self._batches, payload.split(sizes), strict=True):
            decoded += self._plain.read([record.view(batch.rows, -1)], batch.columns, RoundKey())
        return decoded

    def _rows(self, places: Sequence[Tensor], kept: Tensor) -> list[Decoded]:
        """`kept` [1, all of a section] at the places [rows, k] of each batch."""
        parts = kept[0].split([p.numel() for p in places])
        pairs = zip(places, parts, strict=True)
        return [SparseRows(indices=p, values=part.view_as(p)) for p, part in pairs]

    def _shape(self, batch: RowBatch) -> tuple[int, int]:
        return batch.rows, _k_of(self._k, batch.columns)

    def _places_nbytes(self, batch: RowBatch) -> int:
        rows, k = self._shape(batch)
        return rows * elias_fano_nbytes(batch.columns, k)

    def _plain_nbytes(self, batch: RowBatch) -> int:
        return batch.rows * self._plain.nbytes(batch.columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RandomKRows(RowFormat):
    """Values alone: every worker computes the places from the seed and the round."""

    k: int
    values: Values
    seed: int

    @property
    def id(self) -> str:
        return f"randomk-{self.k}-seed-{self.seed}/{self.values.id}"

    @property
    def verbatim(self) -> RowFormat:
        return self.values.verbatim

    def nbytes(self, columns: int) -> int:
        return self.values.nbytes(_k_of(self.k, columns))

    def write(self, x: Tensor, key: RoundKey) -> tuple[Tensor, SparseRows]:
        rows, columns = x.shape
        places = self._places(rows, columns, key).to(x.device)
        packed, kept = self.values.write(x.gather(1, places))
        return packed, SparseRows(indices=places, values=kept)

    def read(self, records: Sequence[Tensor], columns: int, key: RoundKey) -> Iterator[SparseRows]:
        if not records:
            return
        places = self._places(len(records[0]), columns, key).to(records[0].device)
        for packed in records:
            kept = self.values.read(packed, places.shape[1])
            yield SparseRows(indices=places, values=kept)

    def _places(self, rows: int, columns: int, key: RoundKey) -> Tensor:
        """The places of the first row, moved on by one from row to row: int64 [rows, k]."""
        k = _k_of(self.k, columns)
        first = random_places(columns=columns, k=k, seed=self.seed, round_number=key.round)
        return (first + key.row + torch.arange(rows)[:, None]) % columns


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomK(GroupedCodec):
    """k numbers of every 4096 at places drawn from a shared seed and the round, which are not sent.

    A baseline: it keeps k / 4096 of the energy where Top-k keeps many times that.

    Args:
        k: of every 4096 numbers.
        seed: shared by all workers.
        values: how the kept numbers are written; not `TensorLevels`.
        groups: rows: `Chunks`, `Blocks` or `Tensors`.
        transform: of rows: `DCT` or `Hadamard`; then k coefficients are sent.

    Raises:
        ConfigurationError: k is not in 1..4096, the seed not in 0..2^63 - 1, or values span rows.

    >>> RandomK(k=64).nbytes(4096)
    20
    """

    k: int = 64
    seed: int = 0
    values: Values = field(default_factory=SignLevels)
    groups: Grouping = field(default_factory=Chunks)
    transform: Transform | None = field(default=None, metadata={"describe_default": False})

    def __post_init__(self) -> None:
        _check_k(self.k)
        if not 0 <= self.seed < 2**63:
            raise ConfigurationError(
                f"choose places with seed {self.seed}",
                because="a seed must be a non-negative number of 63 bits",
                do="pass 0 <= seed < 2**63",
            )
        if self.values.spans_rows:
            raise ConfigurationError(
                f"write values at random places as {self.values.id}",
                because="they share levels over all rows of a tensor, which TopK alone writes",
                do="pass SignLevels(), which has levels for each row",
            )

    @property
    def is_sparse(self) -> bool:
        """Whether k is below 4096."""
        return self.k < CHUNK

    def row_format(self) -> RowFormat:
        """The kept values alone."""
        return _RandomKRows(k=self.k, values=self.values, seed=self.seed)
