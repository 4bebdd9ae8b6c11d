"""What an exchange is: how the workers' pseudo-gradients become the mean that moves an anchor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from thinwire.aggregate import Aggregate
from thinwire.blocks import LazyVector, StreamedVector
from thinwire.codecs import BoundCodec, Codec
from thinwire.exchange.message import Header, header_of
from thinwire.feedback import Feedback
from thinwire.fragments.layout import Layout
from thinwire.rejection import Rejection
from thinwire.storage import StatePlacement
from thinwire.transport import Posts, RoundTag

Pattern: TypeAlias = Literal["gather", "reduce_scatter", "pairs"]
"""Which workers send what to which: all that a link must know of an exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeContext:
    """All that an exchange needs to know of a fragment, its method and its workers.

    Args:
        codec: what travels.
        feedback: what a round leaves for the next one.
        aggregate: one pseudo-gradient from all workers'.
        layout: of the fragment's vector.
        fragment: its index.
        workers: K, for as long as the exchange is bound.
        rank: this worker's.
        storage: where feedback rests.
        drops_bad_messages: the workers agree on which messages are bad and go on without them;
            otherwise a bad message is an error.
        votes: whether they vote on it, because a message may have reached some of them only; else
            the transport gives all of them the same bytes, and they find the same.
        has_own_anchors: each worker has an anchor of its own, so messages carry no digest of it.
        warns_of_same_work: warn if all workers send the same in the first round.
        refuses_own: what this worker would send is an error if it is not finite; else it is sent,
            and all workers hear of it.
    """

    codec: Codec
    feedback: Feedback
    aggregate: Aggregate
    layout: Layout
    fragment: int
    workers: int
    rank: int
    storage: StatePlacement
    drops_bad_messages: bool = False
    votes: bool = True
    has_own_anchors: bool = False
    warns_of_same_work: bool = True
    refuses_own: bool = True

    def header(
        self, codec: BoundCodec, tag: RoundTag, *, sender: int, kind: int, shard: int = 0
    ) -> Header:
        """What the message of `sender` must say in the round of `tag`."""
        return header_of(
            codec,
            fragment=self.fragment,
            round=tag.round,
            sender=sender,
            kind=kind,
            anchor=bytes(8) if self.has_own_anchors else tag.anchor,
            shard=shard,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What one worker sends and receives in one exchange, in bytes, headers included.

    Args:
        messages: of this worker's pseudo-gradient, by name.
        result_nbytes: of the message made of others' messages; 0 without one.
        sent_nbytes: that go to other workers, each message counted once.
        received_nbytes: that come from other workers.
        sent_count: messages that go to other workers, counted like their bytes.
        received_count: messages that come from other workers.
        pattern: which workers send what to which.
    """

    messages: Mapping[str, int]
    sent_nbytes: int
    received_nbytes: int
    sent_count: int
    received_count: int
    pattern: Pattern
    result_nbytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundResult:
    """What an exchange returns: the mean, and which workers are not in it.

    Args:
        mean: of the fragment's vector, decoded as it is read.
        left_out: why a worker is not in it, by rank.
        messages: that the mean was made of, in rank order: enough to make it again.
        clipped: the factor by which a worker's contribution was scaled down, by rank; under a
            reduce-scatter, that of the shard which this worker owns.
    """

    mean: StreamedVector
    left_out: Mapping[int, Rejection]
    messages: Sequence[Tensor]
    clipped: Mapping[int, float] = field(default_factory=dict[int, float])


class ExchangeState(ABC):
    """The exchange of one fragment on one worker: it keeps the error feedback between rounds.

    Args:
        sizes: of its messages.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    @abstractmethod
    def encode(self, delta: LazyVector, tag: RoundTag) -> dict[str, Tensor]:
        """The messages for `delta` ([numel], finite), by name.

        Feedback keeps what they lack.
        """

    @abstractmethod
    def empty_messages(self, tag: RoundTag) -> dict[str, Tensor]:
        """Messages of a worker that has nothing to contribute; they are never averaged."""

    @abstractmethod
    def run(self, messages: Mapping[str, Tensor], tag: RoundTag) -> Posts[RoundResult]:
        """The exchange itself, from the messages of this worker to the mean.

        A worker that resumes passes the messages that it had sent before.
        """

    @abstractmethod
    def absorb(self, mean: StreamedVector) -> StreamedVector:
        """What the outer optimizer applies, by feedback's rule.

        Called once for each result that is applied, in their order; it is read once.
        """

    @abstractmethod
    def replay_mean(
        self, messages: Sequence[Tensor], tag: RoundTag, *, left_out: Collection[int]
    ) -> StreamedVector:
        """The mean that others made of `messages` in a round that this worker missed.

        Args:
            messages: of that round's `RoundResult`.
            tag: of that round; `anchor` is that of this worker, which had got as far.
            left_out: ranks that are not in it.
        """

    @abstractmethod
    def prefetch(self) -> None:
        """Begin to bring to the device what `encode` needs."""

    # -- feedback ----------------------------------------------------------------------------------

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Feedback as it was before what is in flight: a worker that resumes sends that again."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`."""

    def feedback(self) -> dict[str, Tensor]:
        """A copy of feedback as it is now."""
        return {key: value.clone() for key, value in self.state_dict().items()}

    @abstractmethod
    def feedback_vector(self) -> Tensor | None:
        """What earlier rounds left to be sent (fp32 [numel], a copy), whatever K; None if nothing.

        A shard's owner also keeps what the mean lacks. It counts K times here, because a worker's
        pseudo-gradient has a weight of 1/K in the mean.
        """

    @abstractmethod
    def load_feedback_vector(self, vector: Tensor) -> None:
        """Continue from what `feedback_vector` returned, perhaps for another K."""

    def blank(self) -> dict[str, Tensor]:
        """Messages of the names and sizes that `encode` makes, all zeros."""
        return {
            name: torch.zeros(nbytes, dtype=torch.uint8)
            for name, nbytes in self.sizes.messages.items()
        }


class Exchange(ABC):
    """Describes how the workers of a method exchange; `bind` makes its state."""

    @abstractmethod
    def bind(self, context: ExchangeContext) -> ExchangeState:
        """A fresh exchange state for one fragment."""

    @abstractmethod
    def sizes(
        self, codec: Codec, layout: Layout, aggregate: Aggregate, *, workers: int, rank: int
    ) -> Sizes:
        """What worker `rank` of `workers` sends and receives; nothing is made or sent."""

    def sizes_in(self, context: ExchangeContext) -> Sizes:
        """`sizes` of the worker that `context` is of."""
        return self.sizes(
            context.codec,
            context.layout,
            context.aggregate,
            workers=context.workers,
            rank=context.rank,
        )
