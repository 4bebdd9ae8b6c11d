"""The exchanges: which shard each worker combines."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.aggregate import Aggregate
from thinwire.codecs import Codec
from thinwire.errors import check
from thinwire.exchange.base import ExchangeContext, Sizes
from thinwire.exchange.message import HEADER_NBYTES
from thinwire.exchange.state import ExchangeState
from thinwire.feedback import Feedback, NoFeedback
from thinwire.fragments.layout import Layout


class Exchange:
    """Describes how the workers of a method exchange; `bind` makes its state.

    A subclass answers `owners`: by default all workers combine all that is sent.
    """

    owner_feedback: Feedback = NoFeedback()
    """Of the shard that a worker combines, where there are several."""

    def owners(self, rank: int, workers: int, round: int) -> Mapping[int, int]:
        """The shard that each worker combines, by rank, of those that exchange with `rank`.

        All combine shard 0, or worker s combines shard s and sends the result to all.

        >>> dict(Exchange().owners(0, 3, round=1))
        {0: 0, 1: 0, 2: 0}
        """
        del rank, round
        return dict.fromkeys(range(workers), 0)

    def bind(self, context: ExchangeContext) -> ExchangeState:
        """A fresh exchange state for one fragment."""
        return ExchangeState(context, self)

    def sizes(
        self, codec: Codec, layout: Layout, aggregate: Aggregate, *, workers: int, rank: int
    ) -> Sizes:
        """Bytes that worker `rank` of `workers` sends and receives; nothing is made or sent.

        >>> from thinwire.aggregate import MeanOverWorkers
        >>> from thinwire.codecs import Identity
        >>> layout = Layout.vector(10)
        >>> Gather().sizes(Identity(), layout, MeanOverWorkers(), workers=3, rank=0).received_nbytes
        208
        """
        del aggregate
        owners = self.owners(rank, workers, round=1)
        shards = 1 + max(owners.values())
        pieces = layout.cut(shards) if shards > 1 else [(0, layout)]
        nbytes = [
            HEADER_NBYTES * (workers > 1) + codec.payload_nbytes(piece) for _, piece in pieces
        ]
        others, is_cut = len(owners) - 1, len(pieces) > 1
        # Results travel in an all-gather, which takes equal sizes.
        result_nbytes = max(nbytes) if is_cut else 0
        sent = {shard for peer, shard in owners.items() if peer != rank}
        return Sizes(
            messages={f"shard{n}" if is_cut else "whole": size for n, size in enumerate(nbytes)},
            sent_nbytes=sum(nbytes[shard] for shard in sent) + result_nbytes,
            received_nbytes=others * (nbytes[owners[rank]] + result_nbytes),
            sent_count=len(sent) + is_cut,
            received_count=others * (1 + is_cut),
            pattern="reduce_scatter" if is_cut else "gather",
            result_nbytes=result_nbytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather(Exchange):
    """Every worker's payload goes to every worker, and all of them combine all payloads.

    >>> Gather()
    Gather()
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class ReduceScatter(Exchange):
    """mean_s = decode(encode(aggregate_k(decode(encode(Delta_k,s))))) by the owner of shard s.

    Sums are fp32 in rank order. A lossless codec gives the very numbers of `Gather`; any other
    rounds twice.

    Args:
        owner_feedback: feeds the error of the second encoding back on the shard's owner, too.

    Source: MuLoCo (arXiv 2505.23725), section on compression, whose code only simulates it.

    >>> ReduceScatter().owner_feedback
    NoFeedback()
    """

    owner_feedback: Feedback = field(default_factory=NoFeedback)

    def owners(self, rank: int, workers: int, round: int) -> Mapping[int, int]:
        """Worker s combines shard s, one of as many as there are workers."""
        del rank, round
        return {owner: owner for owner in range(workers)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Automatic(Exchange):
    """Gathers up to a few workers, or while what arrives is no more than the vector in fp32.

    gather receives (K - 1) B bytes for payloads of B; reduce-scatter 2 B, but encodes twice. An
    aggregate that is not elementwise is always gathered: it needs whole tensors.

    Args:
        few: K up to which the answer is always gather.
        otherwise: the reduce-scatter for the other cases.

    Raises:
        ConfigurationError: `few` is below 1.

    >>> Automatic().few
    4
    """

    few: int = 4
    otherwise: ReduceScatter = field(default_factory=ReduceScatter)

    def __post_init__(self) -> None:
        check(
            self.few >= 1,
            f"choose an exchange with few={self.few}",
            because="few counts workers and must be 1 or more",
            do="pass few >= 1, or ReduceScatter() to fix the choice",
        )

    def bind(self, context: ExchangeContext) -> ExchangeState:
        """A state of the exchange that `choose` returns."""
        chosen = self.choose(context.codec, context.layout, context.aggregate, context.workers)
        return chosen.bind(context)

    def sizes(
        self, codec: Codec, layout: Layout, aggregate: Aggregate, *, workers: int, rank: int
    ) -> Sizes:
        """The sizes of the exchange that `choose` returns."""
        chosen = self.choose(codec, layout, aggregate, workers)
        return chosen.sizes(codec, layout, aggregate, workers=workers, rank=rank)

    def choose(self, codec: Codec, layout: Layout, aggregate: Aggregate, workers: int) -> Exchange:
        """The exchange for so many workers: `Gather` or `otherwise`."""
        received_bytes = (workers - 1) * codec.payload_nbytes(layout)
        few = workers <= self.few or received_bytes <= 4 * layout.numel
        return Gather() if few or not aggregate.elementwise else self.otherwise
