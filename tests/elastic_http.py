"""Signed servers and what talks to them, records of rounds, and when two are the same."""

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.elastic.signed_http import SignedReply, SignedServer
from thinwire.elastic.token import Token
from thinwire.membership import RoundRecord

TOKEN = Token("a secret of many characters")


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
    server = SignedServer(TOKEN, routes, host=host)
    try:
        yield server.port
    finally:
        server.close()


def echo(body: bytes) -> SignedReply:
    return SignedReply(body=body)


ECHO = {("POST", "/echo"): echo, ("GET", "/ping"): lambda _: SignedReply(body=b"pong")}


def signed_head(
    body: bytes = b"",
    *,
    path: str = "/echo",
    sent: str | None = None,
    nonce: str = "n",
    length: str | None = "",
    signature: str | None = None,
) -> bytes:
    sent = repr(time.time()) if sent is None else sent
    digest = hashlib.sha256(body).hexdigest()
    signature = TOKEN.sign("POST", path, nonce, sent, digest) if signature is None else signature
    lines = [f"POST {path} HTTP/1.0", f"Thinwire-Nonce: {nonce}", f"Thinwire-Time: {sent}"]
    lines.append(f"Thinwire-Signature: {signature}")
    if length is not None:
        lines.append(f"Content-Length: {length or len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def exchange(port: int, raw: bytes) -> tuple[int, bytes]:
    """Status and body of what a plain client gets for `raw`."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(raw)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := client.recv(1 << 16):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body[:-64]


def read_request(client: socket.socket) -> bytes:
    """A request, in full."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        raw += client.recv(1 << 16)
    head, _, body = raw.partition(b"\r\n\r\n")
    announced = [line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")]
    left = int(announced[0].split()[1]) - len(body) if announced else 0
    return raw + (client.recv(left, socket.MSG_WAITALL) if left else b"")


@contextmanager
def other_program(*pieces: bytes, silent_s: float = 0.0) -> Iterator[str]:
    """The address of a program that answers anything with `pieces`, is silent, and ends."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            client, _ = listener.accept()
            with client:
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


OK = b"HTTP/1.0 200 OK\r\nThinwire-Signature: follows\r\n"


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 5
    while not holds() and time.monotonic() < until:
        time.sleep(0.005)
    return holds()
