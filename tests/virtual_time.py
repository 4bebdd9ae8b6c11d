"""Processes and an object store under one scheduler with a virtual clock, replayed by a seed.

`VirtualLoop` is an event loop that never waits: when nothing is ready it jumps to the next timer.
It picks a random process with something to do and runs one of its callbacks, so every interleaving
that separate machines could have may happen. A process can be frozen (SIGSTOP) or killed (SIGKILL:
nothing of it runs again, not even `finally`), between any two of its awaits.

`VirtualStore` replaces the module `obstore` beneath an `ObjectStore`.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import heapq
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import Any

from obstore.exceptions import AlreadyExistsError, GenericError

from thinwire.errors import ExchangeError

_LONGEST_STILL = 100_000  # callbacks without time passing
_PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process")


class Process:
    """Callbacks that run in order, interleaved with those of other processes."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.loop, self.name = loop, name
        self.ready: deque[_Call] = deque()
        self.is_frozen = self.is_dead = False
        self.steps = 0
        self.at_step: tuple[int, Callable[[], object]] | None = None
        self.tasks: list[asyncio.Task[Any]] = []
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` in this process."""
        self.tasks.append(self.loop.create_task(work, context=self.context))

    def freeze(self, seconds: float) -> None:
        """Run nothing for a while; others, such as a store, go on working for it meanwhile."""
        self.is_frozen = True
        self.loop.update(self)
        self.loop.world.call_later(seconds, self._thaw)

    def _thaw(self) -> None:
        self.is_frozen = False
        self.loop.update(self)

    def kill(self) -> None:
        """Run nothing ever again."""
        self.is_dead = not self.loop.is_burying
        self.loop.update(self)

    def call_later(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        """Call `callback` in this process."""
        self.loop.call_later(seconds, callback, *args, context=self.context)


class _Call:
    """A replacement for `asyncio.Handle` that takes a third of the time."""

    __slots__ = ("args", "callback", "context", "is_cancelled")
    _source_traceback = None  # `call_later` reads it

    def __init__(self, callback: Any, args: Any, context: contextvars.Context | None) -> None:
        self.callback, self.args, self.is_cancelled = callback, args, False
        self.context = contextvars.copy_context() if context is None else context

    def __repr__(self) -> str:
        return f"{self.callback} of {self.args}"

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time passes only while all processes wait.

    Args:
        random: picks the process that runs next.
    """

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random, self._now_s, self._still = random, 0.0, 0
        self._runnable: list[Process] = []
        self._timers: list[tuple[float, int, _Call]] = []
        self._set = 0
        self.is_burying = False
        self._idle: asyncio.Future[None] | None = None  # resolved once nothing can run
        self.world = Process(self, "world")

    def time(self) -> float:
        return self._now_s

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Any:
        call = _Call(callback, args, context)
        self._add(call)
        return call

    call_soon_threadsafe = call_soon

    def _add(self, call: _Call) -> None:
        process = call.context.get(_PROCESS, self.world)
        process.ready.append(call)
        if len(process.ready) == 1 and not process.is_frozen and not process.is_dead:
            self._runnable.append(process)

    def update(self, process: Process) -> None:
        """Note whether `process` can run now."""
        runs = bool(process.ready) and not process.is_frozen and not process.is_dead
        if runs and process not in self._runnable:
            self._runnable.append(process)
        elif not runs and process in self._runnable:
            self._runnable.remove(process)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Any:
        call = _Call(callback, args, context)
        if when <= self._now_s:
            self._add(call)
        else:
            self._set += 1
            heapq.heappush(self._timers, (when, self._set, call))
        return call

    def _run_once(self) -> None:
        random, runnable = self._random.random, self._runnable
        while not self._stopping:
            if not runnable:
                self._advance()
                continue
            process = runnable[int(random() * len(runnable))]
            ready = process.ready
            call = ready.popleft()
            if not ready:
                runnable.remove(process)
            process.steps += 1
            self._still += 1
            if self._still > _LONGEST_STILL:
                raise RuntimeError(f"{process.name} spins at {self._now_s} s: {call}")
            if process.at_step is not None and process.steps >= process.at_step[0]:
                act, process.at_step = process.at_step[1], None
                act()
                if process.is_dead or process.is_frozen:
                    ready.appendleft(call)
                    self.update(process)
                    continue
            if not call.is_cancelled:
                call.context.run(call.callback, *call.args)

    def _advance(self) -> None:
        """Advance to the next time that has timers, and make them ready."""
        if self._idle is not None:
            self._idle.set_result(None)
            self._idle = None
            return
        timers = self._timers
        while timers and timers[0][2].is_cancelled:
            heapq.heappop(timers)
        if not timers:
            raise RuntimeError("every process waits, and there is no timer")
        self._now_s, self._still = timers[0][0], 0
        while timers and timers[0][0] <= self._now_s:
            timer = heapq.heappop(timers)[2]
            if not timer.is_cancelled:
                self._add(timer)

    def bury(self, processes: Iterable[Process]) -> None:
        """End what is left of `processes`, whose results no longer matter."""
        self.is_burying = True
        for process in processes:
            process.is_frozen = process.is_dead = False
            process.at_step = None
            self.update(process)

        async def end() -> None:
            while pending := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in pending:
                    task.cancel()
                self._idle = self.create_future()
                await self._idle

        self.run_until_complete(end())


class VirtualRanks:
    """A replacement for a rank's `WorkerRanks`, among processes under a `VirtualLoop`.

    Args:
        loop: event loop of the processes.
        index: number of this rank.
        size: S.
        peers: the objects of all ranks of the worker, to which this one is added.
        random: decides how soon each rank learns a result.
    """

    def __init__(
        self, loop: VirtualLoop, index: int, size: int, peers: list[VirtualRanks], random: Random
    ) -> None:
        self._loop, self._peers, self._random = loop, peers, random
        self.index, self.size, self.is_first = index, size, not index
        self.is_gone = False
        self._given: deque[tuple[Any, asyncio.Future[list[Any]]]] = deque()
        peers.append(self)

    async def gather_async(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, once all have arrived."""
        if self.size == 1:
            return [value]
        answer = self._loop.create_future()
        self._given.append((value, answer))
        self._meet()
        return await answer

    def leave(self) -> None:
        """Note that the process of this rank ends, for ranks that wait for it."""
        self.is_gone = True
        self._meet()

    def _meet(self) -> None:
        if any(rank.is_gone and not rank._given for rank in self._peers):
            for rank in self._peers:
                while rank._given:
                    self._tell(rank._given.popleft()[1], None)
        elif all(rank._given for rank in self._peers):
            met = [rank._given.popleft() for rank in self._peers]
            for _, answer in met:
                self._tell(answer, [value for value, _ in met])

    def _tell(self, answer: asyncio.Future[list[Any]], values: list[Any] | None) -> None:
        error = (
            None
            if values
            else ExchangeError(
                f"go on as a worker of {self.size} ranks",
                because="another rank of it is gone",
                do="",
            )
        )
        delay_s = 0.002 * self._random.random()
        self._loop.world.call_later(delay_s, _answer, answer, values, error)


@dataclass(kw_only=True)
class StoreFaults:
    """What may go wrong with a request.

    Args:
        latency_s: approximate time of a request.
        slow: share of requests that take up to a thousand times as long.
        lost: share of requests that do not arrive.
        unanswered: share of requests that arrive and whose answer is lost.
        listing_lag_s: longest time for which listings may lack a written object.
        damaged: share of reads with one flipped bit.
        outages: (begin, end) of times in which nothing arrives.
    """

    latency_s: float = 0.02
    slow: float = 0.0
    lost: float = 0.0
    unanswered: float = 0.0
    listing_lag_s: float = 0.0
    damaged: float = 0.0
    outages: Sequence[tuple[float, float]] = ()


class VirtualStore:
    """Objects in memory, behind requests that take time and fail.

    Args:
        loop: provides the clock.
        random: decides the fate of each request.
        faults: what may go wrong.
        wrote: called with the key and the bytes of each object that is written.
        has_put_if_absent: false for a store that ignores the condition.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        random: Random,
        faults: StoreFaults,
        wrote: Callable[[str, bytes], None],
        *,
        has_put_if_absent: bool = True,
    ) -> None:
        self._loop, self._random, self.faults, self._wrote = loop, random, faults, wrote
        self._has_put_if_absent = has_put_if_absent
        self.objects: dict[str, bytes] = {}
        self.written_s: dict[str, float] = {}
        self.is_closed = False
        self.requests = self.damaged = 0

    def __repr__(self) -> str:
        return "VirtualStore()"

    # -- the interface of obstore ------------------------------------------------------------------

    async def put_async(
        self,
        store: Any,
        key: str,
        parts: Any,
        *,
        mode: str = "overwrite",
        use_multipart: bool,
        chunk_size: int,
    ) -> None:
        raw = b"".join(parts)  # copied before the caller can change it
        late_s = store.late_s(key)
        if late_s:
            await asyncio.sleep(late_s)

        def put() -> None:
            if mode == "create" and key in self.objects and self._has_put_if_absent:
                raise AlreadyExistsError(key)
            self.objects[key], self.written_s[key] = raw, self._loop.time()
            self._wrote(key, raw)

        await self._request(put)

    async def get_async(self, store: Any, key: str) -> _Found:
        return _Found(await self.get_range_async(store, key, start=0, end=None))

    async def get_range_async(self, store: Any, key: str, *, start: int, end: int | None) -> bytes:
        def cut() -> bytes:
            raw = self._get(key)
            if end is not None and start >= len(raw):
                raise GenericError("Requested range was invalid")
            return raw[start:end]

        raw = await self._request(cut)
        if raw and self.faults.damaged and self._random.random() < self.faults.damaged:
            raw = bytearray(raw)
            raw[self._random.randrange(len(raw))] ^= 1 << self._random.randrange(8)
            self.damaged += 1
        return bytes(raw)

    def _get(self, key: str) -> bytes:
        if key not in self.objects:
            raise FileNotFoundError(key)
        return self.objects[key]

    async def head_async(self, store: Any, key: str) -> dict[str, Any]:
        def head() -> dict[str, Any]:
            raw = self._get(key)
            written = datetime.fromtimestamp(1e9 + self.written_s[key], UTC)
            tag = hashlib.sha256(raw).hexdigest()
            return {"e_tag": tag, "last_modified": written, "size": len(raw)}

        return await self._request(head)

    async def list(
        self, store: Any, prefix: str, *, offset: str | None, chunk_size: int = 50
    ) -> AsyncIterator[list[dict[str, Any]]]:
        def names() -> list[dict[str, Any]]:
            until_s = self._loop.time() - self._random.random() * self.faults.listing_lag_s
            return [
                {"path": key, "size": len(raw)}
                for key, raw in self.objects.items()
                if key.startswith(prefix) and self.written_s[key] <= until_s
                if offset is None or key > offset
            ]

        found = await self._request(names)
        for start in range(0, len(found), chunk_size):
            yield found[start : start + chunk_size]

    async def delete_async(self, store: Any, keys: Sequence[str]) -> None:
        def delete() -> None:
            for key in keys:
                self.objects.pop(key, None)

        await self._request(delete)

    # -- requests ----------------------------------------------------------------------------------

    def _latency_s(self) -> float:
        seconds = self.faults.latency_s * (0.5 + self._random.random())
        if self._random.random() < self.faults.slow:
            seconds *= 10.0 ** (3 * self._random.random())
        return seconds

    async def _request(self, act: Callable[[], Any]) -> Any:
        if self.is_closed:
            raise asyncio.CancelledError
        self.requests += 1
        answer = self._loop.create_future()
        self._loop.world.call_later(self._latency_s(), self._arrive, act, answer)
        return await answer

    def _arrive(self, act: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        now_s, fate, result = self._loop.time(), self._random.random(), None
        error: Exception | None = None
        is_out = any(start_s <= now_s < end_s for start_s, end_s in self.faults.outages)
        if is_out or fate < self.faults.lost:
            error = GenericError("status code: 503")
        else:
            try:
                result = act()
            except (AlreadyExistsError, FileNotFoundError, GenericError) as refused:
                error = refused
            fate -= self.faults.lost
            if fate < self.faults.unanswered:
                if fate < self.faults.unanswered / 4:
                    return  # the client waits in vain
                error = GenericError("connection reset")
        self._loop.world.call_later(self._latency_s(), _answer, answer, result, error)


class _Found:
    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    async def bytes_async(self) -> bytes:
        return self._raw


def _answer(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
