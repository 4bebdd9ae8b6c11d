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
    FinishedRound,
    Post,
    Posts,
    Received,
    Round,
    RoundTag,
    RunningExchange,
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
        self._answers: dict[tuple[str, int], list[tuple[str, Received]]] = {}
        self._old_calls: list[int] = []
        self._missed = 0

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange of the present roll; what stops it discards the round here."""
        running = RunningExchange(posts)
        if running.post is None:
            return FinishedRound(running)
        # Here, on the stream that has computed it.
        running.post = running.post.changed(lambda payload: payload.cpu().contiguous())
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
                is_whole = len(messages) == len(self.names)
                if is_whole and all(messages[rank] is each for rank, each in answer.items()):
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
        nbytes, forgetting = 0, asyncio.ensure_future(self._forget_calls())
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
                await self._withdraw(f"{place}/{late}/{self.rank:05}")
            if isinstance(error, RoundDiscarded):
                raise
            raise discarded(tag, str(error)) from error
        finally:
            # No message waits for it: what it did not get to, the next exchange deletes.
            forgetting.cancel()
        if self._missed == missed:
            # Else it is how long a worker was waited for, and says nothing of the store.
            self._timeouts.exchanged(nbytes, seconds=time.monotonic() - began_s)

    async def _answered(self, tag: RoundTag, roll: int, base: str, post: Post) -> Received:
        """The answer to `post`; it has this worker's own message where that does not count."""
        me, to_all = self.rank, post.is_to_all(len(self.names))
        if to_all:
            puts = {f"{base}/{me:05}": next(iter(post.to.values()))}
            gets = {rank: f"{base}/{rank:05}" for rank in post.take}
        else:
            puts = {f"{base}/{to:05}/{me:05}": payload for to, payload in post.to.items()}
            gets = {rank: f"{base}/{me:05}/{rank:05}" for rank in post.take}
        found, own = await self._exchanged(roll, puts, gets, max(post.take.values(), default=0))
        # A shard that came too late is known to its owner, who gives up the round.
        if to_all and not own:
            found[me] = absent_message()
        late = [self.names[rank] for rank, each in sorted(found.items()) if not each.numel()]
        if late and not post.allow_missing:
            raise discarded(tag, f"what {' and '.join(late)} sent did not come in time")
        if to_all:
            self._answers.get((tag.what, tag.round), []).append((base, found))
        return found

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
