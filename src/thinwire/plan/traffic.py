"""The messages of a method: after which steps, and how many bytes.

Sizes come from the codecs and exchanges themselves, bound to the layout that a run would have.
Nothing is estimated, and nothing is sent. Bytes are counted as a run counts them: each payload
once, as the transport receives it, with its header and the bytes of sealing, and both halves of a
reduction. Introductions do not count. `Traffic.on_links` gives what a worker's link carries.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache, partial

from thinwire.exchange import Pattern, Sizes
from thinwire.exchange.message import HEADER_NBYTES
from thinwire.fragments.layout import Layout
from thinwire.method import Method
from thinwire.outer import DelayedNesterov
from thinwire.plan.shape import Shape
from thinwire.transport.metered import up_and_down


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageSpec:
    """Exchange of one fragment by one worker, repeated every H steps.

    Args:
        offset: t_p, inner steps; due when (t - t_p) mod H = 0.
        first: the first inner step, counted from 1, after which it may be due.
        parameters: numbers in the fragment.
        payload_nbytes: bytes of this worker's own pseudo-gradient, headers included.
        result_nbytes: bytes of the shard that this worker combined; 0 for a gather.
        sent_nbytes: bytes to other workers, each message counted once.
        received_nbytes: bytes from other workers.
        sent_count: messages to other workers.
        received_count: messages from other workers.
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

    @property
    def puts(self) -> int:
        """Objects that carry the messages over a store: one holds the shards for all owners."""
        return min(self.sent_count, 2 if self.result_nbytes else 1)

    def first_due(self, *, sync_every: int) -> int:
        """The inner step, counted from 1, after which the fragment is first sent."""
        return self.first + (self.offset - self.first) % sync_every

    def last_due(self, steps: int, *, sync_every: int) -> int:
        """The last inner step up to `steps` after which the fragment is due; 0 if it never is."""
        first = self.first_due(sync_every=sync_every)
        return steps - (steps - first) % sync_every if steps >= first else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """All messages of one worker in a run.

    Args:
        sync_every: H, inner steps from one exchange of a fragment to the next.
        tau: inner steps that an exchange may take.
        messages: one for each fragment, in the order of the plan.
        workers: K.

    >>> from thinwire import presets
    >>> plan = traffic(presets.diloco(), Shape.of_size(1000, 2), workers=2)
    >>> plan.sent_nbytes(), plan.sent_nbytes(30), plan.sent_nbytes(31)
    (4064, 4064, 8128)
    """

    sync_every: int
    tau: int
    messages: tuple[MessageSpec, ...]
    workers: int

    def on_links(self, *, relayed: bool) -> Traffic:
        """The same messages, with sent bytes counted as often as a worker's link carries them.

        Args:
            relayed: whether a store or a hub, which takes each message once, passes them on.

        >>> from thinwire import presets
        >>> plan = traffic(presets.muloco(bits=8), Shape.of_size(1000, 2), workers=4)
        >>> plan.sent_nbytes(), plan.on_links(relayed=False).sent_nbytes()
        (1072, 3216)
        """
        messages = list[MessageSpec]()
        for m in self.messages:
            by_relay = relayed or m.exchange == "server"
            up, _ = up_and_down(m.sent_nbytes, m.received_nbytes, relayed=by_relay)
            messages.append(replace(m, sent_nbytes=int(up)))
        return replace(self, messages=tuple(messages))

    def sent_nbytes(self, steps: int | None = None) -> int:
        """Bytes that this worker sends.

        Args:
            steps: inner steps of a run, whose end counts; default one round in the middle of a run.
        """
        return sum(self._times(m, steps) * m.sent_nbytes for m in self.messages)

    def received_nbytes(self, steps: int | None = None) -> int:
        """Bytes that this worker receives; see `sent_nbytes`."""
        return sum(self._times(m, steps) * m.received_nbytes for m in self.messages)

    def puts(self, steps: int | None = None) -> int:
        """Objects that this worker writes to an object store; see `sent_nbytes`.

        Introductions and repeated requests do not count.
        """
        return sum(self._times(m, steps) * m.puts for m in self.messages)

    def gets(self, steps: int | None = None) -> int:
        """Objects that this worker reads from an object store; see `puts`."""
        return sum(self._times(m, steps) * m.received_count for m in self.messages)

    @property
    def peak_sent_per_step(self) -> int:
        """The most bytes that are due after one inner step of a long run."""
        together: dict[int, int] = defaultdict(int)
        for message in self.messages:
            together[message.offset % self.sync_every] += message.sent_nbytes
        return max(together.values(), default=0)

    def _times(self, message: MessageSpec, steps: int | None) -> int:
        if steps is None:
            return 1
        first = message.first_due(sync_every=self.sync_every)
        last = message.last_due(steps, sync_every=self.sync_every)
        scheduled = (last - first) // self.sync_every + 1 if last else 0
        return scheduled + (last < steps)


def traffic(
    method: Method, shape: Shape, *, workers: int, rank: int = 0, added_nbytes: int = 0
) -> Traffic:
    """The messages of `method` for a model of `shape`, as worker `rank` of `workers` counts them.

    Assumes one rank per worker: each rank of a larger worker has its own headers and shards. In an
    asynchronous run, a worker sends its pseudo-gradient to the server and receives theta; bytes are
    those of messages in an object store, before sealing.

    Args:
        method: method of the run.
        shape: shape of the model.
        workers: K.
        rank: rank of the worker. A summary is of rank 0; others differ only in their shards.
        added_nbytes: bytes that the transport adds to every message: 28 if sealed.

    Raises:
        ConfigurationError: the method does not fit the model.

    >>> from thinwire import presets
    >>> plan = traffic(presets.streaming_diloco(), Shape.of_size(99, 5), workers=2)
    >>> [(message.offset, message.parameters) for message in plan.messages]
    [(0, 59), (15, 40)]
    """
    numels, messages = {part.name: part.numel for part in shape.parts}, list[MessageSpec]()
    # Equal layers are computed once: a thousand workers have a thousand shards of each.
    sizes_of = cache(partial(_sizes, method, workers, rank))
    for fragment in method.fragments.plan(shape.parts, sync_every=method.sync_every):
        sizes = sizes_of(shape.layout(fragment.names).without_names())
        added = 0 if workers == 1 or sizes.pattern == "server" else added_nbytes
        message = MessageSpec(
            offset=fragment.offset_steps,
            first=fragment.first_step,
            parameters=sum(numels[name] for name in fragment.names),
            payload_nbytes=sum(nbytes + added for nbytes in sizes.messages.values()),
            result_nbytes=sizes.result_nbytes + (added if sizes.result_nbytes else 0),
            sent_nbytes=sizes.sent_nbytes + sizes.sent_count * added,
            received_nbytes=sizes.received_nbytes + sizes.received_count * added,
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


def _sizes(method: Method, workers: int, rank: int, layout: Layout) -> Sizes:
    if not isinstance(method.outer, DelayedNesterov):
        codec, aggregate = method.codec, method.aggregate
        return method.exchange.sizes(codec, layout, aggregate, workers=workers, rank=rank)
    # A worker sends its pseudo-gradient to the server, and reads the answer and theta.
    up, down = HEADER_NBYTES + method.codec.payload_nbytes(layout), 4 * layout.numel
    return Sizes(
        messages={"": up},
        result_nbytes=down,
        sent_nbytes=up,
        received_nbytes=down,
        sent_count=1,
        received_count=2,
        pattern="server",
    )
