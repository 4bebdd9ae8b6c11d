"""HTTP requests and answers among the members of a run; nothing in them is unpickled.

They travel within the run's TLS, directly or by way of the relay: no stranger reads, changes or
repeats one. A receiver refuses a body by its announced length if it is larger than it is ready to
take.
"""

import http.client
import io
import json
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias

from thinwire.elastic.dialer import Dialer, knows_another_token
from thinwire.elastic.http_server import (
    LARGEST_REQUEST,
    HttpRequest,
    HttpResponse,
    HttpServer,
    OpenTunnel,
    read_length,
)
from thinwire.errors import ExchangeError, ExchangeTimeout, MismatchError
from thinwire.security.tls import server_context
from thinwire.security.token import Token

_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpReply:
    """An answer to be sent: an HTTP status and a body.

    Args:
        status: of HTTP.
        body: the first part of the body, or all of it.
        more: further parts, sent from the memory that they are views of.
        on_sent: called once all of it has left.

    >>> json_answer({"ok": True}).body
    b'{"ok": true}'
    """

    status: int = 200
    body: bytes = b""
    more: Sequence[memoryview] = ()
    on_sent: Callable[[], object] = lambda: None


Handler: TypeAlias = Callable[[bytes], HttpReply]
"""The body of a request in, the answer out; called in a thread of its own. An exception is answered
with status 500 and its text."""


def json_answer(value: Any, *, status: int = 200) -> HttpReply:
    """An answer with `value` as JSON."""
    return HttpReply(status=status, body=json.dumps(value).encode())


class RunServer:
    """Answers clients that know the run's token in threads of its own, until it is closed.

    Args:
        token: of the run.
        routes: the handler of each (method, path), such as ("GET", "/path").
        host: address to listen on; IPv6 in brackets or not.
        port: 0 takes any that is free.
        on_refusal: called with host and reason when a client is refused.
        largest_request: bytes of a request; a longer one is refused unread.
        request_s: seconds within which a request must have arrived; a minute by default.
        tunnels: what streams can be opened to: the part of a target before the slash.

    Raises:
        OSError: the port is taken.
        ConfigurationError: cryptography is not installed.
    """

    def __init__(
        self,
        token: Token,
        routes: Mapping[tuple[str, str], Handler],
        *,
        host: str,
        port: int = 0,
        on_refusal: Callable[[str, str], object] | None = None,
        largest_request: int = LARGEST_REQUEST,
        request_s: float | None = None,
        tunnels: Mapping[str, OpenTunnel] | None = None,
    ) -> None:
        self._routes = routes
        self._listener = HttpServer(
            host,
            port,
            self._respond,
            largest_request=largest_request,
            request_s=request_s,
            tls=server_context(token),
            tunnels=tunnels,
            on_refusal=on_refusal,
        )
        self.port: int = self._listener.server_address[1]
        self._thread = threading.Thread(
            target=self._listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    def serve(self, stream: ssl.SSLSocket) -> None:
        """Answer the request that comes by `stream`, whose other end knows the token."""
        self._listener.process_request(stream, ("the relay", 0))

    def close(self) -> None:
        """Stop answering; answers that are being sent go on."""
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()

    def _respond(self, request: HttpRequest) -> HttpResponse:
        answer = self._answer(request)
        parts = (memoryview(answer.body), *answer.more)

        def pieces() -> Any:
            yield from parts
            answer.on_sent()

        length = sum(map(len, parts))
        return HttpResponse(status=answer.status, headers={}, length=length, pieces=pieces())

    def _answer(self, request: HttpRequest) -> HttpReply:
        if request.fault is not None:
            status, why = request.fault
            return json_answer({"error": why}, status=status)
        handler = self._routes.get((request.method, request.path))
        if handler is None:
            missing = f"there is no {request.method} {request.path[:100]} here"
            return json_answer({"error": missing}, status=404)
        try:
            return handler(request.body)
        except Exception as error:
            why = f"it failed with {type(error).__name__}: {error}"
            return json_answer({"error": why}, status=500)


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpAnswer:
    """An answer that was received.

    Args:
        status: of HTTP.
        body: empty where it was written to a file.
        source: where it came from, for error messages.
    """

    status: int
    body: bytes
    source: str

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            ExchangeError: it is not JSON.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise ExchangeError(
                f"ask {self.source}",
                because=f"its answer is not JSON: {error}",
                do="run the same thinwire version on all workers",
            ) from error


def send_request(
    dialer: Dialer,
    address: str,
    path: str,
    body: Any = None,
    *,
    largest: int = 16 << 20,
    timeout_s: float = 10.0,
    accept: Sequence[int] = (200,),
    into: BinaryIO | None = None,
) -> HttpAnswer:
    """The answer to a GET, or to a POST of `body`.

    Memory grows with what arrives, up to `largest`.

    Args:
        dialer: connects, with the run's token.
        address: HOST:PORT, or [HOST]:PORT for IPv6.
        path: on that server.
        body: bytes, or a memoryview of bytes, or anything else as JSON; None makes it a GET. More
            than 4 MiB are refused unread where the server does not say that it takes them.
        largest: bytes of an answer that are taken; a longer one is refused unread.
        timeout_s: without a byte from the other side.
        accept: HTTP statuses that are returned; others raise.
        into: an empty file, where the body is written instead of being returned.

    Raises:
        ExchangeError: there is no answer, or it is incomplete, or the other side failed.
        MismatchError: the other side refuses, or does not know the token.
    """
    is_raw = body is None or isinstance(body, bytes | memoryview)
    raw = body if is_raw else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    content = io.BytesIO() if into is None else into
    try:
        with closing(http.client.HTTPConnection("run")) as connection:
            connection.sock = dialer.connect(address, timeout_s=timeout_s)
            connection.request(method, path, body=raw)
            answer = connection.getresponse()
            _receive(answer, largest, content)
    except TimeoutError as error:
        because = f"no byte came from there for {timeout_s:g} s"
        raise _failed(address, path, because, ExchangeTimeout) from error
    except ssl.SSLError as error:
        if knows_another_token(error):
            why = "it does not take this token: it has another one"
            raise _refused(address, path, {"error": why}) from error
        raise _failed(address, path, f"it does not speak TLS as a run does ({error})") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _failed(address, path, str(error) or type(error).__name__) from error
    if answer.status not in accept:
        content.seek(0)
        raise _not_accepted(address, path, answer.status, content.read())
    received = content.getvalue() if isinstance(content, io.BytesIO) else b""
    return HttpAnswer(status=answer.status, body=received, source=f"{address} for {path}")


def _receive(answer: http.client.HTTPResponse, largest: int, content: BinaryIO) -> None:
    """Write the body of `answer` to `content`."""
    length = read_length(answer.headers.get("Content-Length"))
    if not 0 <= length <= largest:
        raise ValueError(f"it announces {length} bytes and at most {largest} are taken")
    received = 0
    scratch = memoryview(bytearray(min(_PIECE, length)))
    while received < length:
        count = answer.readinto(scratch[: length - received])
        if not count:
            raise ValueError(f"it sent {received} bytes of {length}")
        content.write(scratch[:count])
        received += count


def _not_accepted(address: str, path: str, status: int, content: bytes) -> Exception:
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or "error" not in answer:
        answer = {"error": f"status {status}"}
    if status >= 500:
        return _failed(address, path, str(answer["error"]))
    return _refused(address, path, answer)


def _failed(
    address: str, path: str, because: str, kind: type[ExchangeError] = ExchangeError
) -> ExchangeError:
    return kind(
        f"ask {address} for {path}",
        because=because,
        do="check that it runs and that its port can be reached from here (thinwire doctor)",
    )


def _refused(address: str, path: str, answer: Mapping[str, Any]) -> MismatchError:
    default = (
        "give the lighthouse and all workers the same THINWIRE_TOKEN, model, method and version"
    )
    return MismatchError(
        f"ask {address} for {path}", because=str(answer["error"]), do=str(answer.get("do", default))
    )
