"""An HTTP server that strangers may send anything to: bounded in threads, bytes and seconds.

With the run's TLS a stranger gets no further than the handshake, of which every host has a share:
of more at once than that the oldest is given up, so that no member waits for it. A request CONNECT
makes the connection a stream of bytes to the target that it names.
"""

import contextlib
import io
import socket
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, TypeAlias

from thinwire.errors import ThinwireError

LARGEST_REQUEST = 4 << 20
_MOST_AT_ONCE = 128
_MOST_WITHIN_TLS = 4096
_MOST_HANDSHAKES = 256  # of one host; many workers may be behind one router
_HANDSHAKE_S = 10.0
_REQUEST_S = 60.0
# For one piece to leave: 256 KiB, so a link that takes 9 KB/s is fast enough.
_SEND_S = 30.0
_PIECE = 256 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpRequest:
    """One request, of which nothing is checked but its length.

    Args:
        method: GET or POST.
        path: as it was sent.
        body: in full, unless there is a fault.
        fault: an HTTP status and a reason if the request could not be read.
    """

    method: str
    path: str
    body: bytes = b""
    fault: tuple[int, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpResponse:
    """The answer to one request.

    Args:
        status: of HTTP.
        headers: besides the length.
        length: bytes of all pieces.
        pieces: sent one after another; a generator of them runs on once the last has left.
    """

    status: int
    headers: Mapping[str, str]
    length: int
    pieces: Iterable[bytes | memoryview]


Respond: TypeAlias = Callable[[HttpRequest], HttpResponse]
"""Answers a request; called in a thread of its own."""

OpenTunnel: TypeAlias = Callable[[str], Callable[[socket.socket], None]]
"""What a request CONNECT is for: given what follows the slash, returns what to do with the stream,
in the same thread. A `ThinwireError` or an `OSError` refuses it."""


def read_length(text: str | None) -> int:
    """The number in a Content-Length header.

    Raises:
        ValueError: it is missing or not a number.

    >>> read_length("12")
    12
    """
    if text is None:
        raise ValueError("it does not say how many bytes it has")
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise ValueError(f"it announces {text[:20]!r} bytes")
    return int(text)


class HttpServer(ThreadingHTTPServer):
    """Calls `respond` for every request; start it with `serve_forever`.

    Args:
        host: address to listen on: a name, IPv4 or IPv6, in brackets or not; "" is all of IPv4.
        port: 0 takes any that is free.
        respond: see `Respond`.
        largest_request: bytes of a body; a request that announces more is answered unread.
        request_s: seconds within which a request must have arrived; a minute by default.
        tls: of the side that is connected to; by default what travels is plain.
        tunnels: what CONNECT may name: the part before the slash.
        on_refusal: called with host and reason if a handshake fails.

    Raises:
        OSError: the port is taken, or this machine does not have the address.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        host: str,
        port: int,
        respond: Respond,
        *,
        largest_request: int = LARGEST_REQUEST,
        request_s: float | None = None,
        tls: ssl.SSLContext | None = None,
        tunnels: Mapping[str, OpenTunnel] | None = None,
        on_refusal: Callable[[str, str], object] | None = None,
    ) -> None:
        self.respond, self.tunnels = respond, dict(tunnels or {})
        self.largest_request = largest_request
        self.request_s = request_s or _REQUEST_S
        self._tls, self._on_refusal = tls, on_refusal
        self._free_threads = threading.BoundedSemaphore(_MOST_WITHIN_TLS if tls else _MOST_AT_ONCE)
        self._handshakes: dict[str, deque[socket.socket]] = {}
        self._lock = threading.Lock()
        found = socket.getaddrinfo(
            host.strip("[]") or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self.address_family, *_, address = found[0]
        super().__init__(address, _HttpConnection)  # pyright: ignore[reportArgumentType]

    def server_bind(self) -> None:
        """Bind; unlike HTTPServer's, it does not ask a name server for this machine's name."""
        if self.address_family == socket.AF_INET6:
            with contextlib.suppress(OSError):  # "::" then takes IPv4, too, where there is both
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle the request in a thread; close the connection if too many are being served."""
        if not self._free_threads.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self._free_threads.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle the request, then let the next one have the thread's place."""
        try:
            if self._tls is not None and not isinstance(request, ssl.SSLSocket):
                request = self._greet(self._tls, request, str(client_address[0]))
            if request is not None:
                super().process_request_thread(request, client_address)
        finally:
            self._free_threads.release()

    def _greet(
        self, tls: ssl.SSLContext, request: socket.socket, host: str
    ) -> ssl.SSLSocket | None:
        """The connection within TLS; None if its other end does not belong here."""
        with self._lock:
            waiting = self._handshakes.setdefault(host, deque())
            if len(waiting) >= _MOST_HANDSHAKES:
                with contextlib.suppress(OSError):
                    # Not SSLSocket's own, which takes it from under the thread that shakes hands.
                    socket.socket.shutdown(waiting.popleft(), socket.SHUT_RDWR)
            waiting.append(request)
        stream = request
        try:
            request.getpeername()  # of one that has been reset, ssl leaves an unclosed socket
            stream = wrapped = tls.wrap_socket(
                request, server_side=True, do_handshake_on_connect=False
            )
            with self._lock:
                # A ValueError if it was given up meanwhile: then nothing could shut it down.
                waiting[waiting.index(request)] = wrapped
            wrapped.settimeout(_HANDSHAKE_S)
            wrapped.do_handshake()
        except (OSError, ValueError) as error:
            stream.close()
            if self._on_refusal is not None:
                self._on_refusal(host, _reason_of(error))
            return None
        finally:
            with self._lock:
                with contextlib.suppress(ValueError):
                    waiting.remove(stream)
                if not waiting:
                    self._handshakes.pop(host, None)
        return wrapped

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors in this code, and nothing about a connection that is closed or stalls."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _HttpConnection(BaseHTTPRequestHandler):
    server: HttpServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.0"
    # Header and body are written apart: Nagle's algorithm would delay the body until the header
    # is acknowledged.
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(
            _DeadlineReader(self.connection, time.monotonic() + self.server.request_s)
        )

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_CONNECT(self) -> None:
        kind, _, rest = self.path.partition("/")
        open_tunnel = self.server.tunnels.get(kind)
        try:
            if open_tunnel is None:
                raise OSError(f"there is no {kind[:100]!r} to connect to here")
            run = open_tunnel(rest)
        except (ThinwireError, OSError, ValueError) as error:
            why = error.because if isinstance(error, ThinwireError) else str(error)
            self.send_response_only(502)
            self.send_header("Content-Length", str(len(why.encode())))
            self.end_headers()
            self.wfile.write(why.encode())
            return
        # A client sends nothing before the answer, so that nothing is left in `rfile`.
        self.send_response_only(200)
        self.end_headers()
        self.connection.settimeout(None)
        run(self.connection)

    def log_message(self, format: str, *args: Any) -> None:
        del format, args  # the handler of a request reports what it refuses

    def _serve(self) -> None:
        response = self.server.respond(self._receive())
        self.connection.settimeout(_SEND_S)
        self.send_response_only(response.status)
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(response.length))
        self.end_headers()
        for piece in response.pieces:
            for start in range(0, len(piece), _PIECE):
                self.wfile.write(piece[start : start + _PIECE])

    def _receive(self) -> HttpRequest:
        body, fault, largest = b"", None, self.server.largest_request
        least = "0" if self.command == "GET" else None
        try:
            length = read_length(self.headers.get("Content-Length", least))
        except ValueError as error:
            length, fault = 0, (400, str(error))
        if length > largest:
            fault = 413, f"{length} bytes are more than {largest}"
        elif length:
            body = self.rfile.read(length)
            if len(body) < length:
                fault = 400, f"{len(body)} bytes of {length} arrived"
        return HttpRequest(method=self.command, path=self.path, body=body, fault=fault)


class _DeadlineReader(io.RawIOBase):
    """Reads from a socket up to a moment, however slowly the bytes come."""

    def __init__(self, connection: socket.socket, until_s: float) -> None:
        self._connection, self._until_s = connection, until_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


def _reason_of(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it finished no handshake in {_HANDSHAKE_S:g} s"
    if isinstance(error, ssl.SSLError):
        known = {
            "CERTIFICATE_VERIFY_FAILED": "it has another token",
            "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no token",
            "TLSV1_ALERT_UNKNOWN_CA": "it has another token",
        }
        return known.get(error.reason or "", f"it does not speak this run's TLS ({error.reason})")
    return f"it broke off its handshake ({error})"
