"""Exchanges without a loop: K states of one fragment, and one round of them over any transports."""

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import thinwire as tw
from thinwire import codecs
from thinwire.blocks import DenseVector
from thinwire.checksums import checksum
from thinwire.exchange import Exchange, ExchangeContext, ExchangeState, RoundResult
from thinwire.exchange.message import HEADER_NBYTES, Header, blank_message, seal
from thinwire.fragments.layout import Layout
from thinwire.storage import StatePlacement
from thinwire.transport import RoundTag, Transport

CODECS = [
    *(codecs.Identity(), codecs.CastBF16(), codecs.CastFP16(), codecs.E3M0()),
    *(codecs.Quantise(bits=bits) for bits in (8, 4, 2, 1)),
    codecs.Quantise(bits=4, rounding=codecs.Stochastic()),
    codecs.Quantise(bits=2, groups=codecs.Tensors()),
    codecs.TopK(k=512, values=codecs.F32()),
    codecs.TopK(k=512, values=codecs.SignMean(), groups=codecs.Blocks()),
    codecs.TopK(k=512, values=codecs.TensorLevels(), groups=codecs.Blocks()),
    codecs.RandomK(k=512),
    codecs.PerRole(default=codecs.TopK(k=512), vector=codecs.CastBF16()),
]

# Matrices are cut after a multiple of 64 rows: two of seven workers have an empty shard.
LAYOUT = Layout.of({"weight": (300, 70), "bias": (70,)})
MEAN = tw.MeanOverWorkers()
ANCHOR = b"an ancho"


def sealed(body: Tensor, header: Header) -> Tensor:
    """A message with `body`."""
    message = blank_message(len(body), StatePlacement(torch.device("cpu")))
    message[HEADER_NBYTES:] = body
    return seal(message, header)


def tag_of(round: int = 1, anchor: bytes = ANCHOR) -> RoundTag:
    return RoundTag(what="the fragment", round=round, anchor=anchor)


def delta_of(rank: int, round: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(100 * round + rank)
    return torch.randn(LAYOUT.numel, generator=generator)


def state_of(exchange: Exchange, rank: int, workers: int, **changes: Any) -> ExchangeState:
    """The state of one fragment; `changes` replace defaults of its context."""
    fields: dict[str, Any] = {
        "codec": codecs.Identity(),
        "feedback": tw.NoFeedback(),
        "aggregate": MEAN,
        "layout": LAYOUT,
        "fragment": 0,
        "storage": StatePlacement(torch.device("cpu")),
        "drops_bad_messages": False,
        "has_own_anchors": False,
    }
    return exchange.bind(ExchangeContext(workers=workers, rank=rank, **fields | changes))


Messages = Mapping[str, Tensor]


def exchanged(
    states: Sequence[ExchangeState],
    transports: Sequence[Transport],
    *,
    round: int = 1,
    encode: Callable[[int, ExchangeState], Messages] | None = None,
) -> list[RoundResult]:
    """One round of workers that share a thread; `encode` makes a worker's messages."""
    tag = tag_of(round)
    encode = encode or (lambda rank, state: state.encode(DenseVector(delta_of(rank, round)), tag))
    rounds = [
        transport.run(state.run(encode(transport.rank, state), tag), tag)
        for state, transport in zip(states, transports, strict=True)
    ]
    return [each.wait() for each in rounds]


def flipped(message: Tensor, place: int = HEADER_NBYTES, bit: int = 0) -> Tensor:
    """A message with one bit changed; by default the first of its body."""
    message = message.clone()
    message[place] ^= 1 << bit
    return message


def poisoned(message: Tensor, bad: float = float("nan")) -> Tensor:
    """A message of bf16 numbers that begins with `bad`, under the right checksums."""
    head = bytearray(message[:HEADER_NBYTES].tolist())
    (elements,) = struct.unpack_from("<Q", head, 40)
    if elements == 0:
        return message
    body = message[HEADER_NBYTES : HEADER_NBYTES + 2 * elements].clone()
    body.view(torch.bfloat16)[0] = bad
    struct.pack_into("<I", head, 36, checksum(body))
    struct.pack_into("<I", head, 60, zlib.crc32(bytes(head[:60])))
    rest = message[HEADER_NBYTES + 2 * elements :]
    return torch.cat([torch.tensor(list(head), dtype=torch.uint8), body, rest])
