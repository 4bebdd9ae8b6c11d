"""Checks of the way from this machine to a run: its lighthouse and workers, or its store."""

import asyncio
import http.client
import ipaddress
import json
import math
import os
import secrets
import socket
import ssl
import statistics
import struct
import time
from collections.abc import Coroutine, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar

from thinwire.doctor.machine import Finding, examine
from thinwire.doctor.method import ExpectedRun, RunDescription, measured_link, method_finding
from thinwire.elastic.dialer import Dialer, open_stream
from thinwire.elastic.https import send_request
from thinwire.errors import ExchangeError, MismatchError, ThinwireError
from thinwire.plan.link import Star
from thinwire.plan.units import duration_text, rate_text
from thinwire.security.token import Token
from thinwire.transport.address import address_text, local_address, split_address
from thinwire.transport.object_store import ObjectStore

T = TypeVar("T")

_ASKS, _ASKING_S, _ANSWER_S = 5, 2.0, 2.0
_CHECK_S, _RATE_S, _METHOD_S = 5.0, 30.0, 20.0
_CONNECT_S, _AT_ONCE, _REACH_S = 1.5, 32, 10.0
_PROBE_NBYTES, _TIME_NBYTES = 1 << 20, 1 << 10
# An object store refuses what was signed by a clock that is 15 minutes off.
_CLOCK_S = 300.0
_TCP_INFO_NBYTES, _SENT_AGAIN_AT, _SEGMENTS_AT = 256, 100, 136
_STORE_PROBE_NBYTES, _STORE_CHECK_S, _STORE_RATE_S = 4 << 20, 20.0, 60.0


def network_findings(
    address: str, token: Token | None, planned: ExpectedRun | None = None
) -> Iterator[Finding]:
    """What each check finds, one after the other; most take at most 5 s, a slow line's rate 30 s.

    Args:
        address: HOST:PORT that `thinwire lighthouse` printed.
        token: of the run; without it only names and ports can be checked.
        planned: what is known of the run for which a method is looked for.

    Raises:
        ConfigurationError: `address` is no HOST:PORT.
    """
    checks = _NetworkChecks(address, token, planned or ExpectedRun())
    for name in ("name", "registry"):
        finding = examine(name, getattr(checks, name), limit_s=_CHECK_S)
        yield finding
        if finding.status != "ok":
            rest = "clock, lighthouse, rate, method, inbound, peers"
            yield Finding("warn", f"not established: {rest}", name="the rest")
            return
    yield examine("clock", checks.clock, limit_s=_CHECK_S)
    yield examine("lighthouse", checks.lighthouse, limit_s=_CHECK_S)
    yield examine("rate", checks.rate, limit_s=_RATE_S)
    yield examine("method", checks.method, limit_s=_METHOD_S)
    yield examine("inbound", checks.inbound, limit_s=_CHECK_S)
    yield examine("peers", checks.peers, limit_s=_CHECK_S)


class _NetworkChecks:
    """Checks of one address; `registry` comes before the others, which use what it was told."""

    def __init__(self, address: str, token: Token | None, planned: ExpectedRun) -> None:
        self._address, self._token, self._planned = address, token, planned
        if token is not None:
            self._dialer = Dialer(token, address)
        self._host, self._port = split_address(address)
        self._facts: Mapping[str, Any] = {}
        self._round_trip_s = 0.0
        self._ahead_s: float | None = None
        self._rates_bits_per_s: tuple[float, float] | tuple[None, None] = (None, None)

    def name(self) -> Finding:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            do = "correct the name, or pass the lighthouse's numeric address"
            return Finding("fail", f"{self._host}: {error}", do)
        addresses = sorted({str(entry[4][0]) for entry in found})
        is_here = bool(addresses[0]) and ipaddress.ip_address(addresses[0]).is_loopback
        itself = ", which is this machine itself" if is_here else ""
        return Finding("ok", f"{self._host} is {', '.join(addresses)}{itself}")

    def registry(self) -> Finding:
        try:
            if self._token is None:
                socket.create_connection((self._host, self._port), timeout=_CONNECT_S).close()
                found = f"{self._address} takes connections; no token to ask more with"
                return Finding("warn", found)
            self._facts = self._ask("/peers")
            self._time_it()
        except MismatchError as error:
            return Finding("fail", f"{self._address}: {error.because}", error.do)
        except (ExchangeError, OSError) as error:
            do = f"start thinwire lighthouse there, or let TCP port {self._port} through"
            return Finding("fail", f"{self._address}: {_reason_of(error)}", do)
        return Finding("ok", f"{self._address} answers in {1000 * self._round_trip_s:.1f} ms")

    def _time_it(self) -> None:
        """Round trip and clock, as NTP does: by the server's time between a request's two ends."""
        trips: list[tuple[float, float | None]] = []
        until_s = time.monotonic() + _ASKING_S
        while len(trips) < _ASKS and (not trips or time.monotonic() < until_s):
            with self._connected() as (connection, _):
                sent_s, start_s = time.time(), time.perf_counter()
                connection.request("GET", "/time")
                body = connection.getresponse().read(_TIME_NBYTES)
                took_s = time.perf_counter() - start_s
            try:
                told_s = float(json.loads(body)["time"])
            except (KeyError, TypeError, ValueError, RecursionError):
                told_s = math.nan  # of a server that does not tell it
            ahead_s = sent_s + took_s / 2 - told_s
            trips.append((took_s, ahead_s if math.isfinite(ahead_s) else None))
        # The shortest was delayed least, and says most about the clock.
        self._round_trip_s, self._ahead_s = min(trips, key=lambda trip: trip[0])

    def clock(self) -> Finding:
        ahead_s, within_s = self._ahead_s, self._round_trip_s / 2
        if ahead_s is None:
            found = "unknown: the lighthouse does not tell its time, as that of another version"
            return Finding("ok", found)
        word = "ahead of" if ahead_s > 0 else "behind"
        off = f"{abs(ahead_s):.3f} s" if abs(ahead_s) < 60 else duration_text(abs(ahead_s))
        found = f"{off} {word} the lighthouse, give or take {within_s:.3f} s"
        if abs(ahead_s) <= _CLOCK_S:
            return Finding("ok", f"{found}; no part of a run needs it")
        found += "; a run does not need it, but object stores and certificates do"
        do = "set the clock that is wrong: a store refuses requests that are 15 min off"
        return Finding("warn", found, do)

    def lighthouse(self) -> Finding:
        try:
            open_stream(self._dialer, self._address, "lighthouse", timeout_s=_ANSWER_S).close()
        except (OSError, ThinwireError) as error:
            return Finding("fail", _reason_of(error), "start thinwire lighthouse there again")
        return Finding("ok", "takes connections behind its port")

    def rate(self) -> Finding:
        """Bits a second each way, of some MiB within one connection each."""
        body, info = os.urandom(_PROBE_NBYTES), b""
        with self._connected() as (connection, stream):
            start_s = time.perf_counter()
            connection.request("POST", "/discard", body=body)
            stream.recv(1)  # of an answer that says that all has arrived
            up_s = time.perf_counter() - start_s
            if hasattr(socket, "TCP_INFO"):
                info = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
        with self._connected() as (connection, _):
            start_s = time.perf_counter()
            connection.request("GET", "/noise")
            received = connection.getresponse().read(_PROBE_NBYTES)
            down_s = time.perf_counter() - start_s
        if len(received) < _PROBE_NBYTES:
            raise ExchangeError(
                f"measure the rate from {self._address}",
                because=f"it sent {len(received)} bytes of {_PROBE_NBYTES}",
                do="run the same thinwire version there",
            )
        up, down = self._rates_bits_per_s = 8 * _PROBE_NBYTES / up_s, 8 * _PROBE_NBYTES / down_s
        found = f"{rate_text(up)} to the lighthouse, {rate_text(down)} from it"
        if len(info) >= _SEGMENTS_AT + 4:
            # Linux's struct tcp_info: all segments sent, and of these those sent once more.
            (again,) = struct.unpack_from("=I", info, _SENT_AGAIN_AT)
            (segments,) = struct.unpack_from("=I", info, _SEGMENTS_AT)
            found += f", {100 * again / max(1, segments):.1f} % of packets sent again"
        return Finding("ok", found)

    def method(self) -> Finding:
        """Which method fits the rates; latency is that of one way."""
        link = measured_link(*self._rates_bits_per_s, self._round_trip_s / 2)
        fields: Mapping[str, str] = {}
        # A registry of an earlier version does not tell.
        with suppress(ExchangeError, MismatchError, AttributeError, KeyError, TypeError):
            told = self._ask("/description")["description"]
            fields = {str(key): str(text) for key, text in told.items()}
        run = RunDescription(fields=fields, workers=len(self._facts["peers"]))
        return method_finding(link, self._planned, run)

    def inbound(self) -> Finding:
        local = local_address(self._host)
        with socket.create_server((local, 0)) as listener:
            listener.settimeout(0.5)
            port = listener.getsockname()[1]
            where = address_text(local, port)
            told = self._ask("/probe", {"host": local, "port": port})
            with suppress(TimeoutError):
                if told["reached"]:
                    listener.accept()[0].close()
                    direct = f"the lighthouse's machine reaches {where}"
                    return Finding("ok", f"{direct}: workers there connect directly")
        why = told["why"] or "it reached another machine that has this address"
        found = f"not reached at {where} ({why}): what is sent here goes by way of the lighthouse"
        return Finding("ok", found)

    def peers(self) -> Finding:
        addresses = {p["identity"]: p["address"] for p in self._facts["peers"]}
        if not addresses:
            return Finding("ok", "no workers yet")

        def reach(peer: tuple[str, str]) -> str:
            identity, address = peer
            try:
                self._dialer.connect(address, timeout_s=_REACH_S).close()
            except (OSError, ThinwireError) as error:
                return f"{identity} at {address}: {_reason_of(error)}"
            return ""

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            missed = [why for why in pool.map(reach, addresses.items()) if why]
        if missed:
            found = f"{len(missed)} of {len(addresses)} not reached: {'; '.join(missed)}"
            return Finding("fail", found, "see whether these still run (thinwire status)")
        relayed = sum(map(self._dialer.is_relayed, addresses.values()))
        directly = len(addresses) - relayed
        return Finding("ok", f"{directly} reached directly, {relayed} by way of the lighthouse")

    def _ask(self, path: str, body: Any = None) -> Any:
        return send_request(self._dialer, self._address, path, body, timeout_s=_REACH_S).json()

    @contextmanager
    def _connected(self) -> Generator[tuple[http.client.HTTPConnection, ssl.SSLSocket]]:
        """A connection on which no request was made: what it takes to connect is not timed."""
        with closing(http.client.HTTPConnection("run")) as connection:
            stream = self._dialer.connect(self._address, timeout_s=_REACH_S)
            connection.sock = stream
            yield connection, stream


def _reason_of(error: Exception) -> str:
    return error.because if isinstance(error, ThinwireError) else str(error) or type(error).__name__


# -- an object store -------------------------------------------------------------------------------


def store_findings(url: str, planned: ExpectedRun | None = None) -> Iterator[Finding]:
    """What each check finds, one after the other; what they write they delete.

    Args:
        url: of the bucket with its prefix, or of a folder.
        planned: what is known of the run for which a method is looked for.
    """
    key = f"thinwire-doctor/{secrets.token_hex(8)}"
    latencies_s: list[float] = []
    rates: list[float] = []

    def store() -> Finding:
        try:
            may_delete = asyncio.run(_try_store(url, key, latencies_s))
        except ThinwireError as error:
            return Finding("fail", error.because, error.do)
        latency = duration_text(statistics.median(latencies_s))
        found = f"takes one object of each name, and answers in {latency}"
        if may_delete:
            return Finding("ok", found)
        do = "let them, or have a lifecycle rule delete what is older than the run lasts"
        return Finding("warn", f"{found}; these keys may not delete", do)

    def rate() -> Finding:
        rates.extend(asyncio.run(_store_rates(url, key)))
        return Finding("ok", f"{rate_text(rates[0])} to the store, {rate_text(rates[1])} from it")

    def method() -> Finding:
        up, down = rates or (None, None)
        link = measured_link(up, down, statistics.median(latencies_s) / 2)
        return method_finding(link, planned or ExpectedRun(), RunDescription(), topology=Star())

    finding = examine("store", store, limit_s=_STORE_CHECK_S)
    yield finding
    if finding.status == "fail" or len(latencies_s) < _ASKS:
        yield Finding("warn", "not established: rate, method", name="the rest")
        return
    yield examine("rate", rate, limit_s=_STORE_RATE_S)
    yield examine("method", method, limit_s=_METHOD_S)


async def _try_store(url: str, key: str, latencies_s: list[float]) -> bool:
    """Whether what is written can be deleted, once all else has been tried."""
    store, until_s = ObjectStore(url), time.monotonic() + _STORE_CHECK_S
    await store.check_put_if_absent(f"{key}-check", until_s)
    for _ in range(_ASKS):
        # Of what is not there: it is an answer like any other, and nothing travels.
        latencies_s.append((await _timed(store.get(key, until_s, nbytes=0)))[0])
    await store.replace(key, memoryview(b"1"), until_s)
    return await store.delete([key])


async def _store_rates(url: str, key: str) -> tuple[float, float]:
    """Bits a second each way, of one object."""
    store, until_s = ObjectStore(url), time.monotonic() + _STORE_RATE_S
    body = memoryview(os.urandom(_STORE_PROBE_NBYTES))
    try:
        up_s, _ = await _timed(store.replace(key, body, until_s))
        down_s, _ = await _timed(store.get(key, until_s, nbytes=_STORE_PROBE_NBYTES))
    finally:
        await store.delete([key])
    return 8 * _STORE_PROBE_NBYTES / up_s, 8 * _STORE_PROBE_NBYTES / down_s


async def _timed(work: Coroutine[Any, Any, T]) -> tuple[float, T]:
    start_s = time.perf_counter()
    result = await work
    return time.perf_counter() - start_s, result
