"""Objects that are waited for are requested when they appear, however late they appeared before."""

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("obstore")

from thinwire.transport.object_store import ObjectStore, now_s
from virtual_time import StoreFaults, VirtualLoop, VirtualStore


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop(Random(1))
    yield loop
    loop.close()


def run(loop: VirtualLoop, store: ObjectStore, work: Coroutine[Any, Any, Any]) -> Any:
    store._store = SimpleNamespace(late_s=lambda key: 0.0)
    store._obstore = VirtualStore(loop, Random(2), StoreFaults(), lambda key, raw: None)
    return loop.run_until_complete(work)


def test_objects_that_come_sooner_again_are_found_sooner_again(loop) -> None:
    """A wait that ends with the first request does not show when the object appeared."""
    store, absent_s = ObjectStore("memory://"), deque[float](maxlen=5)

    async def wait(key: str, after_s: float) -> tuple[float, int]:
        async def come() -> None:
            await asyncio.sleep(after_s)
            await store.put(key, memoryview(b"a"), now_s() + 10, lambda _: True)

        began_s, polls, coming = now_s(), store.requests.polls, asyncio.ensure_future(come())
        found = await store.get_all({1: key}, timeout_s=10, nbytes=1, absent_s=absent_s)
        took_s = now_s() - began_s
        await coming
        assert bytes(found[1]) == b"a"
        return took_s, store.requests.polls - polls

    async def rounds() -> None:
        _, unknown = await wait("first", 1.0)
        _, polls = await wait("second", 1.0)
        assert polls < unknown
        sooner_s, polls = await wait("third", 0.05)
        assert polls == 1
        assert absent_s[-1] < 0.05
        took_s, _ = await wait("fourth", 0.05)
        assert took_s < 0.5 < sooner_s

    run(loop, store, rounds())


def test_a_worker_that_is_lost_is_waited_for_no_longer(loop) -> None:
    store, absent_s = ObjectStore("memory://"), deque[float](maxlen=5)

    async def lost(workers: object) -> set[int]:
        return {2}

    async def wait() -> dict[int, memoryview]:
        await store.put("a", memoryview(b"a"), now_s() + 10, lambda _: True)
        keys = {1: "a", 2: "b"}
        found = await store.get_all(keys, timeout_s=60, nbytes=1, absent_s=absent_s, lost=lost)
        assert now_s() < 10
        return found

    assert list(run(loop, store, wait())) == [1]
    assert not absent_s  # it tells nothing of the next round
