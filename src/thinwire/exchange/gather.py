"""Gather: every worker's payload goes to every worker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
from thinwire.transport import Post, Posts, RoundTag, SharedAnswer, attempt

_WHOLE = "whole"
# Workers of one process that would rather decode all payloads each than share a vector.
_FEW = 2


class GatherState(ExchangeState):
    """One codec and one feedback for the whole fragment, and one message with all of it.

    Args:
        context: fragment, method and workers.
        sizes: of the messages.
        group: by round, the ranks that exchange with this worker, its own included, in rank order;
            None is all of them.
    """

    def __init__(
        self,
        context: ExchangeContext,
        sizes: Sizes,
        group: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        super().__init__(sizes)
        self._context, self._group = context, group
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

    def run(self, messages: Mapping[str, Tensor], tag: RoundTag) -> Posts[RoundResult]:
        """Send the message to the group, and combine those of all its workers."""
        rank, own = self._context.rank, messages[_WHOLE]
        group = range(self._context.workers) if self._group is None else self._group(tag.round)
        drops = self._context.drops_bad_messages and not self._alone
        others = [other for other in group if other != rank]
        to = dict.fromkeys([rank] if self._alone else others, own)
        answer = yield Post(to, dict.fromkeys(others, own.numel()), allow_missing=drops)
        by_rank = {rank: own, **answer}
        received = {sender: by_rank[sender] for sender in group}
        # A message may be damaged on its way to some workers only. They then vote, so that all of
        # them leave out the same ones and get equal means.
        rejected: dict[int, Rejection] = {}
        if drops:
            workers, votes = self._context.workers, self._context.votes
            found = self._examine(received, tag)
            rejected = yield from agree(found, rank=rank, workers=workers, votes=votes)
            check_round_counts(rejected, MessageKind.WHOLE, what=tag, workers=workers)
        senders = [sender for sender in group if sender not in rejected]
        # This worker's own message, if it is as it was sent, was checked before. Where workers vote
        # on what to leave out, each judges its own as the others do.
        is_checked = self._context.refuses_own and not drops
        mine = rank if is_checked and received[rank] is own else None
        # In the transport's thread; an error belongs to the caller, and is no fault of the link.
        opened = attempt(
            lambda: [
                self._body(received[each], each, tag, is_checked=drops or each == mine)
                for each in senders
            ]
        )

        def combine() -> RoundResult:
            bodies, given = opened(), list(received.values())
            if isinstance(answer, SharedAnswer) and len(group) > _FEW:

                def whole() -> RoundResult:
                    found = self._result(given, bodies, senders, tag)
                    return replace(found, mean=DenseVector(found.mean.whole()))

                result = answer.once(("mean", tag, *rejected), whole)
            else:
                place = None if mine is None else senders.index(mine)
                result = self._result(given, bodies, senders, tag, place)
            return replace(result, left_out={**rejected, **result.left_out})

        return torch.no_grad()(combine)

    def _examine(self, messages: Mapping[int, Tensor], tag: RoundTag) -> dict[int, Rejection]:
        """What is wrong with each worker's message, by rank."""
        found: dict[int, Rejection] = {}
        for sender, message in messages.items():
            expected = self._header(tag, sender=sender)
            rejection = examine(message, expected, body_nbytes=self._codec.nbytes)
            if rejection is not None:
                found[sender] = rejection
        return found

    def _body(self, message: Tensor, sender: int, tag: RoundTag, *, is_checked: bool) -> Tensor:
        """The body of `message`; if it is bad and was not checked before, its error is raised."""
        if self._alone:
            return message
        if is_checked:
            return body_of(message, self._codec.nbytes)
        expected = self._header(tag, sender=sender)
        return open_message(message, expected, body_nbytes=self._codec.nbytes)

    def _result(
        self,
        messages: Sequence[Tensor],
        bodies: Sequence[Tensor],
        senders: Sequence[int],
        tag: RoundTag,
        mine: int | None = None,
    ) -> RoundResult:
        """The mean of `bodies`, which the workers `senders` sent, less what is not usable."""
        payloads = Payloads(coder=self._codec, payloads=bodies, round=tag.round)
        aggregate, device = self._context.aggregate, self._context.storage.device
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

    def replay_mean(
        self, messages: Sequence[Tensor], tag: RoundTag, *, left_out: Collection[int]
    ) -> StreamedVector:
        """Combine the messages of a round that this worker missed."""
        bodies = [
            self._body(message, sender, tag, is_checked=False)
            for sender, message in enumerate(messages)
            if sender not in left_out
        ]
        # Which messages were left out is known: no other turns out to be unusable.
        payloads = Payloads(coder=self._codec, payloads=bodies, round=tag.round)
        return combined(self._context.aggregate, payloads, self._context.storage.device)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather(Exchange):
    """Every worker's payload goes to every worker, and all of them combine all payloads.

    >>> Gather()
    Gather()
    """

    def bind(self, context: ExchangeContext) -> ExchangeState:
        """A state with one codec and one feedback for the whole fragment."""
        return GatherState(context, self.sizes_in(context))

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
