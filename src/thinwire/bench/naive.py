"""Top-k with error feedback as it is usually written: what the codecs are timed against."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.fragments.layout import CHUNK, Layout, Segment

Record = tuple[Tensor, Tensor]
"""int64 indices and fp32 values of one tensor."""

_ONE_OF = 64


class NaiveTopK(ABC):
    """A loop over tensors: e = beta e + Delta; send the largest 1/64 of e; e = e - sent.

    Args:
        layout: of the vectors.
        decay: beta.
    """

    name: str

    def __init__(self, layout: Layout, *, decay: float) -> None:
        self._segments, self._decay = layout.segments, decay
        self._residuals = [torch.zeros(s.numel) for s in layout.segments]

    def encode(self, delta: Tensor) -> list[Record]:
        """Indices and values of every tensor.

        Args:
            delta: fp32 [numel].
        """
        return [
            record
            for s, e in zip(self._segments, self._residuals, strict=True)
            for record in self._encode(e.mul_(self._decay).add_(delta[s.start : s.stop]))
        ]

    @abstractmethod
    def mean(self, payloads: Sequence[list[Record]]) -> list[Tensor]:
        """The mean of what all workers sent, tensor by tensor."""

    @abstractmethod
    def _encode(self, e: Tensor) -> list[Record]:
        """The largest numbers of `e` [numel], which become 0 there."""

    @staticmethod
    def nbytes(payload: list[Record]) -> int:
        """Bytes of the numbers that it sends: 8 for an index and 4 for a value."""
        return sum(part.nbytes for record in payload for part in record)


class TensorTopK(NaiveTopK):
    """torch.topk over a whole tensor."""

    name = "per-tensor torch.topk"

    def mean(self, payloads: Sequence[list[Record]]) -> list[Tensor]:
        """One dense tensor for each worker, added up."""
        return [
            _dense_mean([payload[i] for payload in payloads], (s.numel,))
            for i, s in enumerate(self._segments)
        ]

    def _encode(self, e: Tensor) -> list[Record]:
        return [_take_largest(e, max(1, len(e) // _ONE_OF))]


class ChunkedTopK(NaiveTopK):
    """torch.topk over the chunks of a tensor, and over what is left of it."""

    name = "chunked torch.topk"

    def mean(self, payloads: Sequence[list[Record]]) -> list[Tensor]:
        """One dense tensor for each worker, added up, for the chunks and for the rest."""
        shapes = [shape for s in self._segments for shape in _rows(s)]
        return [
            _dense_mean([payload[i] for payload in payloads], shape)
            for i, shape in enumerate(shapes)
        ]

    def _encode(self, e: Tensor) -> list[Record]:
        whole = len(e) // CHUNK * CHUNK
        parts = e[:whole].view(-1, CHUNK), e[whole:].view(1, -1)
        return [_take_largest(x, max(1, x.shape[1] // _ONE_OF)) for x in parts if x.numel()]


def _rows(s: Segment) -> list[tuple[int, int]]:
    chunks, rest = divmod(s.numel, CHUNK)
    return [(rows, columns) for rows, columns in ((chunks, CHUNK), (1, rest)) if rows and columns]


def _take_largest(e: Tensor, k: int) -> Record:
    indices = e.abs().topk(k, dim=-1).indices
    values = e.gather(-1, indices)
    e.scatter_(-1, indices, 0.0)
    return indices, values


def _dense_mean(records: Sequence[Record], shape: tuple[int, ...]) -> Tensor:
    total = torch.zeros(shape)
    for indices, values in records:
        total += torch.zeros(shape).scatter_add_(-1, indices, values)
    return total.div_(len(records))
