"""K workers in one process: the twin of the real network, exact and without one."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from thinwire.errors import ConfigurationError, ExchangeError, ExchangeTimeout
from thinwire.transport.base import (
    AllGather,
    AllToAll,
    Announce,
    FinishedRound,
    Requests,
    Round,
    RoundTag,
    RunningExchange,
    SharedAnswer,
    Swap,
    Transport,
)

T = TypeVar("T")


def answers_of(requests: Sequence[Any], tag: RoundTag) -> list[Any]:
    """What every worker gets back when all of them ask at once, in rank order.

    Raises:
        ExchangeError: they ask for different things, or for different sizes.

    >>> import torch
    >>> asked = [AllGather(torch.tensor([1])), AllGather(torch.tensor([2]))]
    >>> answers_of(asked, RoundTag(what="x", round=1))[0]
    [tensor([1]), tensor([2])]
    """
    match requests[0]:
        case AllGather() if all(isinstance(r, AllGather) for r in requests):
            payloads: list[Tensor] = [request.payload for request in requests]
            _check_sizes(payloads, tag)
            return [SharedAnswer(payloads)] * len(requests)
        case AllToAll() if all(isinstance(r, AllToAll) for r in requests):
            columns = list(zip(*(r.payloads for r in requests), strict=True))
            for column in columns:
                _check_sizes(column, tag)
            return [list(column) for column in columns]
        case Swap() if all(isinstance(r, Swap) for r in requests):
            peers = [request.peer for request in requests]
            if any(peers[peer] != rank for rank, peer in enumerate(peers)):
                raise _unequal(
                    tag, f"the workers swap with {peers}, where each must name the other"
                )
            for rank, peer in enumerate(peers):
                _check_sizes([requests[rank].payload, requests[peer].payload], tag)
            return [requests[peer].payload for peer in peers]
        case _:
            kinds = sorted({type(request).__name__ for request in requests})
            raise _unequal(tag, f"the workers ask for {', '.join(kinds)}")


def _check_sizes(payloads: Sequence[Tensor], tag: RoundTag) -> None:
    sizes = [payload.numel() for payload in payloads]
    if len(set(sizes)) > 1:
        raise _unequal(tag, f"the workers sent payloads of {sizes} bytes")


def _unequal(tag: RoundTag, because: str) -> ExchangeError:
    return ExchangeError(
        f"exchange {tag}", because=because, do="give all workers the same model and method"
    )


@dataclass(eq=False)  # state: it fills up with workers
class _Meeting:
    """The n-th exchange of every worker, and what stopped it."""

    running: dict[int, RunningExchange[Any]] = field(default_factory=dict)
    complete_s: float | None = None
    error: Exception | None = None


def _advance(meeting: _Meeting, tag: RoundTag) -> None:
    """Run all exchanges until nothing has to be carried; one thread does it for all workers."""
    everyone = [meeting.running[rank] for rank in range(len(meeting.running))]
    try:
        while any(running.travels for running in everyone):
            answers = answers_of([running.request for running in everyone], tag)
            for running, answer in zip(everyone, answers, strict=True):
                running.answer(answer)
    except Exception as error:
        # It stops the exchange for all: each of them hears why when it waits.
        meeting.error = error


class _Hub:
    """Where the workers meet: exchange n of each worker goes to meeting n."""

    def __init__(self, workers: int, timeout_s: float) -> None:
        self.workers = workers
        self.timeout_s = timeout_s
        self.arrived = threading.Condition()
        self.announced: dict[int, bytes] = {}
        self.meetings: dict[int, _Meeting] = {}

    def put(self, number: int, rank: int, running: RunningExchange[Any]) -> _Meeting:
        with self.arrived:
            meeting = self.meetings.setdefault(number, _Meeting())
            meeting.running[rank] = running
            if len(meeting.running) == self.workers:
                meeting.complete_s = time.perf_counter()
                # The rounds hold on to it; no other worker will ask for it.
                del self.meetings[number]
            self.arrived.notify_all()
            return meeting

    def take(self, meeting: _Meeting, tag: RoundTag) -> None:
        """Return once everything of `meeting` has been carried."""
        with self.arrived:
            complete = self.arrived.wait_for(
                lambda: len(meeting.running) == self.workers, self.timeout_s
            )
            if not complete:
                raise self._missing(meeting, tag)
            # The first thread to get here carries for all; the others find nothing left to carry.
            if meeting.error is None:
                _advance(meeting, tag)
        if meeting.error is not None:
            raise meeting.error

    def _missing(self, meeting: _Meeting, tag: RoundTag) -> ExchangeTimeout:
        missing = [str(rank) for rank in range(self.workers) if rank not in meeting.running]
        return ExchangeTimeout(
            f"exchange {tag}",
            because=f"worker {', '.join(missing)} of {self.workers} has not sent it"
            + (f" within {self.timeout_s:g} s" if self.timeout_s else ""),
            do="call begin() on all workers and then finish() on all, or give each worker a thread "
            "and in_process() a timeout_s",
        )


class _InProcessRound(Round[T]):
    def __init__(
        self, hub: _Hub, meeting: _Meeting, tag: RoundTag, running: RunningExchange[T]
    ) -> None:
        self._hub, self._meeting, self._tag, self._running = hub, meeting, tag, running

    def wait(self) -> T:
        self._hub.take(self._meeting, self._tag)
        return self._running.finish()

    def arrived_s(self) -> float | None:
        return self._meeting.complete_s


class _InProcess(Transport):
    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub, self._rank, self._next_meeting = hub, rank, 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._hub.workers

    def run(self, requests: Requests[T], tag: RoundTag) -> Round[T]:
        running = RunningExchange(requests)
        # Workers that share a thread are built one after the other: nothing can be waited for.
        while isinstance(running.request, Announce):
            with self._hub.arrived:
                self._hub.announced[self._rank] = running.request.payload
                running.answer(dict(self._hub.announced))
        if not running.travels:
            return FinishedRound(running)
        number, self._next_meeting = self._next_meeting, self._next_meeting + 1
        meeting = self._hub.put(number, self._rank, running)
        return _InProcessRound(self._hub, meeting, tag, running)


def in_process(workers: int, *, timeout_s: float = 0.0) -> list[Transport]:
    """Connected transports for `workers` workers that live in this process.

    Args:
        workers: K.
        timeout_s: seconds that a worker waits for the others. 0 suits workers that share a thread
            (`begin()` on all, then `finish()` on all): one that is missing then never comes.

    Returns:
        One transport per worker, in rank order.

    Raises:
        ConfigurationError: `workers` below 1 or a negative timeout.

    >>> [t.rank for t in in_process(3)]
    [0, 1, 2]
    """
    if workers < 1 or timeout_s < 0:
        raise ConfigurationError(
            f"connect {workers} workers with a timeout of {timeout_s:g} s",
            because="workers must be >= 1 and timeout_s >= 0",
            do="pass workers >= 1 and timeout_s >= 0",
        )
    hub = _Hub(workers, timeout_s)
    return [_InProcess(hub, rank) for rank in range(workers)]
