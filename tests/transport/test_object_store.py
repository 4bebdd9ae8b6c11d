"""Objects in memory, in a folder, and on a real S3 server that makes mistakes."""

import asyncio
import math
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("obstore")

from obstore.exceptions import GenericError

import thinwire as tw
from processes import free_port, promptly
from s3_server import Proxy, options_of, s3_fixture  # noqa: F401 - the fixture
from thinwire.errors import ExchangeError, ExchangeTimeout
from thinwire.transport import object_store
from thinwire.transport.object_store import ObjectStore, now_s, together
from virtual_time import StoreFaults, VirtualLoop, VirtualStore


def on_put(answer: str) -> Callable[[int, str], str]:
    return lambda count, line: answer if line.startswith("PUT") else ""


def write(store: ObjectStore, key: str, payload: bytes = b"abc", timeout_s: float = 20) -> bool:
    """Put if absent, as messages are."""
    until_s = time.monotonic() + timeout_s
    raw = memoryview(payload)
    return asyncio.run(store.put(key, [raw], until_s, lambda there: bytes(there) == payload))


def there_and_back(store: ObjectStore, count: int) -> None:
    """Two objects are put and got as they come, `count` times."""

    async def work(number: int) -> None:
        until_s = time.monotonic() + 60
        keys, raw = {who: f"x/{number}/{who}" for who in range(2)}, bytes(range(7 + number))
        view = memoryview(raw)
        puts = [store.put(key, [view], until_s, lambda t: bytes(t) == raw) for key in keys.values()]
        found, *are_mine = await together(store.get_all(keys, timeout_s=60, nbytes=9), *puts)
        assert [bytes(each) for each in found.values()] == [raw, raw]
        assert are_mine == [True, True]
        await store.delete(list(keys.values()))  # if that works

    for number in range(count):
        asyncio.run(work(number))


@pytest.mark.parametrize("kind", ["memory", "folder", "s3"])
def test_a_part_of_an_object_is_read_alone_and_a_shorter_object_whole(
    kind: str, tmp_path, request
) -> None:
    places = {"memory": "memory://", "folder": f"file://{tmp_path}", "s3": "s3://run/parts"}
    options = options_of(request.getfixturevalue("s3")) if kind == "s3" else None
    store, parts = ObjectStore(places[kind], options), [memoryview(b"abc"), memoryview(b"defg")]

    async def found(at: slice, key: str) -> bytes | None:
        raw = await store.get(key, now_s() + 20, nbytes=7, at=at)
        return None if raw is None else bytes(raw)

    async def work() -> None:
        await store.put("whole", parts, now_s() + 20, lambda _: True)
        await store.put("empty", [memoryview(b"")], now_s() + 20, lambda _: True)
        for at, of_it in ((slice(0, 3), b"abc"), (slice(3, 7), b"defg"), (slice(3, 3), b"")):
            assert await found(at, "whole") == of_it
            assert await found(at, "empty") == b""
            assert await found(at, "nothing") is None
        assert await found(slice(20, 25), "whole") == b"abcdefg"

    asyncio.run(work())


@pytest.mark.parametrize("kind", ["memory", "file", "s3"])
def test_more_than_the_store_takes_at_once_is_written_beside_its_name(
    kind: str, tmp_path, request, monkeypatch
) -> None:
    monkeypatch.setitem(object_store._LARGEST_NBYTES, kind, 100)
    monkeypatch.setattr(object_store, "_PART_NBYTES", 6 << 20)  # S3 wants 5 MiB or more
    places = {"memory": "memory://", "file": f"file://{tmp_path}", "s3": "s3://run/large"}
    options = options_of(request.getfixturevalue("s3")) if kind == "s3" else None
    store, payload = ObjectStore(places[kind], options), Random(0).randbytes(13_000_007)
    parts = [memoryview(payload)[:5], memoryview(payload)[5:9_000_000]]
    parts.append(memoryview(payload)[9_000_000:])

    async def work() -> None:
        def until() -> float:
            return now_s() + 60

        for _ in range(2):  # an answer may have been lost
            assert await store.put("a", parts, until(), lambda there: there == payload)
        assert not await store.put("a", parts, until(), lambda there: there == payload[1:])
        assert bytes(await store.get("a", until(), nbytes=1) or b"") == payload
        for at in (slice(0, 200), slice(300, 9_000_001), slice(13_000_000, 13_000_007)):
            assert bytes(await store.get("a", until(), nbytes=1, at=at) or b"") == payload[at]
        assert len(await store.sizes("", until())) == 4
        await store.replace("b", memoryview(payload), until())
        await store.replace("b", memoryview(payload)[1:], until())
        assert bytes(await store.get("b", until(), nbytes=1) or b"") == payload[1:]
        # Of what another process claims, no more is read than lies beside it.
        for key, claim in (("c", b"thinwire object a.0"), ("d", b"thinwire object d.\xff")):
            await store.put(key, [memoryview(claim)], until(), lambda _: True)
        assert bytes(await store.get("c", until(), nbytes=1) or b"") == b"thinwire object a.0"
        assert await store.get("d", until(), nbytes=1) is None

    asyncio.run(work())


def test_of_an_object_whose_part_cannot_be_read_now_no_more_is_read(monkeypatch) -> None:
    store, tries = ObjectStore("memory://"), list[int]()
    write(store, "a", b"abcdefg")
    real = store._obstore

    async def fails_once(*args: Any, **options: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise GenericError("status code: 503")
        return await real.get_range_async(*args, **options)

    fake = SimpleNamespace(head_async=real.head_async, get_range_async=fails_once)
    monkeypatch.setattr(store, "_obstore", fake)
    monkeypatch.setattr(store, "_is_remote", True)  # as what may pass by itself
    reading = store.get("a", time.monotonic() + 20, nbytes=3, at=slice(3, 6))
    assert bytes(asyncio.run(reading) or b"") == b"def"
    assert (len(tries), store.requests.retries) == (2, 1)


@pytest.mark.slow_cases("409", "50", "c", "lost")
@pytest.mark.parametrize(
    "fault", ["503", "500", "409", "400 RequestTimeout", "cut", "lost", "half"]
)
def test_what_fails_in_passing_changes_nothing(s3, fault: str) -> None:
    """Every third request, of all kinds."""
    with closing(Proxy(s3, lambda count, line: fault if count % 3 == 0 else "")) as proxy:
        store = ObjectStore(f"s3://run/fault-{fault[:6].strip()}", options_of(proxy.endpoint))
        there_and_back(store, 8)
        assert len(proxy.faults) > 5
        assert store.requests.retries > (fault != "409") * 3
        # What was asked again is counted apart.
        assert (store.requests.puts, store.requests.gets) == (16, 16)


@pytest.mark.slow
def test_silence_is_broken_off_and_asked_again_and_slowness_is_not(s3, monkeypatch) -> None:
    with closing(Proxy(s3, lambda count, line: "late" if count % 7 == 0 else "")) as proxy:
        there_and_back(ObjectStore("s3://run/slow", options_of(proxy.endpoint)), 5)
        assert "late" in proxy.faults
    monkeypatch.setattr(object_store, "_REQUEST_S", 0.3)
    with closing(Proxy(s3, lambda count, line: "late" if count in (1, 2) else "")) as proxy:
        store = ObjectStore("s3://run/silent", options_of(proxy.endpoint))
        there_and_back(store, 5)
        assert store.requests.retries >= 2


def test_a_store_that_is_gone_is_an_error_within_the_timeout(caplog) -> None:
    store = ObjectStore("s3://run/gone", options_of(f"http://127.0.0.1:{free_port()}"))
    wanted = r"s3://run/gone; because .*; do: see that"
    with promptly(30), pytest.raises(ExchangeTimeout, match=wanted):
        write(store, "a-run/x", timeout_s=1.0)
    assert "still trying to write a-run/" in caplog.text


@pytest.mark.parametrize(
    ("url", "fault", "keys", "error", "word"),
    [
        # As of another region, or of an endpoint that is no store's.
        ("run", lambda *_: "400", {}, ExchangeError, "the URL, the endpoint, the region"),
        ("run", lambda *_: "301", {}, ExchangeError, "the URL, the endpoint, the region"),
        ("run/x", on_put("409"), {}, ExchangeTimeout, "says that it is there and has"),
        ("absent", on_put("404"), {}, ExchangeError, "create the bucket, or correct its name"),
        ("run", on_put(""), {"key": "reader"}, ExchangeError, r"403 .* do: pass keys that may put"),
        ("run", on_put(""), {"secret": "wrong"}, ExchangeError, "403 .* do: pass keys"),
    ],
)
def test_a_store_that_refuses_is_an_error_in_time(s3, url, fault, keys, error, word) -> None:
    with closing(Proxy(s3, fault)) as proxy, promptly(30):
        store = ObjectStore(f"s3://{url}", options_of(proxy.endpoint, **keys))
        with pytest.raises(error, match=word):
            write(store, "a-run/x", b"a", 2 if error is ExchangeTimeout else 40)


def test_a_full_disk_is_an_error_at_once_and_leaves_nothing_half_visible(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)  # Python ignores its signal
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, hard))
    try:
        with pytest.raises(ExchangeError, match=r"write r/x in .*File too large.*make room"):
            write(ObjectStore(f"file://{tmp_path}"), "r/x", bytes(70_001), 60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


def test_a_folder_that_may_not_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    if os.getuid() == 0:
        (tmp_path / "a-run").write_text("in the way")
    else:
        tmp_path.chmod(0o500)
    with promptly(30), pytest.raises(ExchangeError, match="cannot write a-run/"):
        write(ObjectStore(f"file://{tmp_path}"), "a-run/x")


@pytest.mark.parametrize(
    ("url", "options", "environment", "match"),
    [
        ("file:///proc/none/x", None, None, "do: pass a folder that this user can make"),
        ("ftp://nowhere", None, None, "open the object store ftp://nowhere"),
        ("s3://b", {"colour": "red"}, None, "open the object store s3://b"),
        *(
            ("s3://a/b", *given)
            for e in ("", "localhost:9000", "https://", "ftp://host")
            for given in (({"endpoint": e}, None, "endpoint"), (None, e, "AWS_ENDPOINT_URL"))
        ),
    ],
)
def test_places_that_cannot_be_are_refused(
    monkeypatch, url: str, options: Any, environment: str | None, match: str
) -> None:
    if environment is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", environment)
    with pytest.raises(tw.ConfigurationError, match=match):
        ObjectStore(url, options)


def test_what_is_absent_is_deleted_and_so_is_what_comes_after_it(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}")
    keys = [f"r/{number}" for number in range(20)]
    for key in keys[1::2]:
        assert write(store, key)
    assert asyncio.run(store.delete(keys))
    assert asyncio.run(store.sizes("r/", time.monotonic() + 10)) == {}


def test_a_folder_that_others_empty_is_made_again(tmp_path: Path) -> None:
    """An empty folder goes with its last object, also while another worker makes it."""

    async def worker(rank: int) -> None:
        store, raw = ObjectStore(f"file://{tmp_path}"), memoryview(b"abc")
        for number in range(300):
            key = f"r/{number}/x/{rank}"
            assert await store.put(key, [raw], time.monotonic() + 20, raw.__eq__)
            assert await store.delete([key])

    asyncio.run(together(*(worker(rank) for rank in range(4))))
    assert list(tmp_path.rglob("*")) == []


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(tw.ConfigurationError, match=r"pip install 'thinwire\[elastic\]'"):
        ObjectStore("memory://")


def test_a_store_that_pays_no_heed_to_conditions_is_refused(monkeypatch) -> None:
    store = ObjectStore("memory://")
    honest = store._obstore.put_async

    async def heedless(into, key, payload, *, mode="overwrite", **more):
        return await honest(into, key, payload, mode="overwrite", **more)

    monkeypatch.setattr(store._obstore, "put_async", heedless)
    with pytest.raises(ExchangeError, match="despite If-None-Match"):
        asyncio.run(store.check_put_if_absent("r/check", time.monotonic() + 10))
    assert asyncio.run(store.sizes("", time.monotonic() + 10)) == {}


async def get(store: ObjectStore, within_s: float) -> None:
    assert await store.get("nothing", time.monotonic() + within_s, nbytes=1) is None


@pytest.mark.parametrize("status", ["401", "403", "400 ExpiredToken"])
def test_keys_are_refused_at_once_only_before_they_were_accepted(s3, caplog, status) -> None:
    refused = [True]
    with closing(Proxy(s3, lambda number, line: status if refused[0] else "")) as proxy:
        store = ObjectStore("s3://run", options_of(proxy.endpoint))

        async def renewed() -> None:
            refused[0] = True
            waiting = asyncio.ensure_future(get(store, 30))
            await asyncio.sleep(1)
            assert not waiting.done()
            refused[0] = False
            await waiting

        begin_s = time.monotonic()
        with pytest.raises(ExchangeError, match="pass keys that may put") as caught:
            asyncio.run(get(store, 30))
        assert not isinstance(caught.value, ExchangeTimeout)
        assert time.monotonic() - begin_s < 25
        refused[0] = False
        asyncio.run(get(store, 30))
        asyncio.run(renewed())
        assert sum("still trying" in each.message for each in caplog.records) == 1
        refused[0] = True
        with pytest.raises(ExchangeTimeout, match=rf"{status[:3]} .*<Code>.*this clock is right"):
            asyncio.run(get(store, 1))


HEALTHY = StoreFaults()


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop(Random(1))
    yield loop
    loop.close()


def run(
    loop: VirtualLoop,
    store: ObjectStore,
    work: Coroutine[Any, Any, Any],
    faults: StoreFaults = HEALTHY,
) -> Any:
    store._store = SimpleNamespace(late_s=lambda key: 0.0)
    store._obstore = VirtualStore(loop, Random(2), faults, lambda key, raw: None)
    return loop.run_until_complete(work)


def test_objects_that_come_sooner_again_are_found_sooner_again(loop) -> None:
    """A wait that ends with the first request does not show when the object appeared."""
    store, absent_s = ObjectStore("memory://"), deque[float](maxlen=5)

    async def wait(key: str, after_s: float) -> tuple[float, int]:
        async def come() -> None:
            await asyncio.sleep(after_s)
            await store.put(key, [memoryview(b"a")], now_s() + 10, lambda _: True)

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
        await store.put("a", [memoryview(b"a")], now_s() + 10, lambda _: True)
        keys = {1: "a", 2: "b"}
        found = await store.get_all(keys, timeout_s=60, nbytes=1, absent_s=absent_s, lost=lost)
        assert now_s() < 10
        return found

    assert list(run(loop, store, wait())) == [1]
    assert not absent_s  # it tells nothing of the next round


def test_a_silent_worker_is_no_silent_store(loop) -> None:
    """The last look at a distant store begins before the deadline, and is answered after it."""
    store = ObjectStore("memory://")
    store._is_remote = True

    async def waits() -> None:
        for tenths in range(50, 90):
            began_s = now_s()
            assert await store.get_all({1: "a"}, timeout_s=tenths / 10, nbytes=1) == {}
            assert now_s() - began_s < tenths / 10 + 1

    run(loop, store, waits(), StoreFaults(latency_s=0.3))
    for gone_s in (0, 2, 58):
        began_s = loop.time()
        gone = StoreFaults(outages=[(began_s + gone_s, math.inf)])
        with pytest.raises(ExchangeTimeout):
            run(loop, store, store.get_all({1: "a"}, timeout_s=60, nbytes=1), gone)
        assert loop.time() - began_s < max(60, gone_s + 32)
