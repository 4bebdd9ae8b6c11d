"""Gather: every worker's payload goes to every worker."""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.aggregate import Aggregate, Payloads, aggregate_valid, clipped_of, combined
from thinwire.blocks import DenseVector, LazyVector, StreamedVector
from thinwire.checksums import checksums
from thinwire.codecs import Codec
from thinwire.exchange.base import (
    Exchange,
    ExchangeContext,
    ExchangeState,
    RoundResult,
    Sizes,
)
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
from thinwire.fragments.layout import Layout
from thinwire.rejection import MessageKind, Rejection, check_round_counts
from thinwire.transport import AllGather, Requests, RoundTag, SharedAnswer, ToCaller, attempt

_WHOLE = "whole"
# Workers of one process that would rather decode all payloads each than share a vector.
_FEW = 2


class WholeMessages(ExchangeState, ABC):
    """One codec and one feedback for the whole fragment, and one message with all of it."""

    def __init__(self, context: ExchangeContext, sizes: Sizes) -> None:
        super().__init__(sizes)
        self._context = context
        self._codec = context.codec.bind(context.layout, device=context.storage.device)
        self._codec.prepare(context.storage.device)
        self._feedback = context.feedback.bind(context.layout.numel, context.storage)
        # A lone worker sends its message to no other, so the message needs no header.
        self._alone = context.workers == 1
        self._same_work = SameWorkCheck(is_due=context.warns_of_same_work)

    def encode(self, delta: LazyVector, tag: RoundTag) -> dict[str, Tensor]:
        """Encode `delta` as one message, named `whole`."""
        message = blank_message(self._codec.nbytes, self._context.storage)
        body = body_of(message, self._codec.nbytes)
        total = self._feedback.encode_to(body, delta, self._codec, round=tag.round)
        total = total if self._context.refuses_own else None
        found = checksums([] if self._alone else [body], total)
        if self._alone:
            return {_WHOLE: body}
        header = self._header(tag, sender=self._context.rank)
        return {_WHOLE: seal(message, header, *found)}

    def empty_messages(self, tag: RoundTag) -> dict[str, Tensor]:
        """Make one message of zeros."""
        message = torch.zeros(HEADER_NBYTES + self._codec.nbytes, dtype=torch.uint8)
        header = self._header(tag, sender=self._context.rank, kind=Kind.NOTHING)
        return {_WHOLE: seal(message, header)}

    def _header(self, tag: RoundTag, *, sender: int, kind: int = Kind.WHOLE) -> Header:
        return self._context.header(self._codec, tag, sender=sender, kind=kind)

    def _examine(self, messages: Sequence[Tensor], tag: RoundTag) -> dict[int, Rejection]:
        """What is wrong with each worker's message, by rank."""
        found: dict[int, Rejection] = {}
        for sender, message in enumerate(messages):
            expected = self._header(tag, sender=sender)
            rejection = examine(message, expected, body_nbytes=self._codec.nbytes)
            if rejection is not None:
                found[sender] = rejection
        return found

    def _opened(self, message: Tensor, sender: int, tag: RoundTag) -> Tensor:
        """The checked body of `message`; the error of a bad one is raised."""
        expected = self._header(tag, sender=sender)
        return open_message(message, expected, body_nbytes=self._codec.nbytes)

    def _payloads(self, bodies: Sequence[Tensor], tag: RoundTag) -> Payloads:
        return Payloads(coder=self._codec, payloads=bodies, round=tag.round)

    def _result(
        self,
        messages: Sequence[Tensor],
        bodies: Sequence[Tensor],
        senders: Sequence[int],
        tag: RoundTag,
        mine: int | None = None,
    ) -> RoundResult:
        """The mean of `bodies`, which the workers `senders` sent, less what is not usable."""
        payloads, aggregate = self._payloads(bodies, tag), self._context.aggregate
        device = self._context.storage.device
        mean, unusable = aggregate_valid(aggregate, payloads, device, mine=mine)
        self._same_work.compare(payloads)
        self._same_work.warn()
        clipped = clipped_of(aggregate, payloads, unusable)
        return RoundResult(
            mean=mean,
            left_out={senders[place]: why for place, why in unusable.items()},
            messages=messages,
            clipped={senders[place]: factor for place, factor in clipped.items()},
        )

    def absorb(self, mean: StreamedVector) -> StreamedVector:
        """Hand the whole mean to the one feedback."""
        return self._feedback.absorb(mean)

    def prefetch(self) -> None:
        """Begin to bring the residual to the device."""
        self._feedback.prefetch()

    def state_dict(self) -> dict[str, Tensor]:
        """The residual; what is in flight has been taken out of it."""
        return self._feedback.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`."""
        self._feedback.load_state_dict(state)

    def feedback_vector(self) -> Tensor | None:
        """Return a copy of the residual, None without error feedback."""
        held = self._feedback.state_dict()
        return held["residual"].clone() if held else None

    def load_feedback_vector(self, vector: Tensor) -> None:
        """Continue with `vector` as the residual."""
        self._feedback.load_state_dict({"residual": vector})


class _GatherState(WholeMessages):
    def run(self, messages: Mapping[str, Tensor], tag: RoundTag) -> Requests[RoundResult]:
        drops = self._context.drops_bad_messages and not self._alone
        received = yield AllGather(messages[_WHOLE], may_lack=drops)
        # A message may be damaged on its way to some workers only. They then vote, so that all of
        # them leave out the same ones and get equal means.
        rejected: dict[int, Rejection] = {}
        if drops:
            workers = len(received)
            found, votes = self._examine(received, tag), self._context.votes
            rejected = yield from agree(found, workers, votes=votes)
            check_round_counts(rejected, MessageKind.WHOLE, what=tag, workers=workers)
        senders = [rank for rank in range(len(received)) if rank not in rejected]
        # What came back as it was sent was checked before. Where workers vote on what to leave out,
        # each judges its own message as the others do.
        rank = self._context.rank
        is_checked = self._context.refuses_own and not drops
        mine = rank if received[rank] is messages[_WHOLE] and is_checked else None
        # In the transport's thread; an error belongs to the caller, and is no fault of the link.
        opened = attempt(lambda: self._bodies(received, senders, tag, mine, is_checked=drops))
        yield ToCaller()
        place = None if mine is None else senders.index(mine)
        return self._combine(received, opened(), senders, tag, rejected, mine=place)

    @torch.no_grad()
    def _combine(
        self,
        received: Sequence[Tensor],
        bodies: Sequence[Tensor],
        senders: Sequence[int],
        tag: RoundTag,
        rejected: Mapping[int, Rejection],
        *,
        mine: int | None,
    ) -> RoundResult:
        """The mean of all messages but the rejected, less what turns out not to be usable."""
        if isinstance(received, SharedAnswer) and len(received) > _FEW:
            key = ("mean", tag, *rejected)
            found = received.once(key, lambda: self._whole(received, bodies, senders, tag))
        else:
            found = self._result(received, bodies, senders, tag, mine)
        return replace(found, left_out={**rejected, **found.left_out})

    def _whole(
        self,
        received: Sequence[Tensor],
        bodies: Sequence[Tensor],
        senders: Sequence[int],
        tag: RoundTag,
    ) -> RoundResult:
        found = self._result(received, bodies, senders, tag)
        return replace(found, mean=DenseVector(found.mean.whole()))

    def _bodies(
        self,
        received: Sequence[Tensor],
        senders: Sequence[int],
        tag: RoundTag,
        mine: int | None = None,
        *,
        is_checked: bool,
    ) -> list[Tensor]:
        if self._alone:
            return list(received)
        return [
            body_of(received[rank], self._codec.nbytes)
            if is_checked or rank == mine
            else self._opened(received[rank], rank, tag)
            for rank in senders
        ]

    def replay_mean(
        self, messages: Sequence[Tensor], tag: RoundTag, *, left_out: Collection[int]
    ) -> StreamedVector:
        senders = [rank for rank in range(len(messages)) if rank not in left_out]
        bodies = self._bodies(messages, senders, tag, is_checked=False)
        # Which messages were left out is known: no other turns out to be unusable.
        payloads, device = self._payloads(bodies, tag), self._context.storage.device
        return combined(self._context.aggregate, payloads, device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather(Exchange):
    """Every worker's payload goes to every worker, and all of them combine all payloads.

    >>> Gather()
    Gather()
    """

    def bind(self, context: ExchangeContext) -> ExchangeState:
        """A state with one codec and one feedback for the whole fragment."""
        return _GatherState(context, self.sizes_in(context))

    def sizes(
        self, codec: Codec, layout: Layout, aggregate: Aggregate, *, workers: int, rank: int
    ) -> Sizes:
        """One message to each of the others, and one from each.

        >>> from thinwire.aggregate import MeanOverWorkers
        >>> from thinwire.codecs import Identity
        >>> layout = Layout.vector(10)
        >>> Gather().sizes(Identity(), layout, MeanOverWorkers(), workers=3, rank=0).received_nbytes
        208
        """
        del aggregate, rank
        body_nbytes = codec.payload_nbytes(layout)
        if workers == 1:
            return Sizes(
                messages={_WHOLE: body_nbytes},
                sent_nbytes=0,
                received_nbytes=0,
                sent_count=0,
                received_count=0,
                pattern="gather",
            )
        nbytes = HEADER_NBYTES + body_nbytes
        return Sizes(
            messages={_WHOLE: nbytes},
            sent_nbytes=nbytes,
            received_nbytes=(workers - 1) * nbytes,
            sent_count=1,
            received_count=workers - 1,
            pattern="gather",
        )
