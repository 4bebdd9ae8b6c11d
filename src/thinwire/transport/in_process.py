"""K workers in one process, without a network."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from thinwire.errors import ExchangeError, ExchangeTimeout, check
from thinwire.transport.base import (
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
    """The answers to simultaneous posts of all workers, in rank order.

    A worker whose exchange has ended (None) sends and expects nothing.

    Raises:
        ExchangeError: one expects other payloads than are sent to it.

    >>> import torch
    >>> posts = [Post({1: torch.tensor([7])}, {}), Post({}, {0: 1})]
    >>> answers_of(posts, RoundTag(what="x", round=1))
    [{}, {0: tensor([7])}]
    """
    present = [post or Post({}, {}) for post in posts]
    answers: list[dict[int, Tensor]] = []
    for rank, post in enumerate(present):
        answer = {
            k: each.to[rank] for k, each in enumerate(present) if rank in each.to and k != rank
        }
        sent = {k: payload.numel() for k, payload in answer.items()}
        if sent != post.take:
            raise ExchangeError(
                f"exchange {tag}",
                because=f"worker {rank} expects {dict(post.take)} bytes by sender, and gets {sent}",
                do="give all workers the same model and method",
            )
        answers.append(answer)
    if not all(post.is_to_all(len(posts)) for post in present):
        return answers
    made, lock = dict[Any, Any](), threading.Lock()
    return [SharedAnswer(answer, made, lock) for answer in answers]


_Meeting: TypeAlias = dict[int, RunningExchange[Any]]
"""The n-th exchange of every worker, by rank."""


class _Hub:
    """The state that the workers share: exchange n of each worker belongs to meeting n."""

    def __init__(self, workers: int, timeout_s: float) -> None:
        self.workers, self.timeout_s = workers, timeout_s
        self.arrived = threading.Condition()
        self.announced: dict[int, bytes] = {}
        self.meetings: dict[int, _Meeting] = {}

    def carry(self, meeting: _Meeting, tag: RoundTag) -> None:
        """Run all exchanges of a meeting to their end; the first thread does so for all."""
        with self.arrived:
            self.arrived.wait_for(lambda: len(meeting) == self.workers, self.timeout_s)
            missing = [str(rank) for rank in range(self.workers) if rank not in meeting]
            within = f" within {self.timeout_s:g} s" if self.timeout_s else ""
            check(
                not missing,
                f"exchange {tag}",
                because=f"worker {', '.join(missing)} of {self.workers} has not sent it{within}",
                do="call begin() on all workers and then finish() on all, or give each worker a "
                "thread and in_process() a timeout_s",
                kind=ExchangeTimeout,
            )
            everyone = [meeting[rank] for rank in range(self.workers)]
            try:
                while everyone[0].error is None and any(each.post is not None for each in everyone):
                    answers = answers_of([each.post for each in everyone], tag)
                    for running, answer in zip(everyone, answers, strict=True):
                        if running.post is not None:
                            running.answer(answer)
            except Exception as error:  # every worker raises it
                for running in everyone:
                    running.error = error
            for running in everyone:
                running.arrive = bool  # drops the reference to the others


class _InProcess(Transport):
    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub, self._meetings = hub, itertools.count()
        self.rank, self.world_size = rank, hub.workers

    def announce(self, card: bytes, tag: RoundTag) -> Mapping[int, bytes]:
        del tag
        # Workers that share a thread are built in turn, so this cannot wait for the others.
        with self._hub.arrived:
            self._hub.announced[self.rank] = card
            return dict(self._hub.announced)

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        running, hub = RunningExchange(posts), self._hub
        if running.post is None:
            return running
        number = next(self._meetings)
        with hub.arrived:
            meeting = hub.meetings.setdefault(number, {})
            meeting[self.rank] = running
            running.arrive = partial(hub.carry, meeting, tag)
            if len(meeting) == hub.workers:
                # The exchanges refer to it; no other worker will look it up.
                del hub.meetings[number]
            hub.arrived.notify_all()
        if hub.workers == 1:
            running.arrive()
        return running


def in_process(workers: int, *, timeout_s: float = 0.0) -> list[Transport]:
    """Connected transports for K workers in this process.

    Args:
        workers: K.
        timeout_s: seconds that a worker waits for the others; 0 for workers that share a thread
            (`begin()` on all, then `finish()` on all).

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
