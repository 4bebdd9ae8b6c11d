"""Sparse codecs, which send k numbers of every row: the largest, or k at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.blocks import VectorPart, block_numel
from thinwire.codecs.base import BoundCodec, PiecewiseCodec, squared_norm_of
from thinwire.codecs.bits import elias_fano_sizes, pack_indices, unpack_indices
from thinwire.codecs.cast import CastSpan
from thinwire.codecs.grouping import Chunks, Grouping, RowBatch
from thinwire.codecs.levels import RoundKey
from thinwire.codecs.row_format import Decoded, GroupedCodec
from thinwire.codecs.transforms import Transform
from thinwire.codecs.values import SignLevels, SignMean, Values, largest, random_places
from thinwire.errors import check, check_whole
from thinwire.fragments.layout import CHUNK, Layout


def k_for_density(density: float) -> int:
    """The k to send of every 4096 numbers.

    Raises:
        ConfigurationError: the density is not in (0, 1], or rounds to 0 of 4096.

    >>> k_for_density(1 / 64)
    64
    """
    k = round(density * CHUNK) if 0 < density <= 1 else 0
    check(
        k >= 1,
        f"send a density of {density}",
        because=f"that is not between 1 and {CHUNK} of every {CHUNK} numbers",
        do=f"pass a density from 1/{CHUNK} to 1, such as 1/64",
    )
    return k


@dataclass(frozen=True, kw_only=True, slots=True)
class _KOfEach(GroupedCodec):
    """Sends k of every 4096 numbers."""

    k: int = 64
    values: Values = field(default_factory=SignLevels)
    groups: Grouping = field(default_factory=Chunks)
    transform: Transform | None = field(default=None, metadata={"describe_default": False})

    def __post_init__(self) -> None:
        check_whole(f"k, the numbers sent of every {CHUNK},", self.k, most=CHUNK)

    @property
    def verbatim(self) -> torch.dtype:
        """The type that the values use."""
        return self.values.verbatim

    @property
    def is_sparse(self) -> bool:
        """True for k below 4096."""
        return self.k < CHUNK

    def k_of(self, columns: int) -> int:
        """k of 4096, scaled to a row of `columns` numbers: rounded half up, at least 1."""
        return max(1, (2 * self.k * columns + CHUNK) // (2 * CHUNK))


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK(_KOfEach):
    """Exact Top-k: the k largest magnitudes of every 4096 numbers, with Elias-Fano coded places.

    A row of another length n sends k n / 4096 numbers, rounded, and at least one.

    Args:
        k: numbers sent of every 4096.
        values: how the kept numbers are written: `SignMean` (1 bit), `SignLevels` (2 bits),
            `TensorLevels` (2 bits, the published code), `BF16` or `F32`.
        groups: what forms a row: `Chunks`, `Blocks` (64x64) or `Tensors` (global Top-k).
        transform: of each row, `DCT` or `Hadamard`; then k coefficients are sent.

    Raises:
        ConfigurationError: k is not in 1..4096, or a transform comes with values that span rows.

    Source: SparseLoCo (arXiv 2508.15706), Top-k per chunk.

    Differs: `SignLevels` by default, in place of the 2-bit statistical quantiser over a tensor's
    kept values, which is `TensorLevels`.

    >>> 8 * TopK(k=64).nbytes(4096) / 4096
    0.1640625
    """

    def __post_init__(self) -> None:
        _KOfEach.__post_init__(self)
        check(
            not self.values.spans_rows or self.transform is None,
            f"send coefficients of {self.transform and self.transform.id} as {self.values.id}",
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
    def record_id(self) -> str:
        """k, then the id of the values."""
        return f"topk-{self.k}/{self.values.id}"

    def record_nbytes(self, columns: int) -> int:
        """Places, then values."""
        return self.places_nbytes(columns) + self.values.nbytes(self.k_of(columns))

    def places_nbytes(self, columns: int) -> int:
        """Bytes of the places of one row."""
        _, high_nbytes, low_nbytes = elias_fano_sizes(columns, self.k_of(columns))
        return high_nbytes + low_nbytes

    @property
    def has_kernel(self) -> bool:
        """True for values of one or two levels."""
        return isinstance(self.values, SignLevels | SignMean)

    def write(self, x: Tensor, key: RoundKey) -> Tensor:
        """Choose k numbers and encode their places and values."""
        columns = x.shape[1]
        places = largest(x, self.k_of(columns))
        packed = self.values.write(x.gather(1, places))
        return torch.cat([pack_indices(places, columns), packed], 1)

    def read(self, records: Sequence[Tensor], columns: int, key: RoundKey) -> Iterator[Decoded]:
        """Decode all workers' records at once: they are small, and each call takes microseconds."""
        rows, k, split = len(records[0]), self.k_of(columns), self.places_nbytes(columns)
        stacked = torch.cat(list(records))
        places = unpack_indices(stacked[:, :split], columns, k)
        values = self.values.read(stacked[:, split:], k)
        yield from map(Decoded, values.split(rows), places.split(rows))

    def bind(self, layout: Layout, *, device: torch.device | None = None) -> BoundCodec:
        """Gather the rows of every parameter into batches."""
        if not self.values.spans_rows:
            return GroupedCodec.bind(self, layout, device=device)
        sections = filter(None, self.groups.sections(layout, block_numel(device)))
        return PiecewiseCodec(self.id, layout, map(self._of_section, sections))

    def _of_section(self, batches: Sequence[RowBatch]) -> tuple[VectorPart, BoundCodec]:
        part = VectorPart(span for batch in batches for span in batch.part.ranges)
        codec, plain = _SectionCodec(self, batches), CastSpan(self.id, part.numel, self.verbatim)
        return part, min(plain, codec, key=lambda its: its.nbytes)


class _SectionCodec(BoundCodec):
    """Writes the places of each row of a parameter, then the kept values of all rows together."""

    def __init__(self, codec: TopK, batches: Sequence[RowBatch]) -> None:
        self._codec, self._batches = codec, batches
        self._sizes = [batch.part.numel for batch in batches]
        kept = sum(batch.rows * codec.k_of(batch.columns) for batch in batches)
        places = sum(batch.rows * codec.places_nbytes(batch.columns) for batch in batches)
        layout = Layout.vector(sum(self._sizes))
        super().__init__(codec.id, layout, places + codec.values.nbytes(kept))

    def encode_to(self, out: Tensor, x: Tensor, round: int = 0) -> None:
        codec, parts = self._codec, x.split(self._sizes)
        rows = [batch.rows_of(part) for batch, part in zip(self._batches, parts, strict=True)]
        places = [largest(part, codec.k_of(part.shape[1])) for part in rows]
        pairs = list(zip(rows, places, strict=True))
        chosen = torch.cat([part.gather(1, where).view(1, -1) for part, where in pairs], 1)
        records = [pack_indices(where, part.shape[1]) for part, where in pairs]
        records.append(codec.values.write(chosen))
        torch.cat([record.view(-1) for record in records], out=out)

    def add_to(
        self, out: Tensor, payloads: Sequence[Tensor], *, weight: float, round: int = 0
    ) -> None:
        parts = out.split(self._sizes)
        for payload in payloads:
            for batch, part, numbers in zip(self._batches, parts, self._read(payload), strict=True):
                rows = batch.rows_of(part)
                numbers.add_to(rows, weight=weight)
                batch.put_rows(part, rows)

    def largest(self, payload: Tensor, round: int = 0) -> Tensor:
        return torch.stack([numbers.values.abs().amax() for numbers in self._read(payload)]).amax()

    def squared_norm(self, payload: Tensor, round: int = 0) -> Tensor:
        norms = [squared_norm_of(numbers.values) for numbers in self._read(payload)]
        return torch.stack(norms).sum()

    def _read(self, payload: Tensor) -> list[Decoded]:
        """The numbers of each batch."""
        batches, codec = self._batches, self._codec
        sizes = [batch.rows * codec.places_nbytes(batch.columns) for batch in batches]
        *records, packed = payload.split([*sizes, len(payload) - sum(sizes)])
        places = [
            unpack_indices(record.view(b.rows, -1), b.columns, codec.k_of(b.columns))
            for record, b in zip(records, batches, strict=True)
        ]
        kept = codec.values.read(packed[None], sum(p.numel() for p in places))[0]
        parts = kept.split([p.numel() for p in places])
        return [Decoded(part.view_as(p), p) for p, part in zip(places, parts, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomK(_KOfEach):
    """k of every 4096 numbers, at places that are not sent: a shared seed and the round give them.

    A baseline: it keeps k / 4096 of the energy where Top-k keeps many times that.

    Args:
        k: numbers sent of every 4096.
        seed: shared by all workers.
        values: how the kept numbers are written; not `TensorLevels`.
        groups: what forms a row: `Chunks`, `Blocks` or `Tensors`.
        transform: of each row, `DCT` or `Hadamard`; then k coefficients are sent.

    Raises:
        ConfigurationError: k is not in 1..4096, the seed not in 0..2^63 - 1, or values span rows.

    >>> RandomK(k=64).nbytes(4096)
    20
    """

    seed: int = 0

    def __post_init__(self) -> None:
        _KOfEach.__post_init__(self)
        check_whole("the seed", self.seed, least=0, most=2**63 - 1)
        check(
            not self.values.spans_rows,
            f"write values at random places as {self.values.id}",
            because="they share levels over all rows of a tensor, which TopK alone writes",
            do="pass SignLevels(), which has levels for each row",
        )

    @property
    def record_id(self) -> str:
        """k and the seed, then the id of the values."""
        return f"randomk-{self.k}-seed-{self.seed}/{self.values.id}"

    def record_nbytes(self, columns: int) -> int:
        """Values alone: receivers know the places."""
        return self.values.nbytes(self.k_of(columns))

    def write(self, x: Tensor, key: RoundKey) -> Tensor:
        """The values at the places of the round."""
        places = self._places(len(x), x.shape[1], key).to(x.device)
        return self.values.write(x.gather(1, places))

    def read(self, records: Sequence[Tensor], columns: int, key: RoundKey) -> Iterator[Decoded]:
        """The same places for all workers."""
        places = self._places(len(records[0]), columns, key).to(records[0].device)
        for packed in records:
            yield Decoded(self.values.read(packed, places.shape[1]), places)

    def _places(self, rows: int, columns: int, key: RoundKey) -> Tensor:
        """The places of the first row, moved on by one from row to row: int64 [rows, k]."""
        k = self.k_of(columns)
        first = random_places(columns=columns, k=k, seed=self.seed, round_number=key.round)
        return (first + key.row + torch.arange(rows, device="cpu")[:, None]) % columns
