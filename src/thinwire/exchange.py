"""Exchanges: how the workers' pseudo-gradients become one mean that all of them hold.

gather          everyone sends its payload to everyone: K - 1 payloads received, encoded once
reduce-scatter  everyone sends each shard to its owner, who combines, encodes again and sends the
                result to everyone: two payloads' worth received, encoded twice
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from thinwire.aggregate import Aggregate, Received, combine_finite
from thinwire.codecs import Codec, Coder
from thinwire.errors import ConfigurationError, NonFiniteError
from thinwire.feedback import Feedback, FeedbackState, NoFeedback
from thinwire.layout import Layout
from thinwire.message import HEADER_NBYTES, Header, Kind, open_message, seal
from thinwire.transport import Label, Pending, Transport

__all__ = [
    "Automatic",
    "Exchange",
    "ExchangeState",
    "Gather",
    "InFlight",
    "Place",
    "ReduceScatter",
    "Wiring",
]


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
        device: of the vector.
    """

    codec: Codec
    feedback: Feedback
    aggregate: Aggregate
    layout: Layout
    fragment: int
    transport: Transport
    device: torch.device


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
    """A pseudo-gradient under way."""

    @abstractmethod
    def finish(self) -> tuple[Tensor, tuple[int, ...]]:
        """The mean (fp32 [numel]) and the workers left out of it; waits for them all."""


class ExchangeState(ABC):
    """The exchange of one fragment on one worker."""

    @abstractmethod
    def start(self, delta: Tensor, place: Place) -> InFlight:
        """Encode and send `delta` (fp32 [numel], finite; it may be overwritten)."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the messages that this worker makes for one exchange, headers included."""

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


# -- gather ----------------------------------------------------------------------------------------


@final
class _Gathering(ExchangeState):
    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._coder = wiring.codec.fit(wiring.layout)
        self._feedback = wiring.feedback.bind(wiring.layout.numel, wiring.device)

    @property
    def nbytes(self) -> int:
        return HEADER_NBYTES + self._coder.nbytes

    def start(self, delta: Tensor, place: Place) -> InFlight:
        transport, coder = self._wiring.transport, self._coder.at(place.label.round)
        body = self._feedback.encode(delta, coder)
        header = _header(self._wiring, coder, place, sender=transport.rank, kind=Kind.WHOLE)
        # A lone worker talks to nobody, who need not be told what it says.
        message = body if transport.world_size == 1 else seal(body, header)
        pending = transport.start(message, place.label)
        return _Gathered(self._wiring, coder, place, pending)

    def state_dict(self) -> dict[str, Tensor]:
        return self._feedback.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._feedback.load_state_dict(state)


@final
class _Gathered(InFlight):
    def __init__(self, wiring: Wiring, coder: Coder, place: Place, pending: Pending) -> None:
        self._wiring, self._coder, self._place, self._pending = wiring, coder, place, pending

    def finish(self) -> tuple[Tensor, tuple[int, ...]]:
        messages = self._pending.wait()
        bodies = messages if len(messages) == 1 else self._open(messages)
        payloads = [body.to(self._wiring.device) for body in bodies]
        received = Received(coder=self._coder, payloads=payloads)
        return combine_finite(self._wiring.aggregate, received)

    def _open(self, messages: Sequence[Tensor]) -> list[Tensor]:
        return [
            open_message(
                message,
                _header(self._wiring, self._coder, self._place, sender=rank, kind=Kind.WHOLE),
                body_nbytes=self._coder.nbytes,
            )
            for rank, message in enumerate(messages)
        ]


def _header(
    wiring: Wiring, coder: Coder, place: Place, *, sender: int, kind: int, shard: int = 0
) -> Header:
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


# -- reduce-scatter --------------------------------------------------------------------------------


@final
class _ReduceScattering(ExchangeState):
    """Shard s of the vector belongs to worker s."""

    def __init__(self, wiring: Wiring, owner_feedback: Feedback) -> None:
        workers, rank = wiring.transport.world_size, wiring.transport.rank
        self._wiring = wiring
        pieces = wiring.layout.cut(workers)
        self._shards = [slice(start, start + piece.numel) for start, piece in pieces]
        self._coders = [wiring.codec.fit(piece) for _, piece in pieces]
        self._feedback = [wiring.feedback.bind(p.numel, wiring.device) for _, p in pieces]
        self._owner = owner_feedback.bind(pieces[rank][1].numel, wiring.device)
        # Results travel in an all-gather, which takes equal sizes.
        self._result_nbytes = HEADER_NBYTES + max(coder.nbytes for coder in self._coders)

    @property
    def nbytes(self) -> int:
        return sum(HEADER_NBYTES + coder.nbytes for coder in self._coders) + self._result_nbytes

    def start(self, delta: Tensor, place: Place) -> InFlight:
        rank, coders = self._wiring.transport.rank, self._at(place)
        parts = zip(self._shards, coders, self._feedback, strict=True)
        bodies = [feedback.encode(delta[where], coder) for where, coder, feedback in parts]
        shards = [
            seal(body, self._header(coders, place, shard, sender=rank, kind=Kind.SHARD))
            for shard, body in enumerate(bodies)
        ]
        flight = _Scattered(self._wiring, coders, self._shards, place, self._owner)
        flight.pending = self._wiring.transport.start_reduce(
            shards, lambda messages: flight.reduce(messages, self._result_nbytes), place.label
        )
        return flight

    def _at(self, place: Place) -> list[Coder]:
        return [coder.at(place.label.round) for coder in self._coders]

    def _header(
        self, coders: Sequence[Coder], place: Place, shard: int, *, sender: int, kind: int
    ) -> Header:
        return _header(self._wiring, coders[shard], place, sender=sender, kind=kind, shard=shard)

    def state_dict(self) -> dict[str, Tensor]:
        parts = {f"shard{i}": feedback for i, feedback in enumerate(self._feedback)}
        return {
            f"{part}.{key}": value
            for part, feedback in {**parts, "owner": self._owner}.items()
            for key, value in feedback.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        parts = {f"shard{i}": feedback for i, feedback in enumerate(self._feedback)}
        for part, feedback in {**parts, "owner": self._owner}.items():
            prefix = f"{part}."
            feedback.load_state_dict(
                {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            )


@final
class _Scattered(InFlight):
    def __init__(
        self,
        wiring: Wiring,
        coders: Sequence[Coder],
        shards: Sequence[slice],
        place: Place,
        owner: FeedbackState,
    ) -> None:
        self._wiring, self._coders, self._shards = wiring, coders, shards
        self._place, self._owner = place, owner
        self._left_out: tuple[int, ...] = ()
        self.pending: Pending | None = None

    @torch.no_grad()
    def reduce(self, messages: Sequence[Tensor], nbytes: int) -> Tensor:
        """My shard of all workers in, my shard of the result out, filled up to `nbytes`."""
        mine = self._wiring.transport.rank
        payloads = [
            self._open(message, mine, sender=sender, kind=Kind.SHARD)
            for sender, message in enumerate(messages)
        ]
        received = Received(coder=self._coders[mine], payloads=payloads)
        mean, self._left_out = combine_finite(self._wiring.aggregate, received)
        body = self._owner.encode(mean, self._coders[mine])
        header = self._header(mine, sender=mine, kind=Kind.MEAN)
        message = seal(body, header)
        return torch.cat([message, message.new_zeros(nbytes - len(message))])

    def finish(self) -> tuple[Tensor, tuple[int, ...]]:
        assert self.pending is not None
        messages = self.pending.wait()
        mean = torch.empty(self._wiring.layout.numel, device=self._wiring.device)
        for owner, message in enumerate(messages):
            payload = self._open(message, owner, sender=owner, kind=Kind.MEAN)
            mean[self._shards[owner]] = self._coders[owner].decode(payload)
        self._check_finite(mean)
        return mean, self._left_out

    def _check_finite(self, mean: Tensor) -> None:
        """Nobody else made an owner's shard, so here nothing can be left out."""
        if bool(torch.isfinite(mean.sum())) or bool(torch.isfinite(mean).all()):
            return
        bad = [o for o, s in enumerate(self._shards) if not bool(torch.isfinite(mean[s]).all())]
        raise NonFiniteError(
            f"use the combined shards of worker {', '.join(map(str, bad))} for round "
            f"{self._place.label.round}",
            because="they hold NaN or an infinity",
            do="resume from the last checkpoint with a lower inner learning rate",
        )

    def _open(self, message: Tensor, shard: int, *, sender: int, kind: int) -> Tensor:
        header = self._header(shard, sender=sender, kind=kind)
        body = open_message(message, header, body_nbytes=self._coders[shard].nbytes)
        return body.to(self._wiring.device)

    def _header(self, shard: int, *, sender: int, kind: int) -> Header:
        return _header(
            self._wiring, self._coders[shard], self._place, sender=sender, kind=kind, shard=shard
        )


@final
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

    def bind(self, wiring: Wiring) -> ExchangeState:
        """Coders and feedback for every shard."""
        if wiring.transport.world_size == 1:
            return _Gathering(wiring)
        return _ReduceScattering(wiring, self.owner_feedback)


# -- the choice ------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Automatic(Exchange):
    """Gather up to a few workers, or while what arrives is no more than the vector in fp32.

    gather receives (K - 1) B bytes for payloads of B; reduce-scatter 2 B, but encodes twice.

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
        if self.few < 1:
            raise ConfigurationError(
                f"choose an exchange with few={self.few}",
                because="there is at least one worker",
                do="pass few >= 1, or ReduceScatter() to fix the choice",
            )

    def bind(self, wiring: Wiring) -> ExchangeState:
        """Whatever the sizes say."""
        return self.choose(wiring).bind(wiring)

    def choose(self, wiring: Wiring) -> Exchange:
        """`Gather` or the reduce-scatter."""
        workers = wiring.transport.world_size
        received_bytes = (workers - 1) * wiring.codec.fit(wiring.layout).nbytes
        if workers <= self.few or received_bytes <= 4 * wiring.layout.numel:
            return Gather()
        return self.otherwise
