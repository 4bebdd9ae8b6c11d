"""Objects in memory, in a folder, and on a real S3 server that makes mistakes."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from forked import Forked
from processes import ended, free_port, promptly
from s3_server import Proxy, options_of, s3_fixture  # noqa: F401 - the fixture
from thinwire.transport import object_store
from thinwire.transport.object_store import ObjectStore, together

pytest.importorskip("obstore")


def on_put(answer: str) -> Callable[[int, str], str]:
    return lambda count, line: answer if line.startswith("PUT") else ""


def write(store: ObjectStore, key: str, payload: bytes = b"abc", timeout_s: float = 20) -> bool:
    """Put if absent, as messages are."""
    until_s = time.monotonic() + timeout_s
    raw = memoryview(payload)
    return asyncio.run(store.put(key, raw, until_s, lambda there: bytes(there) == payload))


def there_and_back(store: ObjectStore, count: int) -> None:
    """Two objects are put and got as they come, `count` times."""

    async def work(number: int) -> None:
        until_s = time.monotonic() + 60
        keys, raw = {who: f"x/{number}/{who}" for who in range(2)}, bytes(range(7 + number))
        view = memoryview(raw)
        puts = [store.put(key, view, until_s, lambda t: bytes(t) == raw) for key in keys.values()]
        found, *are_mine = await together(store.get_all(keys, timeout_s=60, nbytes=9), *puts)
        assert [bytes(each) for each in found.values()] == [raw, raw]
        assert are_mine == [True, True]
        await store.delete(list(keys.values()))  # if that works

    for number in range(count):
        asyncio.run(work(number))


@pytest.mark.slow_cases("409", "50", "c", "lost")
@pytest.mark.parametrize("fault", ["503", "500", "409", "cut", "lost", "half"])
def test_what_fails_in_passing_changes_nothing(s3, fault: str) -> None:
    """Every third request, of all kinds."""
    with contextlib.closing(
        Proxy(s3, lambda count, line: fault if count % 3 == 0 else "")
    ) as proxy:
        store = ObjectStore(f"s3://run/fault-{fault}", options_of(proxy.endpoint))
        there_and_back(store, 8)
        assert len(proxy.faults) > 5
        assert store.requests.retries > (fault != "409") * 3
        # What was asked again is counted apart.
        assert (store.requests.puts, store.requests.gets) == (16, 16)


@pytest.mark.slow
def test_silence_is_broken_off_and_asked_again_and_slowness_is_not(s3, monkeypatch) -> None:
    with contextlib.closing(
        Proxy(s3, lambda count, line: "late" if count % 7 == 0 else "")
    ) as proxy:
        there_and_back(ObjectStore("s3://run/slow", options_of(proxy.endpoint)), 5)
        assert "late" in proxy.faults
    monkeypatch.setattr(object_store, "_REQUEST_S", 0.3)
    with contextlib.closing(
        Proxy(s3, lambda count, line: "late" if count in (1, 2) else "")
    ) as proxy:
        store = ObjectStore("s3://run/silent", options_of(proxy.endpoint))
        there_and_back(store, 5)
        assert store.requests.retries >= 2


def test_a_store_that_is_gone_is_an_error_within_the_timeout(caplog) -> None:
    store = ObjectStore("s3://run/gone", options_of(f"http://127.0.0.1:{free_port()}"))
    wanted = r"s3://run/gone; because .*; do: see that"
    with promptly(30), pytest.raises(tw.errors.ExchangeTimeout, match=wanted):
        write(store, "a-run/x", timeout_s=1.0)
    assert "still trying to write a-run/" in caplog.text


@pytest.mark.parametrize(
    ("url", "fault", "timeout_s", "error", "word"),
    [
        # As of another region, or of an endpoint that is no store's.
        ("run", lambda *_: "400", 20, tw.ExchangeError, "the URL, the endpoint, the region"),
        ("run", lambda *_: "301", 20, tw.ExchangeError, "the URL, the endpoint, the region"),
        ("run/x", on_put("409"), 2, tw.errors.ExchangeTimeout, "says that it is there and has"),
        ("absent", on_put("404"), 20, tw.ExchangeError, "create the bucket, or correct its name"),
    ],
)
def test_a_store_that_refuses_is_an_error_in_time(s3, url, fault, timeout_s, error, word) -> None:
    with (
        contextlib.closing(Proxy(s3, fault)) as proxy,
        promptly(30),
        pytest.raises(error, match=word),
    ):
        write(ObjectStore(f"s3://{url}", options_of(proxy.endpoint)), "a-run/x", b"a", timeout_s)


def test_keys_that_may_not_write_are_an_error_at_once(s3) -> None:
    for options in (options_of(s3, key="reader"), options_of(s3, secret="wrong")):
        wanted = r"403 .* do: pass keys that may put"
        with promptly(30), pytest.raises(tw.ExchangeError, match=wanted):
            write(ObjectStore("s3://run/reader", options), "a-run/x")


def test_a_full_disk_is_an_error_at_once_and_leaves_nothing_half_visible(tmp_path: Path) -> None:
    code = (
        "import asyncio, resource, signal, time\n"
        "import thinwire as tw\n"
        "from thinwire.transport.object_store import ObjectStore\n"
        f"store = ObjectStore('file://{tmp_path}')\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "put = store.put('r/x', memoryview(bytes(70_001)), time.monotonic() + 60, lambda _: True)\n"
        "try: asyncio.run(put)\n"
        "except tw.ExchangeError as error: print(type(error).__name__, error)\n"
    )
    (file := tmp_path.with_suffix(".py")).write_text(code)
    (process,) = ended([Forked((str(file),), dict(os.environ))], timeout_s=60)
    assert process.stdout.startswith("ExchangeError cannot write r/x"), process.stderr
    assert "File too large" in process.stdout
    assert "make room" in process.stdout
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


def test_a_folder_that_may_not_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    if os.getuid() == 0:
        (tmp_path / "a-run").write_text("in the way")
    else:
        tmp_path.chmod(0o500)
    with promptly(30), pytest.raises(tw.ExchangeError, match="cannot write a-run/"):
        write(ObjectStore(f"file://{tmp_path}"), "a-run/x")


@pytest.mark.parametrize(
    ("url", "options", "environment", "match"),
    [
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
    with pytest.raises(tw.ExchangeError, match="in place of another one"):
        asyncio.run(store.check_put_if_absent("r/check", time.monotonic() + 10))
    assert asyncio.run(store.sizes("", time.monotonic() + 10)) == {}
