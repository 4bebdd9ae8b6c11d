"""Reduce-scatter: every shard of the vector is combined by its owner, who sends the result."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from thinwire.aggregate import Aggregate, Payloads, aggregate_valid, clipped_of
from thinwire.blocks import ComputedVector, DenseVector, LazyVector, StreamedVector, VectorPart
from thinwire.checksums import checksums, refuse_vector
from thinwire.codecs import BoundCodec, Codec
from thinwire.errors import NonFiniteError, RoundDiscarded
from thinwire.exchange.base import (
    Exchange,
    ExchangeContext,
    ExchangeState,
    RoundResult,
    Sizes,
)
from thinwire.exchange.gather import Gather
from thinwire.exchange.message import (
    HEADER_NBYTES,
    Header,
    Kind,
    blank_message,
    body_of,
    examine,
    open_message,
    seal,
)
from thinwire.exchange.same_work import SameWorkCheck
from thinwire.exchange.votes import agree
from thinwire.feedback import Feedback, FeedbackState, NoFeedback
from thinwire.fragments.layout import Layout
from thinwire.rejection import MessageKind, Rejection, check_round_counts
from thinwire.transport import Post, Posts, Received, RoundTag, SharedAnswer, attempt, to_all


class _OwnerFeedback:
    """The error feedback of the shard that this worker owns, safe from any thread.

    A transport may combine the shard in a thread of its own while the loop saves a checkpoint, or
    cancels the round. A checkpoint has the feedback as it was before the oldest exchange in flight:
    a worker that resumes sends that one again.
    """

    def __init__(self, feedback: FeedbackState) -> None:
        self._feedback, self._lock = feedback, threading.Lock()
        # A copy for each exchange in flight that has encoded, the oldest first.
        self._before: deque[dict[str, Tensor]] = deque()
        # An exchange of a cancelled round may still be running when the feedback that it began with
        # has been put back. It must not encode into that, so it remembers which load it belongs to.
        self._loads = 0

    def loads(self) -> int:
        """How often the feedback was loaded; an exchange asks when it begins."""
        with self._lock:
            return self._loads

    def encode_to(
        self, out: Tensor, mean: Tensor, codec: BoundCodec, *, round: int, loads: int
    ) -> None:
        """Encode `mean` and keep what is lost, for an exchange that began after `loads` loads."""
        with self._lock:
            if loads != self._loads:
                raise RoundDiscarded(
                    "combine a shard",
                    because="its round was cancelled meanwhile",
                    do="nothing: the next round sends it again",
                )
            self._before.append(self._copy())
            self._feedback.encode_to(out, DenseVector(mean), codec, round=round)

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
            self._loads += 1
            self._feedback.load_state_dict(state)

    def _copy(self) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in self._feedback.state_dict().items()}


class _ReduceScatterState(ExchangeState):
    """The exchange of one fragment: shard s of its vector is combined by worker s."""

    def __init__(self, context: ExchangeContext, sizes: Sizes, owner_feedback: Feedback) -> None:
        super().__init__(sizes)
        self._context, self._rank = context, context.rank
        self._same_work = SameWorkCheck(is_due=context.warns_of_same_work)
        pieces = context.layout.cut(context.workers)
        self._shards = [slice(start, start + piece.numel) for start, piece in pieces]
        device = context.storage.device
        self._codecs = [context.codec.bind(piece, device=device) for _, piece in pieces]
        for codec in self._codecs:
            codec.prepare(device)
        self._feedback = [context.feedback.bind(p.numel, context.storage) for _, p in pieces]
        self._owner = _OwnerFeedback(
            owner_feedback.bind(pieces[self._rank][1].numel, context.storage)
        )

    def encode(self, delta: LazyVector, tag: RoundTag) -> dict[str, Tensor]:
        messages = [blank_message(c.nbytes, self._context.storage) for c in self._codecs]
        bodies = [body_of(m, c.nbytes) for m, c in zip(messages, self._codecs, strict=True)]
        parts = zip(bodies, self._shards, self._codecs, self._feedback, strict=True)
        # Before the feedback of any shard has changed.
        refuses = self._context.refuses_own
        if refuses and self._context.storage.device.type == "cpu" and not delta.is_finite():
            refuse_vector()
        totals = [
            feedback.encode_to(body, delta.piece(at.start, at.stop), codec, round=tag.round)
            for body, at, codec, feedback in parts
        ]
        total = torch.stack(totals).sum() if refuses else None
        return self._sealed(messages, tag, Kind.SHARD, checksums(bodies, total))

    def empty_messages(self, tag: RoundTag) -> dict[str, Tensor]:
        sizes = (HEADER_NBYTES + codec.nbytes for codec in self._codecs)
        messages = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in sizes]
        bodies = [message[HEADER_NBYTES:] for message in messages]
        return self._sealed(messages, tag, Kind.NOTHING, checksums(bodies))

    def _sealed(
        self, messages: Sequence[Tensor], tag: RoundTag, kind: int, found: Sequence[int]
    ) -> dict[str, Tensor]:
        headers = (
            self._header(shard, tag, sender=self._rank, kind=kind) for shard in range(len(messages))
        )
        return {
            f"shard{shard}": seal(message, header, body_checksum)
            for shard, (message, header, body_checksum) in enumerate(
                zip(messages, headers, found, strict=True)
            )
        }

    def run(self, messages: Mapping[str, Tensor], tag: RoundTag) -> Posts[RoundResult]:
        loads, workers, rank = self._owner.loads(), self._context.workers, self._rank
        drops = self._context.drops_bad_messages
        others = [worker for worker in range(workers) if worker != rank]
        own = messages[f"shard{rank}"]
        shards = yield Post(
            {owner: messages[f"shard{owner}"] for owner in others},
            dict.fromkeys(others, own.numel()),
            allow_missing=drops,
        )
        # From here on this may run in a thread of the transport.
        mine = {rank: own, **shards}
        combined, left_out, clipped = self._combine_shard(
            [mine[sender] for sender in range(workers)], tag, loads
        )
        answer = yield to_all(combined, rank, workers, allow_missing=drops)
        by_rank = {rank: combined, **answer}
        results = [by_rank[owner] for owner in range(workers)]
        if drops:
            found, votes = self._examine_results(results, tag), self._context.votes
            rejected = yield from agree(found, rank=rank, workers=workers, votes=votes)
            check_round_counts(rejected, MessageKind.RESULT, what=tag, workers=workers)
        joined = attempt(lambda: self._joined(answer, results, tag, is_checked=drops))

        def finish() -> RoundResult:
            self._same_work.warn()
            self._owner.finished()
            mean = joined()
            return RoundResult(mean=mean, left_out=left_out, messages=results, clipped=clipped)

        return finish

    @torch.no_grad()
    def _combine_shard(
        self, messages: Sequence[Tensor], tag: RoundTag, loads: int
    ) -> tuple[Tensor, dict[int, Rejection], dict[int, float]]:
        """This worker's shard of the mean, as a message, the workers that are not in it, and how
        others were scaled down."""
        mine, codec = self._rank, self._codecs[self._rank]
        headers = [
            self._header(mine, tag, sender=sender, kind=Kind.SHARD)
            for sender in range(len(messages))
        ]
        rejected = self._rejected(messages, headers) if self._context.drops_bad_messages else {}
        check_round_counts(rejected, MessageKind.SHARD, what=tag, workers=len(messages))
        senders = [sender for sender in range(len(messages)) if sender not in rejected]
        bodies = [self._body(messages[sender], headers[sender]) for sender in senders]
        payloads = Payloads(coder=codec, payloads=bodies, round=tag.round)
        device = self._context.storage.device
        combined, unusable = aggregate_valid(self._context.aggregate, payloads, device)
        self._same_work.compare(payloads)
        mean = combined.whole()
        # Results travel in an all-gather, which takes equal sizes.
        padded = self._context.storage.buffers.take(self.sizes.result_nbytes, device)
        end = HEADER_NBYTES + codec.nbytes
        padded[end:] = 0
        self._owner.encode_to(padded[HEADER_NBYTES:end], mean, codec, round=tag.round, loads=loads)
        seal(padded[:end], self._header(mine, tag, sender=mine, kind=Kind.MEAN))
        left_out = {**rejected, **{senders[place]: why for place, why in unusable.items()}}
        clipped = clipped_of(self._context.aggregate, payloads, unusable)
        return padded, left_out, {senders[place]: factor for place, factor in clipped.items()}

    def _body(self, message: Tensor, header: Header) -> Tensor:
        """The body of a shard's message: examined already where bad messages are dropped."""
        nbytes = self._codecs[header.shard].nbytes
        if self._context.drops_bad_messages:
            return body_of(message, nbytes)
        return open_message(message, header, body_nbytes=nbytes)

    def _examine_results(self, results: Sequence[Tensor], tag: RoundTag) -> dict[int, Rejection]:
        headers = [
            self._header(owner, tag, sender=owner, kind=Kind.MEAN) for owner in range(len(results))
        ]
        return self._rejected(results, headers)

    def _rejected(
        self, messages: Sequence[Tensor], headers: Sequence[Header]
    ) -> dict[int, Rejection]:
        found = (
            (header.sender, examine(message, header, body_nbytes=self._codecs[header.shard].nbytes))
            for message, header in zip(messages, headers, strict=True)
        )
        return {sender: rejection for sender, rejection in found if rejection is not None}

    def _joined(
        self, answer: Received, results: Sequence[Tensor], tag: RoundTag, *, is_checked: bool
    ) -> StreamedVector:
        if not isinstance(answer, SharedAnswer):
            return self._join(results, tag, is_checked=is_checked)
        return answer.once(
            ("mean", tag),
            lambda: DenseVector(self._join(results, tag, is_checked=is_checked).whole()),
        )

    @torch.no_grad()
    def _join(
        self, results: Sequence[Tensor], tag: RoundTag, *, is_checked: bool
    ) -> StreamedVector:
        """The mean that the owners made, shard by shard."""
        bodies: list[Tensor] = []
        for owner, (message, codec) in enumerate(zip(results, self._codecs, strict=True)):
            if is_checked:
                bodies.append(body_of(message, codec.nbytes))
            else:
                header = self._header(owner, tag, sender=owner, kind=Kind.MEAN)
                bodies.append(open_message(message, header, body_nbytes=codec.nbytes))
        self._check_finite(bodies, tag)
        device = self._context.storage.device
        blocks = partial(self._decoded, bodies, tag)
        return ComputedVector(self._context.layout.numel, device, blocks)

    def _decoded(
        self, bodies: Sequence[Tensor], tag: RoundTag
    ) -> Iterator[tuple[VectorPart, Tensor]]:
        device = self._context.storage.device
        for where, codec, body in zip(self._shards, self._codecs, bodies, strict=True):
            for piece in codec.pieces:
                payload = body[piece.where].to(device)
                values = piece.codec.decode(payload, round=tag.round)
                # A decoded number may lie in the payload, which is not to be changed.
                yield piece.part.shifted(where.start), values.clone()

    def _check_finite(self, bodies: Sequence[Tensor], tag: RoundTag) -> None:
        """Raise `NonFiniteError`: only the owner has made its shard, so it cannot be left out."""
        shards = [
            Payloads(coder=codec, payloads=[body], round=tag.round)
            for codec, body in zip(self._codecs, bodies, strict=True)
        ]
        if all(math.isfinite(shard.largest()) for shard in shards):
            return
        bad = [owner for owner, shard in enumerate(shards) if not shard.is_finite(0)]
        if not bad:
            return
        raise NonFiniteError(
            f"use the combined shards of worker {', '.join(map(str, bad))} for round {tag.round}",
            because="they hold NaN or an infinity",
            do="resume from the last checkpoint with a lower inner learning rate",
        )

    def _header(self, shard: int, tag: RoundTag, *, sender: int, kind: int) -> Header:
        codec = self._codecs[shard]
        return self._context.header(codec, tag, sender=sender, kind=kind, shard=shard)

    def replay_mean(
        self, messages: Sequence[Tensor], tag: RoundTag, *, left_out: Collection[int]
    ) -> StreamedVector:
        del left_out  # owners left them out of what they sent
        return self._join(messages, tag, is_checked=False)

    def absorb(self, mean: StreamedVector) -> StreamedVector:
        if not self._context.feedback.gives_momentum:
            return mean
        whole = mean.whole()
        shards = zip(self._shards, self._feedback, strict=True)
        return DenseVector(
            torch.cat([feedback.absorb(DenseVector(whole[at])).whole() for at, feedback in shards])
        )

    def prefetch(self) -> None:
        for feedback in self._feedback:
            feedback.prefetch()

    # -- feedback: one part for each shard, and the owner's ----------------------------------------

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

    def feedback_vector(self) -> Tensor | None:
        states = [feedback.state_dict() for feedback in self._feedback]
        owners = self._owner.state_dict()
        if not owners and not all(states):
            return None
        whole = torch.zeros(self._context.layout.numel)
        for where, state in zip(self._shards, states, strict=True):
            if state:
                whole[where] += state["residual"].cpu()
        # The mean lacks it, and what one worker sends has a weight of 1/K in the mean.
        if owners:
            whole[self._shards[self._rank]] += len(self._shards) * owners["residual"].cpu()
        return whole

    def load_feedback_vector(self, vector: Tensor) -> None:
        for where, feedback in zip(self._shards, self._feedback, strict=True):
            if feedback.state_dict():
                feedback.load_state_dict({"residual": vector[where]})


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

    def bind(self, context: ExchangeContext) -> ExchangeState:
        """A state with a codec and a feedback for every shard."""
        if context.workers == 1:
            return Gather().bind(context)
        return _ReduceScatterState(context, self.sizes_in(context), self.owner_feedback)

    def sizes(
        self, codec: Codec, layout: Layout, aggregate: Aggregate, *, workers: int, rank: int
    ) -> Sizes:
        """A shard to each of the others, and the combined shard of this worker to all of them."""
        if workers == 1:
            return Gather().sizes(codec, layout, aggregate, workers=1, rank=rank)
        nbytes = [HEADER_NBYTES + codec.payload_nbytes(piece) for _, piece in layout.cut(workers)]
        # Results travel in an all-gather, which takes equal sizes.
        result_nbytes = max(nbytes)
        return Sizes(
            messages={f"shard{shard}": size for shard, size in enumerate(nbytes)},
            sent_nbytes=sum(nbytes) - nbytes[rank] + result_nbytes,
            received_nbytes=(workers - 1) * (nbytes[rank] + result_nbytes),
            sent_count=workers,
            received_count=2 * (workers - 1),
            pattern="reduce_scatter",
            result_nbytes=result_nbytes,
        )
