"""What a method sends, to the byte: which messages, after which steps, and how large they are.

Sizes are those of the codecs and exchanges themselves, bound to the layout that a run would have.
Nothing is estimated and nothing is sent. Counted is what a run counts: a payload once as it is
handed to the transport, with its header, and both halves of a reduction; introductions are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from thinwire.elastic.votes import vote
from thinwire.errors import ConfigurationError
from thinwire.exchange import Exchange, ExchangeContext, ExchangeState, Pattern
from thinwire.feedback import NoFeedback
from thinwire.fragments import Fragment
from thinwire.method import Method
from thinwire.plan.shape import Shape
from thinwire.storage import Ledger, OnDevice
from thinwire.transport import in_process

__all__ = ["Message", "Traffic", "traffic"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One fragment's exchange, as one worker sees it; it is repeated every H steps.

    Args:
        fragment: index.
        name: what error messages call the fragment.
        offset: t_p, inner steps; it is due when (t - t_p) mod H = 0.
        first: the first inner step, counted from 1, after which it may be due.
        layers: that it holds, sorted; None, at the end, is what lies outside of the stack.
        parameters: numbers in the fragment.
        payload_nbytes: of the messages for this worker's own pseudo-gradient, headers included.
        result_nbytes: of the message with the shard that this worker combined; 0 for a gather.
        sent_nbytes: that this worker hands over for others, each message counted once.
        received_nbytes: that come from others.
        vote_nbytes: that this worker sends besides, to agree on whose payloads are used.
        exchange: who sends what to whom.
    """

    fragment: int
    name: str
    offset: int
    first: int
    layers: tuple[int | None, ...]
    parameters: int
    payload_nbytes: int
    result_nbytes: int
    sent_nbytes: int
    received_nbytes: int
    vote_nbytes: int
    exchange: Pattern

    def first_due(self, *, sync_every: int) -> int:
        """The inner step, counted from 1, after which it is first sent."""
        return self.first + (self.offset - self.first) % sync_every

    def last_due(self, steps: int, *, sync_every: int) -> int:
        """The last inner step up to `steps` after which it was due; 0 if it was not."""
        first = self.first_due(sync_every=sync_every)
        return steps - (steps - first) % sync_every if steps >= first else 0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one worker sends and receives in a run.

    Args:
        sync_every: H, inner steps from one exchange of a fragment to the next.
        tau: inner steps that an exchange may take.
        messages: one for each fragment, in the order of their plan.
        workers: K.

    >>> from thinwire import presets
    >>> plan = traffic(presets.diloco(), Shape.of_size(1000, 2), workers=2)
    >>> plan.sent_per_round, plan.sent_after(30), plan.sent_after(31)
    (4064, 4064, 8128)
    """

    sync_every: int
    tau: int
    messages: tuple[Message, ...]
    workers: int

    def due_after(self, step: int) -> tuple[Message, ...]:
        """What is sent after inner step `step`, counted from 1, while training goes on."""
        return tuple(m for m in self.messages if step and self._last(m, step) == step)

    def left_over(self, steps: int) -> tuple[Message, ...]:
        """What is sent at the end of a run of `steps`: all that was trained since it was sent."""
        _check_steps(steps)
        return tuple(m for m in self.messages if self._last(m, steps) < steps)

    def exchanges_after(self, steps: int) -> int:
        """Exchanges of a run of `steps` inner steps with its end, each fragment's counted."""
        return sum(self._times(m, steps) for m in self.messages)

    def sent_after(self, steps: int) -> int:
        """Bytes that this worker sent in a run of `steps` inner steps with its end.

        Raises:
            ConfigurationError: steps < 0.
        """
        return sum(self._times(m, steps) * (m.sent_nbytes + m.vote_nbytes) for m in self.messages)

    def received_after(self, steps: int) -> int:
        """Bytes that came from others in a run of `steps` inner steps with its end.

        Raises:
            ConfigurationError: steps < 0.
        """
        others = self.workers - 1
        return sum(
            self._times(m, steps) * (m.received_nbytes + others * m.vote_nbytes)
            for m in self.messages
        )

    def peak_sent_after(self, steps: int) -> int:
        """The most that a run of `steps` inner steps sent after any one of them, without votes.

        What is left over at the end counts fragment by fragment, for no training goes on beside it.

        Raises:
            ConfigurationError: steps < 0.
        """
        at_the_end = (m.sent_nbytes for m in self.left_over(steps))
        sent = tuple(m for m in self.messages if self._last(m, steps))
        return max(self._peak(sent), *at_the_end, 0)

    @property
    def peak_sent_per_step(self) -> int:
        """The most bytes that are due after one inner step of a long run, without votes."""
        return self._peak(self.messages)

    @property
    def sent_per_round(self) -> int:
        """Bytes that this worker sends every H inner steps."""
        return sum(m.sent_nbytes + m.vote_nbytes for m in self.messages)

    @property
    def received_per_round(self) -> int:
        """Bytes that come from others every H inner steps."""
        others = self.workers - 1
        return sum(m.received_nbytes + others * m.vote_nbytes for m in self.messages)

    def _last(self, message: Message, steps: int) -> int:
        return message.last_due(steps, sync_every=self.sync_every)

    def _times(self, message: Message, steps: int) -> int:
        _check_steps(steps)
        first, last = message.first_due(sync_every=self.sync_every), self._last(message, steps)
        scheduled = (last - first) // self.sync_every + 1 if last else 0
        return scheduled + (last < steps)

    def _peak(self, messages: Sequence[Message]) -> int:
        # All of one offset have been sent together once the last of them has begun.
        together: dict[int, int] = defaultdict(int)
        for message in messages:
            together[message.offset % self.sync_every] += message.sent_nbytes
        return max(together.values(), default=0)


def traffic(
    method: Method, shape: Shape, *, workers: int, rank: int = 0, votes: int = 0
) -> Traffic:
    """What `method` sends for a model of `shape`, as worker `rank` of `workers` counts it.

    A worker is one rank here: ranks that share a worker each have headers and shards of their own.

    Args:
        method: as a run would have it.
        shape: of the model.
        workers: K, the same for the whole run.
        rank: whose bytes; a summary has those of worker 0. They differ only where shards do.
        votes: that end each exchange: 0 where workers are fixed, 1 where they come and go. What
            rounds that count on nobody and what healing costs is not in it.

    Raises:
        ConfigurationError: K < 1, a rank that is none of them, or a method that does not fit the
            model.

    >>> from thinwire import presets
    >>> plan = traffic(presets.streaming_diloco(), Shape.of_size(99, 5), workers=2)
    >>> [message.layers for message in plan.messages]
    [(0, 2, 4), (1, 3)]
    """
    _check_workers(workers, rank)
    fragments = method.fragments.plan(shape.parts, sync_every=method.sync_every)
    vote_nbytes = votes * vote({}, workers).numel() if workers > 1 else 0
    return Traffic(
        sync_every=method.sync_every,
        tau=method.overlap.steps(sync_every=method.sync_every),
        messages=tuple(
            _message(
                fragment, shape, _exchange(method, fragment, shape, workers, rank), vote_nbytes
            )
            for fragment in fragments
        ),
        workers=workers,
    )


def _exchange(
    method: Method, fragment: Fragment, shape: Shape, workers: int, rank: int
) -> ExchangeState:
    wiring = ExchangeContext(
        codec=method.codec,
        # It decides what is in a payload and never how large that is, and it takes memory.
        feedback=NoFeedback(),
        aggregate=method.aggregate,
        layout=shape.layout(fragment.names),
        fragment=fragment.index,
        transport=in_process(workers)[rank],
        workers=workers,
        rank=rank,
        storage=OnDevice(torch.device("meta"), Ledger()),
    )
    exchange: Exchange = method.exchange
    return exchange.bind(wiring)


def _message(
    fragment: Fragment, shape: Shape, exchange: ExchangeState, vote_nbytes: int
) -> Message:
    held = set(fragment.names)
    parts = [part for part in shape.parts if part.name in held]
    layers = {part.layer for part in parts}
    return Message(
        fragment=fragment.index,
        name=fragment.name,
        offset=fragment.offset_steps,
        first=fragment.first_step,
        layers=tuple(sorted(layers, key=lambda layer: (layer is None, layer or 0))),
        parameters=sum(part.numel for part in parts),
        payload_nbytes=exchange.nbytes - exchange.result_nbytes,
        result_nbytes=exchange.result_nbytes,
        sent_nbytes=exchange.sent_nbytes,
        received_nbytes=exchange.received_nbytes,
        vote_nbytes=vote_nbytes,
        exchange=exchange.pattern,
    )


def _check_steps(steps: int) -> None:
    if steps < 0:
        raise ConfigurationError(
            f"count the bytes of {steps} inner steps",
            because="a run has none or more",
            do="pass steps >= 0",
        )


def _check_workers(workers: int, rank: int) -> None:
    if workers < 1 or not 0 <= rank < workers:
        raise ConfigurationError(
            f"plan for worker {rank} of {workers}",
            because="a run has a worker or more, counted from 0",
            do="pass workers >= 1 and 0 <= rank < workers",
        )
