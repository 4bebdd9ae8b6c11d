"""What somebody without the token can do to a hub, and what a recorded request can."""

import asyncio
import contextlib
import hashlib
import re
import resource
import socket
import ssl
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from hub_process import TOKEN, Hub, got, listening, member_tls, put
from thinwire.errors import ExchangeError
from thinwire.security.tls import hub_certificate
from thinwire.security.token import Token
from thinwire.transport import address
from thinwire.transport.address import HubAddress, hub_keys
from thinwire.transport.object_store import ObjectStore
from thinwire.transport.sealed_objects import SealedObjects, bytes_tensor

OTHER = Token("another token of many characters")


@pytest.fixture(name="victim")
def victim_fixture(running: Hub) -> Hub:
    assert put(ObjectStore(running.address, token=TOKEN), "run/secret", b"weights")
    return running


def still_there(victim: Hub) -> bool:
    return got(ObjectStore(victim.address, token=TOKEN), "run/secret") == b"weights"


@contextlib.contextmanager
def over_tls(victim: Hub):
    """A connection over TLS that trusts the hub."""
    with (
        socket.create_connection(("127.0.0.1", victim.port), timeout=20) as raw,
        member_tls().wrap_socket(raw, server_hostname="127.0.0.1") as connection,
    ):
        yield connection


def asked(victim: Hub, request: bytes) -> bytes:
    """The answer to the bytes of a request."""
    with over_tls(victim) as connection:
        connection.sendall(request)
        answer = b""
        while more := connection.recv(65536):
            answer += more
            if b"Connection: close" not in request:
                break
        return answer


def request(line: str, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"{line} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def test_what_is_not_signed_is_refused(victim: Hub) -> None:
    for line in (
        *("GET /", "GET /thinwire?list-type=2", "GET /thinwire/run/secret"),
        *("HEAD /thinwire/run/secret", "PUT /thinwire/run/secret", "PUT /thinwire/new"),
        *("POST /thinwire?delete", "POST /thinwire/new?uploads", "PUT /thinwire?policy"),
        *("DELETE /thinwire/run/secret", "DELETE /thinwire", "PUT /other"),
        *("POST /?Action=CreateUser&UserName=a", "GET /buckets/thinwire/run/secret"),
        "GET /thinwire/../thinwire/run/secret",
    ):
        answer = asked(victim, request(line, body=b"mine"))
        assert re.match(rb"HTTP/1\.1 (301|307|400|403|404|405|501) ", answer), (line, answer[:300])
        assert b"weights" not in answer
        assert still_there(victim), line


def test_keys_of_another_token_are_refused_even_by_who_trusts_the_hub(victim: Hub) -> None:
    own = hub_keys(TOKEN)
    for keys in (hub_keys(OTHER), ("", ""), (own[0], "0" * 64), (own[0], "")):
        store = ObjectStore(HubAddress.read(victim.address).open(TOKEN, keys))
        begin_s = time.monotonic()
        with pytest.raises(ExchangeError, match="clock is right"):
            asyncio.run(store.get("run/secret", begin_s + 30, nbytes=1))
        assert time.monotonic() - begin_s < 25


def test_a_worker_gets_no_other_bucket(victim: Hub, monkeypatch) -> None:
    monkeypatch.setattr(address, "BUCKET", "other")
    store = ObjectStore(victim.address, token=TOKEN)
    with pytest.raises(ExchangeError, match="keys that may put"):
        put(store, "x", b"1", within_s=10)


def test_a_client_refuses_a_server_without_the_runs_authority() -> None:
    """It learns neither key nor payload: the handshake fails before a request."""
    heard = bytearray()
    certificate, key = hub_certificate(OTHER, ["127.0.0.1"])
    with tls_server(certificate, key, heard) as port:
        store = ObjectStore(f"hub://127.0.0.1:{port}", token=TOKEN)
        with pytest.raises(ExchangeError, match=r"sending request.* a hub's token is right"):
            asyncio.run(store.get("x", time.monotonic() + 2, nbytes=1))
    assert not heard


@contextlib.contextmanager
def tls_server(certificate: bytes, key: bytes, heard: bytearray, answer: bytes = b""):
    """Listens with a certificate, keeps what it is sent and answers the same to every request."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(certificate + key)
        context.load_cert_chain(file.name)

    def serve() -> None:
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), context.wrap_socket(raw, server_side=True) as one:
                one.settimeout(2)
                heard.extend(one.recv(1 << 20))
                one.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def recorded(send) -> bytes:
    """The bytes of a signed request, which only somebody inside of TLS can record."""
    heard = bytearray()
    certificate, key = hub_certificate(TOKEN, ["127.0.0.1"])
    answer = b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n'
    with tls_server(certificate, key, heard, answer) as port:
        asyncio.run(send(ObjectStore(f"hub://127.0.0.1:{port}", token=TOKEN)))
    return bytes(heard)


def test_a_recorded_put_is_refused_where_something_is_and_cannot_be_changed(victim: Hub) -> None:
    until_s = time.monotonic() + 30
    body = b"said once"
    put = recorded(
        lambda store: store.put("run/roll", [memoryview(body)], until_s, lambda _: False)
    )
    signed = re.search(rb"SignedHeaders=([^,]+)", put)[1].split(b";")
    assert {b"host", b"if-none-match", b"x-amz-content-sha256", b"x-amz-date"} <= set(signed)
    assert hashlib.sha256(body).hexdigest().encode() in put
    assert asked(victim, put).startswith(b"HTTP/1.1 200 ")
    assert asked(victim, put).startswith(b"HTTP/1.1 412 ")
    for changed in (
        re.sub(rb"(?i)if-none-match: \*\r\n", b"", put),
        put.replace(body, b"said else"),
        put.replace(b"/thinwire/run/roll", b"/thinwire/run/rolX"),
        put.replace(b"PUT ", b"DELETE ", 1),
        put.replace(hashlib.sha256(body).hexdigest().encode(), b"UNSIGNED-PAYLOAD"),
    ):
        assert changed != put
        assert re.match(rb"HTTP/1\.1 4(00|03|12) ", asked(victim, changed)), changed
    elsewhere = put.replace(b"/thinwire/run/roll", b"/thinwire/run/rolX")
    assert asked(victim, elsewhere).startswith(b"HTTP/1.1 403 ")
    assert got(ObjectStore(victim.address, token=TOKEN), "run/roll") == body


def test_a_recorded_put_with_another_body_does_not_open(victim: Hub) -> None:
    """SeaweedFS does not compare a body with the hash of it that is signed: the seal does."""
    until_s, payload = time.monotonic() + 30, bytes_tensor(b"said once")
    put = recorded(lambda store: SealedObjects(store, TOKEN, "run").put("run/a", payload, until_s))
    asked(victim, put[:-1] + bytes([put[-1] ^ 1]))
    objects = SealedObjects(ObjectStore(victim.address, token=TOKEN), TOKEN, "run")
    there = asyncio.run(objects.store.get("run/a", until_s, nbytes=1))
    assert there is None or objects.opened(there, "run/a") is None


def test_an_upload_without_keys_is_thrown_away_as_it_comes(victim: Hub) -> None:
    processes = [psutil.Process(pid) for pid in (victim.process.pid, victim.weed())]

    def taken() -> tuple[int, int]:
        """Memory, and what is in the folder."""
        files = [file for file in victim.folder.rglob("*") if file.is_file()]
        memory = sum(process.memory_info().rss for process in processes)
        return memory, sum(file.stat().st_size for file in files)

    before = taken()
    head = "PUT /thinwire/huge HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000000000\r\n\r\n"
    with over_tls(victim) as connection:
        connection.sendall(head.encode())
        for _ in range(96):
            connection.sendall(bytes(1 << 20))
        after = taken()
    assert after[0] - before[0] < 48 << 20
    assert after[1] - before[1] < 1 << 20
    assert still_there(victim)


def test_what_is_no_tls_is_refused_and_many_connections_do_not_shut_others_out(victim: Hub) -> None:
    with socket.create_connection(("127.0.0.1", victim.port), timeout=20) as plain:
        plain.sendall(request("GET /thinwire/run/secret"))
        answer = plain.recv(65536)
    assert b"weights" not in answer
    assert answer.startswith(b"HTTP/1.0 400 ")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.ExitStack() as held:
        silent = [
            held.enter_context(socket.create_connection(("127.0.0.1", victim.port), timeout=20))
            for _ in range(2100)
        ]
        # One address has 2,048 of them at most: the others are closed at once.
        assert [each.recv(1) for each in silent[2048:]] == [b""] * 52
    until_s = time.monotonic() + 20
    while not still_there(victim):
        assert time.monotonic() < until_s


@pytest.mark.slow
def test_loopback_ports_give_nothing_to_other_users_of_the_machine(victim: Hub) -> None:
    """They demand a certificate, or know no object by the names that S3 has."""
    names = ("thinwire/run/secret", "buckets/thinwire/run/secret", "1,01637037d6", "2,01637037d6")
    attempts = [request(f"{method} /{name}") for method in ("GET", "DELETE") for name in names]
    attempts += [request(f"PUT /{n},0f0000000a", body=b"mine") for n in (1, 2)]
    attempts.append(HTTP2)
    stranger = member_tls()
    stranger.set_alpn_protocols(["h2"])
    ports = {port for _, port in listening(victim.process.pid)} - {victim.port}
    without_certificate = list[int]()
    assert len(ports) >= 7
    for port in ports:
        for attempt in attempts:
            with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
                answer = everything(raw, attempt)
            assert b"weights" not in answer, (port, attempt)
            assert not answer.startswith((b"HTTP/1.1 2", *SETTINGS)), (port, attempt, answer[:200])
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port)) as raw,
            stranger.wrap_socket(raw, server_hostname="127.0.0.1") as connection,
        ):
            if everything(connection, HTTP2).startswith(SETTINGS):
                without_certificate.append(port)
    assert len(without_certificate) == 1, "none but S3, which looks at signatures"
    assert still_there(victim)


HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
# How a server of gRPC begins, after its frame's length.
SETTINGS = (bytes([0, 0, 0, 4]), *(bytes([0, 0, 6 * n, 4]) for n in range(1, 9)))


def everything(connection: socket.socket, request: bytes) -> bytes:
    """What comes back within a second, or until the connection ends."""
    connection.settimeout(1)
    answer = b""
    with contextlib.suppress(OSError):
        connection.sendall(request)
        while more := connection.recv(65536):
            answer += more
    return answer
