"""Exchanges among the workers of a roll."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from thinwire.elastic.bucket.run_objects import RunObjects, absent_message
from thinwire.elastic.group import discarded
from thinwire.elastic.timeouts import Timeouts
from thinwire.errors import RoundDiscarded, ThinwireError
from thinwire.transport.async_task import AsyncTask
from thinwire.transport.base import (
    AllGather,
    AllToAll,
    FinishedRound,
    Request,
    Requests,
    Round,
    RoundTag,
    RunningExchange,
    on_host,
)
from thinwire.transport.object_store import together
from thinwire.transport.progress_thread import ProgressThread

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

KEPT_ROLLS = 4
"""Messages stay for at least so many rolls more."""


class BucketGroup:
    """The workers of a roll, until they change.

    A message counts if it is there before anything else is in its place. Who waited in vain for one
    puts an empty one there, so that it counts for no worker or for all of them.

    Args:
        objects: of the run.
        names: of the workers, in rank order.
        rank: of this one.
        timeouts: how long an exchange may take.
    """

    def __init__(
        self, objects: RunObjects, names: Sequence[str], rank: int, timeouts: Timeouts
    ) -> None:
        self._objects, self._timeouts = objects, timeouts
        self.names, self.rank = tuple(names), rank
        self.roll = 0
        self._progress = ProgressThread()
        self._answers: dict[tuple[str, int], list[tuple[str, Sequence[Tensor]]]] = {}
        self._old_calls: list[int] = []
        self._missed = 0

    def run(self, requests: Requests[T], tag: RoundTag) -> Round[T]:
        """Start an exchange of the present roll; what stops it discards the round here."""
        running = RunningExchange(requests)
        if not running.travels:
            return FinishedRound(running)
        # Here, on the stream that has computed it.
        running.request = on_host(running.request)
        roll, self._answers[tag.what, tag.round] = self.roll, []
        task = AsyncTask(tag, running, lambda: self._carry(tag, roll, running))
        self._progress.submit(task)
        return task.future

    def forget_call(self, roll: int) -> None:
        """Delete this worker's call before `roll` when the next exchange begins."""
        self._old_calls.append(roll)

    def place_of(self, messages: Sequence[Tensor]) -> str:
        """Where the messages of a round lie, which is over now; "" if they came from elsewhere."""
        for key, answers in self._answers.items():
            for place, answer in answers:
                if list(map(id, answer)) == list(map(id, messages)):
                    del self._answers[key]
                    return place
        return ""

    def close(self) -> None:
        """Give up what is under way."""
        self._progress.close()
        self._answers.clear()

    # -- in the progress thread --------------------------------------------------------------------

    async def _carry(self, tag: RoundTag, roll: int, running: RunningExchange[Any]) -> None:
        place, step = self._objects.place(roll, tag), 0
        began_s, missed = time.monotonic(), self._missed
        is_reduction = isinstance(running.request, AllToAll)
        nbytes, forgetting = 0, asyncio.ensure_future(self._forget_calls())
        try:
            while running.travels:
                base = f"{place}/{step}"
                answer, received = await self._answered(tag, roll, base, running.request)
                nbytes += received
                step += 1
                running.answer(answer)
                running.request = on_host(running.request)
        except (RuntimeError, ValueError, ThinwireError) as error:
            # Of a reduction the others wait for this worker's result, whatever has failed.
            await self._withdraw(f"{place}/{int(is_reduction)}/{self.rank:05}")
            if isinstance(error, RoundDiscarded):
                raise
            raise discarded(tag, str(error)) from error
        finally:
            # No message waits for it: what it did not get to, the next exchange deletes.
            forgetting.cancel()
        if self._missed == missed:
            # Else it is how long a worker was waited for, and says nothing of the store.
            self._timeouts.exchanged(nbytes, seconds=time.monotonic() - began_s)

    async def _answered(
        self, tag: RoundTag, roll: int, base: str, request: Request | None
    ) -> tuple[Any, int]:
        """The answer to `request`, and the bytes of others in it."""
        workers, me = len(self.names), self.rank
        match request:
            case AllGather(payload, may_lack=may_lack):
                puts = {f"{base}/{me:05}": payload}
                gets = {rank: f"{base}/{rank:05}" for rank in range(workers) if rank != me}
                found, own = await self._exchanged(roll, puts, gets, payload.numel())
                found[me] = payload if own else absent_message()
            case AllToAll(payloads, may_lack=may_lack):
                others = [rank for rank in range(workers) if rank != me]
                puts = {f"{base}/{to:05}/{me:05}": payloads[to] for to in others}
                gets = {rank: f"{base}/{me:05}/{rank:05}" for rank in others}
                # A shard that came too late is known to its owner, who gives up the round.
                found, _ = await self._exchanged(roll, puts, gets, payloads[me].numel())
                found[me] = payloads[me]
            case _:
                raise AssertionError(request)
        answer = [found[rank] for rank in range(workers)]
        late = [self.names[rank] for rank, each in found.items() if not each.numel()]
        if late and not may_lack:
            raise discarded(tag, f"what {' and '.join(late)} sent did not come in time")
        if isinstance(request, AllGather):
            self._answers.get((tag.what, tag.round), []).append((base, answer))
        return answer, sum(each.nbytes for rank, each in found.items() if rank != me)

    async def _exchanged(
        self, roll: int, puts: Mapping[str, Tensor], gets: Mapping[int, str], nbytes: int
    ) -> tuple[dict[int, Tensor], bool]:
        """Others' messages of `nbytes` each, and whether this worker's own count."""
        sealed, store = self._objects.sealed, self._objects.store
        timeout_s = self._timeouts.exchange(nbytes * len(gets))
        until_s = time.monotonic() + timeout_s
        coming = store.get_all(gets, timeout_s=timeout_s, nbytes=nbytes + sealed.added_nbytes)
        writing = [sealed.put(key, payload, until_s) for key, payload in puts.items()]
        raw, *are_mine = await together(coming, *writing)
        missing = {rank: key for rank, key in gets.items() if rank not in raw}
        if missing:
            raw |= await self._decided(roll, missing, nbytes)
        found: dict[int, Tensor] = {}
        for rank, each in raw.items():
            payload = sealed.opened(each, gets[rank])
            is_whole = payload is not None and payload.numel() == nbytes
            found[rank] = payload if payload is not None and is_whole else absent_message()
        return found, all(are_mine)

    async def _decided(
        self, roll: int, missing: Mapping[int, str], nbytes: int
    ) -> dict[int, memoryview]:
        """What counts in the places of messages that did not come: they, or nothing for good.

        Raises:
            RoundDiscarded: the run has gone on, and these messages were deleted meanwhile.
        """
        sealed, store = self._objects.sealed, self._objects.store
        # Messages that came at the last moment are still to be read.
        until_s = time.monotonic() + self._timeouts.exchange(nbytes * len(missing))
        self._missed += 1
        self._timeouts.timed_out()
        keys = list(missing.values())
        await together(*(sealed.put(key, absent_message(), until_s) for key in keys))
        there = await together(*(store.get(key, until_s, nbytes=nbytes) for key in keys))
        # In this order: what was there before this roll was written has not been deleted.
        if await self._objects.roll(roll + KEPT_ROLLS, until_s) is not None:
            raise RoundDiscarded(
                "use messages of a round that others have finished long ago",
                because="this worker was away meanwhile",
                do="nothing: it catches up before the next round",
            )
        if any(raw is None for raw in there):
            raise RuntimeError("what was written there a moment ago is gone")
        return {rank: raw for rank, raw in zip(missing, there, strict=True) if raw is not None}

    async def _forget_calls(self) -> None:
        while self._old_calls:
            await self._objects.forget_call(self._old_calls[0], self.names[self.rank])
            del self._old_calls[0]

    async def _withdraw(self, key: str) -> None:
        """Let others not wait for what this worker would have sent next; if that works."""
        until_s = time.monotonic() + self._timeouts.floor_s
        try:
            await self._objects.sealed.put(key, absent_message(), until_s)
        except ThinwireError as error:
            _LOG.info("the others will wait for this worker: %s", error)
