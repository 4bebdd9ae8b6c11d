"""Pairs: every worker swaps payloads with one other, drawn anew each round."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.aggregate import Aggregate
from thinwire.blocks import StreamedVector
from thinwire.codecs import Codec
from thinwire.errors import ConfigurationError
from thinwire.exchange.base import Exchange, ExchangeContext, ExchangeState, RoundResult, Sizes
from thinwire.exchange.gather import Gather, WholeMessages
from thinwire.fragments.layout import Layout
from thinwire.transport import Post, Posts, RoundTag


def peers_of(workers: int, *, round: int, seed: int) -> list[int]:
    """The peer of each worker in a round, in rank order; an odd one out is its own peer.

    All workers draw alike: they are ordered by SHA-256(seed, round, rank), and neighbours in that
    order are a pair. Every pair is equally likely, and rounds are independent.

    >>> peers_of(5, round=1, seed=0)
    [3, 4, 2, 0, 1]
    """
    drawn = sorted(range(workers), key=lambda rank: _draw(seed, round, rank))
    peers = list(range(workers))
    for left, right in zip(drawn[::2], drawn[1::2], strict=False):
        peers[left], peers[right] = right, left
    return peers


def _draw(seed: int, round: int, rank: int) -> bytes:
    return hashlib.sha256(f"{seed} {round} {rank}".encode()).digest()


class _PairsState(WholeMessages):
    def __init__(self, context: ExchangeContext, sizes: Sizes, seed: int) -> None:
        super().__init__(context, sizes)
        self._seed = seed

    def run(self, messages: Mapping[str, Tensor], tag: RoundTag) -> Posts[RoundResult]:
        (message,) = messages.values()
        mine = self._context.rank
        peer = peers_of(self._context.workers, round=tag.round, seed=self._seed)[mine]
        is_alone = peer == mine
        post = Post({}, {}) if is_alone else Post({peer: message}, {peer: message.numel()})
        by_rank = {mine: message, **(yield post)}
        senders = sorted(by_rank)
        return lambda: self._combine([by_rank[rank] for rank in senders], senders, tag)

    @torch.no_grad()
    def _combine(
        self, messages: Sequence[Tensor], senders: Sequence[int], tag: RoundTag
    ) -> RoundResult:
        bodies = list(messages)
        if not self._alone:
            pairs = zip(messages, senders, strict=True)
            bodies = [self._opened(m, sender, tag) for m, sender in pairs]
        return self._result(messages, bodies, senders, tag)

    def replay_mean(
        self, messages: Sequence[Tensor], tag: RoundTag, *, left_out: Collection[int]
    ) -> StreamedVector:
        del messages, tag, left_out
        raise AssertionError("pairs are refused where rounds are replayed")


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
        return _PairsState(context, self.sizes_in(context), self.seed)

    def sizes(
        self, codec: Codec, layout: Layout, aggregate: Aggregate, *, workers: int, rank: int
    ) -> Sizes:
        """One message each way. With odd K one worker, drawn each round, sends none."""
        whole = Gather().sizes(codec, layout, aggregate, workers=min(workers, 2), rank=0)
        del rank
        return replace(whole, pattern="pairs")
