"""Exchanges through objects, among the workers of a roll or a fixed number of them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from thinwire.elastic.alive import LostWorkers
from thinwire.elastic.loop_thread import LoopThread, result_of
from thinwire.elastic.run_objects import RunObjects, absent_message
from thinwire.elastic.timeouts import Timeouts
from thinwire.errors import RoundDiscarded, ThinwireError
from thinwire.rejection import discarded
from thinwire.storage import HostCopy
from thinwire.transport.base import (
    Post,
    Posts,
    Received,
    Round,
    RoundTag,
    RunningExchange,
)
from thinwire.transport.distributed import closed
from thinwire.transport.object_store import now_s, together

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_REMEMBERED = 5  # recent waits; no message is expected sooner than the shortest
KEPT_ROLLS = 4
"""Messages stay in the store for at least this many more rolls."""


class Swap(NamedTuple):
    """The objects of a post: this worker's, and those of the workers that it takes from.

    Args:
        tag: the exchange's tag.
        mine: name of this worker's object.
        parts: its payloads, by the names they are sealed under; empty if it sends nothing.
        keys: names of the others' objects, by rank.
        at: slices of these objects that are for the reader; default all of an object.
        reader: rank of this worker, or of a lost one.
        stand_in: returns what a lost worker would have sent; None if that cannot be known.
    """

    tag: RoundTag
    mine: str
    parts: Mapping[str, Tensor]
    keys: Mapping[int, str]
    at: Mapping[int, slice]
    reader: int = 0
    stand_in: Callable[[int], Awaitable[Tensor]] | None = None


class StoreGroup:
    """The workers of a roll, until they change.

    The first object under a message's name counts. A worker whose wait ends writes one there:
    what the sender would have sent, if that follows from what the workers posted before, else an
    empty one. So the message counts for all workers or for none.

    Args:
        objects: the run's objects.
        names: the workers' names, in rank order.
        rank: this worker's rank.
        timeouts: how long an exchange may take.
        lost: finds workers that gave no sign of life.

    Attributes:
        roll: number of the roll that the next exchange belongs to.
        is_asked_to_leave: ends a wait once it returns true.
    """

    def __init__(
        self,
        objects: RunObjects,
        names: Sequence[str],
        rank: int,
        timeouts: Timeouts,
        lost: LostWorkers,
    ) -> None:
        self._objects, self._timeouts, self._lost = objects, timeouts, lost
        self.names, self.rank = tuple(names), rank
        self.roll = 0
        self._absent_s: dict[str, deque[float]] = {}
        self.is_asked_to_leave: Callable[[], bool] = lambda: False
        self._thread: LoopThread | None = None
        self._turn, self._is_closed = asyncio.Lock(), False
        self._answers: dict[tuple[str, int], list[tuple[str, Received]]] = {}
        self._missed = 0

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange of the current roll; a failure discards the round here."""
        running = RunningExchange(posts)
        if running.post is None:
            return running
        # Begin each copy here, after the work that computes its payload; the thread waits for it.
        copies = {id(p): HostCopy(p) for p in running.post.to.values() if not p.is_cpu}
        exchange = partial(self.exchange, tag, running, self.roll)

        async def send() -> None:
            if copies and running.post is not None:
                running.post = running.post.changed(lambda payload: copies[id(payload)].read())
            await exchange()

        running.arrive = self._in_thread(tag, send)
        return running

    def _in_thread(
        self, tag: RoundTag, work: Callable[[], Coroutine[Any, Any, T]]
    ) -> Callable[[], T]:
        """Start `work` in a thread, after earlier work; the returned function waits for it."""
        # torch's thread count is set per thread, and sums may depend on it.
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
                return result_of(carried, self.is_asked_to_leave)
            except CancelledError as error:
                raise closed(tag) from error

        return result

    def place_of(self, messages: Sequence[Tensor]) -> str:
        """Name prefix of a finished round's messages; "" if they came from elsewhere."""
        for key, answers in self._answers.items():
            for place, answer in answers:
                same = (
                    messages[k] is each or torch.equal(messages[k].cpu(), each)
                    for k, each in answer.items()
                )
                if len(messages) == len(self.names) and all(same):
                    del self._answers[key]
                    return place
        return ""

    def close(self) -> None:
        """Cancel all exchanges under way."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.close()
        self._answers.clear()

    # -- in the progress thread --------------------------------------------------------------------

    async def exchange(self, tag: RoundTag, running: RunningExchange[Any], roll: int) -> None:
        """Run an exchange of `roll` to its end.

        Raises:
            RoundDiscarded: the round does not count here.
        """
        self._answers[tag.what, tag.round] = []
        place, step = self._objects.place(roll, tag), 0
        began_s, missed, nbytes = now_s(), self._missed, 0
        last: tuple[str, Post] | None = None
        try:
            while running.post is not None:
                base = f"{place}/{step}"
                post = running.post.changed(lambda payload: payload.cpu().contiguous())
                received = await self._answered(tag, roll, base, post, last)
                nbytes += sum(received[sender].nbytes for sender in post.take)
                sent = {id(payload): payload.nbytes for payload in post.to.values()}
                nbytes += sum(sent.values())
                last, step = (base, post), step + 1
                running.answer(received)
        except (RuntimeError, ValueError, ThinwireError) as error:
            # The others may wait for this message or the next one.
            for late in (step, step + 1):
                await self._withdraw(f"{place}/{late}/{self.rank:05}{self._objects.shard}")
            if isinstance(error, RoundDiscarded):
                raise
            is_told = isinstance(error, ThinwireError)  # `discarded` says what to do
            why = f"cannot {error.cannot}: {error.because}" if is_told else str(error)
            raise discarded(tag, why) from error
        if self._missed == missed:
            # Otherwise the time shows the wait for a worker, not the speed of the store.
            self._timeouts.exchanged(nbytes, seconds=now_s() - began_s)

    async def _answered(
        self, tag: RoundTag, roll: int, base: str, post: Post, last: tuple[str, Post] | None
    ) -> Received:
        """Return the answer to `post`; `last` is the post before it, with its name prefix.

        Where another object counts as this worker's message, the answer includes that one.
        """
        if not post.to and not post.take:
            return {}
        nbytes, absent_s = max(post.take.values(), default=0), self._absent(tag, base)
        swap = self._swap(tag, base, post)
        if last is not None and post.stand_in is not None:
            of_lost = partial(self._of_lost, tag, roll, *last, post.stand_in)
            swap = swap._replace(stand_in=of_lost)
        found = await self._swapped(roll, swap, nbytes, absent_s)
        received = self._judged(tag, post, found)
        if post.is_to_all(len(self.names)):
            # A lone worker receives nothing: its own message tells its rounds apart.
            answer = received or post.to
            self._answers.get((tag.what, tag.round), []).append((base, answer))
        return received

    def _judged(
        self, tag: RoundTag, post: Post, found: Mapping[int, Tensor | None]
    ) -> dict[int, Tensor]:
        """Return the messages `found`, with an empty one in place of each that does not count.

        Raises:
            RoundDiscarded: `post` needs a message that does not count.
        """
        received, is_whole = dict[int, Tensor](), post.is_to_all(len(self.names))
        for rank, each in found.items():
            is_sound = each is not None and each.numel() in (0, post.take.get(rank, each.numel()))
            if not is_sound and not is_whole:
                # Other readers may have sound parts, and the sender assumes that all are sound.
                raise discarded(tag, f"a part of what {self.names[rank]} sent is damaged")
            received[rank] = absent_message() if each is None or not is_sound else each
        late = [self.names[rank] for rank, each in sorted(received.items()) if not each.numel()]
        if late and not post.allow_missing:
            raise discarded(tag, f"what {' and '.join(late)} sent did not come in time")
        return received

    async def _swapped(
        self, roll: int, swap: Swap, nbytes: int, absent_s: deque[float] | None = None
    ) -> dict[int, Tensor | None]:
        """Swap payloads of about `nbytes`; returns the others' by rank, None if one does not open.

        If another object took the place of this worker's, the result includes that one.
        """
        sealed, keys = self._objects.sealed, swap.keys
        sent_nbytes = sum(payload.nbytes for payload in swap.parts.values())
        timeout_s = self._timeouts.exchange(sent_nbytes + nbytes * len(keys))
        until_s, length = now_s() + timeout_s, nbytes + sealed.added_nbytes
        coming = self._objects.store.get_all(
            keys,
            timeout_s=timeout_s,
            nbytes=length,
            at=swap.at,
            absent_s=absent_s,
            lost=self._lost_among,
        )
        writing = [self._put(swap, until_s)] if swap.parts else []
        raw, *are_mine = await together(coming, *writing)
        missing = {rank: key for rank, key in keys.items() if rank not in raw}
        if missing:
            raw |= await self._decided(roll, swap._replace(keys=missing), nbytes, list(raw))
        found = dict[int, Tensor | None]()
        for rank, each in raw.items():
            name = keys[rank] + (f"/{swap.reader:05}" if rank in swap.at else "")
            found[rank] = sealed.opened(each, name)
            if found[rank] is None:
                # An empty message replaces all parts that its sender sent.
                found[rank] = sealed.opened(each, keys[rank])
            if found[rank] is None:
                # The object may be sound, and only this read of it damaged.
                until_s, at = now_s() + timeout_s, swap.at.get(rank)
                again = await sealed.get(keys[rank], until_s, nbytes=nbytes, name=name, at=at)
                found[rank] = None if again is None or not again.numel() else again
        if not all(are_mine):
            until_s = now_s() + timeout_s
            found[self.rank] = await sealed.get(swap.mine, until_s, nbytes=nbytes)
        return found

    async def _lost_among(self, ranks: Collection[int]) -> set[int]:
        gone = await self._lost.first_of([self.names[rank] for rank in ranks])
        return {rank for rank in ranks if self.names[rank] in gone}

    async def _put(self, swap: Swap, until_s: float) -> bool:
        """Write this worker's object; false if another one took its place."""
        return await self._objects.sealed.put_parts(swap.mine, swap.parts, until_s)

    async def _decided(
        self, roll: int, swap: Swap, nbytes: int, present: Sequence[int]
    ) -> dict[int, memoryview]:
        """Write replacements for missing messages; returns what counts in their place for good.

        Args:
            roll: number of the exchange's roll.
            swap: the missing messages.
            nbytes: size of each.
            present: ranks whose messages are there, besides this worker's.

        Raises:
            RoundDiscarded: the run has gone on, and these messages may have been deleted.
        """
        store, keys, here = self._objects.store, swap.keys, sorted({*present, self.rank})
        timeout_s, there = self._timeouts.exchange(nbytes * len(keys)), set[int]()
        self._missed += 1
        if await self._lost_among([*keys]) != {*keys}:
            self._timeouts.timed_out()  # a lost worker's message would never come
        if swap.stand_in is not None:
            # Each worker stands in for some, then for all that no other has stood in for.
            mine = sorted(keys)[here.index(self.rank) :: len(here)]
            await together(*(self._replace(swap, rank, timeout_s) for rank in mine))
            there = {*await store.get_all(keys, timeout_s=timeout_s, nbytes=nbytes)}
        left = [rank for rank in keys if rank not in there]
        await together(*(self._replace(swap, rank, timeout_s) for rank in left))
        # This also reads messages that came at the last moment.
        until_s = now_s() + timeout_s
        gets = (store.get(keys[k], until_s, nbytes=nbytes, at=swap.at.get(k)) for k in keys)
        there = await together(*gets)
        # Only after the reads: until that roll is written, no message of this one is deleted.
        if await self._objects.roll(roll + KEPT_ROLLS, until_s) is not None:
            raise RoundDiscarded(
                "use messages of a round that others have finished long ago",
                because="this worker was away meanwhile",
                do="nothing: it catches up before the next round",
            )
        if any(raw is None for raw in there):
            raise RuntimeError("what was written there a moment ago is gone")
        return {rank: raw for rank, raw in zip(keys, there, strict=True) if raw is not None}

    async def _replace(self, swap: Swap, rank: int, timeout_s: float) -> None:
        """Write a replacement for a missing message, unless the message comes first."""
        payload = absent_message() if swap.stand_in is None else await swap.stand_in(rank)
        await self._objects.sealed.put(swap.keys[rank], payload, now_s() + timeout_s)

    async def _of_lost(
        self,
        tag: RoundTag,
        roll: int,
        base: str,
        posted: Post,
        stand_in: Callable[..., Tensor],
        lost: int,
    ) -> Tensor:
        """Derive what worker `lost` would have sent from what all `posted` under `base`; empty if
        that is not enough."""
        swap = self._swap(tag, base, posted, lost)._replace(parts={})
        nbytes = posted.to[lost].numel()
        found = await self._swapped(roll, swap, nbytes)
        theirs = posted._replace(take=dict.fromkeys(found, nbytes))
        try:
            return stand_in(lost, self._judged(tag, theirs, found)).cpu().contiguous()
        except (RuntimeError, ValueError, ThinwireError) as error:
            _LOG.info("nobody can stand in for worker %d: %s", lost, error)
            return absent_message()

    def _absent(self, tag: RoundTag, base: str) -> deque[float]:
        """How long messages of this kind were still absent in the last rounds, in seconds."""
        kind = f"{tag.what}/{base.rpartition('/')[2]}"
        # One long wait, as for a worker that was lost, must not make the next one long.
        return self._absent_s.setdefault(kind, deque([0.0] * _REMEMBERED, maxlen=_REMEMBERED))

    def _swap(self, tag: RoundTag, base: str, post: Post, reader: int | None = None) -> Swap:
        """The objects of `post` under prefix `base`, for `reader`; by default for this worker."""
        me, shard, added = self.rank, self._objects.shard, self._objects.sealed.added_nbytes
        mine, reader = f"{base}/{me:05}{shard}", me if reader is None else reader
        senders = {*post.take, me} - {reader}
        keys = {rank: f"{base}/{rank:05}{shard}" for rank in sorted(senders)}
        if post.is_to_all(len(self.names)):
            return Swap(tag, mine, {mine: next(iter(post.to.values()))}, keys, {})
        parts = {f"{mine}/{to:05}": payload for to, payload in sorted(post.to.items())}
        # Parts are in the order of their readers, and a reader's is as long from every sender.
        lengths = {to: payload.numel() + added for to, payload in post.to.items()}
        lengths[me] = max(post.take.values(), default=0) + added
        end = lengths[reader] + sum(length for to, length in lengths.items() if to < reader)
        ends = {rank: end - (lengths.get(rank, 0) if rank < reader else 0) for rank in senders}
        at = {rank: slice(end - lengths[reader], end) for rank, end in ends.items()}
        return Swap(tag, mine, parts, keys, at, reader)

    async def _withdraw(self, key: str) -> None:
        """Try to write an empty message, so that the others do not wait for this worker."""
        until_s = now_s() + self._timeouts.floor_s
        try:
            await self._objects.sealed.put(key, absent_message(), until_s)
        except ThinwireError as error:
            _LOG.info("the others will wait for this worker: %s", error)
