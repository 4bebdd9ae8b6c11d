"""Workers that share an object store, or a folder, and no network of their own."""

from __future__ import annotations

import asyncio
import os
import re
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError, ExchangeError, ExchangeTimeout, MismatchError
from thinwire.security.token import TOKEN_VARIABLE, Token, find_token
from thinwire.transport.async_task import AsyncTask
from thinwire.transport.base import (
    FinishedRound,
    Post,
    Posts,
    Received,
    Round,
    RoundTag,
    RunningExchange,
    Transport,
    run_alone,
)
from thinwire.transport.object_store import ObjectStore, ServiceRequests, together
from thinwire.transport.progress_thread import ProgressThread
from thinwire.transport.sealed import not_opened
from thinwire.transport.sealed_objects import SealedObjects, bytes_tensor, name_part

T = TypeVar("T")

_URL, _RUN = "THINWIRE_BUCKET", "THINWIRE_RUN"
_WORKER, _WORKERS = "THINWIRE_WORKER", "THINWIRE_WORKERS"
_MOST_FAILURES = 3


class Bucket(Transport):
    """K workers that exchange by objects in a store, one for each message.

    A worker puts its message, unless one of that name is there, and gets those of the others as
    they come. So it needs no address, no open port and no other worker at the same moment: one
    that was killed and goes on from a checkpoint finds the messages of the rounds that it missed,
    puts again what it had put, which changes nothing, and catches up.

        RUN/what/round/step-kind/[receiver/]sender

    Exchanges go on while the worker trains. Messages are deleted by their sender once all that are
    to read them have, and are older than `keep` rounds.

    Args:
        url: s3://, gs:// or az:// of a bucket with a prefix, file:// of a folder that all workers
            see, or a store of obstore's. Keys and endpoints are taken from the environment, as the
            provider's own tools do (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...).
        rank: this worker's number, from 0.
        workers: K, the same everywhere.
        run: name, the same everywhere; no other run in that place may have it.
        token: what is written is sealed with it; None is as it is, for the provider to read.
        keep: rounds whose messages stay after all have read them, for a worker that is killed: as
            many as may have passed since its last checkpoint.
        timeout_s: in which no message comes that is waited for.
        options: of the store, in place of environment variables, such as {"endpoint": "https://..."}.

    Raises:
        ConfigurationError: a number or name that cannot be, obstore is missing, or the URL is
            unknown.

    Its exchanges raise `MismatchError` where the name has another run's objects, `ExchangeTimeout`
    where messages do not come, and `ExchangeError` where the store refuses.

    >>> Bucket("memory://", rank=0, workers=1, run="first").world_size
    1
    """

    def __init__(
        self,
        url: Any,
        *,
        rank: int,
        workers: int,
        run: str,
        token: Token | str | None = None,
        keep: int = 2,
        timeout_s: float = 600.0,
        options: Mapping[str, str] | None = None,
    ) -> None:
        _check(rank, workers, run, keep, timeout_s)
        self._rank, self._workers, self._run = rank, workers, run
        self._store = ObjectStore(url, options)
        token = Token(token) if isinstance(token, str) else token
        self._objects = SealedObjects(self._store, token, run, workers=workers)
        self._timeout_s = timeout_s
        self._written = _Written(keep)
        self._last: dict[str, tuple[int, int]] = {}
        self._begun = 0
        self._progress = ProgressThread()
        # Also at the end of the interpreter, which must not find the thread inside a request.
        self._closing = weakref.finalize(self, self._progress.close)

    @classmethod
    def from_environment(cls) -> Self:
        """The bucket that THINWIRE_BUCKET, THINWIRE_WORKER, THINWIRE_WORKERS, THINWIRE_RUN name.

        With THINWIRE_TOKEN it is sealed. Where torchrun started several ranks, they are one worker,
        and each exchanges with the same rank of the others.

        Raises:
            ConfigurationError: one of the four is missing or no number; and what the class raises.
        """
        names = (_URL, _WORKER, _WORKERS, _RUN)
        missing = [name for name in names if not os.environ.get(name)]
        numbers = [os.environ.get(name, "") for name in (_WORKER, _WORKERS)]
        if missing or not all(n.isascii() and n.isdigit() for n in numbers):
            raise ConfigurationError(
                "exchange over an object store",
                because=f"{missing[0]} is not set"
                if missing
                else f"{_WORKER} and {_WORKERS} are {numbers[0]!r} and {numbers[1]!r}",
                do=f"export {_URL}=URL, {_RUN}=NAME, {_WORKER}=0 (1, 2, ...) and {_WORKERS}=K",
            )
        ranks, run = int(os.environ.get("WORLD_SIZE", "1")), os.environ[_RUN]
        return cls(
            os.environ[_URL],
            rank=int(numbers[0]),
            workers=int(numbers[1]),
            run=run if ranks == 1 else f"{run}.{os.environ['RANK']}of{ranks}",
            token=find_token() if os.environ.get(TOKEN_VARIABLE) else None,
        )

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self._workers

    @property
    def added_nbytes(self) -> int:
        """What sealing adds; nothing without a token."""
        return self._objects.added_nbytes

    @property
    def service_requests(self) -> Mapping[str, int]:
        """What the store was asked for since this was built; introductions are not counted."""
        return asdict(self._store.requests)

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange; it goes on in a thread, after those that were started before."""
        if self._workers == 1:
            return run_alone(posts)
        running = RunningExchange(posts)
        if running.post is None:
            return FinishedRound(running)
        # Here, on the stream that has computed it.
        running.post = running.post.changed(lambda payload: payload.cpu().contiguous())
        place = self._place(tag)
        return self._start(tag, running, lambda: self._carry(tag, place, running))

    def announce(self, card: bytes, tag: RoundTag) -> Mapping[int, bytes]:
        """Put the card, and wait for those of the others: nothing is trained yet."""
        if self._workers == 1:
            return {0: card}
        step = _Step(base=f"{self._place(tag)}/0", tag=tag, heard=set())
        cards: dict[int, bytes] = {}

        def told() -> Posts[Mapping[int, bytes]]:
            yield from ()
            return lambda: cards

        async def work() -> None:
            cards.update(await self._announced(step, card))

        return self._start(tag, RunningExchange(told()), work).wait()

    def _start(
        self,
        tag: RoundTag,
        running: RunningExchange[T],
        work: Callable[[], Coroutine[Any, Any, None]],
    ) -> Round[T]:
        if not self._closing.alive:
            raise ExchangeError(
                f"exchange {tag}", because="its transport was closed", do="build another one"
            )
        task = AsyncTask(tag, running, work)
        self._progress.submit(task)
        return task.future

    def close(self) -> None:
        """End the thread; exchanges under way fail. What was written stays.

        It happens by itself when the transport is no longer used and when the process ends.
        """
        self._closing()

    def _place(self, tag: RoundTag) -> str:
        """Where the objects of an exchange lie: equal on all workers, and after a restart."""
        last, times = self._last.get(tag.what, (-1, 0))
        times = times + 1 if tag.round == last else 0
        self._last[tag.what] = tag.round, times
        again = f".{times}" if times else ""
        return f"{self._run}/{name_part(tag.what)}/{tag.round:08}{again}"

    # -- in the progress thread --------------------------------------------------------------------

    async def _carry(self, tag: RoundTag, place: str, running: RunningExchange[Any]) -> None:
        """Answer every post of an exchange."""
        self._begun += 1
        heard: set[int] = set()
        cleaning = asyncio.ensure_future(self._clean())
        try:
            step = 0
            while running.post is not None:
                post = running.post.changed(lambda payload: payload.cpu().contiguous())
                exchange = _Step(base=f"{place}/{step}", tag=tag, heard=heard)
                running.answer(await self._carried(exchange, post))
                step += 1
            await cleaning
        finally:
            cleaning.cancel()
        self._written.heard_from(heard, number=self._begun)

    async def _carried(self, step: _Step, post: Post) -> Received:
        """Write this worker's payloads while those of the others are read."""
        if not post.to and not post.take:
            return {}
        if post.is_to_all(self._workers):
            base = f"{step.base}-gather"
            puts = {f"{base}/{self._rank:05}": next(iter(post.to.values()))}
            gets = {rank: f"{base}/{rank:05}" for rank in post.take}
        else:
            base = f"{step.base}-scatter"
            puts = {f"{base}/{to:05}/{self._rank:05}": payload for to, payload in post.to.items()}
            gets = {rank: f"{base}/{self._rank:05}/{rank:05}" for rank in post.take}
        until_s = time.monotonic() + self._timeout_s
        writing = [self._put(step, key, payload, until_s) for key, payload in puts.items()]
        most = max(post.take.values(), default=0)
        found, *_ = await together(self._got(step, gets, most, list(puts)), *writing)
        opened: dict[int, Tensor] = {}
        for rank, raw in found.items():
            payload, nbytes = self._objects.opened(raw, gets[rank]), post.take[rank]
            if payload is None and not post.allow_missing:
                raise not_opened(step.tag, rank)
            opened[rank] = torch.empty(0, dtype=torch.uint8) if payload is None else payload
            if payload is not None and payload.numel() != nbytes:
                raise ExchangeError(
                    f"use what worker {rank} sent for {step.tag}",
                    because=f"it has {payload.numel()} bytes, and {nbytes} were expected",
                    do="give all workers the same model and method",
                )
        self._written.note(step.tag, self._begun, list(post.to), list(puts))
        return opened

    async def _announced(self, step: _Step, card: bytes) -> dict[int, bytes]:
        """The cards of all workers."""
        counted, self._store.requests = self._store.requests, ServiceRequests()
        base, until_s = f"{step.base}-announce", time.monotonic() + self._timeout_s
        mine = f"{base}/{self._rank:05}"
        try:
            await self._store.check_put_if_absent(f"{base}/check-{self._rank:05}", until_s)
            if not await self._objects.put(mine, bytes_tensor(card), until_s):
                raise MismatchError(
                    f"be worker {self._rank} of run {self._run!r} in {self._store.url}",
                    because="a worker of that number has announced something else there: another "
                    "method, model, seed, K or version, other weights to go on from, or another "
                    "token",
                    do="pass another name as run, the same on all workers, or delete what is in "
                    "that place",
                )
            others = [rank for rank in range(self._workers) if rank != self._rank]
            gets = {rank: f"{base}/{rank:05}" for rank in others}
            found = await self._got(step, gets, len(card), [mine])
            cards = {rank: self._objects.opened(raw, gets[rank]) for rank, raw in found.items()}
        finally:
            self._store.requests = counted
        for rank, theirs in cards.items():
            if theirs is None:
                raise not_opened(step.tag, rank)
        opened = {rank: theirs for rank, theirs in cards.items() if theirs is not None}
        return {self._rank: card} | {r: p.numpy().tobytes() for r, p in opened.items()}

    async def _got(
        self, step: _Step, gets: Mapping[int, str], nbytes: int, own: Sequence[str]
    ) -> dict[int, memoryview]:
        found = await self._store.get_all(
            gets, timeout_s=self._timeout_s, nbytes=nbytes + self.added_nbytes
        )
        step.heard.update(found)
        missing = sorted(set(gets) - set(found))
        if missing:
            raise await self._missing(step, missing, gets, own)
        return found

    async def _missing(
        self, step: _Step, missing: Sequence[int], gets: Mapping[int, str], own: Sequence[str]
    ) -> ExchangeTimeout:
        """Why messages did not come, as far as it can be known."""
        until_s = time.monotonic() + self._timeout_s
        kept = await together(*(self._store.get(key, until_s, nbytes=0) for key in own))
        who = f"worker {', '.join(map(str, missing))}"
        because = f"{who} of {self._workers} has put nothing there for {self._timeout_s:g} s"
        do = (
            f"see whether it runs; one that was killed may be started again. If this worker went "
            f"on from an older checkpoint than the others' last {self._written.keep} rounds, "
            "start all of them from one checkpoint, under another name"
        )
        if any(payload is None for payload in kept):
            because = "what this worker has put there is gone, as may be what others did"
            do = "end the lifecycle rule, or whatever deletes objects of the run, and start again"
        place = gets[missing[0]]
        return ExchangeTimeout(
            f"exchange {step.tag} by {place} in {self._store.url}", because=because, do=do
        )

    # -- objects -----------------------------------------------------------------------------------

    async def _put(self, step: _Step, key: str, payload: Tensor, until_s: float) -> None:
        if not await self._objects.put(key, payload, until_s):
            raise MismatchError(
                f"send {step.tag} as worker {self._rank} of run {self._run!r}",
                because=f"{key} in {self._store.url} has another message of this worker: another "
                "process has its number, or it went on from a checkpoint and came to other numbers",
                do="end the other process; or start all workers from one checkpoint with another "
                "name as run",
            )

    async def _clean(self) -> None:
        keys = self._written.to_delete()
        if keys:
            self._written.tried(keys, is_deleted=await self._store.delete(keys))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """One post of an exchange: where its objects lie, and what has come from which workers."""

    base: str
    tag: RoundTag
    heard: set[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """Objects that this worker has written for one post.

    Args:
        what: exchanges, of which kind.
        round: number among them.
        number: of the exchange among all of this worker's.
        readers: that have not been seen to be past it.
        keys: of the objects.
    """

    what: str
    round: int
    number: int
    readers: frozenset[int]
    keys: Sequence[str]


class _Written:
    """What this worker has written and not deleted yet.

    Workers run the same exchanges in the same order, each after the one before. So what comes from
    a worker for exchange n says that it has read all that it needed for those before n.

    Args:
        keep: latest rounds of each kind of exchange that stay.
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self._messages: list[_Message] = []
        self._newest: dict[str, int] = {}
        self._failures = 0

    def note(self, tag: RoundTag, number: int, readers: Sequence[int], keys: list[str]) -> None:
        """Remember that `keys` are written for `readers` in exchange `number`."""
        self._newest[tag.what] = max(tag.round, self._newest.get(tag.what, 0))
        self._messages.append(
            _Message(
                what=tag.what,
                round=tag.round,
                number=number,
                readers=frozenset(readers),
                keys=keys,
            )
        )

    def heard_from(self, workers: set[int], *, number: int) -> None:
        """Note that something of exchange `number` has come from `workers`."""
        self._messages = [
            replace(m, readers=m.readers - workers) if m.number < number else m
            for m in self._messages
        ]

    def to_delete(self) -> list[str]:
        """Keys that no worker needs any more."""
        read = [m for m in self._messages if not m.readers and self._is_old(m)]
        return [key for message in read for key in message.keys]

    def tried(self, keys: Sequence[str], *, is_deleted: bool) -> None:
        """Forget `keys` if they are deleted, or if the store does not let this worker delete."""
        self._failures = 0 if is_deleted else self._failures + 1
        if is_deleted or self._failures >= _MOST_FAILURES:
            gone = set(keys)
            self._messages = [m for m in self._messages if not gone.issuperset(m.keys)]

    def _is_old(self, message: _Message) -> bool:
        return message.round + self.keep <= self._newest[message.what]


def _check(rank: int, workers: int, run: str, keep: int, timeout_s: float) -> None:
    if not 0 <= rank < workers:
        raise ConfigurationError(
            f"be worker {rank} of {workers}",
            because="workers are numbered from 0",
            do=f"pass a rank from 0 to {max(0, workers - 1)} and the number of all workers",
        )
    check_run_name(run)
    if keep < 1 or not timeout_s > 0:
        raise ConfigurationError(
            f"exchange over an object store with keep={keep} and timeout_s={timeout_s}",
            because="one round at least has to stay, and every message takes some time",
            do="pass keep >= 1 and timeout_s > 0",
        )


def check_run_name(run: str) -> None:
    """Raise `ConfigurationError` if `run` cannot be part of the names of objects.

    >>> check_run_name("an-evening.2")
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run):
        raise ConfigurationError(
            f"call a run {run!r}",
            because="its name is part of the names of objects",
            do="pass up to 100 letters, digits, dots, underscores and hyphens",
        )
