"""Requests and answers within the run's TLS, and what is not one."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from elastic_http import DIALER, ECHO, OK, OTHER, other_program, serving
from thinwire.elastic.dialer import Dialer
from thinwire.elastic.https import HttpReply, json_answer, send_request
from thinwire.elastic.snapshot import memory_file
from thinwire.errors import ExchangeError, ExchangeTimeout, MismatchError


def test_an_answer_comes_back() -> None:
    with serving(ECHO) as port:
        address = f"127.0.0.1:{port}"
        assert send_request(DIALER, address, "/ping").body == b"pong"
        assert send_request(DIALER, address, "/echo", body=b"").body == b""
        assert send_request(DIALER, address, "/echo", body=bytes(3_000_001)).body == bytes(
            3_000_001
        )
        assert send_request(DIALER, address, "/echo", {"a": [1]}).json() == {"a": [1]}


def test_what_a_handler_raises_is_answered(capfd: pytest.CaptureFixture) -> None:
    def broken(body: bytes) -> HttpReply:
        raise KeyError("no such worker")

    with (
        serving({("POST", "/broken"): broken, **ECHO}) as port,
        pytest.raises(ExchangeError, match="KeyError: 'no such worker'"),
    ):
        send_request(DIALER, f"127.0.0.1:{port}", "/broken", body=b"")
    assert capfd.readouterr().err == ""


def test_a_refusal_says_why_and_what_to_do() -> None:
    answer = {"error": "two have one identity", "do": "choose another"}
    routes = {
        ("GET", "/a"): lambda _: json_answer(answer, status=409),
        ("GET", "/b"): lambda _: HttpReply(status=400, body=b"[1]"),
        ("GET", "/c"): lambda _: HttpReply(body=b"{"),
    }
    with serving(routes) as port:
        address = f"127.0.0.1:{port}"
        with pytest.raises(MismatchError, match="two have one identity; do: choose another"):
            send_request(DIALER, address, "/a")
        with pytest.raises(MismatchError, match="status 400"):
            send_request(DIALER, address, "/b")
        with pytest.raises(ExchangeError, match="not JSON"):
            send_request(DIALER, address, "/c").json()
        with pytest.raises(MismatchError, match="there is no GET /d"):
            send_request(DIALER, address, "/d")


def test_another_token_is_refused() -> None:
    with serving(ECHO) as port, pytest.raises(MismatchError, match=r"another token|another one"):
        send_request(Dialer(OTHER), f"127.0.0.1:{port}", "/ping")


def test_an_answer_that_is_too_large_is_not_read() -> None:
    with serving(ECHO) as port:
        address = f"127.0.0.1:{port}"
        with pytest.raises(ExchangeError, match="announces 11 bytes and at most 10"):
            send_request(DIALER, address, "/echo", body=bytes(11), largest=10)
        assert send_request(DIALER, address, "/echo", body=bytes(10), largest=10).body == bytes(10)


@pytest.mark.parametrize("address", ["", "here", "here:", ":1", "h:abc", "h:65536", "h:-1"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ExchangeError, match="is not HOST:PORT"):
        send_request(DIALER, address, "/ping")


def test_a_closed_port_is_reported_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ExchangeError, match="refused"):
            send_request(DIALER, f"127.0.0.1:{taken.getsockname()[1]}", "/ping")


@contextmanager
def man_in_the_middle(port: int, change: Callable[[bytes], bytes]) -> Iterator[str]:
    """The address of a stranger that passes on what two members say, changed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def carry(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while piece := source.recv(1 << 16):
                    target.sendall(change(piece))
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)

        def run() -> None:
            client, _ = listener.accept()
            with client, socket.create_connection(("127.0.0.1", port)) as server:
                back = threading.Thread(target=carry, args=(server, client))
                back.start()
                carry(client, server)
                back.join(5)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join(5)


def flipped(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1]) if len(raw) > 600 else raw


@pytest.mark.parametrize(
    "change",
    [flipped, lambda raw: raw[: len(raw) // 2] if len(raw) > 600 else raw, lambda raw: raw * 2],
    ids=["a bit is flipped", "cut short", "said twice"],
)
def test_what_was_changed_on_the_way_is_refused(change: Callable[[bytes], bytes]) -> None:
    heard: list[bytes] = []
    said: list[bytes] = []

    def listening(raw: bytes) -> bytes:
        said.append(raw)
        return raw

    routes = {("POST", "/loud"): lambda body: (heard.append(body), HttpReply(body=body.upper()))[1]}
    secret = b"a weight of the model " * 100
    with serving(routes) as port:
        with man_in_the_middle(port, listening) as address:
            assert send_request(DIALER, address, "/loud", body=secret).body == secret.upper()
        assert not any(b"weight" in raw or b"loud" in raw for raw in said)
        assert sum(map(len, said)) > 2 * len(secret)
        with man_in_the_middle(port, change) as address, pytest.raises(ExchangeError):
            send_request(DIALER, address, "/loud", body=secret, timeout_s=1.0)
    assert set(heard) <= {secret}


def test_a_program_without_tls_is_named_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(b"SSH-2.0-OpenSSH\r\n")
                client.recv(1 << 16)

        thread = threading.Thread(target=run)
        thread.start()
        with pytest.raises(ExchangeError, match="does not speak TLS as a run does"):
            send_request(DIALER, f"127.0.0.1:{listener.getsockname()[1]}", "/ping")
        thread.join(5)


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([], "without response"),
        ([b"SSH-2.0-OpenSSH\r\n"], "SSH"),
        ([b"HTTP/1.0 404 Not Found\r\n\r\n<html>"], "does not say how many"),
        ([OK, b"\r\n"], "does not say how many"),
        *[([OK, b"Content-Length: %s\r\n\r\n" % n], "announces") for n in (b"x", b"-1", b"1e3")],
        ([OK, b"Content-Length: 999999999999999999\r\n\r\n"], "at most"),
        ([OK, b"Content-Length: 1000\r\n\r\n", bytes(999)], "it sent 999 bytes of 1000"),
    ],
)
def test_an_answer_of_another_program_is_refused(pieces: list[bytes], why: str) -> None:
    with (
        other_program(*pieces) as address,
        pytest.raises((ExchangeError, MismatchError), match=why),
    ):
        send_request(DIALER, address, "/ping")


@pytest.mark.parametrize(
    "pieces", [[], [OK], [OK, b"Content-Length: 1064\r\n\r\n"], [OK[:9], OK[9:12]]]
)
def test_silence_ends_in_time(pieces: list[bytes]) -> None:
    began = time.monotonic()
    with (
        other_program(*pieces, silent_s=10) as address,
        pytest.raises(ExchangeTimeout, match=r"no byte came from there for 0\.2 s"),
    ):
        send_request(DIALER, address, "/ping", timeout_s=0.2)
    assert time.monotonic() - began < 2


def test_a_body_with_more_parts_is_sent_from_where_it_lies() -> None:
    parts = [memoryview(b"x" * n) for n in (0, 1, (1 << 20) + 3)]
    sent = threading.Event()
    answer = HttpReply(body=b"first", more=parts, on_sent=sent.set)
    with serving({("GET", "/parts"): lambda _: answer}) as port:
        found = send_request(DIALER, f"127.0.0.1:{port}", "/parts").body
        assert found == b"first" + b"".join(parts)
        assert sent.wait(5)


def test_a_large_answer_lies_in_a_file_and_nowhere_else() -> None:
    import tracemalloc

    nbytes = 48 << 20
    part = memoryview(bytes(1 << 20))
    answer = HttpReply(more=[part] * 48)
    with serving({("GET", "/large"): lambda _: answer}) as port, memory_file() as file:
        address = f"127.0.0.1:{port}"
        tracemalloc.start()
        try:
            send_request(DIALER, address, "/large", largest=nbytes, into=file)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert file.tell() == nbytes
    assert peak < 8 << 20
