"""Requests and answers over HTTP that both sides sign; nothing in them is secret or unpickled.

A request carries a nonce, the time and a signature over method, path, nonce, time and body; an
answer a signature over the nonce of its request, its status and body. A body is never larger than
its receiver is ready to take, which is decided by the length that was announced.
"""

import hashlib
import http.client
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias, final

from thinwire.errors import ExchangeError, MismatchError
from thinwire.membership.token import Token

__all__ = ["Answer", "Handler", "SignedServer", "ask", "ask_json", "json_answer", "request"]

_NONCE, _TIME, _SIGNATURE = "Thinwire-Nonce", "Thinwire-Time", "Thinwire-Signature"
_SKEW_S = 120.0
_LARGEST_REQUEST = 4 << 20
_NONCES = 100_000
_PIECE = 1 << 20


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An answer: an HTTP status and a body.

    >>> json_answer({"ok": True}).body
    b'{"ok": true}'
    """

    status: int = 200
    body: bytes = b""


Handler: TypeAlias = Callable[[bytes], Answer]
"""The body of a request in, the answer out; called in a thread of its own."""


def json_answer(value: Any, *, status: int = 200) -> Answer:
    """`value` as JSON."""
    return Answer(status=status, body=json.dumps(value).encode())


@final
class SignedServer:
    """Answers signed requests in threads of its own, until it is closed.

    Args:
        token: of the run.
        routes: what answers ("GET", "/path").
        host: address to listen on.
        port: 0 takes any that is free.
        on_refusal: is told the host and why when a request is not signed as it should be.

    Raises:
        OSError: the port is taken.
    """

    def __init__(
        self,
        token: Token,
        routes: Mapping[tuple[str, str], Handler],
        *,
        host: str,
        port: int = 0,
        on_refusal: Callable[[str, str], None] | None = None,
    ) -> None:
        self._server = _Server((host, port), _Request)
        self._server.desk = _Desk(token, routes, on_refusal)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@final
class _Desk:
    """Checks requests and finds who answers them."""

    def __init__(
        self,
        token: Token,
        routes: Mapping[tuple[str, str], Handler],
        on_refusal: Callable[[str, str], None] | None,
    ) -> None:
        self.token, self._routes, self._on_refusal = token, routes, on_refusal
        self._seen: set[str] = set()
        self._order: deque[str] = deque()
        self._lock = threading.Lock()

    def answer(
        self, host: str, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Answer:
        refused = self._refusal(method, path, headers, body)
        if refused:
            if self._on_refusal is not None:
                self._on_refusal(host, refused)
            return json_answer({"error": refused}, status=403)
        handler = self._routes.get((method, path))
        if handler is None:
            return json_answer({"error": f"there is no {method} {path}"}, status=404)
        return handler(body)

    def _refusal(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> str:
        nonce, sent = headers.get(_NONCE, ""), headers.get(_TIME, "")
        signature = headers.get(_SIGNATURE, "")
        if not self.token.signed(signature, method, path, nonce, sent, _digest(body)):
            return "the token is another one"
        skew_s = float(sent) - time.time()
        if abs(skew_s) > _SKEW_S:
            return f"your clock is {skew_s:+.0f} s from mine"
        return "" if self._is_new(nonce) else "this request was made before"

    def _is_new(self, nonce: str) -> bool:
        with self._lock:
            if nonce in self._seen:
                return False
            self._seen.add(nonce)
            self._order.append(nonce)
            if len(self._order) > _NONCES:
                self._seen.discard(self._order.popleft())
            return True


@final
class _Server(ThreadingHTTPServer):
    daemon_threads = True
    desk: _Desk


@final
class _Request(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.0"
    timeout = 30.0

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def log_message(self, format: str, *args: Any) -> None:
        del format, args  # who was refused is told by those who refuse

    def _serve(self, method: str) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        if not 0 <= length <= _LARGEST_REQUEST:
            self.send_error(413)
            return
        headers = {key: self.headers.get(key, "") for key in (_NONCE, _TIME, _SIGNATURE)}
        host, body = self.client_address[0], self.rfile.read(length)
        answer = self.server.desk.answer(host, method, self.path, headers, body)
        status, nonce = str(answer.status), headers[_NONCE]
        signature = self.server.desk.token.sign("answer", nonce, status, _digest(answer.body))
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header(_SIGNATURE, signature)
        self.end_headers()
        view = memoryview(answer.body)
        for start in range(0, len(view), _PIECE):
            self.wfile.write(view[start : start + _PIECE])


def ask(
    token: Token,
    address: str,
    path: str,
    *,
    body: bytes | None = None,
    largest: int = 16 << 20,
    timeout_s: float = 10.0,
) -> bytes:
    """The body of the answer to a GET, or a POST of `body`.

    Args:
        token: of the run.
        address: HOST:PORT.
        path: on that server.
        body: what to post.
        largest: bytes of an answer that are taken; a longer one is refused unread.
        timeout_s: without a byte from the other side.

    Raises:
        ExchangeError: nobody answers, or not in full.
        MismatchError: the other side refuses, or does not know the token.
    """
    answer = request(token, address, path, body=body, largest=largest, timeout_s=timeout_s)
    if answer.status != 200:
        because = str(json.loads(answer.body).get("error", answer.status))
        raise _refused(address, path, because)
    return answer.body


def request(
    token: Token,
    address: str,
    path: str,
    *,
    body: bytes | None = None,
    largest: int = 16 << 20,
    timeout_s: float = 10.0,
) -> Answer:
    """The answer to a GET, or a POST of `body`, whatever its status.

    Args:
        token: of the run.
        address: HOST:PORT.
        path: on that server.
        body: what to post.
        largest: bytes of an answer that are taken; a longer one is refused unread.
        timeout_s: without a byte from the other side.

    Raises:
        ExchangeError: nobody answers, or not in full.
        MismatchError: the other side does not know the token.
    """
    method = "GET" if body is None else "POST"
    nonce, sent = secrets.token_hex(16), repr(time.time())
    signature = token.sign(method, path, nonce, sent, _digest(body or b""))
    headers = {_NONCE: nonce, _TIME: sent, _SIGNATURE: signature}
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        status, content = answer.status, _read(answer, largest)
        signature = answer.headers.get(_SIGNATURE, "")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ExchangeError(
            f"ask {address} for {path}",
            because=str(error) or type(error).__name__,
            do="check that it runs and that its port can be reached from here (thinwire doctor)",
        ) from error
    finally:
        connection.close()
    if not token.signed(signature, "answer", nonce, str(status), _digest(content)):
        raise _refused(address, path, "its answer is not signed with this run's token")
    return Answer(status=status, body=content)


def ask_json(token: Token, address: str, path: str, value: Any = None, **options: Any) -> Any:
    """`ask` with JSON both ways; posts `value` unless it is None."""
    body = None if value is None else json.dumps(value).encode()
    return json.loads(ask(token, address, path, body=body, **options))


def _read(answer: http.client.HTTPResponse, largest: int) -> bytes:
    length = int(answer.headers.get("Content-Length", "-1"))
    if not 0 <= length <= largest:
        raise ValueError(f"it announces {length} bytes and at most {largest} are taken")
    content = answer.read(length)
    if len(content) < length:
        raise ValueError(f"it sent {len(content)} bytes of {length}")
    return content


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _refused(address: str, path: str, because: str) -> MismatchError:
    return MismatchError(
        f"ask {address} for {path}",
        because=because,
        do="give the lighthouse and all workers the same THINWIRE_TOKEN, model, method and version",
    )
