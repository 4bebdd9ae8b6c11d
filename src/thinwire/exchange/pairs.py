"""Pairs: every worker swaps payloads with one other, drawn at random each round."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from thinwire.aggregate import Aggregate
from thinwire.codecs import Codec
from thinwire.errors import check
from thinwire.exchange.base import ExchangeContext, Sizes
from thinwire.exchange.kinds import Exchange, Gather
from thinwire.exchange.state import ExchangeState
from thinwire.fragments.layout import Layout


def peers_of(workers: int, *, round: int, seed: int) -> list[int]:
    """The peer of each worker in a round, in rank order; an odd one out is its own peer.

    All workers draw alike: they are ordered by SHA-256(seed, round, rank), and neighbours in that
    order are a pair. Every pair is equally likely, and rounds are independent.

    >>> peers_of(5, round=1, seed=0)
    [3, 4, 2, 0, 1]
    """

    def draw(rank: int) -> bytes:
        return hashlib.sha256(f"{seed} {round} {rank}".encode()).digest()

    drawn = sorted(range(workers), key=draw)
    peers = list(range(workers))
    for left, right in zip(drawn[::2], drawn[1::2], strict=False):
        peers[left], peers[right] = right, left
    return peers


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs(Exchange):
    """Delta = aggregate(Delta_k, Delta_j) for one peer j of each worker k, drawn each round.

    Every worker receives one payload, for any number of workers. Each pair moves its own anchors,
    so the outer optimizer must have an anchor per worker, and pull them together.

    Args:
        seed: of the draw.

    Source: NoLoCo (arXiv 2506.10911), whose outer step needs the peer's anchor besides.

    >>> Pairs().seed
    0
    """

    seed: int = 0

    def owners(self, rank: int, workers: int, round: int) -> Mapping[int, int]:
        """A worker and its peer of the round combine both payloads."""
        peer = peers_of(workers, round=round, seed=self.seed)[rank]
        return dict.fromkeys(sorted({rank, peer}), 0)

    def bind(self, context: ExchangeContext) -> ExchangeState:
        """A fresh exchange state for one fragment.

        Raises:
            ConfigurationError: workers come and go; their anchors must be equal.
        """
        check(
            not context.drops_bad_messages,
            "average in pairs among workers that come and go",
            because="a newcomer takes over the outer parameters of all, and in pairs they differ "
            "from worker to worker",
            do="take tw.Gather(), or a fixed number of workers",
        )
        return Exchange.bind(self, context)

    def sizes(
        self, codec: Codec, layout: Layout, aggregate: Aggregate, *, workers: int, rank: int
    ) -> Sizes:
        """One message each way. With odd K one worker, drawn each round, sends none."""
        whole = Gather().sizes(codec, layout, aggregate, workers=min(workers, 2), rank=rank % 2)
        return replace(whole, pattern="pairs")
