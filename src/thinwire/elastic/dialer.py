"""Connections to the servers of a run: directly, or by way of the lighthouse's machine."""

import contextlib
import socket
import ssl
import threading
import time

from thinwire.errors import ExchangeError, MismatchError, ThinwireError
from thinwire.security.tls import client_context
from thinwire.security.token import Token
from thinwire.transport.address import split_address

_DIRECT_S = 2.0
_RELAYED_S = 600.0
_LONGEST_ANSWER = 4096


class Dialer:
    """Connects to servers that know the run's token, over TLS.

    A worker that cannot be reached directly, as behind a router, is reached through the connection
    that it keeps to the relay; the direct way is tried again after ten minutes.

    Args:
        token: of the run.
        relay: HOST:PORT of the lighthouse; without it only direct connections are made.
    """

    def __init__(self, token: Token, relay: str = "") -> None:
        self.token, self._relay = token, relay
        self._tls = client_context(token)
        self._relayed_until_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def connect(self, address: str, *, timeout_s: float) -> ssl.SSLSocket:
        """A connection to the server at HOST:PORT.

        Args:
            address: of the server.
            timeout_s: for all of it, and afterwards without a byte.

        Raises:
            OSError: it cannot be reached.
            MismatchError: it has another token.
        """
        if not self._relay or address == self._relay:
            return self._direct(address, timeout_s)
        relayed_first, missed = self.is_relayed(address), list[str]()
        for relayed in (relayed_first, not relayed_first):
            try:
                if relayed:
                    target = f"worker/{address}"
                    stream = open_stream(self, self._relay, target, timeout_s=timeout_s)
                else:
                    stream = self._direct(address, min(timeout_s, _DIRECT_S))
            # A private address may be that of a stranger's machine here: another token, too.
            except (OSError, ExchangeError, MismatchError) as error:
                missed.append(error.because if isinstance(error, ThinwireError) else str(error))
                continue
            with self._lock:
                if not relayed:
                    self._relayed_until_s.pop(address, None)
                elif not relayed_first:
                    self._relayed_until_s[address] = time.monotonic() + _RELAYED_S
            return stream
        raise OSError(f"{missed[0]}, and {missed[1]} (directly, and by way of {self._relay})")

    def is_relayed(self, address: str) -> bool:
        """Whether the direct way to a server was tried in vain a short time ago."""
        with self._lock:
            return time.monotonic() < self._relayed_until_s.get(address, 0.0)

    def _direct(self, address: str, timeout_s: float) -> ssl.SSLSocket:
        host, port = split_address(address)
        until_s = time.monotonic() + timeout_s
        plain = socket.create_connection((host, port), timeout=timeout_s)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.settimeout(max(0.1, until_s - time.monotonic()))
            stream = self._tls.wrap_socket(plain)
        except ssl.SSLCertVerificationError as error:
            plain.close()
            raise _another_token(address) from error
        except BaseException:
            plain.close()
            raise
        stream.settimeout(timeout_s)
        return stream


def open_stream(dialer: Dialer, address: str, target: str, *, timeout_s: float) -> ssl.SSLSocket:
    """A stream of bytes to `target` of the server at `address`.

    Args:
        dialer: connects.
        address: HOST:PORT of the server.
        target: what a request CONNECT names there.
        timeout_s: for all of it, and afterwards without a byte.

    Raises:
        OSError: the server cannot be reached.
        ExchangeError: it has no such target, or cannot reach it.
        MismatchError: it has another token.
    """
    stream = dialer.connect(address, timeout_s=timeout_s)
    try:
        stream.sendall(f"CONNECT {target} HTTP/1.0\r\n\r\n".encode())
        try:
            head = _read_head(stream)
        except ssl.SSLError as error:
            if not knows_another_token(error):
                raise
            raise _another_token(address) from error
        if head.split()[1:2] != [b"200"]:
            raise ExchangeError(
                f"connect to {target} of {address}",
                because=stream.recv(_LONGEST_ANSWER).decode(errors="replace") or "it hung up",
                do="see whether it runs, and whether this is its address (thinwire status)",
            )
    except BaseException:
        with contextlib.suppress(OSError):
            stream.close()
        raise
    return stream


def knows_another_token(error: ssl.SSLError) -> bool:
    """Whether a connection failed because its other end does not take this run's certificate.

    >>> knows_another_token(ssl.SSLEOFError("it hung up"))
    False
    """
    reason = getattr(error, "reason", None) or ""
    return "UNKNOWN_CA" in reason or "CERTIFICATE" in reason


def _read_head(stream: ssl.SSLSocket) -> bytes:
    """The head of an answer, and no byte more: what follows belongs to the stream."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        piece = stream.recv(1)
        if not piece or len(head) > _LONGEST_ANSWER:
            raise OSError("it hung up before it answered")
        head += piece
    return head


def _another_token(address: str) -> MismatchError:
    return MismatchError(
        f"connect to {address}",
        because="it has another token than this run's",
        do="give the lighthouse and all workers the same THINWIRE_TOKEN, and see that this is the "
        "lighthouse's address",
    )
