"""Exchanges: which shard each worker combines, and the round that sends shards there and back."""

from __future__ import annotations

import hashlib
import math
import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from thinwire.aggregate import (
    Aggregate,
    MeanOverWorkers,
    Payloads,
    aggregate_valid,
    clipped_of,
    combined,
)
from thinwire.blocks import DenseVector, LazyVector, StreamedVector, VectorPart
from thinwire.checksums import checksums, refuse_vector
from thinwire.codecs import BoundCodec, Codec
from thinwire.errors import (
    LossyReduceScatterWarning,
    NonFiniteError,
    SameWorkWarning,
    check,
    check_whole,
)
from thinwire.exchange.message import (
    HEADER_NBYTES,
    Header,
    blank_message,
    body_of,
    examine,
    open_message,
    seal,
)
from thinwire.feedback import Feedback, FeedbackState, NoFeedback
from thinwire.fragments.layout import Layout
from thinwire.rejection import Kind, Rejection, check_round_counts, discarded
from thinwire.storage import StatePlacement
from thinwire.transport import Post, Posts, RoundTag
from thinwire.transport.base import Received, SharedAnswer, attempt

Pattern: TypeAlias = Literal["gather", "reduce_scatter", "pairs", "server"]
"""Which workers send what to which: all that a link model needs to know of an exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeContext:
    """The fragment, method and workers of one exchange state.

    Args:
        codec: encodes payloads.
        feedback: carries encoding errors to the next round.
        aggregate: combines the pseudo-gradients of all workers.
        layout: layout of the fragment's vector.
        fragment: the fragment's index.
        workers: K.
        rank: this worker's rank.
        storage: where the feedback is kept.
        drops_bad_messages: leave out bad messages; the transport must give all workers the same
            bytes. Otherwise a bad message is an error.
        has_own_anchors: anchors differ between workers, so messages carry no digest of them.
            Otherwise the exchange warns if all workers send the same in the first round.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Bytes and messages of one worker in one exchange, headers included.

    Args:
        messages: bytes of each message of this worker's pseudo-gradient, by name.
        result_nbytes: bytes of the message with a combined shard; 0 without one.
        sent_nbytes: bytes sent to other workers, each message counted once.
        received_nbytes: bytes received from other workers.
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
        mean: the fragment's mean pseudo-gradient, decoded as it is read.
        left_out: rejections of the workers that are not in it, by rank.
        messages: the messages that the mean was made from, in rank order.
        clipped: factors by which contributions were scaled down, by rank; under a reduce-scatter,
            those of the shard that this worker owns.
    """

    mean: StreamedVector
    left_out: Mapping[int, Rejection]
    messages: Sequence[Tensor]
    clipped: Mapping[int, float] = field(default_factory=dict[int, float])


class Exchange:
    """Describes how the workers of a method exchange; `bind` makes its state.

    A subclass overrides `owners`; by default every worker combines everything that is sent.
    """

    owner_feedback: Feedback = NoFeedback()
    """Feedback of the shard that a worker combines, if the vector is cut into shards."""

    def owners(self, rank: int, workers: int, round: int) -> Mapping[int, int]:
        """For each worker that exchanges with `rank`, the shard that it combines.

        Either all combine shard 0, or worker s combines shard s and sends the result to all.

        >>> dict(Exchange().owners(0, 3, round=1))
        {0: 0, 1: 0, 2: 0}
        """
        return dict.fromkeys(range(workers), 0)

    def choose(self, codec: Codec, layout: Layout, aggregate: Aggregate, workers: int) -> Exchange:
        """The exchange to use for this many workers: by default this one."""
        return self

    def bind(self, context: ExchangeContext) -> ExchangeState:
        """A fresh exchange state for one fragment."""
        chosen = self.choose(context.codec, context.layout, context.aggregate, context.workers)
        if chosen is not self:
            warn_of_sharding_loss(f"{context.workers} workers", context.codec, chosen, stacklevel=2)
        return ExchangeState(context, chosen)

    def sizes(
        self, codec: Codec, layout: Layout, aggregate: Aggregate, *, workers: int, rank: int
    ) -> Sizes:
        """Bytes that worker `rank` of `workers` sends and receives, without sending anything.

        >>> from thinwire.aggregate import MeanOverWorkers
        >>> from thinwire.codecs import Identity
        >>> layout = Layout.vector(10)
        >>> Gather().sizes(Identity(), layout, MeanOverWorkers(), workers=3, rank=0).received_nbytes
        208
        """
        owners = self.choose(codec, layout, aggregate, workers).owners(rank, workers, round=1)
        shards = 1 + max(owners.values())
        pieces = layout.cut(shards) if shards > 1 else [(0, layout)]
        nbytes = [
            HEADER_NBYTES * (workers > 1) + codec.payload_nbytes(piece) for _, piece in pieces
        ]
        others, is_cut = len(owners) - 1, len(pieces) > 1
        # Results travel in an all-gather, which needs equal sizes.
        result_nbytes = max(nbytes) if is_cut else 0
        sent = {shard for peer, shard in owners.items() if peer != rank}
        return Sizes(
            messages={f"shard{n}" if is_cut else "whole": size for n, size in enumerate(nbytes)},
            sent_nbytes=sum(nbytes[shard] for shard in sent) + result_nbytes,
            received_nbytes=others * (nbytes[owners[rank]] + result_nbytes),
            sent_count=len(sent) + is_cut,
            received_count=others * (1 + is_cut),
            pattern="reduce_scatter" if is_cut else "gather",
            result_nbytes=result_nbytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather(Exchange):
    """Every worker's payload goes to every worker, and all of them combine all payloads.

    >>> Gather()
    Gather()
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class ReduceScatter(Exchange):
    """mean_s = decode(encode(aggregate_k(decode(encode(Delta_k,s))))) by the owner of shard s.

    Sums are fp32 in rank order. A lossless codec gives exactly the numbers of `Gather`; any other
    codec rounds twice.

    Args:
        owner_feedback: feeds back the error of the second encoding, on the shard's owner.

    Source: MuLoCo (arXiv 2505.23725), section on compression, whose code only simulates it.

    >>> ReduceScatter().owner_feedback
    NoFeedback()
    """

    owner_feedback: Feedback = field(default_factory=NoFeedback)

    def owners(self, rank: int, workers: int, round: int) -> Mapping[int, int]:
        """Worker s combines shard s of K."""
        return {owner: owner for owner in range(workers)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Automatic(Exchange):
    """Gathers the payloads of few workers, or what is no larger than the vector in fp32.

    gather receives (K - 1) B bytes for payloads of B; reduce-scatter 2 (K - 1) B / K, but encodes
    twice. A plain mean of lossless payloads has the same bits by either, and takes the one with
    fewer bytes. An aggregate that is not elementwise always gathers, as it needs whole tensors.

    Args:
        few: largest K at which all other payloads are gathered.
        otherwise: the reduce-scatter for the other cases.

    Raises:
        ConfigurationError: `few` is below 1.

    >>> Automatic().few
    4
    """

    few: int = 4
    otherwise: ReduceScatter = field(default_factory=ReduceScatter)

    def __post_init__(self) -> None:
        check_whole("few", self.few)

    def choose(self, codec: Codec, layout: Layout, aggregate: Aggregate, workers: int) -> Exchange:
        """The exchange for this many workers: `Gather` or `otherwise`."""

        def received(exchange: Exchange) -> int:
            return exchange.sizes(codec, layout, aggregate, workers=workers, rank=0).received_nbytes

        is_little = (workers - 1) * codec.payload_nbytes(layout) <= 4 * layout.numel
        if is_little or not aggregate.elementwise:
            return Gather()
        if workers > self.few:
            return self.otherwise
        if not (codec.is_lossless and isinstance(aggregate, MeanOverWorkers)):
            return Gather()
        # Shards are cut between rows, so a shard of a small vector may be as large as the vector.
        return min(Gather(), self.otherwise, key=received)


def warn_of_sharding_loss(who: str, codec: Codec, exchange: Exchange, *, stacklevel: int) -> None:
    """Warn if owners encode a mean again with a codec that loses much of it."""
    loss = codec.sharding_loss
    plain = isinstance(exchange, ReduceScatter) and isinstance(exchange.owner_feedback, NoFeedback)
    if plain and loss is not None:
        warnings.warn(
            f"{who} would lose much of what {type(codec).__name__} sends under ReduceScatter() "
            f"without owner feedback; because {loss}; do: pass exchange=Gather(), or a codec that "
            "keeps more, or lose less by ReduceScatter(owner_feedback=ErrorFeedback())",
            LossyReduceScatterWarning,
            stacklevel=stacklevel + 1,
        )


def peers_of(workers: int, *, round: int, seed: int) -> list[int]:
    """The peer of each worker in a round, in rank order; an odd one out is its own peer.

    All workers draw the same pairs: ranks are sorted by SHA-256(seed, round, rank), and neighbours
    in that order form a pair. Every pair is equally likely, and rounds are independent.

    >>> peers_of(5, round=1, seed=0)
    [3, 4, 2, 0, 1]
    """

    def draw(rank: int) -> bytes:
        return hashlib.sha256(f"{seed} {round} {rank}".encode()).digest()

    drawn = sorted(range(workers), key=draw)
    peers = list(range(workers))
    for left, right in zip(drawn[::2], drawn[1::2], strict=False):
        peers[left], peers[right] = right, left
    return peers


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs(Exchange):
    """Delta = aggregate(Delta_k, Delta_j) for one peer j of each worker k, drawn each round.

    Every worker receives one payload, for any number of workers. Each pair moves its own anchors,
    so the outer optimizer must have an anchor per worker, and pull them together.

    Args:
        seed: seed of the draw.

    Source: NoLoCo (arXiv 2506.10911), whose outer step also needs the peer's anchor.

    >>> Pairs().seed
    0
    """

    seed: int = 0

    def owners(self, rank: int, workers: int, round: int) -> Mapping[int, int]:
        """A worker and its peer of the round combine both payloads."""
        peer = peers_of(workers, round=round, seed=self.seed)[rank]
        return dict.fromkeys(sorted({rank, peer}), 0)

    def sizes(
        self, codec: Codec, layout: Layout, aggregate: Aggregate, *, workers: int, rank: int
    ) -> Sizes:
        """One message each way. With odd K, one worker per round, drawn at random, sends none."""
        whole = Gather().sizes(codec, layout, aggregate, workers=min(workers, 2), rank=rank % 2)
        return replace(whole, pattern="pairs")


class _Arrived(NamedTuple):
    """The answer to a post, judged.

    Args:
        answer: the answer to the post.
        messages: messages by sender, this worker's own included, in rank order.
        rejected: why a message is not used, by sender.
        bodies: opens the other messages, by sender; raises the error of a bad one.
        checked: this worker's rank if its message was checked before it was sent, else None.
    """

    answer: Received
    messages: dict[int, Tensor]
    rejected: dict[int, Rejection]
    bodies: Callable[[], dict[int, Tensor]]
    checked: int | None


class ExchangeState:
    """The exchange of one fragment on one worker: it keeps the error feedback between rounds.

    If all workers combine the whole vector, it is one shard, and no result is sent back.

    Args:
        context: the fragment, method and workers.
        exchange: which shard each worker combines.
    """

    def __init__(self, context: ExchangeContext, exchange: Exchange) -> None:
        codec, workers, rank = context.codec, context.workers, context.rank
        layout, storage = context.layout, context.storage
        self._context, self._exchange, self._device = context, exchange, storage.device
        self.sizes = exchange.sizes(codec, layout, context.aggregate, workers=workers, rank=rank)
        self._names = list(self.sizes.messages)
        shards = len(self._names)
        pieces = layout.cut(shards) if shards > 1 else [(0, layout)]
        self._places = [slice(start, start + piece.numel) for start, piece in pieces]
        self._codecs = [codec.bind(piece, device=self._device) for _, piece in pieces]
        for piece in (piece for bound in self._codecs for piece in bound.pieces):
            piece.codec.prepare(self._device)
        self._feedback = [context.feedback.bind(piece.numel, storage) for _, piece in pieces]
        self._owner: _OwnerFeedback | None = None
        self._parts: dict[str, FeedbackState | _OwnerFeedback] = {"": self._feedback[0]}
        if len(pieces) > 1:
            owned = exchange.owner_feedback.bind(pieces[rank][1].numel, storage)
            self._owner = _OwnerFeedback(owned)
            named = zip(self._names, self._feedback, strict=True)
            self._parts = {f"{name}.": part for name, part in (*named, ("owner", self._owner))}
        # A lone worker sends its message to no other, so the message needs no header.
        self._alone = workers == 1
        self._drops = context.drops_bad_messages and not self._alone
        # Workers with anchors of their own send weights, which are equal before any training.
        self._compares, self._is_same = not context.has_own_anchors, False

    # -- messages ----------------------------------------------------------------------------------

    def encode(self, delta: LazyVector, tag: RoundTag) -> dict[str, Tensor]:
        """Encode `delta` ([numel], finite) into messages, by name; feedback keeps the error."""
        messages = [blank_message(codec.nbytes, self._context.storage) for codec in self._codecs]
        bodies = [message[HEADER_NBYTES:] for message in messages]
        # Checked before any shard's feedback changes; a single shard's feedback checks for itself.
        if self._owner and self._device.type == "cpu" and not delta.is_finite():
            refuse_vector()
        parts = zip(bodies, self._places, self._codecs, self._feedback, strict=True)
        totals = [
            feedback.encode_to(body, delta.piece(at.start, at.stop), codec, round=tag.round)
            for body, at, codec, feedback in parts
        ]
        found = checksums([] if self._alone else bodies, torch.stack(totals).sum())
        if self._alone:
            return {self._names[0]: bodies[0]}
        return self._sealed(messages, tag, Kind.SHARD if self._owner else Kind.WHOLE, found)

    def empty_messages(self, tag: RoundTag) -> dict[str, Tensor]:
        """Messages of a worker without a contribution; they are never averaged."""
        messages = list(self.blank().values())
        found = checksums([message[HEADER_NBYTES:] for message in messages])
        return self._sealed(messages, tag, Kind.NOTHING, found)

    def blank(self) -> dict[str, Tensor]:
        """Messages with the names and sizes that `encode` gives them, all zeros."""
        sizes = self.sizes.messages.items()
        return {
            name: torch.zeros(nbytes, dtype=torch.uint8, device="cpu") for name, nbytes in sizes
        }

    def _sealed(
        self, messages: Sequence[Tensor], tag: RoundTag, kind: int, found: Sequence[int]
    ) -> dict[str, Tensor]:
        for shard, (message, body_checksum) in enumerate(zip(messages, found, strict=True)):
            seal(message, self._header(tag, self._context.rank, shard, kind), body_checksum)
        return dict(zip(self._names, messages, strict=True))

    def _cut(self, message: Tensor, tag: RoundTag) -> dict[str, Tensor]:
        """Cut a lossless message to all, from a checkpoint of a run that gathered, into shards."""
        context = self._context
        whole = context.codec.bind(context.layout, device=self._device)
        numbers = whole.decode(body_of(message, whole.nbytes).to(self._device), round=tag.round)
        shards = [blank_message(codec.nbytes, context.storage) for codec in self._codecs]
        for shard, at, codec in zip(shards, self._places, self._codecs, strict=True):
            codec.encode_to(shard[HEADER_NBYTES:], numbers[at], round=tag.round)
        found = checksums([shard[HEADER_NBYTES:] for shard in shards])
        return self._sealed(shards, tag, Kind.SHARD, found)

    def _header(self, tag: RoundTag, sender: int, shard: int, kind: int) -> Header:
        codec, fragment = self._codecs[shard], self._context.fragment
        anchor = bytes(8) if self._context.has_own_anchors else tag.anchor
        numel = codec.layout.numel
        return Header(fragment, kind, shard, tag.round, sender, numel, anchor, codec.id)

    def _body(self, message: Tensor, header: Header, *, is_checked: bool = False) -> Tensor:
        """The body of `message`; raise its error unless it was checked before."""
        if self._alone:
            return message
        nbytes = self._codecs[header.shard].nbytes
        if is_checked:
            return body_of(message, nbytes)
        return open_message(message, header, body_nbytes=nbytes)

    # -- a round -----------------------------------------------------------------------------------

    def run(self, messages: Mapping[str, Tensor], tag: RoundTag) -> Posts[RoundResult]:
        """The exchange, from this worker's messages to the mean.

        A resumed worker passes the messages that it sent before.
        """
        rank, owner = self._context.rank, self._owner
        if owner and set(messages) == {"whole"}:
            messages = self._cut(messages["whole"], tag)
        owners = self._exchange.owners(rank, self._context.workers, tag.round)
        before = owner.before if owner else None
        to = {peer: messages[self._names[shard]] for peer, shard in owners.items()}
        shard, kind = owners[rank], Kind.SHARD if owner else Kind.WHOLE
        headers = {sender: self._header(tag, sender, shard, kind) for sender in owners}
        arrived = yield from self._arrived(to, headers, tag)
        # The rest may run in a thread of the transport, or in that of the caller.
        if owner is None:

            def finish() -> RoundResult:
                key = ("mean", tag, *arrived.rejected)
                result = _once(arrived, key, lambda: self._combined(arrived, shard, tag))
                self._warn()
                return replace(result, left_out={**arrived.rejected, **result.left_out})

            return finish
        mine = self._combined(arrived, shard, tag)
        message = self._result(mine, partial(owner.encode_to, before=before), rank, tag)
        # The message holds the mean now.
        mine = replace(mine, mean=DenseVector(message[:0]), messages=[])
        headers = {peer: self._header(tag, peer, peer, Kind.MEAN) for peer in owners}
        stand_in = partial(self._stand_in, tag)
        results = yield from self._arrived(dict.fromkeys(owners, message), headers, tag, stand_in)

        def join() -> RoundResult:
            return replace(mine, mean=self._joined(list(results.bodies().values()), tag))

        joined = attempt(lambda: _once(results, ("mean", tag), join))

        def finish_shards() -> RoundResult:
            self._warn()
            owner.before.popleft()  # it need not be sent again
            return replace(mine, mean=joined().mean, messages=[*results.messages.values()])

        return finish_shards

    def _arrived(
        self,
        to: Mapping[int, Tensor],
        headers: Mapping[int, Header],
        tag: RoundTag,
        stand_in: Callable[[int, Received], Tensor] | None = None,
    ) -> Generator[Post, Received, _Arrived]:
        """Post messages to the workers in `to`, and check their messages against `headers`."""
        rank, drops = self._context.rank, self._drops
        own = to[rank]
        post = {peer: message for peer, message in to.items() if self._alone or peer != rank}
        take = {peer: own.numel() for peer in to if peer != rank}
        answer = yield Post(post, take, allow_missing=drops, stand_in=stand_in if drops else None)
        # This worker's own message was checked before it was sent. Where bad messages are left out,
        # each worker checks its own as the others do.
        checked = rank if not drops and answer.get(rank, own) is own else None
        arrived = self._judged({rank: own, **answer}, headers, tag, checked)
        return arrived._replace(answer=answer)

    def _judged(
        self,
        answer: Received,
        headers: Mapping[int, Header],
        tag: RoundTag,
        checked: int | None = None,
    ) -> _Arrived:
        """Check the messages of `answer` against `headers`."""
        drops, messages = self._drops, dict(sorted(answer.items()))
        rejected: dict[int, Rejection] = {}
        if drops:
            # All workers read the same bytes, so they leave out the same messages.
            (kind,) = {header.kind for header in headers.values()}
            for sender, header in headers.items():
                nbytes = self._codecs[header.shard].nbytes
                if found := examine(messages[sender], header, body_nbytes=nbytes):
                    rejected[sender] = found
            check_round_counts(rejected, Kind(kind), what=tag, workers=len(headers))

        def bodies() -> dict[int, Tensor]:
            return {
                sender: self._body(messages[sender], header, is_checked=drops or sender == checked)
                for sender, header in headers.items()
                if sender not in rejected
            }

        # Runs in the transport's thread; the error is raised in the caller's.
        return _Arrived(answer, messages, rejected, attempt(bodies), checked)

    @torch.no_grad()
    def _combined(self, arrived: _Arrived, shard: int, tag: RoundTag) -> RoundResult:
        """The mean of a shard, without unusable contributions."""
        bodies, aggregate = arrived.bodies(), self._context.aggregate
        senders, payloads = list(bodies), self._payloads(list(bodies.values()), shard, tag)
        mine = None if arrived.checked is None else senders.index(arrived.checked)
        mean, unusable = aggregate_valid(aggregate, payloads, self._device, mine=mine)
        if self._compares and payloads.workers > 1:
            self._compares, self._is_same = False, is_same_work(payloads)
        clipped = clipped_of(aggregate, payloads, unusable)
        return RoundResult(
            mean=mean,
            left_out=arrived.rejected | {senders[at]: why for at, why in unusable.items()},
            messages=list(arrived.messages.values()),
            clipped={senders[at]: factor for at, factor in clipped.items()},
        )

    def _payloads(self, bodies: Sequence[Tensor], shard: int, tag: RoundTag) -> Payloads:
        return Payloads(coder=self._codecs[shard], payloads=bodies, round=tag.round)

    def _warn(self) -> None:
        # In the thread of the caller. Where warnings are errors, a transport's own thread may take
        # one for a fault of the link.
        if self._is_same:
            self._is_same = False
            warnings.warn(
                "all workers sent exactly the same in the first round; because they train on the "
                "same data, or something averages their gradients already (DDP or FSDP around "
                "them, a trainer that takes torchrun's processes for its own, an optimizer that "
                "reduces over the default group), so the exchange adds nothing and the run goes "
                "on as one worker's; do: pass each worker its own share of the data (outer.share "
                "numbers it), and let each train without a process group that joins workers",
                SameWorkWarning,
                stacklevel=1,  # one place: Python shows it once, however many fragments find it
            )

    @torch.no_grad()
    def _result(
        self, combined: RoundResult, encode: Callable[..., object], shard: int, tag: RoundTag
    ) -> Tensor:
        """Encode a combined shard into a message."""
        storage, codec = self._context.storage, self._codecs[shard]
        end = HEADER_NBYTES + codec.nbytes
        # Results travel in an all-gather, which needs equal sizes.
        padded = storage.buffers.take(self.sizes.result_nbytes, self._device)
        padded[end:] = 0
        mean = DenseVector(combined.mean.whole())
        encode(padded[HEADER_NBYTES:end], mean, codec, round=tag.round)
        seal(padded[:end], self._header(tag, shard, shard, Kind.MEAN))
        return padded

    @torch.no_grad()
    def _stand_in(self, tag: RoundTag, owner: int, received: Received) -> Tensor:
        """The message of lost `owner` with its combined shard, made from what others sent it."""
        headers = {sender: self._header(tag, sender, owner, Kind.SHARD) for sender in received}
        combined = self._combined(self._judged(received, headers, tag), owner, tag)
        return self._result(combined, FeedbackState().encode_to, owner, tag)

    @torch.no_grad()
    def _joined(self, bodies: Sequence[Tensor], tag: RoundTag) -> StreamedVector:
        """Join the shards of all owners.

        Raises:
            NonFiniteError: a shard is not finite; it cannot be left out, because only its owner
                combined it.
        """
        shards = [self._payloads([body], owner, tag) for owner, body in enumerate(bodies)]
        bad = [
            owner
            for owner, shard in enumerate(shards)
            if not math.isfinite(shard.largest()) and not shard.is_finite(0)
        ]
        check(
            not bad,
            f"use the combined shards of worker {', '.join(map(str, bad))} for round {tag.round}",
            because="they hold NaN or an infinity",
            do="resume from the last checkpoint with a lower inner learning rate",
            kind=NonFiniteError,
        )
        blocks = partial(self._decoded, bodies, tag)
        return StreamedVector(self._context.layout.numel, self._device, blocks)

    def _decoded(
        self, bodies: Sequence[Tensor], tag: RoundTag
    ) -> Iterator[tuple[VectorPart, Tensor]]:
        for where, codec, body in zip(self._places, self._codecs, bodies, strict=True):
            for piece in codec.pieces:
                values = piece.codec.decode(body[piece.where].to(self._device), round=tag.round)
                # Decoded numbers may share memory with the payload.
                yield piece.part.shifted(where.start), values.clone()

    def replay_mean(
        self, messages: Sequence[Tensor], tag: RoundTag, *, left_out: Collection[int]
    ) -> StreamedVector:
        """Compute the mean of a round that this worker missed.

        Args:
            messages: the messages of that round's `RoundResult`.
            tag: that round's tag, with the digest of this worker's anchor.
            left_out: ranks that are not in the mean.
        """
        if self._owner:  # the owners left them out
            headers = [self._header(tag, r, r, Kind.MEAN) for r in range(len(messages))]
            return self._joined(list(map(self._body, messages, headers)), tag)
        bodies = [
            self._body(message, self._header(tag, sender, 0, Kind.WHOLE))
            for sender, message in enumerate(messages)
            if sender not in left_out
        ]
        # No other message is unusable: that was known in the round.
        return combined(self._context.aggregate, self._payloads(bodies, 0, tag), self._device)

    # -- feedback: one for each shard, and the owner's ---------------------------------------------

    def absorb(self, mean: StreamedVector) -> StreamedVector:
        """Return the vector that the outer optimizer applies, by the rule of the feedback.

        Call it once per applied result, in order, and read the vector once.
        """
        if not self._owner:
            return self._feedback[0].absorb(mean)
        if not self._context.feedback.gives_momentum:
            return mean
        whole, shards = mean.whole(), zip(self._places, self._feedback, strict=True)
        absorbed = [feedback.absorb(DenseVector(whole[at])).whole() for at, feedback in shards]
        return DenseVector(torch.cat(absorbed))

    def prefetch(self) -> None:
        """Start copying the feedback to the device, for `encode`."""
        for feedback in self._feedback:
            feedback.prefetch()

    def feedback(self, *, shares_memory: bool = False) -> dict[str, Tensor]:
        """A copy of the current feedback; or, sharing memory, to be read before the next step."""
        now = self._owner.state_dict(now=True) if self._owner else {}
        state = self.state_dict() | {f"owner.{key}": value for key, value in now.items()}
        return state if shares_memory else {key: value.clone() for key, value in state.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Feedback from before the exchanges in flight, which a resumed worker sends again."""
        states = {prefix: part.state_dict() for prefix, part in self._parts.items()}
        return {
            prefix + key: value for prefix, state in states.items() for key, value in state.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`, even of a checkpoint of a run that gathered."""
        if self._owner and "residual" in state:
            self.load_feedback_vector(state["residual"])
            return
        for prefix, part in self._parts.items():
            part.load_state_dict(
                {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            )

    def feedback_vector(self) -> Tensor | None:
        """The error left by earlier rounds, for any K (fp32 [numel], a copy); None without one.

        A shard's owner also keeps the error of the mean. It counts K times here, because a worker's
        pseudo-gradient has a weight of 1/K in the mean.
        """
        states = [feedback.state_dict() for feedback in self._feedback]
        owner = self._owner.state_dict() if self._owner else {}
        if not owner and not all(states):
            return None
        whole = torch.zeros(self._context.layout.numel, dtype=torch.float32, device="cpu")
        for at, state in zip(self._places, states, strict=True):
            whole[at] = state.get("residual", whole[at])
        if owner:
            whole[self._places[self._context.rank]] += len(states) * owner["residual"].cpu()
        return whole

    def load_feedback_vector(self, vector: Tensor) -> None:
        """Continue from the result of `feedback_vector`, perhaps for another K."""
        for at, feedback in zip(self._places, self._feedback, strict=True):
            feedback.load_state_dict({"residual": vector[at]})


def _once(arrived: _Arrived, key: object, make: Callable[[], RoundResult]) -> RoundResult:
    """Return the result of `make`; one worker computes it for all of its process if that pays."""
    answer = arrived.answer
    if not isinstance(answer, SharedAnswer):
        return make()
    with answer.lock:
        if key not in answer.made:
            result = make()
            answer.made[key] = replace(result, mean=DenseVector(result.mean.whole()))
        return answer.made[key]


class _OwnerFeedback:
    """The error feedback of the shard that this worker owns; thread-safe.

    A transport's thread may combine the shard while the loop saves a checkpoint or cancels the
    round. A checkpoint has the feedback before the oldest exchange in flight, which a resumed
    worker sends again.
    """

    def __init__(self, feedback: FeedbackState) -> None:
        self._feedback, self._lock = feedback, threading.RLock()
        # A copy for each exchange in flight that has encoded, the oldest first. A load makes a new
        # list: an exchange of a cancelled round may still run, and must not encode into the
        # restored feedback.
        self.before: deque[dict[str, Tensor]] = deque()

    def encode_to(
        self, out: Tensor, mean: LazyVector, codec: BoundCodec, *, round: int, before: object
    ) -> None:
        """Encode `mean` and keep the error, for an exchange that began with `before`."""
        with self._lock:
            if before is not self.before:
                raise discarded("a shard", "its round was cancelled meanwhile")
            self.before.append(self.state_dict(now=True))
            self._feedback.encode_to(out, mean, codec, round=round)

    def state_dict(self, *, now: bool = False) -> dict[str, Tensor]:
        """A copy: the next shard may be encoded while a checkpoint is written."""
        with self._lock:
            if self.before and not now:
                return self.before[0]
            return {key: value.clone() for key, value in self._feedback.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        with self._lock:
            self.before = deque()
            self._feedback.load_state_dict(state)


def is_same_work(payloads: Payloads) -> bool:
    """True if the payloads of several workers are equal and not all 0.

    Data parallelism around the workers averages their gradients at every step, and workers with the
    same data compute the same. Rounds, bytes and losses of such a run look right, but it is a run
    of one worker.
    """
    # This worker's payload may be on its device, and the others' in host memory.
    first, *others = (payload.cpu() for payload in payloads.payloads)
    is_same = all(torch.equal(first, other) for other in others)
    return is_same and bool(payloads.coefficients(0).any())
