"""Pairs: every worker swaps payloads with one other, drawn anew each round."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from thinwire.aggregate import Aggregate
from thinwire.codecs import Codec
from thinwire.errors import ConfigurationError
from thinwire.exchange.base import Exchange, ExchangeContext, ExchangeState, Sizes
from thinwire.exchange.gather import Gather, GatherState
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
    """Delta = aggregate(Delta_k, Delta_j) for one peer j of each worker k, drawn anew each round.

    Every worker receives one payload, however many workers there are. Each pair moves its own
    anchors, so the outer optimizer must be one whose workers have anchors of their own, and pull
    them together again.

    Args:
        seed: of the draw.

    Source: NoLoCo (arXiv 2506.10911), whose outer step needs the peer's anchor besides.

    >>> Pairs().seed
    0
    """

    seed: int = 0

    def bind(self, context: ExchangeContext) -> ExchangeState:
        """A state with one codec and one feedback for the whole fragment.

        Raises:
            ConfigurationError: workers come and go; their anchors must be equal.
        """
        if context.drops_bad_messages:
            raise ConfigurationError(
                "average in pairs among workers that come and go",
                because="a newcomer takes over the outer parameters of all, and in pairs they "
                "differ from worker to worker",
                do="take tw.Gather(), or a fixed number of workers",
            )
        workers, rank = context.workers, context.rank
        return GatherState(
            context,
            self.sizes_in(context),
            lambda round: sorted({rank, peers_of(workers, round=round, seed=self.seed)[rank]}),
        )

    def sizes(
        self, codec: Codec, layout: Layout, aggregate: Aggregate, *, workers: int, rank: int
    ) -> Sizes:
        """One message each way. With odd K one worker, drawn each round, sends none."""
        whole = Gather().sizes(codec, layout, aggregate, workers=min(workers, 2), rank=0)
        del rank
        return replace(whole, pattern="pairs")
