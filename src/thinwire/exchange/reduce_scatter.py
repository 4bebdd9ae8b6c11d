"""Reduce-scatter: every shard of the vector is combined by its owner, who sends the result."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from thinwire.aggregate import Received, combine_finite
from thinwire.codecs import Coder
from thinwire.errors import NonFiniteError
from thinwire.exchange.base import Exchange, ExchangeState, InFlight, Place, Wiring, header_of
from thinwire.exchange.gather import Gather
from thinwire.feedback import Feedback, FeedbackState, NoFeedback
from thinwire.message import HEADER_NBYTES, Header, Kind, open_message, seal
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

    def encode(self, mean: Tensor, coder: Coder) -> Tensor:
        """As `FeedbackState.encode`."""
        with self._lock:
            self._before.append(self._copy())
            return self._feedback.encode(mean, coder)

    def finished(self) -> None:
        """The oldest exchange was applied and need not be sent again."""
        with self._lock:
            self._before.popleft()

    def state_dict(self) -> dict[str, Tensor]:
        with self._lock:
            # A copy: the next shard may be encoded while a checkpoint is being written.
            return self._before[0] if self._before else self._copy()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        with self._lock:
            self._before.clear()
            self._feedback.load_state_dict(state)

    def _copy(self) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in self._feedback.state_dict().items()}


@final
class _ReduceScattering(ExchangeState):
    """Shard s of the vector belongs to worker s."""

    def __init__(self, wiring: Wiring, owner_feedback: Feedback) -> None:
        workers, rank = wiring.transport.world_size, wiring.transport.rank
        self._wiring, self._rank = wiring, rank
        pieces = wiring.layout.cut(workers)
        self._shards = [slice(start, start + piece.numel) for start, piece in pieces]
        self._coders = [wiring.codec.fit(piece) for _, piece in pieces]
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

    def encode(self, delta: Tensor, place: Place) -> dict[str, Tensor]:
        coders = self._at(place)
        parts = zip(self._shards, coders, self._feedback, strict=True)
        bodies = [feedback.encode(delta[where], coder) for where, coder, feedback in parts]
        return {
            f"shard{shard}": seal(body, self._header(coders, place, shard))
            for shard, body in enumerate(bodies)
        }

    def send(self, messages: Mapping[str, Tensor], place: Place) -> InFlight:
        coders = self._at(place)
        flight = _Scattered(self._wiring, coders, self._shards, place, messages, self._owner)
        flight.pending = self._wiring.transport.start_reduce(
            [messages[f"shard{shard}"] for shard in range(len(coders))],
            lambda received: flight.reduce(received, self._result_nbytes),
            place.label,
        )
        return flight

    def blank(self) -> dict[str, Tensor]:
        return {
            f"shard{shard}": torch.zeros(nbytes, dtype=torch.uint8)
            for shard, nbytes in enumerate(self._message_nbytes)
        }

    def prefetch(self) -> None:
        for feedback in self._feedback:
            feedback.prefetch()

    def _at(self, place: Place) -> list[Coder]:
        return [coder.at(place.label.round) for coder in self._coders]

    def _header(self, coders: Sequence[Coder], place: Place, shard: int) -> Header:
        return header_of(
            self._wiring, coders[shard], place, sender=self._rank, kind=Kind.SHARD, shard=shard
        )

    def state_dict(self) -> dict[str, Tensor]:
        states = [feedback.state_dict() for feedback in self._feedback]
        parts = {f"shard{i}": state for i, state in enumerate(states)}
        return {
            f"{part}.{key}": value
            for part, state in {**parts, "owner": self._owner.state_dict()}.items()
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
class _Scattered(InFlight):
    def __init__(
        self,
        wiring: Wiring,
        coders: Sequence[Coder],
        shards: Sequence[slice],
        place: Place,
        messages: Mapping[str, Tensor],
        owner: _Owner,
    ) -> None:
        super().__init__(place, messages)
        self._wiring, self._coders, self._shards = wiring, coders, shards
        self._owner = owner
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
        self._owner.finished()
        mean = torch.empty(self._wiring.layout.numel, device=self._wiring.storage.device)
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
            f"{self.place.label.round}",
            because="they hold NaN or an infinity",
            do="resume from the last checkpoint with a lower inner learning rate",
        )

    def _open(self, message: Tensor, shard: int, *, sender: int, kind: int) -> Tensor:
        header = self._header(shard, sender=sender, kind=kind)
        body = open_message(message, header, body_nbytes=self._coders[shard].nbytes)
        return body.to(self._wiring.storage.device)

    def _header(self, shard: int, *, sender: int, kind: int) -> Header:
        return header_of(
            self._wiring, self._coders[shard], self.place, sender=sender, kind=kind, shard=shard
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
            return Gather().bind(wiring)
        return _ReduceScattering(wiring, self.owner_feedback)
