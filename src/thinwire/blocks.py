"""Vectors in blocks: a round reads and writes a fragment part by part, never as a whole.

A part is a set of places of a flat vector. Weights, anchor, feedback and payloads are read part by
part while they are in a core's cache, so a round makes no copy of a fragment's size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

_GPU_BLOCK = 2**25
_BLOCKS = {"cpu": 2**18, "meta": 2**62}


def block_numel(device: torch.device | None = None) -> int:
    """Numbers in a block: 1 MiB of fp32 stays in a CPU's cache; a GPU wants few, large kernels.

    Args:
        device: device of the vectors; default the CPU. On the meta device, where numbers take no
            memory, a block may have any size.

    >>> block_numel(torch.device("cpu"))
    262144
    """
    return _BLOCKS.get("cpu" if device is None else device.type, _GPU_BLOCK)


class VectorPart:
    """Ranges of a flat vector, one after the other.

    Args:
        ranges: (first place, place after the last) of each range; ranges do not overlap.

    Attributes:
        step: places from each range to the next, if all have one length and one step; else 0.

    >>> part = VectorPart([(0, 1), (2, 4), (4, 5)])
    >>> part.ranges, part.read(torch.arange(5.0))
    (((0, 1), (2, 5)), tensor([0., 2., 3., 4.]))
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for start, stop in ranges:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            elif start < stop:
                merged.append((start, stop))
        self.ranges = tuple(merged or [(0, 0)])
        self._sizes = [stop - start for start, stop in self.ranges]
        self.numel = sum(self._sizes)
        # The rows of a matrix block are one view, which torch copies at once.
        steps = {later[0] - earlier[0] for earlier, later in pairwise(self.ranges)}
        self.step = min(steps) if len(steps) == len(set(self._sizes)) == 1 else 0
        self._shifted: dict[int, VectorPart] = {}

    def read(self, flat: Tensor, origin: int = 0) -> Tensor:
        """The part of `flat`, contiguous [numel]: a view of a single range, a copy of several.

        Args:
            flat: the vector, or a piece of it that begins at its place `origin`.
            origin: place of the first number of `flat`.
        """
        if len(self.ranges) == 1:
            start, stop = self.ranges[0]
            return flat[start - origin : stop - origin]
        views = self._views(flat, origin)
        return views[0].reshape(-1) if len(views) == 1 else torch.cat(views)

    def write(self, flat: Tensor, x: Tensor) -> None:
        """Copy `x` [numel] to the part's places, unless it is the view that `read` returned."""
        views = self._views(flat, 0)
        if len(views) > 1:
            copy_all(views, x.split(self._sizes))
        elif views[0].data_ptr() != x.data_ptr():
            views[0].copy_(x.view(views[0].shape))

    def shifted(self, by: int) -> VectorPart:
        """The same places of a piece, counted in a vector where the piece begins at `by`."""
        if not by:
            return self
        if by not in self._shifted:
            self._shifted[by] = VectorPart([(start + by, stop + by) for start, stop in self.ranges])
        return self._shifted[by]

    def _views(self, flat: Tensor, origin: int) -> list[Tensor]:
        if self.step > 0:
            shape, first = (len(self.ranges), self._sizes[0]), self.ranges[0][0] - origin
            return [flat.as_strided(shape, (self.step, 1), flat.storage_offset() + first)]
        return [flat[start - origin : stop - origin] for start, stop in self.ranges]


def copy_all(targets: list[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source to its target: on a GPU by a few kernels, however many tensors."""
    torch._foreach_copy_(targets, list(sources))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def pieces_of(part: VectorPart, starts: Sequence[int]) -> list[tuple[int, VectorPart]]:
    """The segments of a vector that `part` runs over, in order, and which part of each.

    Args:
        part: a part of the vector.
        starts: where the segments start, and where the last ends.

    >>> [(at, piece.ranges) for at, piece in pieces_of(VectorPart([(1, 5)]), [0, 3, 3, 9])]
    [(0, ((1, 3),)), (2, ((0, 2),))]
    """
    pieces: list[tuple[int, list[tuple[int, int]]]] = []
    for start, stop in part.ranges:
        while start < stop:
            # If several segments start at one place, all but the last are empty.
            at = bisect_right(starts, start) - 1
            end = min(stop, starts[at + 1])
            if not pieces or pieces[-1][0] != at:
                pieces.append((at, []))
            pieces[-1][1].append((start - starts[at], end - starts[at]))
            start = end
    return [(at, VectorPart(ranges)) for at, ranges in pieces]


def spans(start: int, stop: int, step: int) -> list[VectorPart]:
    """Parts of at most `step` places from `start` to before `stop`.

    >>> [part.ranges for part in spans(0, 5, 2)]
    [((0, 2),), ((2, 4),), ((4, 5),)]
    """
    return [VectorPart([(a, min(stop, a + step))]) for a in range(start, stop, step)]


def all_finite(values: Tensor) -> bool:
    """True if all of `values` are finite: a finite sum, quick to compute, proves it.

    >>> all_finite(torch.tensor([3e38, 3e38])), all_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


class LazyVector:
    """A vector of fp32 that is computed when it is read.

    Args:
        numel: size of the vector.
        device: where it is computed.
        compute: does what `read` does; a subclass may override `read` instead.
    """

    def __init__(
        self,
        numel: int,
        device: torch.device,
        compute: Callable[[VectorPart, Tensor | None], Tensor] | None = None,
    ) -> None:
        self.numel, self.device, self._compute = numel, device, compute

    def read(self, part: VectorPart, out: Tensor | None = None) -> Tensor:
        """The numbers of `part`, fp32 [part.numel]; writable, and valid until the next `read`.

        Args:
            part: the part to read.
            out: fp32 [part.numel] to write them to; by default memory of the vector.
        """
        assert self._compute is not None
        return self._compute(part, out)

    def is_finite(self) -> bool:
        """True if all numbers are finite."""
        parts = spans(0, self.numel, block_numel(self.device))
        return all(all_finite(self.read(part)) for part in parts)

    def piece(self, start: int, stop: int) -> LazyVector:
        """The places from `start` to before `stop`, as a vector."""
        if (start, stop) == (0, self.numel):
            return self
        return LazyVector(
            stop - start, self.device, lambda part, out: self.read(part.shifted(start), out)
        )

    def whole(self) -> Tensor:
        """All of it, as a new fp32 [numel]."""
        out = torch.empty(self.numel, dtype=torch.float32, device=self.device)
        for part in spans(0, self.numel, block_numel(self.device)):
            self.read(part, part.read(out))
        return out


Blocks: TypeAlias = Iterator[tuple[VectorPart, Tensor]]
"""Parts of a vector with their numbers."""


class StreamedVector:
    """A vector of fp32 that arrives in blocks, each once and in any order.

    Args:
        numel: size of the vector.
        device: where the blocks are.
        make: computes the blocks anew each time it is called.
    """

    def __init__(self, numel: int, device: torch.device, make: Callable[[], Blocks]) -> None:
        self.numel, self.device, self._make = numel, device, make

    def blocks(self) -> Blocks:
        """Every part with its numbers, fp32 [part.numel]; writable, and valid until the next."""
        return self._make()

    def whole(self) -> Tensor:
        """All of it, as a new fp32 [numel]; places that no block holds are zero."""
        out = torch.zeros(self.numel, dtype=torch.float32, device=self.device)
        for part, values in self.blocks():
            part.write(out, values)
        return out


class DenseVector(LazyVector, StreamedVector):
    """A vector in memory; its blocks are copies.

    >>> vector = DenseVector(torch.arange(3.0))
    >>> [values.mul_(2).tolist() for _, values in vector.blocks()], vector.whole()
    ([[0.0, 2.0, 4.0]], tensor([0., 1., 2.]))
    """

    def __init__(self, values: Tensor) -> None:
        LazyVector.__init__(self, len(values), values.device)
        self._values = values

    def read(self, part: VectorPart, out: Tensor | None = None) -> Tensor:
        """A copy of the part."""
        values = part.read(self._values)
        return values.clone() if out is None else out.copy_(values)

    def blocks(self) -> Blocks:
        """Copies, span by span."""
        for part in spans(0, self.numel, block_numel(self.device)):
            yield part, self.read(part)

    def whole(self) -> Tensor:
        """The vector itself."""
        return self._values
