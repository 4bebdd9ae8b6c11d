"""Which numbers share a record (a scale, a table of levels, a Top-k): the rows of a codec.

A grouping turns a layout into batches, each a matrix [rows, columns]; every row becomes one record.
A payload holds the records of all batches in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from thinwire.blocks import VectorPart, block_numel
from thinwire.fragments.layout import CHUNK, Layout, Segment

_SIDE = 64
_BATCH = block_numel()


class RowBatch:
    """A part of a vector as a matrix whose rows are records.

    Args:
        part: places in the vector.
        rows: number of records.
        columns: numbers in a record.
        is_block: whether a record is a 64x64 block.
        across: blocks side by side, where the rows of a matrix have to be cut into blocks; 0 where
            the numbers of a record are adjacent.
    """

    def __init__(
        self, part: VectorPart, rows: int, columns: int, *, is_block: bool = False, across: int = 0
    ) -> None:
        self.part, self.rows, self.columns, self.across = part, rows, columns, across
        self.shape = (_SIDE, _SIDE) if is_block else (columns,)

    def rows_of(self, x: Tensor) -> Tensor:
        """The numbers of the part, `x` [part.numel], as [rows, columns]; may share their memory."""
        if not self.across:
            return x.view(self.rows, self.columns)
        return self._tiles(x).reshape(self.rows, self.columns)

    def put_rows(self, x: Tensor, rows: Tensor) -> None:
        """Write `rows`, a matrix that `rows_of` returned and the caller changed, back into `x`."""
        if self.across:
            self._tiles(x).copy_(rows.view(-1, self.across, _SIDE, _SIDE))
        elif rows.data_ptr() != x.data_ptr():
            x.view(self.rows, self.columns).copy_(rows)

    def _tiles(self, x: Tensor) -> Tensor:
        return x.view(-1, _SIDE, self.across, _SIDE).transpose(1, 2)


class Grouping(ABC):
    """A rule for which numbers share a record."""

    id: str
    """Part of the codec's id."""

    spans_tensors: bool = False
    """True if a record covers a whole parameter, whatever its size."""

    @abstractmethod
    def sections(self, layout: Layout, numel: int = _BATCH) -> Iterator[list[RowBatch]]:
        """The batches of each parameter, then those of leftovers that parameters share.

        Args:
            layout: layout of the vector; each element of a segment is in exactly one batch.
            numel: most elements of a batch, unless a record is larger; has no effect on the bytes.
        """

    def batches(self, layout: Layout, numel: int = _BATCH) -> Iterator[RowBatch]:
        """The same rows in the same order, without boundaries between parameters."""
        for section in self.sections(layout, numel):
            yield from section


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensors(Grouping):
    """One record per parameter.

    >>> [b.columns for b in Tensors().batches(Layout.of({"w": (3, 2), "b": (3,)}))]
    [6, 3]
    """

    id = "tensor"

    spans_tensors = True

    def sections(self, layout: Layout, numel: int = _BATCH) -> Iterator[list[RowBatch]]:
        """A batch of one row per parameter."""
        for s in layout.segments:
            yield [RowBatch(VectorPart([(s.start, s.stop)]), 1, s.numel)] if s.numel else []


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows(Grouping):
    """One record per row: the first dimension counts rows, a vector is a single row.

    >>> [(b.rows, b.columns) for b in Rows().batches(Layout.of({"w": (3, 2), "b": (3,)}))]
    [(3, 2), (1, 3)]
    """

    id = "row"

    def sections(self, layout: Layout, numel: int = _BATCH) -> Iterator[list[RowBatch]]:
        """Batches of whole rows of a parameter."""
        for s in layout.segments:
            rows = _strips([(s.start, s.stop)], s.matrix[1], numel) if s.numel else ()
            yield list(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks(Grouping):
    """Runs of 4096 elements of a parameter; the leftovers of all parameters share further chunks.

    First come the whole chunks of every parameter of 4096 elements or more. The leftovers (the ends
    of those, and all smaller parameters) follow, concatenated and cut into chunks; the last chunk
    may be shorter.

    >>> [(b.rows, b.columns) for b in Chunks().batches(Layout.of({"w": (9000,), "b": (3,)}))]
    [(2, 4096), (1, 811)]
    """

    id = "chunk"

    def sections(self, layout: Layout, numel: int = _BATCH) -> Iterator[list[RowBatch]]:
        """The whole chunks of each parameter, then the leftovers."""
        whole, left = self._split(layout)
        for ranges in (*([each] for each in whole), left):
            yield list(_strips(ranges, CHUNK, numel))

    def batches(self, layout: Layout, numel: int = _BATCH) -> Iterator[RowBatch]:
        """Runs of whole chunks, then the leftovers: neighbouring parameters share batches."""
        for ranges in self._split(layout):
            yield from _strips(ranges, CHUNK, numel)

    def _split(self, layout: Layout) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The ranges of whole chunks, and those of leftovers."""
        ends = [(s, s.stop - s.numel % CHUNK) for s in layout.segments]
        return [(s.start, end) for s, end in ends], [(end, s.stop) for s, end in ends]


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks(Grouping):
    """64x64 blocks of matrices; edges, vectors and other leftovers share chunks of 4096.

    The blocks of a matrix follow each other row by row, and so do the elements of a block.

    Source: SparseLoCo (arXiv 2508.15706), 2-D tensors.

    Differs: ragged edges share chunks, where the released code looks for a divisor.

    >>> [(b.rows, b.columns) for b in Blocks().batches(Layout.of({"w": (128, 65)}))]
    [(2, 4096), (1, 128)]
    """

    id = "block"

    def sections(self, layout: Layout, numel: int = _BATCH) -> Iterator[list[RowBatch]]:
        """The blocks of each parameter, then the chunks of the leftovers."""
        for s in layout.segments:
            yield list(self._blocks(s, numel))
        left = [each for s in layout.segments for each in self._left(s)]
        yield list(_strips(left, CHUNK, numel))

    def _blocks(self, s: Segment, numel: int) -> Iterator[RowBatch]:
        rows, width = s.matrix
        down, across = rows // _SIDE, width // _SIDE
        step = max(1, numel // (max(1, across) * CHUNK))
        for first in range(0, down if across else 0, step):
            count, start = min(step, down - first), s.start + first * _SIDE * width
            ranges = [(start, start + count * _SIDE * width)]
            if across * _SIDE < width:
                ranges = [(row, row + across * _SIDE) for row in range(*ranges[0], width)]
            tiled = across if across > 1 else 0  # 64 columns: each block is one contiguous run
            part = VectorPart(ranges)
            yield RowBatch(part, count * across, CHUNK, is_block=True, across=tiled)

    def _left(self, s: Segment) -> Iterator[tuple[int, int]]:
        """The right edge row by row, then the rows below."""
        rows, columns = s.matrix
        covered = columns // _SIDE * _SIDE
        below = rows // _SIDE * _SIDE if covered else 0
        for row in range(below if covered < columns else 0):
            yield s.start + row * columns + covered, s.start + (row + 1) * columns
        yield s.start + below * columns, s.stop


def _strips(ranges: Iterable[tuple[int, int]], columns: int, numel: int) -> Iterator[RowBatch]:
    """Rows over the concatenated `ranges`, a batch at a time; the last row may be short.

    Short ranges share batches: a batch costs some microseconds, whatever its size.
    """
    waiting = sum(b - a for a, b in ranges)
    queue = [(a, b) for a, b in ranges if a < b][::-1]
    step = max(1, numel // columns)
    while waiting:
        width = min(columns, waiting)
        rows = min(step, waiting // width)
        waiting -= rows * width
        taken, missing = list[tuple[int, int]](), rows * width
        while missing:
            a, b = queue.pop()
            middle = min(b, a + missing)
            taken.append((a, middle))
            missing -= middle - a
            if middle < b:
                queue.append((middle, b))
        yield RowBatch(VectorPart(taken), rows, width)
