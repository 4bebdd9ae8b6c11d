"""Engines: where in an inner step something can be sent, and where its answer is needed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from thinwire.plan.freight import Parcel

__all__ = ["Engine", "LayerWise", "Piece", "StepWise"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What is exchanged by itself.

    Args:
        message: its index among those of the method.
        share: of the message, in bytes and in parameters.
        ready_at: place in the inner step at which it is sent: 0 is its beginning, 1 its end.
        needed_at: place in inner step t + 1 + tau at which the answer must be there.
    """

    message: int
    share: float
    ready_at: float
    needed_at: float


class Engine(ABC):
    """A rule that cuts messages into pieces."""

    @abstractmethod
    def pieces(
        self, index: int, message: Parcel, *, layers: int, forward_share: float
    ) -> tuple[Piece, ...]:
        """The pieces of `message`, in the order in which they are ready.

        Args:
            index: of the message.
            message: what is sent.
            layers: L, of the model.
            forward_share: of an inner step.
        """


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StepWise(Engine):
    """What the outer loop does: send when an inner step is done, and wait before a later one.

    A message due after step t is encoded and sent when step t is done; its answer is waited for,
    decoded and applied when step t + tau is.
    """

    def pieces(
        self, index: int, message: Parcel, *, layers: int, forward_share: float
    ) -> tuple[Piece, ...]:
        """One: the whole message."""
        del message, layers, forward_share
        return (Piece(message=index, share=1.0, ready_at=1.0, needed_at=0.0),)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWise(Engine):
    """Each layer by itself: sent when its backward is done, needed when its forward begins.

        ready_at  = f + (1 - f) (L - l) / L          layer l of L, counted from 0
        needed_at = f l / L                          f: share of a step spent forward

    All layers take the same time, and a message's layers have equal shares of it. What lies outside
    of the stack (the embedding is the last to be ready and the first to be needed) has the whole
    backward before it and is needed at once.

    Source: Streaming DiLoCo (arXiv 2501.18512), the simulation behind Table 4.

    >>> from thinwire.fragments import Whole
    >>> from thinwire.plan.ideal import ideal_freight
    >>> freight = ideal_freight(Whole(), parameters=4, layers=2, bits=16, sync_every=1)
    >>> pieces = LayerWise().pieces(0, freight.messages[0], layers=2, forward_share=0.5)
    >>> [(piece.ready_at, piece.needed_at) for piece in pieces]
    [(0.75, 0.25), (1.0, 0.0)]
    """

    def pieces(
        self, index: int, message: Parcel, *, layers: int, forward_share: float
    ) -> tuple[Piece, ...]:
        """One for each layer, the last layer first."""
        forward, share = forward_share, 1 / len(message.layers)
        made = (
            Piece(
                message=index,
                share=share,
                ready_at=forward + (1 - forward) * (layers - (layer or 0)) / layers,
                needed_at=forward * (layer or 0) / layers,
            )
            for layer in message.layers
        )
        return tuple(sorted(made, key=lambda piece: piece.ready_at))
