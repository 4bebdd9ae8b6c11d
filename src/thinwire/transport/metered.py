"""Counters of bytes and seconds around a transport."""

import math
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

    `sent_bytes` counts a payload once, however many receive it: see `up_and_down`.

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


def up_and_down(sent: float, received: float, *, relayed: bool) -> tuple[float, float]:
    """Bytes up and down a worker's link, from what its transport counted.

    A store, a hub or a server takes a payload once, however many read it: up is what was sent.
    Point to point, whatever arrives was sent by some worker, forwarded or not: on average over
    workers, up equals down.

    Args:
        sent: bytes of payloads, each counted once.
        received: bytes of payloads from others.
        relayed: whether payloads pass through a store, a hub or a server.

    >>> up_and_down(100, 300, relayed=True), up_and_down(100, 300, relayed=False)
    ((100, 300), (300, 300))
    """
    return (sent if relayed else received), received


def all_reduce_nbytes(*, workers: int, parameters: int, steps: int) -> int:
    """Bytes each way of a worker that averages 16-bit gradients by a ring at every step.

    2 (K - 1) / K 2 N T, without headers

    >>> all_reduce_nbytes(workers=4, parameters=1000, steps=2)
    6000
    """
    return 4 * (workers - 1) * parameters * steps // workers


def times_fewer(
    up: float, down: float, *, workers: int, parameters: int, steps: int
) -> float | None:
    """`all_reduce_nbytes` both ways, divided by up + down; None if nothing moved.

    >>> times_fewer(*up_and_down(100, 300, relayed=True), workers=4, parameters=1000, steps=2)
    30.0
    """
    all_reduce = all_reduce_nbytes(workers=workers, parameters=parameters, steps=steps)
    return 2 * all_reduce / (up + down) if up + down else None


class Metered(WrappedTransport):
    """A transport that counts the bytes and seconds of another one in `counters`.

    The first post of an exchange is counted at once, the rest when the worker has waited for the
    exchange. So a checkpoint does not depend on how far an exchange in flight has got: a resumed
    run sends it again from its first post.

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
        self._waiting_s = self._in_caller_s = math.inf

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange and count its bytes; `wait` for it here, to count its seconds."""
        return self._inner.run(self._counted(posts), tag)

    def wait(self, round: Round[T]) -> T:
        """Return the result of an exchange that `run` started."""
        self._waiting_s, self._in_caller_s = time.perf_counter(), math.inf
        try:
            return round.wait()
        finally:
            # The exchange's own work in this thread does not count as waiting.
            ended_s = min(self._in_caller_s, time.perf_counter())
            self.counters.wait_s += ended_s - self._waiting_s

    def _counted(self, posts: Posts[T]) -> Posts[T]:
        """The same posts in the same order, with their bytes added to the counters."""
        started_s, rank, added = time.perf_counter(), self.rank, self.added_nbytes
        counters, later = self.counters, TransportCounters()
        current = counters

        def carry(post: Post) -> Generator[Post, Received, Received]:
            nonlocal current
            sent = {id(p): p.nbytes + added for to, p in post.to.items() if to != rank}
            current.sent_bytes += sum(sent.values())
            current = later
            received = yield post
            others = [p.nbytes + added for sender, p in received.items() if sender != rank]
            current.received_bytes += sum(others)
            return received

        finish = yield from wrapped(posts, carry)
        arrived_s = time.perf_counter()

        def timed() -> T:
            self._in_caller_s = time.perf_counter()
            counters.sent_bytes += later.sent_bytes
            counters.received_bytes += later.received_bytes
            counters.overlapped_s += min(arrived_s, self._waiting_s) - started_s
            return finish()

        return timed
