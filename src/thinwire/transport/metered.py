"""Counters of bytes and seconds around a transport."""

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from thinwire.transport.base import (
    Post,
    Posts,
    Received,
    Round,
    RoundTag,
    Transport,
    WrappedTransport,
    wrapped,
)

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)  # state: counters
class TransportCounters:
    """Bytes and seconds of a worker's exchanges.

    `sent_bytes` counts a payload once. It crosses the wire once (a pair, an object store) or K - 1
    times (a ring).

        wait_s        seconds that the worker waited for others
        overlapped_s  seconds of exchanges during which the worker trained: from their start until
                      they had arrived or were waited for, whichever came first
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    wait_s: float = 0.0
    overlapped_s: float = 0.0

    def restore(self, saved: Mapping[str, float]) -> None:
        """Continue from `saved`, in place: exchanges in flight add to this object."""
        for counter, value in saved.items():
            setattr(self, counter, value)


class _MeteredRound(Round[T]):
    """An exchange whose first post is counted at once, and the rest when the worker waits for it.

    So a checkpoint with an exchange in flight does not depend on how far it is: a resumed run sends
    it again from its first post.
    """

    def __init__(
        self, counters: TransportCounters, transport: Transport, posts: Posts[T], tag: RoundTag
    ) -> None:
        self._counters, self._later = counters, TransportCounters()
        self._started_s = time.perf_counter()
        self._in_caller_s: float | None = None
        self._inner = transport.run(self._counted(posts, transport), tag)

    def _counted(self, posts: Posts[T], transport: Transport) -> Posts[T]:
        """The same posts in the same order, with the bytes of each added to the counters."""
        rank, added = transport.rank, transport.added_nbytes
        current = self._counters

        def carry(post: Post) -> Generator[Post, Received, Received]:
            nonlocal current
            payloads = {id(p): p for receiver, p in post.to.items() if receiver != rank}
            current.sent_bytes += sum(p.nbytes + added for p in payloads.values())
            current = self._later
            received = yield post
            others = [payload for sender, payload in received.items() if sender != rank]
            current.received_bytes += sum(payload.nbytes + added for payload in others)
            return received

        finish = yield from wrapped(posts, carry)

        def timed() -> T:
            self._in_caller_s = time.perf_counter()
            return finish()

        return timed

    def wait(self) -> T:
        waiting_s = time.perf_counter()
        try:
            result = self._inner.wait()
        finally:
            # The exchange's own work in this thread is no waiting.
            self._counters.wait_s += (self._in_caller_s or time.perf_counter()) - waiting_s
        self._counters.sent_bytes += self._later.sent_bytes
        self._counters.received_bytes += self._later.received_bytes
        arrived_s = self._inner.arrived_s()
        until_s = waiting_s if arrived_s is None else min(arrived_s, waiting_s)
        self._counters.overlapped_s += max(0.0, until_s - self._started_s)
        return result

    def arrived_s(self) -> float | None:
        return self._inner.arrived_s()


class Metered(WrappedTransport):
    """A transport that counts the bytes and seconds of another one in `counters`.

    >>> from thinwire.transport import RoundTag, in_process, to_all
    >>> import torch
    >>> def gather():
    ...     received = yield to_all(torch.zeros(7, dtype=torch.uint8), 0, 2)
    ...     return lambda: received
    >>> meter = Metered(in_process(2)[0])
    >>> _ = meter.run(gather(), RoundTag(what="x", round=1))
    >>> meter.counters.sent_bytes, meter.counters.received_bytes
    (7, 0)
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.counters = TransportCounters()

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange and count its bytes and seconds."""
        return _MeteredRound(self.counters, self._inner, posts, tag)
