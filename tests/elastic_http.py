"""Servers of a run and what talks to them, records of rounds, and when two are the same."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.elastic.dialer import Dialer
from thinwire.elastic.https import HttpReply, RunServer
from thinwire.membership import RoundRecord
from thinwire.security.tls import server_context
from thinwire.security.token import Token

TOKEN = Token("a secret of many characters")
DIALER = Dialer(TOKEN)
OTHER = Token("another secret of many characters")


def bits(tensor: Tensor) -> tuple[torch.dtype, list[int], bytes]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, list(tensor.shape), raw


def record(version: int, *sizes: int) -> RoundRecord:
    messages = [torch.full((size,), version % 251, dtype=torch.uint8) for size in sizes]
    return RoundRecord(version=version, facts={"round": version}, messages=messages)


def same(left: RoundRecord, right: RoundRecord) -> bool:
    return (left.version, left.facts, [bits(m) for m in left.messages]) == (
        right.version,
        right.facts,
        [bits(m) for m in right.messages],
    )


def versions(records: list[RoundRecord] | None) -> list[int] | None:
    return None if records is None else [one.version for one in records]


@contextmanager
def serving(routes: dict, *, host: str = "127.0.0.1") -> Iterator[int]:
    server = RunServer(TOKEN, routes, host=host)
    try:
        yield server.port
    finally:
        server.close()


def echo(body: bytes) -> HttpReply:
    return HttpReply(body=body)


ECHO = {("POST", "/echo"): echo, ("GET", "/ping"): lambda _: HttpReply(body=b"pong")}


def head(body: bytes = b"", *, path: str = "/echo", length: str | None = "") -> bytes:
    lines = [f"POST {path} HTTP/1.0"]
    if length is not None:
        lines.append(f"Content-Length: {length or len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def connected(port: int) -> ssl.SSLSocket:
    """A client that knows the token and says what a test wants."""
    return DIALER.connect(f"127.0.0.1:{port}", timeout_s=10)


def exchange(port: int, raw: bytes) -> tuple[int, bytes]:
    """Status and body of what a client that knows the token gets for `raw`."""
    with connected(port) as client:
        client.sendall(raw)
        client.settimeout(5)
        answer = b""
        while piece := client.recv(1 << 16):
            answer += piece
    top, _, body = answer.partition(b"\r\n\r\n")
    return (int(top.split()[1]) if top else 0), body


def read_request(client: socket.socket) -> bytes:
    """A request, in full."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        raw += client.recv(1 << 16)
    head, _, body = raw.partition(b"\r\n\r\n")
    announced = [line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")]
    left = int(announced[0].split()[1]) - len(body) if announced else 0
    while left > 0:
        raw += (piece := client.recv(left))
        left -= len(piece)
    return raw


@contextmanager
def other_program(*pieces: bytes, silent_s: float = 0.0) -> Iterator[str]:
    """The address of a program with the token that answers anything with `pieces`, and ends."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            plain, _ = listener.accept()
            with server_context(TOKEN).wrap_socket(plain, server_side=True) as client:
                read_request(client)
                for piece in pieces:
                    client.sendall(piece)
                done.wait(silent_s)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            done.set()
            thread.join(5)


OK = b"HTTP/1.0 200 OK\r\n"


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 5
    while not holds() and time.monotonic() < until:
        time.sleep(0.005)
    return holds()
