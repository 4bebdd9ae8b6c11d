"""K workers in one process, without a network."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
        ExchangeError: a worker expects other payloads than it is sent.

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
    # For two workers it is faster to decode both payloads than to share a dense vector.
    if len(posts) < 3 or not all(post.is_to_all(len(posts)) for post in present):
        return answers
    made, lock = dict[Any, Any](), threading.Lock()
    return [SharedAnswer(answer, made, lock) for answer in answers]


_Meeting: TypeAlias = dict[int, RunningExchange[Any]]
"""The n-th exchange of every worker, by rank."""


@dataclass(eq=False, repr=False)
class _InProcess(Transport):
    """One of the workers, which share `arrived`, `announced` and `meetings`."""

    rank: int
    world_size: int
    timeout_s: float
    arrived: threading.Condition
    announced: dict[int, bytes]
    meetings: dict[int, _Meeting]
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def announce(self, card: bytes, tag: RoundTag) -> Mapping[int, bytes]:
        # Workers that share a thread are built in turn, so this cannot wait for the others.
        with self.arrived:
            self.announced[self.rank] = card
            return dict(self.announced)

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        running = RunningExchange(posts)
        if running.post is None:
            return running
        number = next(self.numbers)
        with self.arrived:
            meeting = self.meetings.setdefault(number, {})
            meeting[self.rank] = running
            running.arrive = partial(self._carry, meeting, tag)
            if len(meeting) == self.world_size:
                # The exchanges refer to it; no other worker will look it up.
                del self.meetings[number]
            self.arrived.notify_all()
        if self.world_size == 1:
            running.arrive()
        return running

    def _carry(self, meeting: _Meeting, tag: RoundTag) -> None:
        """Run all exchanges of a meeting to their end; the first thread does it for all."""
        with self.arrived:
            self.arrived.wait_for(lambda: len(meeting) == self.world_size, self.timeout_s)
            if missing := [rank for rank in range(self.world_size) if rank not in meeting]:
                within = f" within {self.timeout_s:g} s" if self.timeout_s else ""
                raise ExchangeTimeout(
                    f"exchange {tag}",
                    because=f"worker {', '.join(map(str, missing))} of {self.world_size} has not "
                    f"sent it{within}",
                    do="call begin() on all workers and then finish() on all, or give each worker "
                    "a thread and in_process() a timeout_s",
                )
            everyone = [meeting[rank] for rank in range(self.world_size)]
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


def in_process(workers: int, *, timeout_s: float = 0.0) -> list[Transport]:
    """Connected transports for K workers in this process.

    Args:
        workers: K.
        timeout_s: how long a worker waits for the others; 0 for workers that share a thread
            (`begin()` on all, then `finish()` on all).

    Returns:
        One transport per worker, in rank order.

    Raises:
        ConfigurationError: `workers` is below 1, or the timeout is negative.

    >>> [t.rank for t in in_process(3)]
    [0, 1, 2]
    """
    check(
        workers >= 1 and timeout_s >= 0,
        f"connect {workers} workers with a timeout of {timeout_s:g} s",
        because="workers must be >= 1 and timeout_s >= 0",
        do="pass workers >= 1 and timeout_s >= 0",
    )
    shared = threading.Condition(), dict[int, bytes](), dict[int, _Meeting]()
    return [_InProcess(rank, workers, timeout_s, *shared) for rank in range(workers)]
