"""A codec per role: matrices, embeddings, the head and vectors may differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.codecs.base import BoundCodec, Codec, CodecPiece, PiecewiseCodec, pieces_of
from thinwire.fragments.layout import Layout, Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class PerRole(Codec):
    """Parameters are written by the codec of their role: matrix, embedding, head or vector.

    Args:
        default: for roles without a codec of their own.
        embedding: for embeddings, and heads tied to one.
        head: for the output head.
        vector: for norms' gains and biases.

    >>> from thinwire.codecs.cast import CastBF16, Identity
    >>> codec = PerRole(default=CastBF16(), vector=Identity())
    >>> codec.bind(Layout.of({"w": (2, 2), "b": (2,)})).nbytes
    16
    """

    default: Codec
    embedding: Codec | None = None
    head: Codec | None = None
    vector: Codec | None = None

    @property
    def id(self) -> str:
        """The ids of all its codecs."""
        named = [f"{role}={codec.id}" for role, codec in self._own().items()]
        return f"per-role({','.join([f'default={self.default.id}', *named])})"

    @property
    def sharding_loss(self) -> str | None:
        """What shards lose, by the first of the codecs that loses anything; None without a loss."""
        losses = (codec.sharding_loss for codec in (self.default, *self._own().values()))
        return next((loss for loss in losses if loss is not None), None)

    @property
    def is_sparse(self) -> bool:
        """Whether any of the codecs is."""
        return any(codec.is_sparse for codec in (self.default, *self._own().values()))

    def payload_nbytes(self, layout: Layout) -> int:
        """Those of all codecs together."""
        own = self._own()
        rest = self.default.payload_nbytes(layout.where(lambda s: s.role not in own))
        return rest + sum(
            codec.payload_nbytes(layout.where(_has_role(role))) for role, codec in own.items()
        )

    def bind(self, layout: Layout, *, device: torch.device | None = None) -> BoundCodec:
        """The default's segments first, then those of each role that has its own codec."""
        own = self._own()
        parts = [self.default.bind(layout.where(lambda s: s.role not in own), device=device)]
        for role, codec in own.items():
            parts.append(codec.bind(layout.where(_has_role(role)), device=device))
        pieces: list[CodecPiece] = []
        end = 0
        for part in parts:
            pieces += pieces_of(part, start=end)
            end += part.nbytes
        return PiecewiseCodec(self.id, layout, pieces)

    def _own(self) -> dict[str, Codec]:
        roles = {"embedding": self.embedding, "head": self.head, "vector": self.vector}
        return {role: codec for role, codec in roles.items() if codec is not None}


def _has_role(role: str):
    def test(segment: Segment) -> bool:
        return segment.role == role

    return test
