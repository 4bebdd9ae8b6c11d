"""Checks of the store where workers meet, and of the link to it."""

import asyncio
import os
import secrets
import statistics
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from thinwire.doctor.machine import Finding, examine
from thinwire.doctor.method import ExpectedRun, RunDescription, method_finding
from thinwire.elastic.run_objects import RunObjects
from thinwire.elastic.watch import BucketWatch
from thinwire.errors import ConfigurationError
from thinwire.plan.link import Link
from thinwire.plan.units import duration_text, rate_text
from thinwire.security.token import Token
from thinwire.transport.object_store import ObjectStore

_ASKS = 5
_PROBE_NBYTES = 4 << 20
_CHECK_S, _RATE_S, _METHOD_S = 20.0, 60.0, 30.0
# A store refuses requests signed by a clock that is 15 minutes off.
_CLOCK_S = 300.0


def store_findings(
    url: str,
    planned: ExpectedRun | None = None,
    *,
    run: str | None = None,
    token: Token | None = None,
) -> Iterator[Finding]:
    """The findings of all checks, in order; they delete what they write.

    Args:
        url: URL of the bucket with its prefix, or of a folder.
        planned: the run to advise for.
        run: name of a run under way, whose method and size are read.
        token: that run's token, if it has one.
    """
    checks = _StoreChecks(url, planned or ExpectedRun(), run, token)
    finding = examine("store", lambda: asyncio.run(checks.store()), limit_s=_CHECK_S)
    yield finding
    if finding.status == "fail" or len(checks.latencies_s) < _ASKS:
        yield Finding("warn", "not established: clock, rate, method", name="the rest")
        return
    yield examine("clock", checks.clock, limit_s=_CHECK_S)
    yield examine("rate", lambda: asyncio.run(checks.rate()), limit_s=_RATE_S)
    yield examine("method", checks.method, limit_s=_METHOD_S)


class _StoreChecks:
    """Checks of one store; `store` and `rate` measure the link that `method` plans for."""

    def __init__(
        self, url: str, planned: ExpectedRun, run: str | None, token: Token | None
    ) -> None:
        self._url, self._planned, self._run, self._token = url, planned, run, token
        self._key = f"thinwire-doctor/{secrets.token_hex(8)}"
        self._rates = (0.0, 0.0)
        self._ahead_s = 0.0
        self.latencies_s: list[float] = []

    async def store(self) -> Finding:
        """Check that the keys may put and delete, and that a name is written only once."""
        store, until_s = ObjectStore(self._url, token=self._token), time.monotonic() + _CHECK_S
        await store.check_put_if_absent(f"{self._key}-check", until_s)
        for _ in range(_ASKS):
            # The object does not exist, so that no content is sent.
            self.latencies_s.append(await _seconds(store.get(self._key, until_s, nbytes=0)))
        sent_s = time.time()
        await store.replace(self._key, memoryview(b"1"), until_s)
        middle_s = (sent_s + time.time()) / 2
        stamp = await store.stamp(self._key, until_s)
        self._ahead_s = 0.0 if stamp is None else middle_s - stamp[1]
        latency = duration_text(statistics.median(self.latencies_s))
        found = f"takes one object of each name, and answers in {latency}"
        if await store.delete([self._key]):
            return Finding("ok", found)
        do = "let them, or have a lifecycle rule delete what is older than the run lasts"
        return Finding("warn", f"{found}; these keys may not delete", do)

    def clock(self) -> Finding:
        """Compare this machine's clock with the store's, which has whole seconds."""
        off_s, word = abs(self._ahead_s), "ahead of" if self._ahead_s > 0 else "behind"
        if off_s <= _CLOCK_S:
            return Finding("ok", f"{off_s:.0f} s {word} the store's")
        do = "set the clock that is wrong: a store refuses requests that are 15 min off"
        return Finding("warn", f"{duration_text(off_s)} {word} the store's", do)

    async def rate(self) -> Finding:
        """Measure bits per second each way, with one object."""
        store, until_s = ObjectStore(self._url, token=self._token), time.monotonic() + _RATE_S
        body = memoryview(os.urandom(_PROBE_NBYTES))
        try:
            up_s = await _seconds(store.replace(self._key, body, until_s))
            down_s = await _seconds(store.get(self._key, until_s, nbytes=_PROBE_NBYTES))
        finally:
            await store.delete([self._key])
        up, down = self._rates = 8 * _PROBE_NBYTES / up_s, 8 * _PROBE_NBYTES / down_s
        return Finding("ok", f"{rate_text(up)} to the store, {rate_text(down)} from it")

    def method(self) -> Finding:
        """Advise for the measured rates and one-way latency."""
        link, (up, down) = None, self._rates
        if up:
            latency_s = statistics.median(self.latencies_s) / 2
            link = Link(up_bits_per_s=up, down_bits_per_s=down, latency_s=latency_s)
        run = RunDescription() if self._run is None else self._described(self._run)
        finding = method_finding(link, self._planned, run)
        if self._run is None or run.fields:
            return finding
        found = f"run {self._run!r} has no worker that this token opens; {finding.found}"
        return finding._replace(found=found)

    def _described(self, name: str) -> RunDescription:
        """The run as the store describes it; it may not have begun."""
        try:
            status = BucketWatch(self._url, run=name, token=self._token).look()
        except ConfigurationError:
            return RunDescription()
        objects = RunObjects(ObjectStore(self._url, token=self._token), name, self._token)
        fields = asyncio.run(objects.description(time.monotonic() + _CHECK_S))
        workers = len(status.calls) if status.roll is None else len(status.roll.names)
        return RunDescription(fields=fields, workers=workers)


async def _seconds(work: Coroutine[Any, Any, object]) -> float:
    start_s = time.perf_counter()
    await work
    return time.perf_counter() - start_s
