"""Exchanges without a loop: K states of one fragment, and one round of them over any transports."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

import thinwire as tw
from thinwire.aggregate import Aggregate
from thinwire.blocks import DenseVector
from thinwire.codecs import Codec, Identity
from thinwire.exchange import Exchange, ExchangeContext, ExchangeState, RoundResult
from thinwire.exchange.message import HEADER_NBYTES, Header, blank_message, seal
from thinwire.feedback import Feedback
from thinwire.fragments.layout import Layout
from thinwire.storage import OnDevice
from thinwire.transport import RoundTag, Transport

# Matrices are cut after a multiple of 64 rows: two of seven workers have an empty shard.
LAYOUT = Layout.of({"weight": (300, 70), "bias": (70,)})
MEAN = tw.MeanOverWorkers()
ANCHOR = b"an ancho"


def sealed(body: Tensor, header: Header) -> Tensor:
    """A message with `body`."""
    message = blank_message(len(body), OnDevice(torch.device("cpu")))
    message[HEADER_NBYTES:] = body
    return seal(message, header)


def tag_of(round: int = 1, anchor: bytes = ANCHOR) -> RoundTag:
    return RoundTag(what="the fragment", round=round, anchor=anchor)


def delta_of(rank: int, layout: Layout = LAYOUT, round: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(100 * round + rank)
    return torch.randn(layout.numel, generator=generator)


def state_of(
    exchange: Exchange,
    rank: int,
    workers: int,
    *,
    codec: Codec | None = None,
    feedback: Feedback | None = None,
    aggregate: Aggregate = MEAN,
    layout: Layout = LAYOUT,
    drops_bad_messages: bool = False,
    has_own_anchors: bool = False,
) -> ExchangeState:
    return exchange.bind(
        ExchangeContext(
            codec=Identity() if codec is None else codec,
            feedback=tw.NoFeedback() if feedback is None else feedback,
            aggregate=aggregate,
            layout=layout,
            fragment=0,
            workers=workers,
            rank=rank,
            storage=OnDevice(torch.device("cpu")),
            drops_bad_messages=drops_bad_messages,
            has_own_anchors=has_own_anchors,
        )
    )


Messages = Mapping[str, Tensor]


def exchanged(
    states: Sequence[ExchangeState],
    transports: Sequence[Transport],
    *,
    round: int = 1,
    encode: Callable[[int, ExchangeState], Messages] | None = None,
) -> list[RoundResult]:
    """One round of workers that share a thread; `encode` makes a worker's messages."""

    def usual(rank: int, state: ExchangeState) -> Messages:
        return state.encode(DenseVector(delta_of(rank, round=round)), tag_of(round))

    tag, encode = tag_of(round), usual if encode is None else encode
    rounds = [
        transport.run(state.run(encode(transport.rank, state), tag), tag)
        for state, transport in zip(states, transports, strict=True)
    ]
    return [each.wait() for each in rounds]
