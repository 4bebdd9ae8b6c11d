"""Carrying by tagged messages between two ranks: how it is done over gloo.

gloo matches collectives by the order in which they are issued. If two ranks disagree on what is
next, a message that is too long for its receiver aborts the process (`gloo::EnforceNotMet` in a
thread in which it cannot be caught), and one that is too short passes for a whole one. Messages
with a tag made of the exchange's number, the kind of request and the number of bytes never meet a
receiver that expects something else: both ends time out instead. Nor do they depend on the order in
which the halves of several exchanges are issued.
"""

import contextlib
import datetime
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from thinwire.host_copy import HostCopy, lies_on_gpu
from thinwire.transport.backend import Backend, Carried, Work
from thinwire.transport.base import AllGather, AllToAll, Swap, with_payloads

_SERIES_BITS = 6
SERIES_COUNT = 1 << _SERIES_BITS
_MOST_STEPS = 3
_ABORT = 3  # the step number of a message that is never sent

_Step: TypeAlias = tuple[int, str]
"""Number and kind of a request within its exchange."""


class _Deadline:
    """One timeout for all messages of a request; its clock starts with the first wait."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s, self._until_s = timeout_s, float("inf")

    def wait(self, work: Any) -> None:
        """Wait for a message, for what is left of the timeout."""
        if self._timeout_s is None:
            work.wait()
            return
        self._until_s = min(self._until_s, time.monotonic() + self._timeout_s)
        # Not 0, which torch takes for the timeout of the group.
        left_s = max(0.001, self._until_s - time.monotonic())
        work.wait(datetime.timedelta(seconds=left_s))


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

    def wait(self) -> list[Tensor]:
        *early, last = self._coming
        for work, pass_on in zip(early, self._pass_on, strict=True):
            self._clock.wait(work)
            self._sends.append(pass_on())
        # Sends too: the caller may let go of the rows, which gloo reads until they have left.
        for work in (last, *self._sends):
            self._clock.wait(work)
        return list(self._everyone.unbind())


class _ScatterWork(Work):
    def __init__(
        self, works: Sequence[Any], received: Any, sent: Sequence[Tensor], clock: _Deadline
    ) -> None:
        self._works, self._received, self._clock = works, received, clock
        self._sent = sent  # must outlive the sending

    def wait(self) -> Any:
        for work in self._works:
            self._clock.wait(work)
        return self._received


class _WorkOnceCopied(Work):
    """A request whose payloads are on their way to the host; the thread that waits starts it.

    Messages have tags, so it does not matter that later requests may have been started before.
    """

    def __init__(
        self, copies: Sequence[HostCopy], carry: Callable[[Iterator[Tensor]], Work]
    ) -> None:
        self._copies, self._carry = copies, carry

    def wait(self) -> Any:
        return self._carry(copy.read() for copy in self._copies).wait()


class GlooMessages(Backend):
    """One exchange in messages.

    Args:
        group: a gloo group (torch.distributed.ProcessGroup).
        series: of this transport among those on the group, below `SERIES_COUNT`.
        number: of the exchange within the series.
        timeout_s: for each request; None is the group's, for each message.
    """

    def __init__(
        self, group: Any, series: int, number: int, *, timeout_s: float | None = None
    ) -> None:
        self._group, self._series, self._number = group, series, number
        self._rank, self._world_size = group.rank(), group.size()
        self._timeout_s = timeout_s

    def start(self, request: Carried, step: int) -> Work:
        """A ring for an all-gather, else a message to each worker concerned."""
        assert step < _MOST_STEPS, "a tag has room for three requests of an exchange"
        payloads = request.payloads if isinstance(request, AllToAll) else [request.payload]
        if any(map(lies_on_gpu, payloads)):
            return _WorkOnceCopied(
                [HostCopy(payload) for payload in payloads],
                lambda copied: self._carry(with_payloads(request, lambda _: next(copied)), step),
            )
        return self._carry(request, step)

    def _carry(self, request: Carried, step: int) -> Work:
        match request:
            case AllGather(payload):
                return self._ring(payload.cpu(), (step, "gather"))
            case AllToAll(payloads):
                return self._scatter(payloads, (step, "scatter"))
            case Swap(payload, peer):
                return self._swap(payload.cpu().contiguous(), peer, (step, "swap"))

    def _scatter(self, payloads: Sequence[Tensor], step: _Step) -> Work:
        sent = [payload.cpu().contiguous() for payload in payloads]
        mine = sent[self._rank]
        received = [torch.empty_like(mine) for _ in sent]
        received[self._rank].copy_(mine)
        # Each starts with another receiver, or all would send to worker 0 first.
        distances = range(1, self._world_size)
        to = [(self._rank + distance) % self._world_size for distance in distances]
        works = [self._receive(received[peer], peer, step) for peer in to]
        works += [self._send(sent[peer], peer, step) for peer in to]
        return _ScatterWork(works, received, sent, _Deadline(self._timeout_s))

    def _swap(self, payload: Tensor, peer: int, step: _Step) -> Work:
        if peer == self._rank:
            return _ScatterWork([], payload, [payload], _Deadline(self._timeout_s))
        received = torch.empty_like(payload)
        works = [self._receive(received, peer, step), self._send(payload, peer, step)]
        return _ScatterWork(works, received, [payload], _Deadline(self._timeout_s))

    def abort(self) -> None:
        """Close all connections, as gloo does by itself once any message has timed out.

        So this waits a moment for a message that is never sent. It has no other way to wake the
        thread that is blocked in a wait.
        """
        never_sent = torch.empty(1, dtype=torch.uint8)
        for distance in range(1, self._world_size):
            with contextlib.suppress(RuntimeError, ValueError):
                peer = (self._rank + distance) % self._world_size
                self._receive(never_sent, peer, (_ABORT, "")).wait(
                    datetime.timedelta(milliseconds=1)
                )

    def _ring(self, payload: Tensor, step: _Step) -> Work:
        """Each worker passes on to the right what comes from the left.

        For two workers that is one message each way. From four on it is faster over a slow link
        than a message to every worker, which makes the packets of many senders meet at one
        receiver.
        """
        everyone = payload.new_empty(self._world_size, payload.numel())
        everyone[self._rank].copy_(payload)
        # By hop: what I pass on at hop h is what I received at hop h - 1.
        rows = [everyone[(self._rank - hop) % self._world_size] for hop in range(self._world_size)]
        left, right = (self._rank - 1) % self._world_size, (self._rank + 1) % self._world_size
        coming = [self._receive(row, left, step) for row in rows[1:]]
        first = self._send(rows[0], right, step)
        return _RingWork(
            everyone,
            first,
            coming,
            pass_on=[partial(self._send, r, right, step) for r in rows[1:-1]],
            clock=_Deadline(self._timeout_s),
        )

    def _send(self, payload: Tensor, peer: int, step: _Step) -> Any:
        tag = self._tag(payload.numel(), step)
        return self._group.send([payload], peer, tag)

    def _receive(self, payload: Tensor, peer: int, step: _Step) -> Any:
        tag = self._tag(payload.numel(), step)
        return self._group.recv([payload], peer, tag)

    def _tag(self, nbytes: int, step: _Step) -> int:
        """31 bits: a one (tags of others are small), series 6, number 9, step 2, digest 13.

        Those of up to 512 exchanges under way differ surely, those of other sizes or kinds nearly
        so: two workers of which one gathers and one swaps would take each other's payloads.
        """
        number, kind = step
        digest = zlib.crc32(f"{self._number} {nbytes} {kind}".encode()) & 0x1FFF
        fields = ((self._series, _SERIES_BITS), (self._number, 9), (number, 2), (digest, 13))
        tag = 1
        for value, bits in fields:
            tag = tag << bits | value % (1 << bits)
        return tag
