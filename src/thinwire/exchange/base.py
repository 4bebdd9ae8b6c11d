"""What an exchange is given, what it costs, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import Tensor

from thinwire.aggregate import Aggregate
from thinwire.blocks import StreamedVector
from thinwire.codecs import Codec
from thinwire.feedback import Feedback
from thinwire.fragments.layout import Layout
from thinwire.rejection import Rejection
from thinwire.storage import StatePlacement

Pattern: TypeAlias = Literal["gather", "reduce_scatter", "pairs", "server"]
"""Which workers send what to which: all that a link must know of an exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeContext:
    """A fragment, its method and its workers, for one exchange state.

    Args:
        codec: what travels.
        feedback: what a round leaves for the next one.
        aggregate: one pseudo-gradient from all workers'.
        layout: of the fragment's vector.
        fragment: its index.
        workers: K, for as long as the exchange is bound.
        rank: this worker's.
        storage: where feedback rests.
        drops_bad_messages: leave out bad messages; needs a transport that gives all workers the
            same bytes, so that they find the same. Otherwise a bad message is an error.
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
    has_own_anchors: bool = False
    warns_of_same_work: bool = True
    refuses_own: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Bytes and messages of one worker in one exchange, headers included.

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
    """The mean of a round, and which workers are not in it.

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
