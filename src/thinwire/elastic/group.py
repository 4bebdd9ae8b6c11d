"""Exchanges by objects: among the workers of a roll, or among a fixed number of them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.elastic.alive import LostWorkers
from thinwire.elastic.loop_thread import LoopThread, result_of
from thinwire.elastic.run_objects import RunObjects, absent_message
from thinwire.elastic.timeouts import Timeouts
from thinwire.errors import RoundDiscarded, ThinwireError
from thinwire.transport.base import (
    Post,
    Posts,
    Received,
    Round,
    RoundTag,
    RunningExchange,
)
from thinwire.transport.object_store import now_s, together
from thinwire.transport.progress_thread import closed

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_GRACE_S = 5.0
_REMEMBERED = 5  # waits, of which the shortest tells when the next messages come at the soonest
KEPT_ROLLS = 4
"""Messages stay for at least so many rolls more."""


class StoreGroup:
    """The workers of a roll, until they change.

    A message counts if it is there before anything else is in its place. Who waited in vain for one
    puts an empty one there, so that it counts for no worker or for all of them.

    Args:
        objects: of the run.
        names: of the workers, in rank order.
        rank: of this one.
        timeouts: how long an exchange may take.
        shard: ending of messages' names, where workers have several ranks.

    Attributes:
        roll: number of the roll that the next exchange belongs to.
        is_asked_to_leave: ends a wait some seconds after it says so.
    """

    def __init__(
        self,
        objects: RunObjects,
        names: Sequence[str],
        rank: int,
        timeouts: Timeouts,
        *,
        shard: str = "",
    ) -> None:
        self._objects, self._timeouts, self._shard = objects, timeouts, shard
        self.names, self.rank = tuple(names), rank
        self.roll = 0
        self._lost = LostWorkers(objects, timeouts.floor_s)
        self._absent_s: dict[str, deque[float]] = {}
        self.is_asked_to_leave: Callable[[], bool] = lambda: False
        self._thread: LoopThread | None = None
        self._turn, self._is_closed = asyncio.Lock(), False
        self._answers: dict[tuple[str, int], list[tuple[str, Received]]] = {}
        self._missed = 0

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange of the present roll; what stops it discards the round here."""
        running = RunningExchange(posts)
        if running.post is None:
            return running
        # Here, on the stream that has computed it.
        running.post = running.post.changed(lambda payload: payload.cpu().contiguous())
        running.arrive = self._in_thread(tag, partial(self.exchange, tag, running, self.roll))
        return running

    def _in_thread(
        self, tag: RoundTag, work: Callable[[], Coroutine[Any, Any, T]]
    ) -> Callable[[], T]:
        """Begin `work` in a thread, after what was begun before; what waits for its result."""
        # torch keeps the number of threads per thread, and sums may depend on it.
        threads = torch.get_num_threads()

        async def carry() -> T:
            async with self._turn:
                if torch.get_num_threads() != threads:
                    torch.set_num_threads(threads)
                return await work()

        if self._is_closed:
            raise closed(tag)
        self._thread = self._thread or LoopThread()
        carried = self._thread.start(carry())

        def result() -> T:
            try:
                # The others may wait for what this worker sends.
                return result_of(carried, self.is_asked_to_leave, grace_s=_GRACE_S)
            except CancelledError as error:
                raise closed(tag) from error

        return result

    def place_of(self, messages: Sequence[Tensor]) -> str:
        """Where the messages of a round lie, which is over now; "" if they came from elsewhere."""
        for key, answers in self._answers.items():
            for place, answer in answers:
                is_whole = len(messages) == len(self.names)
                if is_whole and all(messages[rank] is each for rank, each in answer.items()):
                    del self._answers[key]
                    return place
        return ""

    def close(self) -> None:
        """Give up what is under way."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.close()
        self._answers.clear()

    # -- in the progress thread --------------------------------------------------------------------

    async def exchange(self, tag: RoundTag, running: RunningExchange[Any], roll: int) -> None:
        """Carry an exchange of `roll` to its end.

        Raises:
            RoundDiscarded: it does not count here.
        """
        self._answers[tag.what, tag.round] = []
        place, step = self._objects.place(roll, tag), 0
        began_s, missed, nbytes = now_s(), self._missed, 0
        try:
            while running.post is not None:
                post = running.post.changed(lambda payload: payload.cpu().contiguous())
                received = await self._answered(tag, roll, f"{place}/{step}", post)
                nbytes += sum(received[sender].nbytes for sender in post.take)
                step += 1
                running.answer(received)
        except (RuntimeError, ValueError, ThinwireError) as error:
            # The others may wait for this message, or for what this worker would have sent next.
            for late in (step, step + 1):
                await self._withdraw(f"{place}/{late}/{self.rank:05}{self._shard}")
            if isinstance(error, RoundDiscarded):
                raise
            raise discarded(tag, str(error)) from error
        if self._missed == missed:
            # Else it is how long a worker was waited for, and says nothing of the store.
            self._timeouts.exchanged(nbytes, seconds=now_s() - began_s)

    async def _answered(self, tag: RoundTag, roll: int, base: str, post: Post) -> Received:
        """The answer to `post`; it has this worker's own message where that does not count."""
        if not post.to and not post.take:
            return {}
        puts, gets = self._keys(base, post)
        found = await self._exchanged(tag, roll, post, puts, gets, self._absent(tag, base))
        if post.is_to_all(len(self.names)):
            self._answers.get((tag.what, tag.round), []).append((base, found))
        return found

    async def _exchanged(
        self,
        tag: RoundTag,
        roll: int,
        post: Post,
        puts: Mapping[str, Tensor],
        gets: Mapping[int, str],
        absent_s: deque[float],
    ) -> dict[int, Tensor]:
        """The others' messages, and this worker's own where that does not count."""
        sealed, store = self._objects.sealed, self._objects.store
        nbytes = max(post.take.values(), default=0)
        timeout_s = self._timeouts.exchange(nbytes * len(gets))
        until_s = now_s() + timeout_s

        async def lost(ranks: Collection[int]) -> set[int]:
            gone = await self._lost.among([self.names[rank] for rank in ranks])
            return {rank for rank in ranks if self.names[rank] in gone}

        coming = store.get_all(
            gets,
            timeout_s=timeout_s,
            nbytes=nbytes + sealed.added_nbytes,
            absent_s=absent_s,
            lost=lost,
        )
        writing = [sealed.put(key, payload, until_s) for key, payload in puts.items()]
        raw, *are_mine = await together(coming, *writing)
        missing = {rank: key for rank, key in gets.items() if rank not in raw}
        if missing:
            raw |= await self._decided(roll, missing, nbytes)
        found: dict[int, Tensor] = {}
        for rank, each in raw.items():
            payload = sealed.opened(each, gets[rank])
            if payload is None and len(each):
                payload = await sealed.get(gets[rank], now_s() + timeout_s, nbytes=nbytes)
            is_whole = payload is not None and payload.numel() == nbytes
            found[rank] = payload if payload is not None and is_whole else absent_message()
        # A shard that came too late is known to its owner, who gives up the round.
        if post.is_to_all(len(self.names)) and not all(are_mine):
            found[self.rank] = absent_message()
        late = [self.names[rank] for rank, each in sorted(found.items()) if not each.numel()]
        if late and not post.allow_missing:
            raise discarded(tag, f"what {' and '.join(late)} sent did not come in time")
        return found

    async def _decided(
        self, roll: int, missing: Mapping[int, str], nbytes: int
    ) -> dict[int, memoryview]:
        """What counts in the places of messages that did not come: they, or nothing for good.

        Raises:
            RoundDiscarded: the run has gone on, and these messages were deleted meanwhile.
        """
        sealed, store = self._objects.sealed, self._objects.store
        # Messages that came at the last moment are still to be read.
        until_s = now_s() + self._timeouts.exchange(nbytes * len(missing))
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

    def _absent(self, tag: RoundTag, base: str) -> deque[float]:
        """For how long messages of this kind were seen to be absent in the last rounds."""
        kind = f"{tag.what}/{base.rpartition('/')[2]}"
        # One long wait, as for a worker that was lost, must not make the next one long.
        unknown = deque([0.0] * _REMEMBERED, maxlen=_REMEMBERED)
        return self._absent_s.setdefault(kind, unknown)

    def _keys(self, base: str, post: Post) -> tuple[dict[str, Tensor], dict[int, str]]:
        """This worker's payloads by their names, and the names of the others' by their ranks."""
        me, shard = self.rank, self._shard
        if post.is_to_all(len(self.names)):
            puts = {f"{base}/{me:05}{shard}": next(iter(post.to.values()))}
            return puts, {rank: f"{base}/{rank:05}{shard}" for rank in post.take}
        puts = {f"{base}/{to:05}/{me:05}{shard}": payload for to, payload in post.to.items()}
        return puts, {rank: f"{base}/{me:05}/{rank:05}{shard}" for rank in post.take}

    async def _withdraw(self, key: str) -> None:
        """Let others not wait for what this worker would have sent next; if that works."""
        until_s = now_s() + self._timeouts.floor_s
        try:
            await self._objects.sealed.put(key, absent_message(), until_s)
        except ThinwireError as error:
            _LOG.info("the others will wait for this worker: %s", error)


def discarded(tag: RoundTag, because: str) -> RoundDiscarded:
    """The error of a round that does not count on any worker."""
    return RoundDiscarded(
        f"use {tag}", because=because, do="nothing: the next round sends it again"
    )
