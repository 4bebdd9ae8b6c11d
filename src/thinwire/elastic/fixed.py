"""Exchanges of a fixed number of workers by objects: every message counts, however late."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from thinwire.elastic.group import StoreGroup
from thinwire.elastic.run_objects import RunObjects, absent_message
from thinwire.elastic.timeouts import Timeouts
from thinwire.errors import ExchangeError, ExchangeTimeout, MismatchError, check
from thinwire.transport.base import Post, RoundTag, RunningExchange
from thinwire.transport.object_store import ServiceRequests, now_s, together
from thinwire.transport.sealed import not_opened
from thinwire.transport.sealed_objects import bytes_tensor


class _Written(NamedTuple):
    """Messages of this worker that are in the store.

    Args:
        tag: of their exchange.
        number: of the exchange among all of this worker's.
        readers: ranks that they are for.
        keys: of the objects.
    """

    tag: RoundTag
    number: int
    readers: Sequence[int]
    keys: Sequence[str]


class FixedGroup(StoreGroup):
    """K workers from the beginning to the end.

    A worker that was killed and resumes from a checkpoint finds the messages of the rounds that it
    missed, puts again what it had put, which changes nothing, and catches up. Messages are deleted
    by their sender once all that are to read them have, and are older than `keep` rounds.

    Args:
        objects: of the run.
        workers: K.
        rank: of this one.
        timeout_s: for how long another worker is waited for.
        keep: latest rounds of each kind of exchange whose messages stay.
        shard: ending of messages' names, where workers have several ranks.
    """

    def __init__(
        self,
        objects: RunObjects,
        *,
        workers: int,
        rank: int,
        timeout_s: float,
        keep: int,
        shard: str = "",
    ) -> None:
        names = [f"worker {number}" for number in range(workers)]
        timeouts = Timeouts(floor_s=1, patience=1, unmeasured_s=1, fixed_s=timeout_s)
        super().__init__(objects, names, rank, timeouts, shard=shard)
        self._timeout_s, self._keep = timeout_s, keep
        self._places: dict[str, tuple[int, int]] = {}
        self._begun = 0
        self._heard: dict[int, int] = {}  # number of the newest exchange by sender
        self._written: list[_Written] = []

    def announce(self, card: bytes, tag: RoundTag) -> dict[int, bytes]:
        """Put the card, and wait for those of the others: nothing is trained yet."""
        return self._in_thread(tag, partial(self._announced, card, tag))()

    async def _announced(self, card: bytes, tag: RoundTag) -> dict[int, bytes]:
        store, base = self._objects.store, self._place(tag)
        keys = {rank: f"{base}/{rank:05}{self._shard}" for rank in range(len(self.names))}
        mine, trial = keys.pop(self.rank), f"{base}/check-{self.rank:05}{self._shard}"
        counted, store.requests = store.requests, ServiceRequests()
        try:
            await store.check_put_if_absent(trial, now_s() + self._timeout_s)
            found = await self._swapped(tag, {mine: bytes_tensor(card)}, keys, len(card))
        finally:
            store.requests = counted
        cards = {self.rank: card}
        for rank, theirs in found.items():
            if theirs is None:
                raise not_opened(tag, rank)
            cards[rank] = theirs.numpy().tobytes()
        return cards

    async def exchange(self, tag: RoundTag, running: RunningExchange[Any], roll: int) -> None:
        """Carry an exchange to its end.

        Raises:
            ExchangeTimeout: another worker stays silent. ExchangeError: what it sent cannot be
                used. MismatchError: another process has this worker's number.
        """
        del roll
        place, step = self._place(tag), 0
        self._begun += 1
        cleaning = asyncio.ensure_future(self._clean())
        try:
            while running.post is not None:
                post = running.post.changed(lambda payload: payload.cpu().contiguous())
                running.answer(await self._answered(tag, 0, f"{place}/{step}", post))
                step += 1
            await cleaning
        finally:
            cleaning.cancel()

    async def _exchanged(
        self,
        tag: RoundTag,
        roll: int,
        post: Post,
        puts: Mapping[str, Tensor],
        gets: Mapping[int, str],
        absent_s: deque[float],
    ) -> dict[int, Tensor]:
        del roll
        nbytes, found = max(post.take.values(), default=0), dict[int, Tensor]()
        for rank, payload in (await self._swapped(tag, puts, gets, nbytes, absent_s)).items():
            if payload is None and not post.allow_missing:
                raise not_opened(tag, rank)
            found[rank] = absent_message() if payload is None else payload
            check(
                payload is None or payload.numel() == post.take[rank],
                f"use what worker {rank} sent for {tag}",
                because=f"it has {found[rank].numel()} bytes, and {post.take[rank]} were expected",
                do="give all workers the same model and method",
                kind=ExchangeError,
            )
        self._heard |= dict.fromkeys(found, self._begun)
        self._written.append(_Written(tag, self._begun, list(post.to), list(puts)))
        return found

    async def _swapped(
        self,
        tag: RoundTag,
        puts: Mapping[str, Tensor],
        gets: Mapping[int, str],
        nbytes: int,
        absent_s: deque[float] | None = None,
    ) -> dict[int, Tensor | None]:
        """What the others sent, of about `nbytes`; None where that does not open."""
        until_s = now_s() + self._timeout_s
        writing = [self._put(tag, key, payload, until_s) for key, payload in puts.items()]
        raw, *_ = await together(self._got(tag, gets, nbytes, list(puts), absent_s), *writing)
        return {rank: self._objects.sealed.opened(each, gets[rank]) for rank, each in raw.items()}

    def _place(self, tag: RoundTag) -> str:
        """Where the objects of an exchange are: equal on all workers, and after a restart."""
        last, times = self._places.get(tag.what, (-1, 0))
        times = times + 1 if tag.round == last else 0
        self._places[tag.what] = tag.round, times
        return self._objects.place(0, tag) + (f".{times}" if times else "")

    async def _put(self, tag: RoundTag, key: str, payload: Tensor, until_s: float) -> None:
        if not await self._objects.sealed.put(key, payload, until_s):
            raise MismatchError(
                f"send {tag} as worker {self.rank} of run {self._objects.run!r}",
                because=f"{key} in {self._objects.store.url} has something else of this worker: "
                "another process has its number; or it has another method, model, seed, version or "
                "token, or resumed from a checkpoint and came to other numbers",
                do="end the other process; or start all workers alike, or from one checkpoint, "
                "with another name as run",
            )

    async def _got(
        self,
        tag: RoundTag,
        gets: Mapping[int, str],
        nbytes: int,
        own: Sequence[str],
        absent_s: deque[float] | None,
    ) -> dict[int, memoryview]:
        store, nbytes = self._objects.store, nbytes + self._objects.sealed.added_nbytes
        found = await store.get_all(
            gets, timeout_s=self._timeout_s, nbytes=nbytes, absent_s=absent_s
        )
        missing = sorted(set(gets) - set(found))
        if not missing:
            return found
        until_s = now_s() + self._timeout_s
        kept = await together(*(store.get(key, until_s, nbytes=0) for key in own))
        because = (
            f"worker {', '.join(map(str, missing))} of {len(self.names)} has put nothing there for "
            f"{self._timeout_s:g} s"
        )
        do = (
            "see whether it runs; one that was killed may be started again. If this worker resumed "
            f"from an older checkpoint than the others' last {self._keep} rounds, start all of "
            "them from one checkpoint, under another name"
        )
        if any(payload is None for payload in kept):
            because = "what this worker has put there is gone, as may be what others did"
            do = "end the lifecycle rule, or whatever deletes objects of the run, and start again"
        place = gets[missing[0]]
        raise ExchangeTimeout(f"exchange {tag} by {place} in {store.url}", because=because, do=do)

    async def _clean(self) -> None:
        """Delete what all of its readers have read: they are past that exchange."""
        newest = {each.tag.what: each.tag.round for each in self._written}
        old = [
            each
            for each in self._written
            if each.tag.round + self._keep <= newest[each.tag.what]
            and all(self._heard.get(reader, 0) > each.number for reader in each.readers)
        ]
        if old:
            self._written = [each for each in self._written if each not in old]
            await self._objects.store.delete([key for each in old for key in each.keys])
