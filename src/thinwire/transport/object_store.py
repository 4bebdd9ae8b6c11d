"""Objects in a bucket or a folder: put if absent, get, list and delete, with deadlines."""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import os
import re
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from thinwire.errors import ConfigurationError, ExchangeError, ExchangeTimeout, check
from thinwire.security.token import Token
from thinwire.transport.address import CLIENT, NO_RETRIES, HubAddress, is_hub

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_PAUSE_S, _LONGEST_PAUSE_S, _GROWTH = 0.02, 1.0, 1.5
# A request that takes longer has lost its connection, and is retried.
_REQUEST_S, _SLOWEST_BYTES_PER_S = 30.0, 32_000
_AT_ONCE, _POLLED, _LISTED, _TOGETHER = 16, 4, 1000, 64
_ADDRESS = re.compile(r"https?://[^/\s]+")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# A redirect leads to the bucket's region. A 4xx is final, except with these statuses, and except
# S3's 400 to a request that was sent too slowly.
_WRONG = re.compile(
    r"Received redirect|status code: 4(?!04|08|09|12|25|29)\d\d(?!.*<Code>RequestTimeout<)", re.S
)
_WARNED_TRIES = 5
_LARGEST_NBYTES = {"s3": 5 << 30, "az": 5000 << 20}  # largest put, as these services document
_PART_NBYTES = 64 << 20  # at most 10,000 parts: up to 670 GB
_WAIT_LONGER = "see that the store can be reached and a hub's token is right, or wait longer"


@dataclass(kw_only=True, slots=True)  # state: counters
class ServiceRequests:
    """Requests to an object store, by kind.

    puts       objects written
    gets       objects read
    lists      requests for names of objects
    polls      requests for an object that did not exist yet
    deletes    objects deleted
    retries    requests after an error, a timeout, or a restart of the worker
    alive      signs of life written and looked up, in proportion to the duration of the run
    """

    puts: int = 0
    gets: int = 0
    lists: int = 0
    polls: int = 0
    deletes: int = 0
    retries: int = 0
    alive: int = 0


class ObjectStore:
    """A bucket or folder: s3://, gs://, az://, hub://, file:// or memory://.

    No reader sees part of an object. A request that fails for the moment (a lost connection, 5xx,
    409, no answer) is retried with growing pauses until the deadline; one that the store refuses
    is an error at once. So are refused keys, unless the store accepted them before: then they may
    yet be renewed, or the clock set.

    Args:
        url: the bucket's URL, with an optional prefix; or an obstore store. The name of a run in
            the address of a hub is no prefix.
        options: options of the store, in place of environment variables: endpoint, region, ...
        token: a hub's token; default the one in its address, or in the environment.

    Raises:
        ConfigurationError: the package obstore is missing, or the URL or an option is unknown.
    """

    def __init__(
        self, url: Any, options: Mapping[str, str] | None = None, *, token: Token | None = None
    ) -> None:
        try:
            self._obstore: Any = importlib.import_module("obstore")
        except ImportError as error:
            raise ConfigurationError(
                "exchange over an object store",
                because="the package obstore is not installed",
                do="pip install 'thinwire[elastic]'",
            ) from error
        self._errors: Any = importlib.import_module("obstore.exceptions")
        self.url = url if isinstance(url, str) else repr(url)
        has_options = isinstance(url, str) and not is_hub(url) and not url.startswith("file://")
        check(
            has_options or not options,
            f"use {', '.join(options or ())} for the object store {self.url}",
            because="they are for stores that a URL opens, such as s3://",
            do="leave store_options out",
        )
        self._store: Any = url
        if is_hub(url):
            hub = HubAddress.read(url)
            self.url, self._store = str(hub), hub.open(token or hub.token())
        elif isinstance(url, str):
            self._store = _opened(url, options or {})
        self._was_allowed = False
        self._is_remote = type(self._store).__name__ not in ("LocalStore", "MemoryStore")
        self.requests = ServiceRequests()
        self._large = dict[str, str]()  # endings of large objects, by names that this process wrote

    async def put(
        self,
        key: str,
        parts: Sequence[memoryview],
        until_s: float,
        is_same: Callable[[memoryview], bool],
    ) -> bool:
        """Write an object if its name is free; return False if another one has the name.

        More than the store takes at once is uploaded in parts, to another object, whose name begins
        with `key`; the object `key` then holds that name.

        Args:
            key: the object's name.
            parts: the object's parts, each uint8 [n].
            until_s: deadline, by the clock of the running event loop.
            is_same: tells whether the object of that name equals `parts`: the connection may have
                been lost after it arrived, or an earlier process wrote it.

        Raises:
            ExchangeError: the store refuses it, or is full. ExchangeTimeout: the deadline.
        """
        nbytes = 2 * sum(map(len, parts))
        if self._is_large(parts):
            ending = secrets.token_hex(8)
            upload = partial(self._write, f"{key}.{ending}", parts, mode="overwrite")
            await self._tried(f"write {key}", upload, until_s, nbytes=nbytes)
            self.requests.puts += 1
            self._large[key] = f"{key}.{ending}"
            parts = [memoryview(_beside(key) + ending.encode())]

        async def write() -> bool:
            try:
                await self._write(key, parts, mode="create")
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                self.requests.retries += 2
            else:
                return True
            try:
                return is_same(await self._fetch(key))
            except FileNotFoundError:
                # If two write at once, some servers answer 409 to both, and take neither.
                raise ConnectionError("the store says that it is there and has none") from None

        is_mine = await self._tried(f"write {key}", write, until_s, nbytes=nbytes)
        self.requests.puts += is_mine
        return is_mine

    def _is_large(self, parts: Sequence[memoryview]) -> bool:
        return sum(map(len, parts)) > _LARGEST_NBYTES.get(self.url.partition(":")[0], math.inf)

    async def _write(self, key: str, parts: Sequence[memoryview], mode: str) -> None:
        # An upload in parts takes no condition.
        uploads = {"use_multipart": self._is_large(parts), "chunk_size": _PART_NBYTES}
        await self._obstore.put_async(self._store, key, parts, mode=mode, **uploads)

    async def check_put_if_absent(self, key: str, until_s: float) -> None:
        """Check, with a trial object, that the store does not overwrite an object put if absent.

        Some servers ignore the condition. Two workers would then both take their object for the one
        that was written first.

        Args:
            key: name of the trial object, which no other process writes.
            until_s: deadline, by the clock of the running event loop.

        Raises:
            ExchangeError: the store ignores the condition, or refuses the object.
            ExchangeTimeout: the deadline.
        """
        one, two = memoryview(b"1"), memoryview(b"2")
        await self.put(key, [one], until_s, one.__eq__)
        is_kept = not await self.put(key, [two], until_s, two.__eq__)
        await self.delete([key])
        check(
            is_kept,
            f"exchange over {self.url}",
            because="it overwrites an object despite If-None-Match",
            do="take a store that supports it, as S3, R2, GCS, Azure, MinIO and SeaweedFS do, or a "
            "later version of this one",
            kind=ExchangeError,
        )

    async def replace(self, key: str, payload: memoryview, until_s: float) -> None:
        """Write an object in place of the one with its name.

        Args:
            key: the object's name; only one process may write it.
            payload: uint8 [n].
            until_s: deadline, by the clock of the running event loop.

        Raises:
            ExchangeError: the store refuses it, or is full. ExchangeTimeout: the deadline.
        """
        write = partial(self._write, key, [payload], mode="overwrite")
        await self._tried(f"write {key}", write, until_s, nbytes=len(payload))
        self.requests.puts += 1

    async def sizes(self, prefix: str, until_s: float, *, after: str = "") -> dict[str, int]:
        """Sizes of objects in bytes by name, sorted by name; each request lists up to a thousand.

        Args:
            prefix: prefix of their names, up to a slash.
            until_s: deadline, by the clock of the running event loop.
            after: lists only names after this one.

        Raises:
            ExchangeError: the store refuses it. ExchangeTimeout: the deadline.
        """

        async def listed() -> list[Any]:
            # Every store supports a request without an offset.
            pages = self._obstore.list(
                self._store, prefix, offset=after or None, chunk_size=_LISTED
            )
            return [page async for page in pages]

        # A folder does not exist before its first object.
        pages = await self._tried(f"list {prefix}", partial(_or_none, listed), until_s) or []
        # An empty answer costs a request, too.
        self.requests.lists += max(1, len(pages))
        found = {each["path"]: each["size"] for page in pages for each in page}
        return dict(sorted((k, n) for k, n in found.items() if k > after))

    async def get(
        self, key: str, until_s: float, *, nbytes: int, at: slice | None = None
    ) -> memoryview | None:
        """Read an object; None if there is no such object.

        Args:
            key: the object's name.
            until_s: deadline, by the clock of the running event loop.
            nbytes: about how many bytes are read.
            at: the bytes to read; an object that ends before them is read whole. None reads all of
                it.

        Raises:
            ExchangeError: the store refuses it. ExchangeTimeout: the deadline.
        """
        read = partial(_or_none, partial(self._fetch, key, at))
        payload = await self._tried(f"read {key}", read, until_s, nbytes=nbytes)
        self.requests.polls += payload is None
        self.requests.gets += payload is not None
        return payload

    async def _fetch(self, key: str, at: slice | None = None) -> memoryview:
        beside = _beside(key)
        if at is not None and at.stop > at.start:
            read = partial(self._obstore.get_range_async, start=at.start, end=at.stop)
            try:
                raw = memoryview(await read(self._store, key))
                if bytes(raw[: len(beside)]) != beside:
                    return raw
            except self._errors.BaseError:
                # A shorter object is an error, and not the same one in every store. If the object
                # is long enough, the error is another one: do not read the whole object.
                if (await self._obstore.head_async(self._store, key))["size"] >= at.stop:
                    raise
        raw = memoryview(await (await self._obstore.get_async(self._store, key)).bytes_async())
        if bytes(raw[: len(beside)]) == beside:
            return await self._fetch(f"{key}.{str(raw[len(beside) :], errors='replace')}", at)
        return raw if at is None or len(raw) < at.stop else raw[at]

    async def stamp(self, key: str, until_s: float) -> tuple[str, float] | None:
        """An object's tag and the time it was written; None if there is no such object.

        Returns:
            A tag that changes with the content, and seconds since 1970 by the store's clock.

        Raises:
            ExchangeError: the store refuses it. ExchangeTimeout: the deadline.
        """

        ask = partial(_or_none, partial(self._obstore.head_async, self._store, key))
        found: Any = await self._tried(f"look up {key}", ask, until_s)
        return found and (str(found["e_tag"]), found["last_modified"].timestamp())

    async def get_all(
        self,
        keys: Mapping[int, str],
        *,
        timeout_s: float,
        nbytes: int,
        at: Mapping[int, slice] = MappingProxyType({}),
        absent_s: deque[float] | None = None,
        lost: Callable[[Collection[int]], Coroutine[Any, Any, set[int]]] | None = None,
    ) -> dict[int, memoryview]:
        """Read objects as they appear; leave out those that do not appear in time.

        A few requests poll at a time, however many objects are missing. Nothing is listed.

        Args:
            keys: names of the objects, by worker.
            timeout_s: the longest time without a new object, and until the last look begins. A
                store that falls silent then is waited for as long again, but at most 30 s.
            nbytes: about the size of each.
            at: the bytes to read, by worker; default all of them.
            absent_s: how long the first object was absent in earlier calls. Polling starts after
                the shortest time; that of this call is appended.
            lost: returns the missing workers that are lost.
        """
        missing, found = dict(keys), dict[int, memoryview]()
        began_s, pause_s = now_s(), _PAUSE_S
        until_s, seen_s = began_s + timeout_s, 0.0
        expected_s = began_s + min(absent_s or (), default=0.0)
        asked = list(missing)
        while missing:
            asked_s = now_s()
            # The last look may be answered after the deadline: cut off, it would blame the store.
            look_s = max(until_s, asked_s + min(timeout_s, _REQUEST_S))
            looks = (self.get(missing[w], look_s, nbytes=nbytes, at=at.get(w)) for w in asked)
            there = await together(*looks, at_once=_AT_ONCE)
            come = {w: p for w, p in zip(asked, there, strict=True) if p is not None}
            found |= come
            missing = {worker: key for worker, key in missing.items() if worker not in come}
            if come:
                # The others have probably appeared, too.
                asked, pause_s, until_s = list(missing), _PAUSE_S, now_s() + timeout_s
                continue
            if not found:
                seen_s = asked_s - began_s
            wait_s = max(pause_s, expected_s - now_s())
            if now_s() + wait_s > until_s:
                break
            looking = together() if lost is None else lost(list(missing))
            gone, _ = await together(looking, asyncio.sleep(wait_s))
            missing = {worker: key for worker, key in missing.items() if worker not in gone}
            asked, pause_s = list(missing)[:_POLLED], min(_LONGEST_PAUSE_S, pause_s * _GROWTH)
        if absent_s is not None and len(found) == len(keys):
            absent_s.append(seen_s)
        return found

    async def delete(self, keys: Sequence[str]) -> bool:
        """Delete objects, if they exist; return False if the store refuses.

        It is tried once: no round depends on it.
        """
        keys = [*keys, *(self._large.pop(key) for key in keys if key in self._large)]
        try:
            async with asyncio.timeout(_REQUEST_S):
                await self._obstore.delete_async(self._store, keys)
        except FileNotFoundError:
            # A folder deletes nothing after the first that is absent.
            return len(keys) == 1 or all([await self.delete([key]) for key in keys])
        except (self._errors.BaseError, TimeoutError, OSError):
            return False
        self.requests.deletes += len(keys)
        return True

    async def _tried(
        self, what: str, request: Callable[[], Awaitable[T]], until_s: float, *, nbytes: int = 0
    ) -> T:
        pause_s, tries = _PAUSE_S, 0
        while True:
            left_s = max(0.001, until_s - now_s())
            allowed_s = min(left_s, _REQUEST_S + nbytes / _SLOWEST_BYTES_PER_S)
            try:
                async with asyncio.timeout(allowed_s):
                    answer = await request()
                self._was_allowed = True
                return answer
            except (self._errors.BaseError, OSError) as error:
                tries, why = tries + 1, _reason_of(error)
                do = self._refuse(what, error, tries)
            if tries == _WARNED_TRIES:
                _LOG.warning("still trying to %s in %s: %s", what, self.url, why)
            self.requests.retries += 1
            # Stop early: a last request, cut off by the deadline, would hide this reason.
            if now_s() + 2 * pause_s > until_s:
                raise ExchangeTimeout(f"{what} in {self.url}", because=why, do=do)
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * _GROWTH)

    def _refuse(self, what: str, error: Exception, tries: int) -> str:
        """Raise an error that will not pass by itself; else return what to do if it stays."""
        errors, is_absent = self._errors, isinstance(error, FileNotFoundError)
        # Another process may remove an empty folder as this one makes it, or before a file is in
        # it. The first of these errors is also that of a file in the way, which stays.
        is_race = tries < _WARNED_TRIES and "Unable to create dir" in str(error)
        is_silent = isinstance(error, (TimeoutError, ConnectionError))
        is_denied = isinstance(error, (errors.PermissionDeniedError, errors.UnauthenticatedError))
        is_denied |= "<Code>ExpiredToken<" in str(error)
        if is_denied:
            do = "pass keys that may put, get and delete there; and see that this clock is right"
        elif is_absent and self._is_remote:
            do = "create the bucket, or correct its name"
        elif _WRONG.search(str(error)):
            do = "correct the URL, the endpoint, the region or the keys"
        elif self._is_remote or is_absent or is_race or is_silent:
            return _WAIT_LONGER
        else:
            do = "make room or correct the folder's permissions; then start this worker again"
        # The clock may yet be set or the keys renewed, so the workers need not end.
        if is_denied and self._was_allowed:
            return do
        raise ExchangeError(f"{what} in {self.url}", because=_reason_of(error), do=do) from error


def _beside(key: str) -> bytes:
    """The beginning of an object that names a large object beside it, whose ending follows."""
    return f"thinwire object {key}.".encode()


async def _or_none(request: Callable[[], Awaitable[T]]) -> T | None:
    """Return the answer of `request`, or None if there is no such object."""
    try:
        return await request()
    except FileNotFoundError:
        return None


def now_s() -> float:
    """Seconds by the clock of the running event loop."""
    return asyncio.get_running_loop().time()


async def together(*work: Coroutine[Any, Any, Any], at_once: int = _TOGETHER) -> list[Any]:
    """Run `work`, some at a time, and return the results; if one fails, cancel the others.

    Each request needs a connection, of which a process may have about a thousand.

    Args:
        work: coroutines to run.
        at_once: how many run at a time, at most.

    >>> async def one(): return 1
    >>> async def both(): return await together(one(), one())
    >>> asyncio.run(both())
    [1, 1]
    """
    if len(work) < 2:
        return [await each for each in work]
    waiting = iter(enumerate(work))
    results: list[Any] = [None] * len(work)

    async def some() -> None:
        for index, each in waiting:
            results[index] = await each

    tasks = [asyncio.ensure_future(some()) for _ in work[:at_once]]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for _, each in waiting:
            each.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return results


def _opened(url: str, options: Mapping[str, str]) -> Any:
    stores: Any = importlib.import_module("obstore.store")
    errors: Any = importlib.import_module("obstore.exceptions")
    given: dict[str, Any] = {}
    if url.startswith("file://"):
        given = {"mkdir": True, "automatic_cleanup": True}
    elif not url.startswith("memory://"):
        # The scheme of the endpoint decides about TLS.
        given = {"client_options": {"allow_http": True, **CLIENT}, "retry_config": NO_RETRIES}
    endpoints = {name: os.environ.get(name) for name in _ENDPOINTS}
    for name, text in (endpoints | {"endpoint": options.get("endpoint")}).items():
        # obstore accepts any text, and panics at the first request.
        check(
            text is None or not url.startswith("s3://") or bool(_ADDRESS.match(text)),
            f"open the object store {url}",
            because=f"{name} is {text!r}, not the address of a server",
            do=f"pass https://HOST as {name}, or unset it for AWS itself",
        )
    because = "it is the address of a server, in which no object can be written"
    do = (
        "pass s3://BUCKET/PREFIX, and its server's address as AWS_ENDPOINT_URL; "
        "gs://BUCKET/PREFIX, az://ACCOUNT/CONTAINER/PREFIX, hub://TOKEN@HOST:PORT or "
        "file:///FOLDER; and options that the store has"
    )
    try:
        store = stores.from_url(url, **given, **options)
        if not isinstance(store, stores.HTTPStore):
            return store
    except (errors.BaseError, TypeError, ValueError, OSError) as error:
        because = _reason_of(error)
        if url.startswith("file:"):
            do = "pass a folder that this user can make and write to"
    raise ConfigurationError(f"open the object store {url}", because=because, do=do)


def _reason_of(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "there was no answer in time"
    text = str(error).split("\n\nDebug source:", 1)[0].strip() or repr(error)
    return " ".join(text.split())[:400]
