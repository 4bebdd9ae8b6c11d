"""Checks of the network from this machine to the lighthouse of a run, and to its workers."""

import http.client
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, final

from thinwire.doctor.finding import Finding, examine
from thinwire.elastic.dialer import Dialer, open_stream
from thinwire.elastic.https import send_request
from thinwire.errors import ExchangeError, MismatchError, ThinwireError
from thinwire.security.token import Token
from thinwire.transport.address import address_text, local_address, split_address

__all__ = ["network_findings"]

_ASKS, _ASKING_S, _ANSWER_S = 5, 2.0, 2.0
_CONNECT_S, _AT_ONCE, _REACH_S = 1.5, 32, 10.0
_PROBE_NBYTES = 1 << 20
_TCP_INFO_NBYTES, _SENT_AGAIN_AT, _SEGMENTS_AT = 256, 100, 136


def network_findings(address: str, token: Token | None) -> Iterator[Finding]:
    """What each check finds, one after the other; no check takes more than 5 s.

    Args:
        address: HOST:PORT that `thinwire lighthouse` printed.
        token: of the run; without it only names and ports can be checked.

    Raises:
        ConfigurationError: `address` is no HOST:PORT.
    """
    checks = _NetworkChecks(address, token)
    for name, check in {"name": checks.name, "registry": checks.registry}.items():
        finding = examine(name, check)
        yield finding
        if finding.status != "ok":
            rest = "clock, lighthouse, rate, inbound, peers"
            yield Finding(name="the rest", status="warn", found=f"not established: {rest}")
            return
    others = {
        "clock": checks.clock,
        "lighthouse": checks.lighthouse,
        "rate": checks.rate,
        "inbound": checks.inbound,
        "peers": checks.peers,
    }
    for name, check in others.items():
        yield examine(name, check)


@final
class _NetworkChecks:
    """Checks of one address; `registry` comes before the others, which use what it was told."""

    def __init__(self, address: str, token: Token | None) -> None:
        self._address, self._token = address, token
        if token is not None:
            self._dialer = Dialer(token, address)
        self._host, self._port = split_address(address)
        self._facts: Mapping[str, Any] = {}
        self._round_trip_s = self._ahead_s = 0.0

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
            self._time_it()
            self._facts = self._ask("/peers")
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
        word = "ahead of" if ahead_s > 0 else "behind"
        found = f"{abs(ahead_s):.3f} s {word} the lighthouse, give or take {within_s:.3f} s"
        return Finding(name="clock", status="ok", found=f"{found}; no part of a run needs it")

    def lighthouse(self) -> Finding:
        try:
            open_stream(self._dialer, self._address, "lighthouse", timeout_s=_ANSWER_S).close()
        except (OSError, ThinwireError) as error:
            do = "start thinwire lighthouse there again"
            return Finding(name="lighthouse", status="fail", found=_reason_of(error), do=do)
        return Finding(name="lighthouse", status="ok", found="takes connections behind its port")

    def rate(self) -> Finding:
        """Bytes a second each way, of a few MiB within one connection each."""
        up_s, lost = self._send_probe()
        down_s = self._timed(lambda: self._ask("/noise"))
        mbit = 8e-6 * _PROBE_NBYTES
        up, down = f"{mbit / up_s:.1f}Mbit/s", f"{mbit / down_s:.1f}Mbit/s"
        found = f"{up} to the lighthouse, {down} from it{lost}"
        link = f"--up {up} --down {down} --latency {1000 * self._round_trip_s / 2:.0f}ms"
        do = f"ask which method fits it: thinwire plan {link} (and your model, workers, step time)"
        return Finding(name="rate", status="ok", found=found, do=do)

    def _send_probe(self) -> tuple[float, str]:
        """Seconds that some MiB take to the lighthouse, and what share had to be sent again."""
        body = os.urandom(_PROBE_NBYTES)
        with closing(http.client.HTTPConnection("run")) as connection:
            stream = self._dialer.connect(self._address, timeout_s=_REACH_S)
            connection.sock = stream
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
        answer = send_request(self._dialer, self._address, path, body, timeout_s=_REACH_S)
        return answer.json() if path != "/noise" else answer.body

    def _timed(self, ask: Callable[[], object]) -> float:
        start_s = time.perf_counter()
        ask()
        # Connecting costs three round trips and says nothing of the rate.
        return max(1e-6, time.perf_counter() - start_s - 3 * self._round_trip_s)

    def _registry_unasked(self) -> Finding:
        why = _connect(self._host, self._port)
        if why:
            do = f"start thinwire lighthouse there, or let TCP port {self._port} through"
            return Finding(name="registry", status="fail", found=f"{self._address}: {why}", do=do)
        found = f"{self._address} takes connections; no token to ask more with"
        return Finding(name="registry", status="warn", found=found)

    def _time_it(self) -> None:
        trips: list[tuple[float, float]] = []
        until_s = time.monotonic() + _ASKING_S
        while len(trips) < _ASKS and (not trips or time.monotonic() < until_s):
            sent_s, start_s = time.time(), time.perf_counter()
            told = self._ask("/time")
            took_s = time.perf_counter() - start_s
            trips.append((took_s, sent_s + took_s / 2 - float(told["time"])))
        # The shortest was delayed least, and says most about the clock. Connecting, TLS and the
        # request take a round trip each.
        whole_s, self._ahead_s = min(trips)
        self._round_trip_s = whole_s / 3


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
