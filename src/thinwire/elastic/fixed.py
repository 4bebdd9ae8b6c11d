"""Exchanges among a fixed set of workers through objects: a message counts, however late."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from thinwire.elastic.alive import LostWorkers
from thinwire.elastic.group import StoreGroup, Swap
from thinwire.elastic.run_objects import RunObjects, absent_message
from thinwire.elastic.timeouts import SLOWEST_BYTES_PER_S, Timeouts
from thinwire.errors import ExchangeError, ExchangeTimeout, MismatchError, check
from thinwire.transport.base import Post, RoundTag, RunningExchange
from thinwire.transport.object_store import ServiceRequests, now_s
from thinwire.transport.sealed import must_open
from thinwire.transport.sealed_objects import bytes_tensor


class _Written(NamedTuple):
    """An object that this worker put in the store.

    Args:
        tag: the exchange's tag.
        number: the exchange's number among all of this worker's.
        readers: ranks that read the object.
        key: the object's name.
    """

    tag: RoundTag
    number: int
    readers: Sequence[int]
    key: str


class _FixedTimeouts(Timeouts):
    """One timeout for all exchanges, plus the time that the bytes take at 1 Mbit/s."""

    def exchange(self, nbytes: int) -> float:
        return super().exchange(nbytes) + nbytes / SLOWEST_BYTES_PER_S


class FixedGroup(StoreGroup):
    """The same K workers from beginning to end.

    A killed worker that resumes from a checkpoint reads the messages of the rounds it missed, puts
    its own again, which changes nothing, and catches up. A sender deletes a message once all its
    readers have read it and `keep` newer rounds have begun.

    Args:
        objects: the run's objects.
        workers: K.
        rank: this worker's rank.
        timeout_s: how long to wait for another worker, plus what its message takes at 1 Mbit/s.
        keep: how many of the latest rounds keep their messages, for each kind of exchange.
    """

    def __init__(
        self, objects: RunObjects, *, workers: int, rank: int, timeout_s: float, keep: int
    ) -> None:
        names = [f"worker {number}" for number in range(workers)]
        timeouts = _FixedTimeouts(floor_s=1, patience=1, unmeasured_s=1, fixed_s=timeout_s)
        super().__init__(objects, names, rank, timeouts, LostWorkers(objects, 1))
        self._keep = keep
        self._places: dict[str, tuple[int, int]] = {}
        self._begun = 0
        self._heard: dict[int, int] = {}  # by sender: the newest exchange it took part in
        self._written: list[_Written] = []
        self._newest_key = ""

    def announce(self, card: bytes, tag: RoundTag) -> dict[int, bytes]:
        """Put this worker's card and wait for the others', before any training."""
        return self._in_thread(tag, partial(self._announced, card, tag))()

    async def _announced(self, card: bytes, tag: RoundTag) -> dict[int, bytes]:
        store, base, shard = self._objects.store, self._place(tag), self._objects.shard
        keys = {rank: f"{base}/{rank:05}{shard}" for rank in range(len(self.names))}
        mine, trial = keys.pop(self.rank), f"{base}/check-{self.rank:05}{shard}"
        counted, store.requests = store.requests, ServiceRequests()
        try:
            await store.check_put_if_absent(trial, now_s() + self._timeouts.exchange(0))
            swap = Swap(tag, mine, {mine: bytes_tensor(card)}, keys, {})
            found = await self._swapped(0, swap, len(card))
        finally:
            store.requests = counted
        cards = {self.rank: card}
        for rank, theirs in found.items():
            cards[rank] = must_open(theirs, tag, rank).numpy().tobytes()
        return cards

    async def exchange(self, tag: RoundTag, running: RunningExchange[Any], roll: int) -> None:
        """Run an exchange to its end.

        Raises:
            ExchangeTimeout: another worker stays silent. ExchangeError: its message cannot be
                used. MismatchError: the store has another message in place of this worker's.
        """
        place, step = self._place(tag), 0
        self._begun += 1
        cleaning = asyncio.ensure_future(self._clean())
        try:
            while running.post is not None:
                post = running.post.changed(lambda payload: payload.cpu().contiguous())
                received = await self._answered(tag, 0, f"{place}/{step}", post, None)
                self._heard |= dict.fromkeys(post.take, self._begun)
                if post.to:
                    readers = list(post.to)
                    self._written.append(_Written(tag, self._begun, readers, self._newest_key))
                running.answer(received)
                step += 1
            await cleaning
        finally:
            cleaning.cancel()

    def _judged(
        self, tag: RoundTag, post: Post, found: Mapping[int, Tensor | None]
    ) -> dict[int, Tensor]:
        received = dict[int, Tensor]()
        for rank, payload in found.items():
            received[rank] = absent_message() if payload is None else payload
            if not post.allow_missing:
                must_open(payload, tag, rank)
            check(
                payload is None or payload.numel() == post.take[rank],
                f"use what worker {rank} sent for {tag}",
                because=f"it has {received[rank].numel()} bytes, and {post.take[rank]} were "
                "expected",
                do="give all workers the same model and method",
                kind=ExchangeError,
            )
        return received

    def _place(self, tag: RoundTag) -> str:
        """Name prefix of an exchange's objects: the same on all workers, and after a restart."""
        last, times = self._places.get(tag.what, (-1, 0))
        times = times + 1 if tag.round == last else 0
        self._places[tag.what] = tag.round, times
        return self._objects.place(0, tag) + (f".{times}" if times else "")

    async def _lost_among(self, ranks: Collection[int]) -> set[int]:
        return set()

    async def _put(self, swap: Swap, until_s: float) -> bool:
        self._newest_key = swap.mine
        if await super()._put(swap, until_s):
            return True
        raise MismatchError(
            f"send {swap.tag} as worker {self.rank} of run {self._objects.run!r}",
            because=f"{swap.mine} in {self._objects.store.url} holds something else from "
            "this worker: another process has its number; or it has another method, model, seed, "
            "version or token, or resumed from a checkpoint and came to other numbers",
            do="end the other process; or start all workers alike, or from one checkpoint, "
            "with another name as run",
        )

    async def _decided(
        self, roll: int, swap: Swap, nbytes: int, present: Sequence[int]
    ) -> dict[int, memoryview]:
        """Raise `ExchangeTimeout`: no worker may declare a message lost."""
        store, missing = self._objects.store, swap.keys
        timeout_s = self._timeouts.exchange(nbytes * len(missing))
        because = (
            f"worker {', '.join(map(str, sorted(missing)))} of {len(self.names)} has put nothing "
            f"there for {timeout_s:,.1f} s"
        )
        do = (
            "see whether it runs; one that was killed may be started again. If this worker resumed "
            f"from an older checkpoint than the others' last {self._keep} rounds, start all of "
            "them from one checkpoint, under another name"
        )
        if await store.get(self._newest_key, now_s() + timeout_s, nbytes=0) is None:
            because = "what this worker has put there is gone, as may be what others did"
            do = "stop the lifecycle rule, or whatever deletes the run's objects, and start again"
        place = missing[min(missing)]
        raise ExchangeTimeout(
            f"exchange {swap.tag} by {place} in {store.url}", because=because, do=do
        )

    async def _clean(self) -> None:
        """Delete old objects whose readers are all past that exchange."""
        newest = {each.tag.what: each.tag.round for each in self._written}
        old = [
            each
            for each in self._written
            if each.tag.round + self._keep <= newest[each.tag.what]
            and all(self._heard.get(reader, 0) > each.number for reader in each.readers)
        ]
        if old:
            self._written = [each for each in self._written if each not in old]
            await self._objects.store.delete([each.key for each in old])
