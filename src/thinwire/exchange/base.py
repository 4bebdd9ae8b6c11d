"""The arguments, sizes and results of an exchange."""

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
"""Which workers send what to which; a link model needs no more of an exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeContext:
    """A fragment, its method and its workers, for one exchange state.

    Args:
        codec: encodes payloads.
        feedback: carries encoding errors to the next round.
        aggregate: combines the pseudo-gradients of all workers.
        layout: of the fragment's vector.
        fragment: its index.
        workers: K.
        rank: of this worker.
        storage: of the feedback.
        drops_bad_messages: leave out bad messages; the transport must give all workers the same
            bytes. Otherwise a bad message is an error.
        has_own_anchors: the anchors differ between workers, so messages have no digest of them.
        warns_of_same_work: warn if all workers send the same in the first round.
        refuses_own: raise if this worker's pseudo-gradient is not finite. Otherwise it is sent, and
            all workers reject it.
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
        messages: bytes of the messages of this worker's pseudo-gradient, by name.
        result_nbytes: of the message with a combined shard; 0 without one.
        sent_nbytes: to other workers, each message counted once.
        received_nbytes: from other workers.
        sent_count: messages to other workers, counted like their bytes.
        received_count: messages from other workers.
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
        left_out: rejections of the workers that are not in it, by rank.
        messages: of which the mean was made, in rank order.
        clipped: factors by which contributions were scaled down, by rank; under a reduce-scatter,
            those of the shard that this worker owns.
    """

    mean: StreamedVector
    left_out: Mapping[int, Rejection]
    messages: Sequence[Tensor]
    clipped: Mapping[int, float] = field(default_factory=dict[int, float])
