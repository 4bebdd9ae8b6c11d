"""K workers in one process: the twin of the real network, exact and without one."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from thinwire.errors import ExchangeError, ExchangeTimeout, check
from thinwire.transport.base import (
    FinishedRound,
    Post,
    Posts,
    Round,
    RoundTag,
    RunningExchange,
    SharedAnswer,
    Transport,
)

T = TypeVar("T")


def answers_of(posts: Sequence[Post | None], tag: RoundTag) -> Sequence[dict[int, Tensor]]:
    """What every worker gets back when all of them post at once, in rank order.

    Raises:
        ExchangeError: one waits for what no other sends, or for another size.

    >>> import torch
    >>> from thinwire.transport.base import to_all
    >>> posts = [to_all(torch.tensor([rank]), rank, 2) for rank in range(2)]
    >>> answers_of(posts, RoundTag(what="x", round=1))
    [{1: tensor([1])}, {0: tensor([0])}]
    """
    answers: list[dict[int, Tensor]] = []
    is_to_all = True
    for rank, post in enumerate(posts):
        if post is None:
            raise _unequal(tag, f"worker {rank} has finished it and others have not")
        answer: dict[int, Tensor] = {}
        for sender, nbytes in post.take.items():
            theirs = posts[sender]
            payload = None if theirs is None else theirs.to.get(rank)
            sent = "nothing" if payload is None else f"{payload.numel()} bytes"
            if payload is None or payload.numel() != nbytes:
                raise _unequal(
                    tag, f"worker {sender} sends worker {rank} {sent}, which expects {nbytes} bytes"
                )
            answer[sender] = payload
        for to in post.to:
            theirs = posts[to]
            if to != rank and theirs is not None and rank not in theirs.take:
                raise _unequal(tag, f"worker {to} expects nothing of worker {rank}, which sends it")
        answers.append(answer)
        is_to_all = is_to_all and post.is_to_all(len(posts))
    if not is_to_all:
        return answers
    made, lock = dict[object, Any](), threading.Lock()
    return [SharedAnswer(answer, made, lock) for answer in answers]


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
        while any(running.post is not None for running in everyone):
            answers = answers_of([running.post for running in everyone], tag)
            for running, answer in zip(everyone, answers, strict=True):
                running.answer(answer)
    except Exception as error:
        # It stops the exchange for all: each of them hears why when it waits.
        meeting.error = error


@dataclass(eq=False)  # state, as above
class _Hub:
    """Where the workers meet: exchange n of each worker goes to meeting n."""

    workers: int
    timeout_s: float
    arrived: threading.Condition = field(default_factory=threading.Condition)
    announced: dict[int, bytes] = field(default_factory=dict)
    meetings: dict[int, _Meeting] = field(default_factory=dict)


class _InProcessRound(Round[T]):
    def __init__(
        self, hub: _Hub, meeting: _Meeting, tag: RoundTag, running: RunningExchange[T]
    ) -> None:
        self._hub, self._meeting, self._tag, self._running = hub, meeting, tag, running

    def wait(self) -> T:
        hub, meeting = self._hub, self._meeting
        with hub.arrived:
            hub.arrived.wait_for(lambda: len(meeting.running) == hub.workers, hub.timeout_s)
            missing = [str(rank) for rank in range(hub.workers) if rank not in meeting.running]
            within = f" within {hub.timeout_s:g} s" if hub.timeout_s else ""
            check(
                not missing,
                f"exchange {self._tag}",
                because=f"worker {', '.join(missing)} of {hub.workers} has not sent it{within}",
                do="call begin() on all workers and then finish() on all, or give each worker a "
                "thread and in_process() a timeout_s",
                kind=ExchangeTimeout,
            )
            # The first thread to get here carries for all; the others find nothing left to carry.
            if meeting.error is None:
                _advance(meeting, self._tag)
        if meeting.error is not None:
            raise meeting.error
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

    def announce(self, card: bytes, tag: RoundTag) -> Mapping[int, bytes]:
        del tag
        # Workers that share a thread are built one after the other: nothing can be waited for.
        with self._hub.arrived:
            self._hub.announced[self._rank] = card
            return dict(self._hub.announced)

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        running = RunningExchange(posts)
        if running.post is None:
            return FinishedRound(running)
        number, self._next_meeting = self._next_meeting, self._next_meeting + 1
        hub = self._hub
        with hub.arrived:
            meeting = hub.meetings.setdefault(number, _Meeting())
            meeting.running[self._rank] = running
            if len(meeting.running) == hub.workers:
                meeting.complete_s = time.perf_counter()
                # The rounds hold on to it; no other worker will ask for it.
                del hub.meetings[number]
            hub.arrived.notify_all()
        return _InProcessRound(hub, meeting, tag, running)


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
    check(
        workers >= 1 and timeout_s >= 0,
        f"connect {workers} workers with a timeout of {timeout_s:g} s",
        because="workers must be >= 1 and timeout_s >= 0",
        do="pass workers >= 1 and timeout_s >= 0",
    )
    hub = _Hub(workers, timeout_s)
    return [_InProcess(hub, rank) for rank in range(workers)]
