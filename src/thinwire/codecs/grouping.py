"""Which numbers share a record (a scale, a table of levels, a Top-k): the rows of a codec.

A grouping turns a layout into batches, each a matrix [rows, columns]; every row becomes one record.
A payload holds the records of all batches in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from thinwire.blocks import Ranges, Span, VectorPart, block_numel
from thinwire.fragments.layout import CHUNK, Layout, Segment

_SIDE = 64
_BATCH = block_numel()


class RowBatch:
    """A part of a vector as a matrix whose rows are records.

    Args:
        part: of the vector.
        rows: records.
        columns: numbers in a record.
        is_block: whether a record is a block of 64x64.
        across: blocks side by side, where the part lies row by row of a matrix and has to be cut
            into blocks; 0 where a record's numbers follow each other already.
    """

    def __init__(
        self,
        part: VectorPart,
        rows: int,
        columns: int,
        *,
        is_block: bool = False,
        across: int = 0,
    ) -> None:
        self.part, self.rows, self.columns, self.across = part, rows, columns, across
        self.shape = (_SIDE, _SIDE) if is_block else (columns,)

    def rows_of(self, x: Tensor) -> Tensor:
        """The numbers of the part, `x` [part.numel], as [rows, columns]; it may share memory."""
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


class _Tiles(VectorPart):
    """Some rows of 64x64 blocks of a matrix that has further columns at its right, block by block.

    Args:
        start: the first block's first place.
        down: rows of blocks.
        across: blocks side by side.
        width: columns of the matrix.
    """

    def __init__(self, start: int, *, down: int, across: int, width: int) -> None:
        self._down, self._across, self._width = down, across, width
        rows = down * _SIDE
        numel = rows * across * _SIDE
        super().__init__(start, start + (rows - 1) * width + across * _SIDE, numel)

    def read(self, flat: Tensor, origin: int = 0) -> Tensor:
        return self._tiles(flat, origin).reshape(self.numel)

    def write(self, flat: Tensor, x: Tensor, origin: int = 0) -> None:
        self._tiles(flat, origin).copy_(x.view(self._down, self._across, _SIDE, _SIDE))

    def _shift(self, by: int) -> VectorPart:
        return _Tiles(self.start + by, down=self._down, across=self._across, width=self._width)

    def _tiles(self, flat: Tensor, origin: int) -> Tensor:
        side = self._width
        return flat.as_strided(
            (self._down, self._across, _SIDE, _SIDE),
            (_SIDE * side, _SIDE, side, 1),
            flat.storage_offset() + self.start - origin,
        )


class Grouping(ABC):
    """A rule for which numbers share a record."""

    def row_counts(self, layout: Layout) -> Iterator[list[tuple[int, int]]]:
        """The rows of `sections` without their places: of each section, (rows, columns).

        All sizes follow from these. The groupings of this package count and lay out nothing.
        """
        for section in self.sections(layout):
            yield [(batch.rows, batch.columns) for batch in section]

    id: str
    """Part of the codec's id."""

    spans_tensors: bool = False
    """Whether a record covers a whole parameter, whatever its size: by default not."""

    @abstractmethod
    def batches(self, layout: Layout, numel: int = _BATCH) -> Iterator[RowBatch]:
        """The batches of a layout; each element of its segments is in exactly one of them.

        Args:
            layout: of the vector.
            numel: of a batch at most, unless a record is larger. It decides no bytes.
        """

    def sections(self, layout: Layout, numel: int = _BATCH) -> Iterator[list[RowBatch]]:
        """The same rows in the same order: a list for each parameter, and one for its leftovers.

        By default without leftovers.
        """
        for s in layout.segments:
            yield list(self.batches(Layout(segments=(s,), numel=layout.numel), numel))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensors(Grouping):
    """One record per parameter.

    >>> [b.columns for b in Tensors().batches(Layout.of({"w": (3, 2), "b": (3,)}))]
    [6, 3]
    """

    def row_counts(self, layout: Layout) -> Iterator[list[tuple[int, int]]]:
        """A row per parameter."""
        for s in layout.segments:
            yield [(1, s.numel)] if s.numel else []

    id = "tensor"

    spans_tensors = True

    def batches(self, layout: Layout, numel: int = _BATCH) -> Iterator[RowBatch]:
        """A batch of one row per parameter."""
        del numel
        for s in layout.segments:
            if s.numel:
                yield RowBatch(Span(s.start, s.stop), 1, s.numel)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows(Grouping):
    """One record per row: the first dimension counts rows, a vector is a single one.

    >>> [(b.rows, b.columns) for b in Rows().batches(Layout.of({"w": (3, 2), "b": (3,)}))]
    [(3, 2), (1, 3)]
    """

    def row_counts(self, layout: Layout) -> Iterator[list[tuple[int, int]]]:
        """The rows of each parameter."""
        for s in layout.segments:
            yield [s.matrix] if s.numel else []

    id = "row"

    def batches(self, layout: Layout, numel: int = _BATCH) -> Iterator[RowBatch]:
        """Batches of whole rows of a parameter."""
        for s in layout.segments:
            if s.numel:
                yield from _strips([(s.start, s.stop)], s.matrix[1], numel)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks(Grouping):
    """Runs of 4096 elements of a parameter; the leftovers of all parameters share further chunks.

    First the whole chunks of every parameter of 4096 elements or more. Then the leftovers (the ends
    of those, and all smaller parameters), laid one after the other and cut into chunks, of which
    the last may be shorter.

    >>> [(b.rows, b.columns) for b in Chunks().batches(Layout.of({"w": (9000,), "b": (3,)}))]
    [(2, 4096), (1, 811)]
    """

    def row_counts(self, layout: Layout) -> Iterator[list[tuple[int, int]]]:
        """The whole chunks of each parameter, then those of the leftovers."""
        left = 0
        for s in layout.segments:
            yield _chunks_in(s.numel - s.numel % CHUNK)
            left += s.numel % CHUNK
        yield _chunks_in(left)

    id = "chunk"

    def batches(self, layout: Layout, numel: int = _BATCH) -> Iterator[RowBatch]:
        """Runs of whole chunks, then the leftovers."""
        whole: list[tuple[int, int]] = []
        left: list[tuple[int, int]] = []
        for s in layout.segments:
            end = s.start + s.numel // CHUNK * CHUNK
            _append(whole, s.start, end)
            _append(left, end, s.stop)
        yield from _strips(whole, CHUNK, numel)
        yield from _strips(left, CHUNK, numel)

    def sections(self, layout: Layout, numel: int = _BATCH) -> Iterator[list[RowBatch]]:
        """The whole chunks of each parameter, then the leftovers of all."""
        left: list[tuple[int, int]] = []
        for s in layout.segments:
            end = s.start + s.numel // CHUNK * CHUNK
            yield list(_strips([(s.start, end)], CHUNK, numel))
            _append(left, end, s.stop)
        yield list(_strips(left, CHUNK, numel))


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks(Grouping):
    """64x64 blocks of matrices; edges, vectors and other leftovers share chunks of 4096.

    The blocks of a matrix follow each other row by row, and so do the elements of a block.

    Source: SparseLoCo (arXiv 2508.15706), 2-D tensors.

    Differs: ragged edges share chunks, where the released code looks for a divisor.

    >>> [(b.rows, b.columns) for b in Blocks().batches(Layout.of({"w": (128, 65)}))]
    [(2, 4096), (1, 128)]
    """

    def row_counts(self, layout: Layout) -> Iterator[list[tuple[int, int]]]:
        """The blocks of each parameter, then the chunks of the leftovers."""
        left = 0
        for s in layout.segments:
            rows, columns = s.matrix
            inside = (rows // _SIDE) * (columns // _SIDE) * CHUNK
            yield _chunks_in(inside)
            left += s.numel - inside
        yield _chunks_in(left)

    id = "block"

    def batches(self, layout: Layout, numel: int = _BATCH) -> Iterator[RowBatch]:
        """Rows of blocks, then the leftovers."""
        for section in self.sections(layout, numel):
            yield from section

    def sections(self, layout: Layout, numel: int = _BATCH) -> Iterator[list[RowBatch]]:
        """The blocks of each parameter, then the leftovers of all."""
        left: list[tuple[int, int]] = []
        for s in layout.segments:
            yield list(_blocks(s, numel))
            for start, stop in _edges(s):
                _append(left, start, stop)
        yield list(_strips(left, CHUNK, numel))


def _chunks_in(numel: int) -> list[tuple[int, int]]:
    """(rows, columns) of `numel` numbers cut into chunks, of which the last may be shorter."""
    whole, rest = divmod(numel, CHUNK)
    return [(rows, columns) for rows, columns in ((whole, CHUNK), (1, rest)) if rows and columns]


def _strips(ranges: Iterable[tuple[int, int]], columns: int, numel: int) -> Iterator[RowBatch]:
    """Rows over `ranges` laid one after the other, a batch at a time, a short row last.

    Short ranges share batches: a batch costs some microseconds, whatever is in it.
    """
    waiting = sum(b - a for a, b in ranges)
    queue = list(reversed([(a, b) for a, b in ranges if a < b]))
    step = max(1, numel // columns)
    while waiting:
        width = min(columns, waiting)
        rows = min(step, waiting // width)
        taken = _take(queue, rows * width)
        waiting -= rows * width
        part = Span(*taken[0]) if len(taken) == 1 else Ranges(taken)
        yield RowBatch(part, rows, width)


def _blocks(s: Segment, numel: int) -> Iterator[RowBatch]:
    rows, width = s.matrix
    down, across = rows // _SIDE, width // _SIDE
    if not across:
        return
    step = max(1, numel // (across * CHUNK))
    for first in range(0, down, step):
        count, start = min(step, down - first), s.start + first * _SIDE * width
        if across * _SIDE == width:
            part: VectorPart = Span(start, start + count * _SIDE * width)
            tiled = across if across > 1 else 0  # 64 columns: each block is one contiguous run
            yield RowBatch(part, count * across, CHUNK, is_block=True, across=tiled)
        else:
            part = _Tiles(start, down=count, across=across, width=width)
            yield RowBatch(part, count * across, CHUNK, is_block=True)


def _edges(s: Segment) -> Iterator[tuple[int, int]]:
    """Ranges of `s` outside its whole blocks: the right edge row by row, then the rows below."""
    rows, columns = s.matrix
    covered = columns // _SIDE * _SIDE
    below = rows // _SIDE * _SIDE if covered else 0
    for row in range(below if covered < columns else 0):
        yield s.start + row * columns + covered, s.start + (row + 1) * columns
    yield s.start + below * columns, s.stop


def _append(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    if start == stop:
        return
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], stop)
    else:
        ranges.append((start, stop))


def _take(queue: list[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    """Remove the first `numel` elements from the ranges in `queue` (last range first)."""
    taken: list[tuple[int, int]] = []
    while numel:
        a, b = queue.pop()
        middle = min(b, a + numel)
        taken.append((a, middle))
        numel -= middle - a
        if middle < b:
            queue.append((middle, b))
    return taken
