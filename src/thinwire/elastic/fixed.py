"""Exchanges of a fixed number of workers by objects: every message counts, however late."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from thinwire.elastic.group import StoreGroup
from thinwire.elastic.run_objects import RunObjects, absent_message
from thinwire.elastic.timeouts import Timeouts
from thinwire.errors import ExchangeError, ExchangeTimeout, MismatchError
from thinwire.transport.base import Post, Posts, Received, RoundTag, RunningExchange
from thinwire.transport.object_store import ServiceRequests, now_s, together
from thinwire.transport.sealed import not_opened
from thinwire.transport.sealed_objects import bytes_tensor

_MOST_FAILURES = 3


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
        self._begun = self._failures = 0
        self._heard: dict[int, int] = {}  # number of the newest exchange by sender
        self._written: list[_Written] = []

    def announce(self, card: bytes, tag: RoundTag) -> dict[int, bytes]:
        """Put the card, and wait for those of the others: nothing is trained yet."""
        cards: dict[int, bytes] = {}

        def known() -> Posts[dict[int, bytes]]:
            yield from ()
            return lambda: cards

        async def work() -> None:
            cards.update(await self._announced(card, tag))

        return self._start(tag, RunningExchange(known()), work).wait()

    async def _announced(self, card: bytes, tag: RoundTag) -> dict[int, bytes]:
        store, sealed = self._objects.store, self._objects.sealed
        counted, store.requests = store.requests, ServiceRequests()
        base, until_s = self._place(tag), now_s() + self._timeout_s
        mine, *keys = [f"{base}/{rank:05}{self._shard}" for rank in self._me_first()]
        try:
            await store.check_put_if_absent(f"{base}/check-{self.rank:05}{self._shard}", until_s)
            await self._put(tag, mine, bytes_tensor(card), until_s)
            gets = dict(zip(self._me_first()[1:], keys, strict=True))
            found = await self._got(tag, gets, len(card), [mine])
        finally:
            store.requests = counted
        cards = {self.rank: card}
        for rank, raw in found.items():
            theirs = sealed.opened(raw, gets[rank])
            if theirs is None:
                raise not_opened(tag, rank)
            cards[rank] = theirs.numpy().tobytes()
        return cards

    def _me_first(self) -> list[int]:
        return sorted(range(len(self.names)), key=lambda rank: (rank != self.rank, rank))

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

    async def _answered(self, tag: RoundTag, roll: int, base: str, post: Post) -> Received:
        del roll
        if not post.to and not post.take:
            return {}
        puts, gets = self._keys(base, post)
        until_s = now_s() + self._timeout_s
        writing = [self._put(tag, key, payload, until_s) for key, payload in puts.items()]
        most = max(post.take.values(), default=0)
        coming = self._got(tag, gets, most, list(puts), self._absent(tag, base))
        raw, *_ = await together(coming, *writing)
        found: dict[int, Tensor] = {}
        for rank, each in raw.items():
            payload = self._objects.sealed.opened(each, gets[rank])
            if payload is None and not post.allow_missing:
                raise not_opened(tag, rank)
            if payload is not None and payload.numel() != post.take[rank]:
                raise ExchangeError(
                    f"use what worker {rank} sent for {tag}",
                    because=f"it has {payload.numel()} bytes, and {post.take[rank]} were expected",
                    do="give all workers the same model and method",
                )
            found[rank] = absent_message() if payload is None else payload
        self._heard |= dict.fromkeys(found, self._begun)
        self._written.append(_Written(tag, self._begun, list(post.to), list(puts)))
        return found

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
        absent_s: deque[float] | None = None,
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
        if not old:
            return
        keys = [key for each in old for key in each.keys]
        is_deleted = await self._objects.store.delete(keys)
        self._failures = 0 if is_deleted else self._failures + 1
        # A store may not let this worker delete at all.
        if is_deleted or self._failures >= _MOST_FAILURES:
            self._written = [each for each in self._written if each not in old]
