"""What an exchange is: how the workers' pseudo-gradients become one mean that all of them hold."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from torch import Tensor

from thinwire.aggregate import Aggregate
from thinwire.codecs import BoundCodec, Codec
from thinwire.exchange.message import Header
from thinwire.feedback import Feedback
from thinwire.fragments.layout import Layout
from thinwire.rejection import Rejection
from thinwire.storage import StatePlacement
from thinwire.transport import Label, Transport

__all__ = [
    "Exchange",
    "ExchangeContext",
    "ExchangeState",
    "InFlight",
    "Pattern",
    "Place",
    "RoundResult",
    "header_of",
]

Pattern: TypeAlias = Literal["gather", "reduce_scatter", "pairs"]
"""Who sends what to whom: all that a link must know of an exchange."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeContext:
    """What an exchange of one fragment is made of.

    Args:
        codec: what travels.
        feedback: what a round leaves for the next one.
        aggregate: one pseudo-gradient from all workers'.
        layout: of the fragment's vector.
        fragment: its index.
        transport: to the other workers.
        workers: K, for as long as the exchange is bound.
        rank: this worker's.
        storage: where feedback rests.
    """

    codec: Codec
    feedback: Feedback
    aggregate: Aggregate
    layout: Layout
    fragment: int
    transport: Transport
    workers: int
    rank: int
    storage: StatePlacement


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where in a run an exchange takes place.

    Args:
        label: for error messages; it has the round's number.
        anchor: digest of this worker's outer parameters.
    """

    label: Label
    anchor: bytes


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RoundResult:
    """What came of an exchange.

    Args:
        mean: a new fp32 [numel].
        left_out: why a worker is not in it, by rank.
        messages: that the mean was made of, in rank order: enough to make it again.
    """

    mean: Tensor
    left_out: Mapping[int, Rejection]
    messages: Sequence[Tensor]


class InFlight(ABC):
    """A pseudo-gradient under way.

    Args:
        place: where in a run it was sent.
        messages: what this worker sent, by name: enough to send it again.
    """

    def __init__(self, place: Place, messages: Mapping[str, Tensor]) -> None:
        self.place, self.messages = place, messages

    @abstractmethod
    def finish(self) -> RoundResult:
        """The mean, and whom it lacks; waits for all workers.

        Raises:
            RoundDiscarded: it counts on nobody; by a transport whose workers come and go.
        """


class ExchangeState(ABC):
    """The exchange of one fragment on one worker."""

    def start(self, delta: Tensor, place: Place) -> InFlight:
        """Encode and send `delta` (fp32 [numel], finite; it may be overwritten)."""
        return self.send(self.encode(delta, place), place)

    @abstractmethod
    def encode(self, delta: Tensor, place: Place) -> dict[str, Tensor]:
        """The messages for `delta`, by name; feedback keeps what they lack."""

    @abstractmethod
    def empty_messages(self, place: Place) -> dict[str, Tensor]:
        """Messages of a worker that has nothing to contribute, which are never used."""

    @abstractmethod
    def remake(
        self, messages: Sequence[Tensor], place: Place, *, left_out: Collection[int]
    ) -> Tensor:
        """The mean that others made of `messages` in a round that this worker missed.

        Args:
            messages: an `RoundResult` has.
            place: of that round; `anchor` is that of this worker, which had got as far.
            left_out: ranks that are not in it.
        """

    @abstractmethod
    def residual(self) -> Tensor | None:
        """What earlier rounds left to be sent (fp32 [numel], a copy), whatever K; None if nothing.

        A shard's owner also keeps what the mean lacks, of which its own pseudo-gradient is 1/K.
        """

    @abstractmethod
    def take_residual(self, residual: Tensor) -> None:
        """Continue from what `residual` returned, perhaps for another K."""

    @abstractmethod
    def send(self, messages: Mapping[str, Tensor], place: Place) -> InFlight:
        """Send what `encode` made, perhaps again by a worker that resumes."""

    @abstractmethod
    def blank(self) -> dict[str, Tensor]:
        """Messages of the names and sizes that `encode` makes, all zeros."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the messages that this worker makes for one exchange, headers included."""

    @property
    @abstractmethod
    def sent_nbytes(self) -> int:
        """Bytes of them that go to other workers, each message counted once."""

    @property
    @abstractmethod
    def received_nbytes(self) -> int:
        """Bytes of the messages that come from other workers in one exchange."""

    @property
    def result_nbytes(self) -> int:
        """Bytes of `nbytes` that are made of others' messages: by default none."""
        return 0

    @property
    @abstractmethod
    def pattern(self) -> Pattern:
        """Who sends what to whom."""

    @abstractmethod
    def prefetch(self) -> None:
        """Begin to bring what `encode` needs to the device."""

    def feedback(self) -> dict[str, Tensor]:
        """A copy of feedback as it is now; `state_dict` has it as it was before what is in flight.

        Where the two are one, this need not be changed.
        """
        return {key: value.clone() for key, value in self.state_dict().items()}

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """What is kept between rounds: feedback."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`."""


class Exchange(ABC):
    """Description of an exchange."""

    @abstractmethod
    def bind(self, wiring: ExchangeContext) -> ExchangeState:
        """A fresh state for one fragment."""


def header_of(
    wiring: ExchangeContext,
    coder: BoundCodec,
    place: Place,
    *,
    sender: int,
    kind: int,
    shard: int = 0,
) -> Header:
    """What the message of `sender` must say."""
    return Header(
        codec=coder.id,
        fragment=wiring.fragment,
        kind=kind,
        shard=shard,
        round=place.label.round,
        sender=sender,
        elements=coder.layout.numel,
        anchor=place.anchor,
    )
