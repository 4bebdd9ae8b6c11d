"""What the simulation wants to know of a method: when which bytes leave, and no more.

`thinwire.plan.traffic` has this of any method and model. Anything else of this form does as well.
"""

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Freight", "Parcel", "due_after", "last_due"]


class Parcel(Protocol):
    """One fragment's exchange, as one worker sees it; it is repeated every H steps."""

    @property
    def offset(self) -> int:
        """t_p, inner steps; it is due when (t - t_p) mod H = 0."""
        ...

    @property
    def first(self) -> int:
        """The first inner step, counted from 1, after which it may be due."""
        ...

    @property
    def layers(self) -> tuple[int | None, ...]:
        """That it holds; None is what lies outside of the stack."""
        ...

    @property
    def parameters(self) -> int:
        """Numbers in it."""
        ...

    @property
    def payload_nbytes(self) -> float:
        """Of the messages for this worker's own pseudo-gradient, headers included."""
        ...

    @property
    def result_nbytes(self) -> float:
        """Of the message with the shard that this worker combined."""
        ...

    @property
    def sent_nbytes(self) -> float:
        """That it hands over for others, each message counted once."""
        ...

    @property
    def received_nbytes(self) -> float:
        """That come from others."""
        ...

    @property
    def vote_nbytes(self) -> float:
        """That it sends besides, to agree on whose payloads are used."""
        ...

    @property
    def exchange(self) -> str:
        """gather, reduce_scatter or pairs."""
        ...


class Freight(Protocol):
    """All that one worker sends."""

    @property
    def sync_every(self) -> int:
        """H, inner steps from one exchange of a fragment to the next."""
        ...

    @property
    def tau(self) -> int:
        """Inner steps that an exchange may take."""
        ...

    @property
    def messages(self) -> Sequence[Parcel]:
        """One for each fragment, in the order in which they are sent."""
        ...

    @property
    def workers(self) -> int:
        """K."""
        ...


def due_after(freight: Freight, step: int) -> list[int]:
    """Indices of the messages that are due after inner step `step`, counted from 1."""
    every = freight.sync_every
    return [
        index
        for index, message in enumerate(freight.messages)
        if step >= message.first and (step - message.offset) % every == 0
    ]


def last_due(message: Parcel, steps: int, *, sync_every: int) -> int:
    """The last inner step up to `steps` after which `message` is due; 0 if there is none."""
    first = message.first + (message.offset - message.first) % sync_every
    return steps - (steps - first) % sync_every if steps >= first else 0
