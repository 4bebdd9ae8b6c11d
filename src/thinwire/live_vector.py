"""The local weights of a fragment as one vector that is never whole."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.blocks import LazyVector, VectorPart, copy_all
from thinwire.live_weights import LiveWeights, local_shard


class LiveVector:
    """Some of a worker's local weights, laid one after the other.

    Args:
        live: the worker's.
        names: of the parameters.

    >>> from torch import nn
    >>> from thinwire.blocks import Span
    >>> linear = nn.Linear(2, 1)
    >>> vector = LiveVector(LiveWeights(linear, []), ["weight", "bias"])
    >>> weights = vector.open()
    >>> weights.mix(Span(1, 3), torch.tensor([5.0, 6.0]), 0.0)
    >>> weights.close()
    >>> linear.weight[0, 1].item(), linear.bias.item(), vector.numel
    (5.0, 6.0, 3)
    """

    def __init__(self, live: LiveWeights, names: Sequence[str]) -> None:
        self.live, self.names = live, tuple(names)
        sizes = [local_shard(live.parameters[name]).numel() for name in self.names]
        self.starts = [0, *accumulate(sizes)]
        self.numel = self.starts[-1]
        self._places: WeakKeyDictionary[VectorPart, _Places] = WeakKeyDictionary()
        # Kept between rounds: fresh memory costs a CPU more than the arithmetic in it.
        self._scratch = torch.empty(0)

    def open(self) -> OpenWeights:
        """The weights as they are from now on; `close()` them after writing."""
        return self.over([local_shard(self.live.parameters[name]) for name in self.names])

    def over(self, tensors: Sequence[Tensor]) -> OpenWeights:
        """Other tensors of the parameters' (local) shapes, such as gradients, laid out alike."""
        return OpenWeights(self, tensors)

    def places(self, part: VectorPart) -> _Places:
        """Where the numbers of `part` are: found once."""
        if part not in self._places:
            self._places[part] = _Places(part, self.starts)
        return self._places[part]

    def scratch(self, numel: int) -> Tensor:
        """Memory for `numel` numbers of fp32, in use until it is asked for again."""
        if self._scratch.numel() < numel:
            self._scratch = torch.empty(numel, device=self.live.device)
        return self._scratch[:numel]


class _Places:
    """The parameters that a part runs over.

    Args:
        part: of the vector.
        starts: of the parameters, and the end of the last.
    """

    def __init__(self, part: VectorPart, starts: Sequence[int]) -> None:
        first = bisect_right(starts, part.start) - 1
        # A part without ranges (blocks of a matrix) is in one parameter.
        self.inside = (first, starts[first]) if part.ranges is None else None
        # Of each parameter in turn, which of its numbers.
        self.pieces: list[tuple[int, int, int]] = []
        for start, stop in part.ranges or ():
            at = bisect_right(starts, start) - 1
            while start < stop:
                end = min(stop, starts[at + 1])
                if start < end:
                    self.pieces.append((at, start - starts[at], end - starts[at]))
                start, at = max(start, end), at + 1
        self.sizes = [stop - start for _, start, stop in self.pieces]


class OpenWeights(LazyVector):
    """A `LiveVector` while it is read or written: what is in the parameters, in fp32.

    Args:
        vector: that was opened.
        tensors: one for each parameter, as this rank holds it.
    """

    def __init__(self, vector: LiveVector, tensors: Sequence[Tensor]) -> None:
        super().__init__(vector.numel, vector.live.device)
        self._vector, self._shards = vector, tensors
        # A view, unless the parameter is not contiguous: then a copy, which `close` writes back.
        self._flat = [shard.reshape(-1) for shard in self._shards]
        self._is_plain = all(
            flat.dtype == torch.float32 and flat.device == self.device for flat in self._flat
        )

    def read(self, part: VectorPart, out: Tensor | None = None) -> Tensor:
        """A copy of them, rounded to fp32."""
        places = self._vector.places(part)
        out = self._vector.scratch(part.numel) if out is None else out
        if places.inside is not None:
            index, origin = places.inside
            return out.copy_(part.read(self._flat[index], origin))
        views = self._views(places)
        if self._is_plain:
            return torch.cat(views, out=out)
        for mine, view in zip(out.split(places.sizes), views, strict=True):
            mine.copy_(view)
        return out

    def subtract_from(self, part: VectorPart, anchor: Tensor, out: Tensor | None) -> Tensor:
        """anchor - local of `part`, for an `anchor` of fp32 [part.numel]; `out` as in `read`."""
        places = self._vector.places(part)
        if self._is_plain and len(places.pieces) == 1:
            (view,) = self._views(places)
            out = self._vector.scratch(part.numel) if out is None else out
            return torch.sub(anchor, view, out=out)
        local = self.read(part, out)
        return torch.sub(anchor, local, out=local)

    def as_written(self, part: VectorPart, values: Tensor) -> Tensor:
        """`values` [part.numel] as `read` would return them once written: rounded to the dtypes."""
        if self._is_plain:
            return values
        places = self._vector.places(part)
        if places.inside is not None:
            return values.to(self._flat[places.inside[0]].dtype).float()
        dtypes = (self._flat[index].dtype for index, _, _ in places.pieces)
        parts = zip(values.split(places.sizes), dtypes, strict=True)
        return torch.cat([piece.to(dtype).float() for piece, dtype in parts])

    def mix(self, part: VectorPart, values: Tensor, alpha: float) -> None:
        """local = alpha local + (1 - alpha) values, in fp32; with alpha 0 exactly `values`."""
        if alpha:
            values = torch.lerp(values, self.read(part), alpha)
        places = self._vector.places(part)
        if places.inside is not None:
            index, origin = places.inside
            part.write(self._flat[index], values.to(self._flat[index]), origin)
            return
        views = self._views(places)
        if len(views) == 1:
            views[0].copy_(values)
        else:
            copy_all(views, values.split(places.sizes))

    def close(self) -> None:
        """Write the changes to the parameters, and drop gathered weights."""
        for shard, flat in zip(self._shards, self._flat, strict=True):
            if flat.data_ptr() != shard.data_ptr():
                shard.copy_(flat.view(shard.shape))
        self._vector.live.forget_gathered_weights()

    def is_finite(self) -> bool:
        """True if all of them are finite."""
        totals = [flat.sum(dtype=torch.float32).to(self.device) for flat in self._flat]
        if bool(torch.isfinite(torch.stack(totals)).all()):
            return True  # a finite sum proves every term finite
        return all(bool(torch.isfinite(flat.to(torch.float32)).all()) for flat in self._flat)

    def _views(self, places: _Places) -> list[Tensor]:
        return [self._flat[index][start:stop] for index, start, stop in places.pieces]
