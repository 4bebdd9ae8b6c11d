"""Carrying by tagged messages between two ranks: how it is done over gloo.

gloo matches collectives by the order in which they are issued. If two ranks disagree on what is
next, a message that is too long for its receiver aborts the process (`gloo::EnforceNotMet` in a
thread that nobody can catch it in), and one that is too short passes for a whole one. Messages with
a tag made of the exchange's number and the number of bytes never meet a receiver that expects
something else: both ends time out instead. Nor do they depend on the order in which the halves of
several exchanges are issued.
"""

import contextlib
import datetime
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from thinwire.transport.backend import Backend, Work

__all__ = ["GlooMessages"]

_GATHER, _SHARDS, _RESULTS, _NOTHING = range(4)


@final
class _Deadline:
    """What is left of a timeout, which begins when somebody first waits."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s, self._until_s = timeout_s, float("inf")

    def wait(self, work: Any) -> None:
        """For a message; the first wait starts the clock."""
        if self._timeout_s is None:
            work.wait()
            return
        self._until_s = min(self._until_s, time.monotonic() + self._timeout_s)
        left_s = max(0.001, self._until_s - time.monotonic())
        work.wait(datetime.timedelta(seconds=left_s))


@final
class _RingWork(Work):
    """Rows that arrive hop by hop; all but the last are passed on."""

    def __init__(
        self,
        everyone: Tensor,
        first: Any,
        coming: Sequence[Any],
        pass_on: Sequence[Callable[[], Any]],
        clock: _Deadline,
    ) -> None:
        self._clock = clock
        self._everyone, self._sends, self._coming, self._pass_on = (
            everyone,
            [first],
            coming,
            pass_on,
        )

    def land(self) -> list[Tensor]:
        *early, last = self._coming
        for work, pass_on in zip(early, self._pass_on, strict=True):
            self._clock.wait(work)
            self._sends.append(pass_on())
        for work in (last, *self._sends):
            self._clock.wait(work)
        return list(self._everyone.unbind())


@final
class _ScatterWork(Work):
    def __init__(
        self, works: Sequence[Any], received: list[Tensor], sent: Sequence[Tensor], clock: _Deadline
    ) -> None:
        self._works, self._received, self._clock = works, received, clock
        self._sent = sent  # must outlive the sending

    def land(self) -> list[Tensor]:
        for work in self._works:
            self._clock.wait(work)
        return self._received


@final
class GlooMessages(Backend):
    """One exchange in messages.

    Args:
        group: a gloo group (torch.distributed.ProcessGroup).
        series: of this transport among those on the group.
        number: of the exchange within the series.
        timeout_s: for landing; None is the group's.
    """

    def __init__(
        self, group: Any, series: int, number: int, *, timeout_s: float | None = None
    ) -> None:
        self._group, self._series, self._number = group, series, number
        self._rank, self._world_size = group.rank(), group.size()
        self._clock = _Deadline(timeout_s)

    def gather(self, payload: Tensor) -> Work:
        """In a ring: everybody passes on to the right what comes from the left.

        For two workers that is one message each way. From four on it is faster over a slow link
        than a message to everybody, which makes the packets of many senders meet at one receiver.
        """
        return self._ring(payload.cpu(), _GATHER)

    def gather_results(self, result: Tensor) -> Work:
        """As `gather`."""
        return self._ring(result.cpu(), _RESULTS)

    def scatter(self, payloads: Sequence[Tensor]) -> Work:
        """One message to everybody."""
        sent = [payload.cpu().contiguous() for payload in payloads]
        mine = sent[self._rank]
        received = [torch.empty_like(mine) for _ in sent]
        received[self._rank].copy_(mine)
        # Each starts with another receiver, or all would send to worker 0 first.
        distances = range(1, self._world_size)
        to = [(self._rank + distance) % self._world_size for distance in distances]
        works = [self._receive(received[peer], peer, _SHARDS) for peer in to]
        works += [self._send(sent[peer], peer, _SHARDS) for peer in to]
        return _ScatterWork(works, received, sent, self._clock)

    def abort(self) -> None:
        """Close all connections, as gloo does by itself once any message has timed out."""
        nothing = torch.empty(1, dtype=torch.uint8)
        for distance in range(1, self._world_size):
            with contextlib.suppress(RuntimeError, ValueError):
                peer = (self._rank + distance) % self._world_size
                self._receive(nothing, peer, _NOTHING).wait(datetime.timedelta(milliseconds=1))

    def _ring(self, payload: Tensor, kind: int) -> Work:
        everyone = payload.new_empty(self._world_size, payload.numel())
        everyone[self._rank].copy_(payload)
        # By hop: what I pass on at hop h is what I received at hop h - 1.
        rows = [everyone[(self._rank - hop) % self._world_size] for hop in range(self._world_size)]
        left, right = (self._rank - 1) % self._world_size, (self._rank + 1) % self._world_size
        coming = [self._receive(row, left, kind) for row in rows[1:]]
        first = self._send(rows[0], right, kind)
        return _RingWork(
            everyone,
            first,
            coming,
            pass_on=[partial(self._send, r, right, kind) for r in rows[1:-1]],
            clock=self._clock,
        )

    def _send(self, payload: Tensor, peer: int, kind: int) -> Any:
        tag = self._tag(payload.numel(), kind)
        return self._group.send([payload], peer, tag)

    def _receive(self, payload: Tensor, peer: int, kind: int) -> Any:
        tag = self._tag(payload.numel(), kind)
        return self._group.recv([payload], peer, tag)

    def _tag(self, nbytes: int, kind: int) -> int:
        """31 bits: a one (tags of others are small), series 4, number 9, kind 2, digest 15.

        Those of up to 512 exchanges under way differ surely, those of different sizes nearly so.
        """
        digest = zlib.crc32(f"{self._number} {nbytes}".encode()) & 0x7FFF
        fields = ((self._series, 4), (self._number, 9), (kind, 2), (digest, 15))
        tag = 1
        for value, bits in fields:
            tag = tag << bits | value % (1 << bits)
        return tag
