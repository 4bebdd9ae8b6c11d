"""Layout: where each parameter of a fragment lies in its flat vector."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

CHUNK = 4096
"""Elements of a chunk."""

_ROWS_OF_A_BLOCK = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A parameter, or some rows of one, in a flat vector.

    Args:
        name: name of the parameter.
        shape: shape of this part of it.
        role: "matrix", "embedding", "head" or "vector".
        start: its first element's place in the vector.

    >>> Segment(name="w", shape=(2, 3), role="matrix", start=4).stop
    10
    """

    name: str
    shape: tuple[int, ...]
    role: str
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """Where the segment ends: the place after its last element."""
        return self.start + self.numel

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows (first dimension) and columns (all others); a vector or scalar is one row."""
        if len(self.shape) < 2:
            return 1, self.numel
        return self.shape[0], math.prod(self.shape[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Segments of a vector of `numel` elements; a codec encodes these and nothing else.

    >>> Layout.of({"w": (3, 2), "b": (3,)}).numel
    9
    """

    segments: tuple[Segment, ...]
    numel: int

    @staticmethod
    def of(
        shapes: Mapping[str, tuple[int, ...]], roles: Mapping[str, str] | None = None
    ) -> "Layout":
        """Parameters one after the other, in the order of `shapes`.

        Args:
            shapes: by name.
            roles: by name; by default "matrix" for two dimensions or more, else "vector".
        """
        segments: list[Segment] = []
        start = 0
        for name, shape in shapes.items():
            role = (roles or {}).get(name, "matrix" if len(shape) > 1 else "vector")
            segments.append(Segment(name=name, shape=tuple(shape), role=role, start=start))
            start = segments[-1].stop
        return Layout(segments=tuple(segments), numel=start)

    @staticmethod
    def vector(numel: int) -> "Layout":
        """A single parameter without a name.

        >>> Layout.vector(3).segments[0].shape
        (3,)
        """
        return Layout.of({"": (numel,)})

    def where(self, accept: Callable[[Segment], bool]) -> "Layout":
        """The same vector with only the segments for which `accept` is true."""
        return Layout(segments=tuple(filter(accept, self.segments)), numel=self.numel)

    def without_names(self) -> "Layout":
        """The same shapes and roles: equal for equal layers of a model."""
        return replace(self, segments=tuple(replace(s, name="") for s in self.segments))

    def cut(self, parts: int) -> "list[tuple[int, Layout]]":
        """`parts` pieces of the vector of about equal size: (first element, layout of the piece).

        Cuts lie between parameters, or after a multiple of 64 rows of one, so that rows and 64x64
        blocks stay whole. Pieces may be empty.

        >>> [piece.numel for _, piece in Layout.of({"w": (256, 4)}).cut(2)]
        [512, 512]
        """
        places = _places(self.segments)
        wanted = [self.numel * part // parts for part in range(1, parts)]
        nearest = [_nearest(places, place) for place in wanted]
        ends = [*nearest, self.numel]
        stops = [s.stop for s in self.segments]
        return [
            (start, self._piece(start, end, skip=bisect_right(stops, start)))
            for start, end in zip([0, *nearest], ends, strict=True)
        ]

    def _piece(self, start: int, end: int, *, skip: int) -> "Layout":
        # With many pieces, each has a few segments: scanning all of them every time takes minutes.
        segments: list[Segment] = []
        for s in islice(self.segments, skip, None):
            if s.start >= end:
                break
            first, last = max(s.start, start), min(s.stop, end)
            if first >= last:
                continue
            shape = s.shape
            if last - first < s.numel:
                shape = ((last - first) // s.matrix[1], *s.shape[1:])
            segments.append(Segment(name=s.name, shape=shape, role=s.role, start=first - start))
        return Layout(segments=tuple(segments), numel=end - start)


def _places(segments: Iterable[Segment]) -> list[int]:
    places = [0]
    for s in segments:
        rows, columns = s.matrix
        places.extend(s.start + r * columns for r in range(0, rows, _ROWS_OF_A_BLOCK))
        places.append(s.stop)
    return places


def _nearest(places: Sequence[int], wanted: int) -> int:
    """The one of `places` (ascending) that is nearest to `wanted`; of two, the lower."""
    above = bisect_left(places, wanted)
    return min(places[max(above - 1, 0) : above + 1], key=lambda place: abs(place - wanted))


def wire_order(shapes: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """Names in wire order: tensors of whole chunks first, ragged and small ones last.

    >>> wire_order({"norm": (64,), "w": (64, 64)})
    ('w', 'norm')
    """

    def ragged(name: str) -> bool:
        numel = math.prod(shapes[name])
        return numel == 0 or numel % CHUNK != 0

    return tuple(sorted(shapes, key=ragged))
