"""Checks of the network from this machine to the lighthouse of a run, and to its workers."""

import ipaddress
import os
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

from thinwire.doctor.finding import Finding, Status, examine
from thinwire.elastic.signed_http import send_request
from thinwire.elastic.token import Token
from thinwire.errors import ExchangeError, MismatchError
from thinwire.transport.address import (
    address_text,
    interface_addresses,
    local_address,
    split_address,
)

__all__ = ["network_findings"]

_ASKS, _ASKING_S, _ANSWER_S = 5, 2.0, 2.0
_CONNECT_S, _AT_ONCE = 1.5, 32
_CLOCK_WARN_S, _CLOCK_FAIL_S = 1.0, 60.0
_INTERFACE = "GLOO_SOCKET_IFNAME"
_OPEN = (
    "let incoming TCP connections from the other machines through, on all ports from 1024 up; "
    "behind NAT, join the machines by WireGuard"
)


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
            rest = "clock, lighthouse, route, gloo, inbound, peers"
            yield Finding(name="the rest", status="warn", found=f"not established: {rest}")
            return
    others = {
        "clock": checks.clock,
        "lighthouse": checks.lighthouse,
        "route": checks.route,
        "gloo": checks.gloo,
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
            self._time_it(self._token)
            self._facts = send_request(
                self._token, self._address, "/peers", timeout_s=_ANSWER_S
            ).json()
        except (ExchangeError, MismatchError) as error:
            do = "set this machine's clock (NTP)" if "clock" in error.because else error.do
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
        if abs(ahead_s) <= _CLOCK_WARN_S:
            return Finding(name="clock", status="ok", found=found)
        status: Status = "fail" if abs(ahead_s) > _CLOCK_FAIL_S else "warn"
        return Finding(name="clock", status=status, found=found, do="set both clocks (NTP)")

    def lighthouse(self) -> Finding:
        port = int(self._facts["lighthouse_port"])
        where, why = address_text(self._host, port), _connect(self._host, port)
        if not why:
            return Finding(name="lighthouse", status="ok", found=f"{where} takes connections")
        do = f"let TCP port {port} of the lighthouse's machine through"
        return Finding(name="lighthouse", status="fail", found=f"{where}: {why}", do=do)

    def route(self) -> Finding:
        local = local_address(self._host)
        interface = _interface_of(local)
        found = f"from {local} on {interface}"
        chosen = os.environ.get(_INTERFACE)
        if chosen and chosen != interface:
            do = f"export {_INTERFACE}={interface}"
            found += f", but {_INTERFACE} is {chosen}"
            return Finding(name="route", status="warn", found=found, do=do)
        remote = socket.gethostbyname(self._host)
        if _is_loopback(local) and not _is_loopback(remote):
            do = f"export {_INTERFACE}= the interface that other machines reach"
            return Finding(name="route", status="warn", found=found, do=do)
        return Finding(name="route", status="ok", found=found)

    def gloo(self) -> Finding:
        local = local_address(self._host)
        why = _gloo_refuses(local)
        if why:
            do = f"export {_INTERFACE}= an interface of this machine that others reach"
            found = f"cannot listen on {local}: {why}"
            return Finding(name="gloo", status="fail", found=found, do=do)
        listens = _gloo_address()
        if listens != local and not (_is_loopback(listens) and _is_loopback(local)):
            found = (
                f"listens on {listens or 'no address'}, and others reach this machine at {local}"
            )
            do = f"export {_INTERFACE}={_interface_of(local)}"
            return Finding(name="gloo", status="warn", found=found, do=do)
        return Finding(name="gloo", status="ok", found=f"can listen on {local}")

    def inbound(self) -> Finding:
        assert self._token is not None
        local = local_address(self._host)
        with socket.create_server((local, 0)) as listener:
            port = listener.getsockname()[1]
            asked = {"host": local, "port": port}
            asked_s = 2 * _ANSWER_S
            told = send_request(
                self._token, self._address, "/probe", asked, timeout_s=asked_s
            ).json()
            reached = told["reached"] and _was_connected(listener)
        where = address_text(local, port)
        if reached:
            found = f"the lighthouse's machine reaches {where}"
            return Finding(name="inbound", status="ok", found=found)
        why = told["why"] or "it reached another machine that has this address"
        found = f"the lighthouse's machine does not reach {where}: {why}"
        return Finding(name="inbound", status="fail", found=found, do=_OPEN)

    def peers(self) -> Finding:
        addresses = {p["identity"]: split_address(p["address"]) for p in self._facts["peers"]}
        if not addresses:
            return Finding(name="peers", status="ok", found="no workers yet")
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            whys = list(pool.map(lambda a: _connect(*a), addresses.values()))
        missed = [
            f"{identity} at {address_text(*address)}: {why}"
            for (identity, address), why in zip(addresses.items(), whys, strict=True)
            if why
        ]
        if not missed:
            return Finding(name="peers", status="ok", found=f"{len(addresses)} reached")
        found = f"{len(missed)} of {len(addresses)} not reached: {'; '.join(missed)}"
        do = f"on the machines of those: {_OPEN}"
        return Finding(name="peers", status="fail", found=found, do=do)

    def _registry_unasked(self) -> Finding:
        why = _connect(self._host, self._port)
        if why:
            do = f"start thinwire lighthouse there, or let TCP port {self._port} through"
            return Finding(name="registry", status="fail", found=f"{self._address}: {why}", do=do)
        found = f"{self._address} takes connections; no token to ask more with"
        return Finding(name="registry", status="warn", found=found)

    def _time_it(self, token: Token) -> None:
        trips: list[tuple[float, float]] = []
        until_s = time.monotonic() + _ASKING_S
        while len(trips) < _ASKS and (not trips or time.monotonic() < until_s):
            sent_s, start_s = time.time(), time.perf_counter()
            told = send_request(token, self._address, "/time", timeout_s=_ANSWER_S).json()
            took_s = time.perf_counter() - start_s
            trips.append((took_s, sent_s + took_s / 2 - float(told["time"])))
        # The shortest round trip was delayed least, and says most about the clock.
        self._round_trip_s, self._ahead_s = min(trips)


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


def _interface_of(address: str) -> str:
    found = [name for name, its in interface_addresses().items() if its == address]
    loopback = "lo" if _is_loopback(address) else "an unknown interface"
    return found[0] if found else loopback


def _is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address).is_loopback


def _gloo_refuses(address: str) -> str:
    from torch.distributed import ProcessGroupGloo

    try:
        ProcessGroupGloo.create_device(hostname=address)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _gloo_address() -> str:
    """Where gloo listens: on the interface it was given, or else at the machine's name."""
    chosen = os.environ.get(_INTERFACE)
    if chosen:
        return interface_addresses().get(chosen, "")
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
