"""Gather: everyone's payload goes to everyone."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from thinwire.aggregate import Payloads, aggregate_valid
from thinwire.codecs import BoundCodec
from thinwire.exchange.base import (
    Exchange,
    ExchangeContext,
    ExchangeState,
    InFlight,
    Pattern,
    Place,
    RoundResult,
    header_of,
)
from thinwire.exchange.message import HEADER_NBYTES, Header, Kind, examine, open_message, seal
from thinwire.rejection import Rejection
from thinwire.transport import Pending

__all__ = ["Gather"]

_WHOLE = "whole"


@final
class _Gathering(ExchangeState):
    def __init__(self, wiring: ExchangeContext) -> None:
        self._wiring = wiring
        self._coder = wiring.codec.bind(wiring.layout)
        self._feedback = wiring.feedback.bind(wiring.layout.numel, wiring.storage)
        # A lone worker talks to nobody, who need not be told what it says.
        self._alone = wiring.workers == 1

    @property
    def nbytes(self) -> int:
        return HEADER_NBYTES + self._coder.nbytes

    @property
    def sent_nbytes(self) -> int:
        return 0 if self._alone else self.nbytes

    @property
    def received_nbytes(self) -> int:
        return (self._wiring.workers - 1) * self.nbytes

    @property
    def pattern(self) -> Pattern:
        return "gather"

    def encode(self, delta: Tensor, place: Place) -> dict[str, Tensor]:
        coder = self._coder.at(place.label.round)
        body = self._feedback.encode(delta, coder)
        if self._alone:
            return {_WHOLE: body}
        return {_WHOLE: self._sealed(body, coder, place, Kind.WHOLE)}

    def empty_messages(self, place: Place) -> dict[str, Tensor]:
        body = torch.zeros(self._coder.nbytes, dtype=torch.uint8)
        return {_WHOLE: self._sealed(body, self._coder, place, Kind.NOTHING)}

    def _sealed(self, body: Tensor, coder: BoundCodec, place: Place, kind: int) -> Tensor:
        sender = self._wiring.rank
        return seal(body, header_of(self._wiring, coder, place, sender=sender, kind=kind))

    def send(self, messages: Mapping[str, Tensor], place: Place) -> InFlight:
        reading = _Reading(self._wiring, self._coder.at(place.label.round), place)
        pending = self._wiring.transport.start(messages[_WHOLE], place.label, reading.inspect)
        return _Gathered(reading, messages, pending)

    def remake(
        self, messages: Sequence[Tensor], place: Place, *, left_out: Collection[int]
    ) -> Tensor:
        reading = _Reading(self._wiring, self._coder.at(place.label.round), place)
        return reading.combine_again(messages, left_out)

    def residual(self) -> Tensor | None:
        held = self._feedback.state_dict()
        return held["residual"].clone() if held else None

    def take_residual(self, residual: Tensor) -> None:
        self._feedback.load_state_dict({"residual": residual})

    def blank(self) -> dict[str, Tensor]:
        nbytes = self._coder.nbytes if self._alone else self.nbytes
        return {_WHOLE: torch.zeros(nbytes, dtype=torch.uint8)}

    def prefetch(self) -> None:
        self._feedback.prefetch()

    def state_dict(self) -> dict[str, Tensor]:
        return self._feedback.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._feedback.load_state_dict(state)


@final
class _Reading:
    """How the messages of one round are read: what they must say, and what is made of them."""

    def __init__(self, wiring: ExchangeContext, coder: BoundCodec, place: Place) -> None:
        self._wiring, self._coder, self.place = wiring, coder, place

    def inspect(self, messages: Sequence[Tensor]) -> dict[int, Rejection]:
        """What is wrong with a message, by sender."""
        if len(messages) == 1:
            return {}  # a lone worker's own has no header
        nbytes = self._coder.nbytes
        found = (
            (r, examine(m, self._expected(r), body_nbytes=nbytes)) for r, m in enumerate(messages)
        )
        return {rank: flaw for rank, flaw in found if flaw is not None}

    def combine(self, messages: Sequence[Tensor], left_out: Mapping[int, Rejection]) -> RoundResult:
        """The mean of all messages but those of `left_out`, and of what else turns out unusable."""
        senders, received = self._received(messages, left_out)
        limit = self._wiring.transport.norm_limit
        mean, flaws = aggregate_valid(self._wiring.aggregate, received, norm_limit=limit)
        worse = {senders[place]: flaw for place, flaw in flaws.items()}
        return RoundResult(mean=mean, left_out={**left_out, **worse}, messages=messages)

    def combine_again(self, messages: Sequence[Tensor], left_out: Collection[int]) -> Tensor:
        """The same mean, when it is known who is not in it: nobody else turns out unusable."""
        return self._wiring.aggregate.combine(self._received(messages, left_out)[1])

    def _received(
        self, messages: Sequence[Tensor], left_out: Collection[int]
    ) -> tuple[list[int], Payloads]:
        senders = [rank for rank in range(len(messages)) if rank not in left_out]
        device = self._wiring.storage.device
        payloads = [self._body(messages, rank).to(device) for rank in senders]
        return senders, Payloads(coder=self._coder, payloads=payloads)

    def _body(self, messages: Sequence[Tensor], rank: int) -> Tensor:
        if len(messages) == 1:
            return messages[0]
        return open_message(messages[rank], self._expected(rank), body_nbytes=self._coder.nbytes)

    def _expected(self, rank: int) -> Header:
        return header_of(self._wiring, self._coder, self.place, sender=rank, kind=Kind.WHOLE)


@final
class _Gathered(InFlight):
    def __init__(self, reading: _Reading, messages: Mapping[str, Tensor], pending: Pending) -> None:
        super().__init__(reading.place, messages)
        self._reading, self._pending = reading, pending

    def finish(self) -> RoundResult:
        messages = self._pending.wait()
        return self._reading.combine(messages, self._pending.left_out())


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Gather(Exchange):
    """Everyone's payload goes to everyone, and all workers combine all of them.

    >>> Gather()
    Gather()
    """

    def bind(self, wiring: ExchangeContext) -> ExchangeState:
        """One coder and one feedback for the whole fragment."""
        return _Gathering(wiring)
