"""Reduce-scatter: every shard of the vector is combined by its owner, who sends the result."""

import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from thinwire.aggregate import Payloads, aggregate_valid
from thinwire.codecs import BoundCodec
from thinwire.errors import NonFiniteError, RoundDiscarded
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
from thinwire.exchange.gather import Gather
from thinwire.exchange.message import HEADER_NBYTES, Header, Kind, examine, open_message, seal
from thinwire.feedback import Feedback, FeedbackState, NoFeedback
from thinwire.rejection import Rejection
from thinwire.transport import Pending

__all__ = ["ReduceScatter"]


@final
class _Owner:
    """The feedback of this worker's shard, which a transport may use on a thread of its own.

    A checkpoint has the feedback as it was before the oldest exchange in flight: whoever resumes
    sends that one again.
    """

    def __init__(self, feedback: FeedbackState) -> None:
        self._feedback, self._lock = feedback, threading.Lock()
        self._before: deque[dict[str, Tensor]] = deque()
        self._life = 0

    def life(self) -> int:
        """Number of the life in which an exchange begins; `load_state_dict` begins another."""
        with self._lock:
            return self._life

    def encode(self, mean: Tensor, coder: BoundCodec, life: int) -> Tensor:
        """As `FeedbackState.encode`, for an exchange that was begun in `life`."""
        with self._lock:
            if life != self._life:
                # It was given up while a thread was at it: feedback is no longer its own.
                raise RoundDiscarded(
                    "combine a shard", because="its round was given up", do="nothing"
                )
            self._before.append(self._copy())
            return self._feedback.encode(mean, coder)

    def finished(self) -> None:
        """The oldest exchange was applied and need not be sent again."""
        with self._lock:
            self._before.popleft()

    def now(self) -> dict[str, Tensor]:
        """A copy of the feedback, whatever is in flight."""
        with self._lock:
            return self._copy()

    def state_dict(self) -> dict[str, Tensor]:
        with self._lock:
            # A copy: the next shard may be encoded while a checkpoint is being written.
            return self._before[0] if self._before else self._copy()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        with self._lock:
            self._before.clear()
            self._life += 1
            self._feedback.load_state_dict(state)

    def _copy(self) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in self._feedback.state_dict().items()}


@final
class _ReduceScattering(ExchangeState):
    """Shard s of the vector belongs to worker s."""

    def __init__(self, wiring: ExchangeContext, owner_feedback: Feedback) -> None:
        workers, rank = wiring.workers, wiring.rank
        self._wiring, self._rank = wiring, rank
        pieces = wiring.layout.cut(workers)
        self._shards = [slice(start, start + piece.numel) for start, piece in pieces]
        self._coders = [wiring.codec.bind(piece) for _, piece in pieces]
        self._feedback = [wiring.feedback.bind(p.numel, wiring.storage) for _, p in pieces]
        self._owner = _Owner(owner_feedback.bind(pieces[rank][1].numel, wiring.storage))
        self._message_nbytes = [HEADER_NBYTES + coder.nbytes for coder in self._coders]
        # Results travel in an all-gather, which takes equal sizes.
        self._result_nbytes = max(self._message_nbytes)

    @property
    def nbytes(self) -> int:
        return sum(self._message_nbytes) + self._result_nbytes

    @property
    def sent_nbytes(self) -> int:
        return self.nbytes - self._message_nbytes[self._rank]

    @property
    def received_nbytes(self) -> int:
        others = self._wiring.workers - 1
        return others * (self._message_nbytes[self._rank] + self._result_nbytes)

    @property
    def result_nbytes(self) -> int:
        return self._result_nbytes

    @property
    def pattern(self) -> Pattern:
        return "reduce_scatter"

    def encode(self, delta: Tensor, place: Place) -> dict[str, Tensor]:
        coders = self._at(place)
        parts = zip(self._shards, coders, self._feedback, strict=True)
        bodies = [feedback.encode(delta[where], coder) for where, coder, feedback in parts]
        return self._sealed(bodies, place, Kind.SHARD)

    def empty_messages(self, place: Place) -> dict[str, Tensor]:
        bodies = [torch.zeros(coder.nbytes, dtype=torch.uint8) for coder in self._coders]
        return self._sealed(bodies, place, Kind.NOTHING)

    def _sealed(self, bodies: Sequence[Tensor], place: Place, kind: int) -> dict[str, Tensor]:
        headers = (
            header_of(self._wiring, coder, place, sender=self._rank, kind=kind, shard=shard)
            for shard, coder in enumerate(self._at(place))
        )
        return {
            f"shard{shard}": seal(body, header)
            for shard, (body, header) in enumerate(zip(bodies, headers, strict=True))
        }

    def send(self, messages: Mapping[str, Tensor], place: Place) -> InFlight:
        reading = self._reading(place)
        flight = _Scattered(reading, messages, self._owner)
        flight.pending = self._wiring.transport.start_reduce(
            [messages[f"shard{shard}"] for shard in range(len(self._coders))],
            lambda received: flight.reduce(received, self._result_nbytes),
            place.label,
            reading.inspect,
        )
        return flight

    def _reading(self, place: Place) -> "_Reading":
        return _Reading(self._wiring, self._at(place), self._shards, place)

    def remake(
        self, messages: Sequence[Tensor], place: Place, *, left_out: Collection[int]
    ) -> Tensor:
        del left_out  # owners left them out of what they sent
        return self._reading(place).join(messages)

    def residual(self) -> Tensor | None:
        states = [feedback.state_dict() for feedback in self._feedback]
        owners = self._owner.state_dict()
        if not owners and not all(states):
            return None
        whole = torch.zeros(self._wiring.layout.numel)
        for where, state in zip(self._shards, states, strict=True):
            if state:
                whole[where] += state["residual"].cpu()
        if owners:
            whole[self._shards[self._rank]] += len(self._shards) * owners["residual"].cpu()
        return whole

    def take_residual(self, residual: Tensor) -> None:
        for where, feedback in zip(self._shards, self._feedback, strict=True):
            if feedback.state_dict():
                feedback.load_state_dict({"residual": residual[where]})

    def blank(self) -> dict[str, Tensor]:
        return {
            f"shard{shard}": torch.zeros(nbytes, dtype=torch.uint8)
            for shard, nbytes in enumerate(self._message_nbytes)
        }

    def prefetch(self) -> None:
        for feedback in self._feedback:
            feedback.prefetch()

    def _at(self, place: Place) -> list[BoundCodec]:
        return [coder.at(place.label.round) for coder in self._coders]

    def feedback(self) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in self._named(self._owner.now()).items()}

    def state_dict(self) -> dict[str, Tensor]:
        return self._named(self._owner.state_dict())

    def _named(self, owner: Mapping[str, Tensor]) -> dict[str, Tensor]:
        states = [feedback.state_dict() for feedback in self._feedback]
        parts = {f"shard{i}": state for i, state in enumerate(states)}
        return {
            f"{part}.{key}": value
            for part, state in {**parts, "owner": owner}.items()
            for key, value in state.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        parts = {f"shard{i}": feedback for i, feedback in enumerate(self._feedback)}
        for part, feedback in {**parts, "owner": self._owner}.items():
            prefix = f"{part}."
            feedback.load_state_dict(
                {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            )


@final
class _Reading:
    """How the messages of one round are read."""

    def __init__(
        self,
        wiring: ExchangeContext,
        coders: Sequence[BoundCodec],
        shards: Sequence[slice],
        place: Place,
    ) -> None:
        self.wiring, self.coders, self.place = wiring, coders, place
        self._shards = shards

    def inspect(self, results: Sequence[Tensor]) -> dict[int, Rejection]:
        """What is wrong with an owner's result."""
        return self._flaws(
            results, [self.header(o, sender=o, kind=Kind.MEAN) for o in range(len(results))]
        )

    def sound_shards(self, messages: Sequence[Tensor]) -> tuple[Payloads, dict[int, Rejection]]:
        """What the workers sent to this owner; a bad message is left out if the transport forgives.

        Raises:
            ExchangeError, MismatchError: a message is bad, and the transport does not forgive.
        """
        mine = self.wiring.rank
        headers = [self.header(mine, sender=s, kind=Kind.SHARD) for s in range(len(messages))]
        flaws = self._flaws(messages, headers) if self.wiring.transport.forgiving else {}
        payloads = [
            self.open(message, header)
            for sender, (message, header) in enumerate(zip(messages, headers, strict=True))
            if sender not in flaws
        ]
        return Payloads(coder=self.coders[mine], payloads=payloads), flaws

    def join(self, results: Sequence[Tensor]) -> Tensor:
        """The mean that the owners made, shard by shard."""
        mean = torch.empty(self.wiring.layout.numel, device=self.wiring.storage.device)
        for owner, message in enumerate(results):
            payload = self.open(message, self.header(owner, sender=owner, kind=Kind.MEAN))
            mean[self._shards[owner]] = self.coders[owner].decode(payload)
        self._check_finite(mean)
        return mean

    def header(self, shard: int, *, sender: int, kind: int) -> Header:
        """What a message of `sender` must say."""
        return header_of(
            self.wiring, self.coders[shard], self.place, sender=sender, kind=kind, shard=shard
        )

    def open(self, message: Tensor, header: Header) -> Tensor:
        """The body of `message`, on the device."""
        nbytes = self.coders[header.shard].nbytes
        return open_message(message, header, body_nbytes=nbytes).to(self.wiring.storage.device)

    def _flaws(self, messages: Sequence[Tensor], headers: Sequence[Header]) -> dict[int, Rejection]:
        found = (
            (h.sender, examine(m, h, body_nbytes=self.coders[h.shard].nbytes))
            for m, h in zip(messages, headers, strict=True)
        )
        return {sender: flaw for sender, flaw in found if flaw is not None}

    def _check_finite(self, mean: Tensor) -> None:
        """Nobody else made an owner's shard, so here nothing can be left out."""
        if bool(torch.isfinite(mean.sum())) or bool(torch.isfinite(mean).all()):
            return
        bad = [o for o, s in enumerate(self._shards) if not bool(torch.isfinite(mean[s]).all())]
        raise NonFiniteError(
            f"use the combined shards of worker {', '.join(map(str, bad))} for round "
            f"{self.place.label.round}",
            because="they hold NaN or an infinity",
            do="resume from the last checkpoint with a lower inner learning rate",
        )


@final
class _Scattered(InFlight):
    def __init__(self, reading: _Reading, messages: Mapping[str, Tensor], owner: _Owner) -> None:
        super().__init__(reading.place, messages)
        self._reading, self._owner, self._life = reading, owner, owner.life()
        self._left_out: dict[int, Rejection] = {}
        self.pending: Pending | None = None

    @torch.no_grad()
    def reduce(self, messages: Sequence[Tensor], nbytes: int) -> Tensor:
        """My shard of all workers in, my shard of the result out, filled up to `nbytes`."""
        reading = self._reading
        received, flaws = reading.sound_shards(messages)
        self._check_whole(flaws)
        senders = [sender for sender in range(len(messages)) if sender not in flaws]
        wiring = reading.wiring
        limit = wiring.transport.norm_limit
        mean, worse = aggregate_valid(wiring.aggregate, received, norm_limit=limit)
        self._left_out = {**flaws, **{senders[place]: flaw for place, flaw in worse.items()}}
        mine = wiring.rank
        body = self._owner.encode(mean, reading.coders[mine], self._life)
        message = seal(body, reading.header(mine, sender=mine, kind=Kind.MEAN))
        return torch.cat([message, message.new_zeros(nbytes - len(message))])

    def _check_whole(self, flaws: Mapping[int, Rejection]) -> None:
        # Its sender hears nothing of it, and would not know what to send again.
        damaged = {sender: flaw for sender, flaw in flaws.items() if flaw.keeps_work}
        workers = self._reading.wiring.workers
        if damaged or len(flaws) == workers:
            raise RoundDiscarded(
                f"use {self.place.label}",
                because="; ".join(f"worker {sender}: {flaw}" for sender, flaw in flaws.items()),
                do="nothing: the next round sends it again",
            )

    def finish(self) -> RoundResult:
        assert self.pending is not None
        messages = self.pending.wait()
        self._owner.finished()
        mean = self._reading.join(messages)
        return RoundResult(mean=mean, left_out=self._left_out, messages=messages)


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

    def bind(self, wiring: ExchangeContext) -> ExchangeState:
        """Coders and feedback for every shard."""
        if wiring.workers == 1:
            return Gather().bind(wiring)
        return _ReduceScattering(wiring, self.owner_feedback)
