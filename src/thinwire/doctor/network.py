"""Checks of the network from this machine to the lighthouse of a run, and to its workers."""

import http.client
import ipaddress
import json
import math
import os
import socket
import ssl
import struct
import time
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any

from thinwire.doctor.finding import Finding, examine
from thinwire.doctor.method import ExpectedRun, RunDescription, measured_link, method_finding
from thinwire.elastic.dialer import Dialer, open_stream
from thinwire.elastic.https import send_request
from thinwire.errors import ExchangeError, MismatchError, ThinwireError
from thinwire.plan.units import duration_text, rate_text
from thinwire.security.token import Token
from thinwire.transport.address import address_text, local_address, split_address

_ASKS, _ASKING_S, _ANSWER_S = 5, 2.0, 2.0
_CHECK_S = 5.0
_CONNECT_S, _AT_ONCE, _REACH_S = 1.5, 32, 10.0
_PROBE_NBYTES, _TIME_NBYTES = 1 << 20, 1 << 10
_RATE_S, _METHOD_S = 30.0, 20.0
# An object store refuses what was signed by a clock that is 15 minutes off.
_CLOCK_S = 300.0
_TCP_INFO_NBYTES, _SENT_AGAIN_AT, _SEGMENTS_AT = 256, 100, 136


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
    for name, check in {"name": checks.name, "registry": checks.registry}.items():
        finding = examine(name, check)
        yield finding
        if finding.status != "ok":
            rest = "clock, lighthouse, rate, method, inbound, peers"
            yield Finding(name="the rest", status="warn", found=f"not established: {rest}")
            return
    others = {
        "clock": checks.clock,
        "lighthouse": checks.lighthouse,
        "rate": checks.rate,
        "method": checks.method,
        "inbound": checks.inbound,
        "peers": checks.peers,
    }
    limits_s = {"rate": _RATE_S, "method": _METHOD_S}
    for name, check in others.items():
        yield examine(name, check, limit_s=limits_s.get(name, _CHECK_S))


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
        self._rates_bits_per_s: tuple[float, float] | tuple[()] = ()

    def name(self) -> Finding:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            do = "correct the name, or pass the lighthouse's numeric address"
            return Finding(name="name", status="fail", found=f"{self._host}: {error}", do=do)
        addresses = sorted({str(entry[4][0]) for entry in found})
        itself = ", which is this machine itself" if _is_loopback(addresses[0]) else ""
        text = f"{self._host} is {', '.join(addresses)}{itself}"
        return Finding(name="name", status="ok", found=text)

    def registry(self) -> Finding:
        if self._token is None:
            return self._registry_unasked()
        try:
            self._facts = self._ask("/peers")
            self._time_it()
        except (ExchangeError, MismatchError) as error:
            do = error.do
            if isinstance(error, ExchangeError):
                do = f"start thinwire lighthouse there, or let TCP port {self._port} through"
            found = f"{self._address}: {error.because}"
            return Finding(name="registry", status="fail", found=found, do=do)
        found = f"{self._address} answers in {1000 * self._round_trip_s:.1f} ms"
        return Finding(name="registry", status="ok", found=found)

    def clock(self) -> Finding:
        ahead_s, within_s = self._ahead_s, self._round_trip_s / 2
        if ahead_s is None:
            found = "unknown: the lighthouse does not tell its time, as that of another version"
            return Finding(name="clock", status="ok", found=found)
        word = "ahead of" if ahead_s > 0 else "behind"
        off = f"{abs(ahead_s):.3f} s" if abs(ahead_s) < 60 else duration_text(abs(ahead_s))
        found = f"{off} {word} the lighthouse, give or take {within_s:.3f} s"
        if abs(ahead_s) <= _CLOCK_S:
            return Finding(name="clock", status="ok", found=f"{found}; no part of a run needs it")
        found += "; a run does not need it, but object stores and certificates do"
        do = "set the clock that is wrong: a store refuses requests that are 15 min off"
        return Finding(name="clock", status="warn", found=found, do=do)

    def lighthouse(self) -> Finding:
        try:
            open_stream(self._dialer, self._address, "lighthouse", timeout_s=_ANSWER_S).close()
        except (OSError, ThinwireError) as error:
            do = "start thinwire lighthouse there again"
            return Finding(name="lighthouse", status="fail", found=_reason_of(error), do=do)
        return Finding(name="lighthouse", status="ok", found="takes connections behind its port")

    def rate(self) -> Finding:
        """Bits a second each way, of some MiB within one connection each."""
        up_s, lost = self._send_probe()
        down_s = self._receive_probe()
        up, down = 8 * _PROBE_NBYTES / up_s, 8 * _PROBE_NBYTES / down_s
        self._rates_bits_per_s = up, down
        found = f"{rate_text(up)} to the lighthouse, {rate_text(down)} from it{lost}"
        return Finding(name="rate", status="ok", found=found)

    def method(self) -> Finding:
        """Which method fits the rates; latency is that of one way."""
        up, down = self._rates_bits_per_s or (None, None)
        link = measured_link(up, down, self._round_trip_s / 2)
        fields: Mapping[str, str] = {}
        # A registry of an earlier version does not tell.
        with suppress(ExchangeError, MismatchError, AttributeError, KeyError, TypeError):
            told = self._ask("/description")["description"]
            fields = {str(key): str(text) for key, text in told.items()}
        run = RunDescription(fields=fields, workers=len(self._facts["peers"]))
        return method_finding(link, self._planned, run)

    def _send_probe(self) -> tuple[float, str]:
        """Seconds that some MiB take to the lighthouse, and what share had to be sent again."""
        body = os.urandom(_PROBE_NBYTES)
        with self._connected() as (connection, stream):
            start_s = time.perf_counter()
            connection.request("POST", "/discard", body=body)
            stream.recv(1)  # of an answer that says that all has arrived
            taken_s = time.perf_counter() - start_s
            if not hasattr(socket, "TCP_INFO"):
                return taken_s, ""
            # Linux's struct tcp_info: all segments sent, and of these those sent once more.
            info = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
        if len(info) < _SEGMENTS_AT + 4:
            return taken_s, ""
        (again,), (segments,) = (
            struct.unpack_from("=I", info, at) for at in (_SENT_AGAIN_AT, _SEGMENTS_AT)
        )
        return taken_s, f", {100 * again / max(1, segments):.1f} % of packets sent again"

    def _receive_probe(self) -> float:
        """Seconds that as many take from there."""
        with self._connected() as (connection, _):
            start_s = time.perf_counter()
            connection.request("GET", "/noise")
            received = connection.getresponse().read(_PROBE_NBYTES)
            taken_s = time.perf_counter() - start_s
        if len(received) < _PROBE_NBYTES:
            raise ExchangeError(
                f"measure the rate from {self._address}",
                because=f"it sent {len(received)} bytes of {_PROBE_NBYTES}",
                do="run the same thinwire version there",
            )
        return taken_s

    @contextmanager
    def _connected(self) -> Generator[tuple[http.client.HTTPConnection, ssl.SSLSocket]]:
        """A connection on which no request was made: what it takes to connect is not timed."""
        with closing(http.client.HTTPConnection("run")) as connection:
            stream = self._dialer.connect(self._address, timeout_s=_REACH_S)
            connection.sock = stream
            yield connection, stream

    def inbound(self) -> Finding:
        local = local_address(self._host)
        with socket.create_server((local, 0)) as listener:
            port = listener.getsockname()[1]
            told = self._ask("/probe", {"host": local, "port": port})
            reached = told["reached"] and _was_connected(listener)
        where = address_text(local, port)
        if reached:
            found = f"the lighthouse's machine reaches {where}: workers there connect directly"
            return Finding(name="inbound", status="ok", found=found)
        why = told["why"] or "it reached another machine that has this address"
        found = f"not reached at {where} ({why}): what is sent here goes by way of the lighthouse"
        return Finding(name="inbound", status="ok", found=found)

    def peers(self) -> Finding:
        addresses = {p["identity"]: p["address"] for p in self._facts["peers"]}
        if not addresses:
            return Finding(name="peers", status="ok", found="no workers yet")
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            whys = list(pool.map(self._reach, addresses.values()))
        missed = [
            f"{identity} at {address}: {why}"
            for (identity, address), why in zip(addresses.items(), whys, strict=True)
            if why
        ]
        relayed = sum(map(self._dialer.is_relayed, addresses.values()))
        found = f"{len(addresses) - relayed} reached directly, {relayed} by way of the lighthouse"
        if not missed:
            return Finding(name="peers", status="ok", found=found)
        found = f"{len(missed)} of {len(addresses)} not reached: {'; '.join(missed)}"
        do = "see whether these still run (thinwire status)"
        return Finding(name="peers", status="fail", found=found, do=do)

    def _reach(self, address: str) -> str:
        """Why a worker is not reached; empty if it is."""
        try:
            self._dialer.connect(address, timeout_s=_REACH_S).close()
        except (OSError, ThinwireError) as error:
            return _reason_of(error)
        return ""

    def _ask(self, path: str, body: Any = None) -> Any:
        return send_request(self._dialer, self._address, path, body, timeout_s=_REACH_S).json()

    def _registry_unasked(self) -> Finding:
        why = _connect(self._host, self._port)
        if why:
            do = f"start thinwire lighthouse there, or let TCP port {self._port} through"
            return Finding(name="registry", status="fail", found=f"{self._address}: {why}", do=do)
        found = f"{self._address} takes connections; no token to ask more with"
        return Finding(name="registry", status="warn", found=found)

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
            told_s = _time_in(body)
            trips.append((took_s, None if told_s is None else sent_s + took_s / 2 - told_s))
        # The shortest was delayed least, and says most about the clock.
        self._round_trip_s, self._ahead_s = min(trips, key=lambda trip: trip[0])


def _time_in(body: bytes) -> float | None:
    """The time in an answer to /time; None in that of a server that does not tell it."""
    try:
        told_s = float(json.loads(body)["time"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return told_s if math.isfinite(told_s) else None


def _connect(host: str, port: int) -> str:
    """Why no connection can be made; empty if it can."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return str(error) or type(error).__name__
    return ""


def _was_connected(listener: socket.socket) -> bool:
    listener.settimeout(0.5)
    try:
        listener.accept()[0].close()
    except TimeoutError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address).is_loopback


def _reason_of(error: Exception) -> str:
    return error.because if isinstance(error, ThinwireError) else str(error)
