"""What an exchange is: how the workers' pseudo-gradients become one mean that all of them hold."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from thinwire.aggregate import Aggregate
from thinwire.codecs import Codec, Coder
from thinwire.feedback import Feedback
from thinwire.layout import Layout
from thinwire.message import Header
from thinwire.storage import Storage
from thinwire.transport import Label, Transport

__all__ = ["Exchange", "ExchangeState", "InFlight", "Place", "Wiring", "header_of"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Wiring:
    """What an exchange of one fragment is made of.

    Args:
        codec: what travels.
        feedback: what a round leaves for the next one.
        aggregate: one pseudo-gradient from all workers'.
        layout: of the fragment's vector.
        fragment: its index.
        transport: to the other workers.
        storage: where feedback rests.
    """

    codec: Codec
    feedback: Feedback
    aggregate: Aggregate
    layout: Layout
    fragment: int
    transport: Transport
    storage: Storage


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


class InFlight(ABC):
    """A pseudo-gradient under way.

    Args:
        place: where in a run it was sent.
        messages: what this worker sent, by name: enough to send it again.
    """

    def __init__(self, place: Place, messages: Mapping[str, Tensor]) -> None:
        self.place, self.messages = place, messages

    @abstractmethod
    def finish(self) -> tuple[Tensor, tuple[int, ...]]:
        """The mean (a new fp32 [numel]) and the workers left out of it; waits for them all."""


class ExchangeState(ABC):
    """The exchange of one fragment on one worker."""

    def start(self, delta: Tensor, place: Place) -> InFlight:
        """Encode and send `delta` (fp32 [numel], finite; it may be overwritten)."""
        return self.send(self.encode(delta, place), place)

    @abstractmethod
    def encode(self, delta: Tensor, place: Place) -> dict[str, Tensor]:
        """The messages for `delta`, by name; feedback keeps what they lack."""

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

    @abstractmethod
    def prefetch(self) -> None:
        """Begin to bring what `encode` needs to the device."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """What is kept between rounds: feedback."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`."""


class Exchange(ABC):
    """Description of an exchange."""

    @abstractmethod
    def bind(self, wiring: Wiring) -> ExchangeState:
        """A fresh state for one fragment."""


def header_of(
    wiring: Wiring, coder: Coder, place: Place, *, sender: int, kind: int, shard: int = 0
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
