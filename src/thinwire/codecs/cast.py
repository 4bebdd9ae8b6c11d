"""Codecs that write each number on its own: fp32 as it is, or cast to 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.blocks import VectorPart, block_numel, spans
from thinwire.codecs.base import BoundCodec, Codec, PiecewiseCodec
from thinwire.codecs.bits import saturating_cast
from thinwire.fragments.layout import Layout


class CastSpan(BoundCodec):
    """The numbers of one part of a vector, one after the other.

    Args:
        id: name of the byte format.
        numel: size of the part.
        dtype: type of a number on the wire.
    """

    def __init__(self, id: str, numel: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        super().__init__(id, Layout.vector(numel), numel * dtype.itemsize)

    def as_numbers(self, payload: Tensor) -> Tensor | None:
        """The payload, if it holds fp32 at an aligned address."""
        is_aligned = payload.storage_offset() % self._dtype.itemsize == 0
        return payload.view(torch.float32) if self._dtype == torch.float32 and is_aligned else None

    def encode_to(self, out: Tensor, x: Tensor, round: int = 0) -> None:
        """Cast the numbers."""
        out.copy_(saturating_cast(x, self._dtype).view(torch.uint8))

    def add_to(
        self, out: Tensor, payloads: Sequence[Tensor], *, weight: float, round: int = 0
    ) -> None:
        """Widen and add one payload after the other."""
        scaled = torch.empty_like(out)
        for payload in payloads:
            out += torch.mul(self._values(payload).float(), weight, out=scaled)

    def coefficients(self, payload: Tensor, round: int = 0) -> Tensor:
        """The numbers, with the signs of their zeros."""
        return self._values(payload).float()

    def largest(self, payload: Tensor, round: int = 0) -> Tensor:
        """The largest magnitude, found before widening."""
        low, high = self._values(payload).aminmax()
        return torch.maximum(-low, high).float()

    def _values(self, payload: Tensor) -> Tensor:
        # A message's body may begin at any byte, and a view as numbers needs an aligned start.
        if payload.storage_offset() % self._dtype.itemsize:
            payload = payload.clone()
        return payload.view(self._dtype)


class _Cast(Codec):
    _dtype: torch.dtype
    """Type of a number on the wire."""

    def bind(self, layout: Layout, *, device: torch.device | None = None) -> BoundCodec:
        """Encode the segments one after the other; shapes do not matter."""
        whole = VectorPart((s.start, s.stop) for s in layout.segments)
        spanned = (p for a, b in whole.ranges for p in spans(a, b, block_numel(device)))
        parts = ((p, CastSpan(self.id, p.numel, self._dtype)) for p in spanned)
        return PiecewiseCodec(self.id, layout, parts, is_exact=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity(_Cast):
    """decode(encode(x)) = x, 4 bytes an element.

    >>> Identity().decode(Identity().encode(torch.tensor([1.5])), 1)
    tensor([1.5000])
    """

    id = "identity/f32"
    is_lossless = True

    _dtype: ClassVar[torch.dtype] = torch.float32


@dataclass(frozen=True, kw_only=True, slots=True)
class CastBF16(_Cast):
    """bfloat16, rounded to nearest even, saturating: 8 bits of precision, 2 bytes an element.

    >>> CastBF16().decode(CastBF16().encode(torch.tensor([1.001])), 1)
    tensor([1.])
    """

    id = "cast/bf16"

    _dtype: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class CastFP16(_Cast):
    """IEEE half precision, saturating: 11 bits of precision up to 65504, 2 bytes an element.

    >>> CastFP16().decode(CastFP16().encode(torch.tensor([0.1])), 1)
    tensor([0.1000])
    """

    id = "cast/fp16"

    _dtype: ClassVar[torch.dtype] = torch.float16
