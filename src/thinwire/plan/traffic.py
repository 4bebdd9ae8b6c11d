"""What a method sends, to the byte: which messages, after which steps, and how large they are.

Sizes are those of the codecs and exchanges themselves, bound to the layout that a run would have.
Nothing is estimated and nothing is sent. Counted is what a run counts: a payload once as it is
handed to the transport, with its header and what sealing adds, and both halves of a reduction;
introductions are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from thinwire.codecs import Identity
from thinwire.errors import check
from thinwire.exchange import Pattern
from thinwire.exchange.message import HEADER_NBYTES
from thinwire.method import Method
from thinwire.outer import DelayedNesterov
from thinwire.plan.shape import Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageSpec:
    """One fragment's exchange, as one worker sees it; it is repeated every H steps.

    Args:
        offset: t_p, inner steps; it is due when (t - t_p) mod H = 0.
        first: the first inner step, counted from 1, after which it may be due.
        parameters: numbers in the fragment.
        payload_nbytes: of the messages for this worker's own pseudo-gradient, headers included.
        result_nbytes: of the message with the shard that this worker combined; 0 for a gather.
        sent_nbytes: that this worker hands over for others, each message counted once.
        received_nbytes: that come from others.
        sent_count: messages that this worker hands over for others.
        received_count: messages that come from others.
        exchange: gather, reduce_scatter, pairs, or server in an asynchronous run.
    """

    offset: int
    first: int
    parameters: int
    payload_nbytes: int
    result_nbytes: int
    sent_nbytes: int
    received_nbytes: int
    sent_count: int
    received_count: int
    exchange: Pattern

    def first_due(self, *, sync_every: int) -> int:
        """The inner step, counted from 1, after which it is first sent."""
        return self.first + (self.offset - self.first) % sync_every

    def last_due(self, steps: int, *, sync_every: int) -> int:
        """The last inner step up to `steps` after which it was due; 0 if it never was."""
        first = self.first_due(sync_every=sync_every)
        return steps - (steps - first) % sync_every if steps >= first else 0


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
    messages: tuple[MessageSpec, ...]
    workers: int

    def left_over(self, steps: int) -> tuple[MessageSpec, ...]:
        """What is sent at the end of a run of `steps`: all that was trained since it was sent."""
        return tuple(m for m in self.messages if self._last(m, steps) < steps)

    def exchanges_after(self, steps: int) -> int:
        """Exchanges of a run of `steps` inner steps with its end, each fragment's counted."""
        return sum(self._times(m, steps) for m in self.messages)

    def sent_after(self, steps: int) -> int:
        """Bytes that this worker sent in a run of `steps` inner steps with its end."""
        return sum(self._times(m, steps) * m.sent_nbytes for m in self.messages)

    def received_after(self, steps: int) -> int:
        """Bytes that came from others in a run of `steps` inner steps with its end."""
        return sum(self._times(m, steps) * m.received_nbytes for m in self.messages)

    def puts_after(self, steps: int) -> int:
        """Objects that this worker wrote over an object store in a run of `steps` with its end.

        Introductions are not counted, nor what is asked for before it is there.
        """
        return sum(self._times(m, steps) * m.sent_count for m in self.messages)

    def gets_after(self, steps: int) -> int:
        """Objects that this worker read over an object store in a run of `steps` with its end."""
        return sum(self._times(m, steps) * m.received_count for m in self.messages)

    def peak_sent_after(self, steps: int) -> int:
        """The most that a run of `steps` inner steps sent after any one of them.

        What is left over at the end counts fragment by fragment, for no training goes on beside it.
        """
        at_the_end = (m.sent_nbytes for m in self.left_over(steps))
        return max(self._peak(m for m in self.messages if self._last(m, steps)), *at_the_end, 0)

    @property
    def peak_sent_per_step(self) -> int:
        """The most bytes that are due after one inner step of a long run."""
        return self._peak(self.messages)

    @property
    def sent_per_round(self) -> int:
        """Bytes that this worker sends every H inner steps."""
        return sum(m.sent_nbytes for m in self.messages)

    @property
    def received_per_round(self) -> int:
        """Bytes that come from others every H inner steps."""
        return sum(m.received_nbytes for m in self.messages)

    @property
    def puts_per_round(self) -> int:
        """Objects that this worker writes over an object store every H inner steps."""
        return sum(m.sent_count for m in self.messages)

    @property
    def gets_per_round(self) -> int:
        """Objects that this worker reads over an object store every H inner steps."""
        return sum(m.received_count for m in self.messages)

    def _last(self, message: MessageSpec, steps: int) -> int:
        return message.last_due(steps, sync_every=self.sync_every)

    def _times(self, message: MessageSpec, steps: int) -> int:
        first, last = message.first_due(sync_every=self.sync_every), self._last(message, steps)
        scheduled = (last - first) // self.sync_every + 1 if last else 0
        return scheduled + (last < steps)

    def _peak(self, messages: Iterable[MessageSpec]) -> int:
        # All of one offset have been sent together once the last of them has begun.
        together: dict[int, int] = defaultdict(int)
        for message in messages:
            together[message.offset % self.sync_every] += message.sent_nbytes
        return max(together.values(), default=0)


def traffic(
    method: Method,
    shape: Shape,
    *,
    workers: int,
    rank: int = 0,
    added_nbytes: int = 0,
) -> Traffic:
    """What `method` sends for a model of `shape`, as worker `rank` of `workers` counts it.

    A worker is one rank here: ranks that share a worker each have headers and shards of their own.
    In an asynchronous run a worker sends its pseudo-gradient to the server and receives theta, and
    bytes are those of an object store's messages before they are sealed.

    Args:
        method: as a run would have it.
        shape: of the model.
        workers: K, the same for the whole run.
        rank: whose bytes; a summary has those of worker 0. They differ only where shards do.
        added_nbytes: of the transport, to every message: 28 where messages are sealed.

    Raises:
        ConfigurationError: K < 1, a rank outside of 0..K-1, or a method that does not fit the
            model.

    >>> from thinwire import presets
    >>> plan = traffic(presets.streaming_diloco(), Shape.of_size(99, 5), workers=2)
    >>> [(message.offset, message.parameters) for message in plan.messages]
    [(0, 59), (15, 40)]
    """
    check(
        workers >= 1 and 0 <= rank < workers,
        f"plan for worker {rank} of {workers}",
        because="a run has at least one worker, and ranks count from 0",
        do="pass workers >= 1 and 0 <= rank < workers",
    )
    if isinstance(method.outer, DelayedNesterov):
        return _with_server(method, shape, workers)
    added_nbytes = added_nbytes if workers > 1 else 0
    numels, messages = {part.name: part.numel for part in shape.parts}, list[MessageSpec]()
    for fragment in method.fragments.plan(shape.parts, sync_every=method.sync_every):
        layout = shape.layout(fragment.names)
        sizes = method.exchange.sizes(
            method.codec, layout, method.aggregate, workers=workers, rank=rank
        )
        message = MessageSpec(
            offset=fragment.offset_steps,
            first=fragment.first_step,
            parameters=sum(numels[name] for name in fragment.names),
            payload_nbytes=sum(nbytes + added_nbytes for nbytes in sizes.messages.values()),
            result_nbytes=sizes.result_nbytes + (added_nbytes if sizes.result_nbytes else 0),
            sent_nbytes=sizes.sent_nbytes + sizes.sent_count * added_nbytes,
            received_nbytes=sizes.received_nbytes + sizes.received_count * added_nbytes,
            sent_count=sizes.sent_count,
            received_count=sizes.received_count,
            exchange=sizes.pattern,
        )
        messages.append(message)
    return Traffic(
        sync_every=method.sync_every,
        tau=method.overlap.steps(sync_every=method.sync_every),
        messages=tuple(messages),
        workers=workers,
    )


def _with_server(method: Method, shape: Shape, workers: int) -> Traffic:
    """What a worker sends to and receives from the server every H steps of its own."""
    layout = shape.layout([part.name for part in shape.parts])
    up, down = (HEADER_NBYTES + c.payload_nbytes(layout) for c in (method.codec, Identity()))
    message = MessageSpec(
        offset=0,
        first=1,
        parameters=sum(part.numel for part in shape.parts),
        payload_nbytes=up,
        result_nbytes=down,
        sent_nbytes=up,
        received_nbytes=down,
        sent_count=1,
        received_count=2,  # the server's answer, and theta
        exchange="server",
    )
    return Traffic(sync_every=method.sync_every, tau=0, messages=(message,), workers=workers)
