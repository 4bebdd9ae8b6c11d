"""Checks of an object store over which workers would exchange."""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from thinwire.doctor.finding import Finding, examine
from thinwire.doctor.method import ExpectedRun, RunDescription, measured_link, method_finding
from thinwire.errors import ThinwireError
from thinwire.plan.link import Star
from thinwire.plan.units import duration_text, rate_text
from thinwire.transport.object_store import ObjectStore

T = TypeVar("T")

_FOLDER = "thinwire-doctor"
_TRIES = 5
_PROBE_NBYTES = 4 << 20
_CHECK_S, _RATE_S, _METHOD_S = 20.0, 60.0, 20.0


def store_findings(url: str, planned: ExpectedRun | None = None) -> Iterator[Finding]:
    """What each check finds, one after the other; what they write they delete.

    Args:
        url: of the bucket with its prefix, or of a folder.
        planned: what is known of the run for which a method is looked for.
    """
    checks = _StoreChecks(url, planned or ExpectedRun())
    finding = examine("store", checks.store, limit_s=_CHECK_S)
    yield finding
    if finding.status == "fail" or not checks.is_open:
        yield Finding(name="the rest", status="warn", found="not established: rate, method")
        return
    yield examine("rate", checks.rate, limit_s=_RATE_S)
    yield examine("method", checks.method, limit_s=_METHOD_S)


class _StoreChecks:
    """Checks of one store; `store` comes before the others."""

    def __init__(self, url: str, planned: ExpectedRun) -> None:
        self._url, self._planned = url, planned
        self._key = f"{_FOLDER}/{secrets.token_hex(8)}"
        self._latency_s = 0.0
        self._rates_bits_per_s: tuple[float, float] | tuple[()] = ()
        self.is_open = False

    def store(self) -> Finding:
        """That it can be written, read and emptied, and writes only if there is nothing."""
        try:
            may_delete = asyncio.run(self._try())
        except ThinwireError as error:
            return Finding(name="store", status="fail", found=error.because, do=error.do)
        self.is_open = True
        found = f"takes one object of each name, and answers in {duration_text(self._latency_s)}"
        if may_delete:
            return Finding(name="store", status="ok", found=found)
        found += "; these keys may not delete"
        do = "let them, or have a lifecycle rule delete what is older than the run lasts"
        return Finding(name="store", status="warn", found=found, do=do)

    async def _try(self) -> bool:
        store = ObjectStore(self._url)
        await store.check_put_if_absent(f"{self._key}-check", _until_s(_CHECK_S))
        tries: list[float] = []
        for _ in range(_TRIES):
            # Of what is not there: it is an answer like any other, and nothing travels.
            tries.append((await _timed(store.get(self._key, _until_s(_CHECK_S), nbytes=0)))[0])
        self._latency_s = statistics.median(tries)
        small = memoryview(b"1")
        await store.replace(self._key, small, _until_s(_CHECK_S))
        return await store.delete([self._key])

    def rate(self) -> Finding:
        """Bits a second each way, of one object."""
        up_s, down_s = asyncio.run(self._probe())
        up, down = 8 * _PROBE_NBYTES / up_s, 8 * _PROBE_NBYTES / down_s
        self._rates_bits_per_s = up, down
        found = f"{rate_text(up)} to the store, {rate_text(down)} from it"
        return Finding(name="rate", status="ok", found=found)

    async def _probe(self) -> tuple[float, float]:
        store, body = ObjectStore(self._url), memoryview(os.urandom(_PROBE_NBYTES))
        try:
            up_s, _ = await _timed(store.replace(self._key, body, _until_s(_RATE_S)))
            getting = store.get(self._key, _until_s(_RATE_S), nbytes=_PROBE_NBYTES)
            down_s, _ = await _timed(getting)
        finally:
            await store.delete([self._key])
        return up_s, down_s

    def method(self) -> Finding:
        """Which method fits the rates."""
        up, down = self._rates_bits_per_s or (None, None)
        link = measured_link(up, down, self._latency_s / 2)
        return method_finding(link, self._planned, RunDescription(), topology=Star())


def _until_s(seconds: float) -> float:
    return time.monotonic() + seconds


async def _timed(work: Coroutine[Any, Any, T]) -> tuple[float, T]:
    start_s = time.perf_counter()
    result = await work
    return time.perf_counter() - start_s, result
