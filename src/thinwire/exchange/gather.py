"""Gather: everyone's payload goes to everyone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from thinwire.aggregate import Received, combine_finite
from thinwire.codecs import Coder
from thinwire.exchange.base import Exchange, ExchangeState, InFlight, Place, Wiring, header_of
from thinwire.message import HEADER_NBYTES, Kind, open_message, seal
from thinwire.transport import Pending

__all__ = ["Gather"]

_WHOLE = "whole"


@final
class _Gathering(ExchangeState):
    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._coder = wiring.codec.fit(wiring.layout)
        self._feedback = wiring.feedback.bind(wiring.layout.numel, wiring.storage)
        # A lone worker talks to nobody, who need not be told what it says.
        self._alone = wiring.transport.world_size == 1

    @property
    def nbytes(self) -> int:
        return HEADER_NBYTES + self._coder.nbytes

    @property
    def sent_nbytes(self) -> int:
        return 0 if self._alone else self.nbytes

    def encode(self, delta: Tensor, place: Place) -> dict[str, Tensor]:
        coder = self._coder.at(place.label.round)
        body = self._feedback.encode(delta, coder)
        if self._alone:
            return {_WHOLE: body}
        rank = self._wiring.transport.rank
        header = header_of(self._wiring, coder, place, sender=rank, kind=Kind.WHOLE)
        return {_WHOLE: seal(body, header)}

    def send(self, messages: Mapping[str, Tensor], place: Place) -> InFlight:
        pending = self._wiring.transport.start(messages[_WHOLE], place.label)
        coder = self._coder.at(place.label.round)
        return _Gathered(self._wiring, coder, place, messages, pending)

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
class _Gathered(InFlight):
    def __init__(
        self,
        wiring: Wiring,
        coder: Coder,
        place: Place,
        messages: Mapping[str, Tensor],
        pending: Pending,
    ) -> None:
        super().__init__(place, messages)
        self._wiring, self._coder, self._pending = wiring, coder, pending

    def finish(self) -> tuple[Tensor, tuple[int, ...]]:
        messages = self._pending.wait()
        bodies = messages if len(messages) == 1 else self._open(messages)
        payloads = [body.to(self._wiring.storage.device) for body in bodies]
        received = Received(coder=self._coder, payloads=payloads)
        return combine_finite(self._wiring.aggregate, received)

    def _open(self, messages: Sequence[Tensor]) -> list[Tensor]:
        return [
            open_message(
                message,
                header_of(self._wiring, self._coder, self.place, sender=rank, kind=Kind.WHOLE),
                body_nbytes=self._coder.nbytes,
            )
            for rank, message in enumerate(messages)
        ]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Gather(Exchange):
    """Everyone's payload goes to everyone, and all workers combine all of them.

    >>> Gather()
    Gather()
    """

    def bind(self, wiring: Wiring) -> ExchangeState:
        """One coder and one feedback for the whole fragment."""
        return _Gathering(wiring)
