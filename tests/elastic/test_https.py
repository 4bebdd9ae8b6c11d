"""Requests and answers within the run's TLS, and what is not one."""

import contextlib
import socket
import threading
import time
from functools import partial

import pytest

from elastic_http import DIALER, ECHO, OK, OTHER, TOKEN, other_program, serving
from thinwire.elastic.dialer import Dialer, open_stream
from thinwire.elastic.https import HttpReply, json_answer, send_request
from thinwire.elastic.snapshot import memory_file
from thinwire.errors import ExchangeError, ExchangeTimeout, MismatchError
from thinwire.security.tls import server_context


def test_an_answer_comes_back() -> None:
    parts = [memoryview(b"x" * n) for n in (0, 1, (1 << 20) + 3)]
    sent, large = threading.Event(), bytes(3_000_001)
    in_parts = HttpReply(body=b"first", more=parts, on_sent=sent.set)
    with serving({("GET", "/parts"): lambda _: in_parts, **ECHO}) as port:
        ask = partial(send_request, DIALER, f"127.0.0.1:{port}")
        assert ask("/ping").body == b"pong"
        for body in (b"", large):
            assert ask("/echo", body=body).body == body
        assert ask("/echo", {"a": [1]}).json() == {"a": [1]}
        assert ask("/parts").body == b"first" + b"".join(parts)
        assert sent.wait(5)
        with pytest.raises(ExchangeError, match="announces 11 bytes and at most 10"):
            ask("/echo", body=bytes(11), largest=10)
        assert ask("/echo", body=bytes(10), largest=10).body == bytes(10)


@pytest.mark.parametrize("kind", ["plain", "endless"])
def test_another_program_is_named_and_left_in_time(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            client, _ = listener.accept()
            with client, contextlib.suppress(OSError):
                if kind == "plain":
                    client.sendall(b"SSH-2.0-OpenSSH\r\n")
                    client.recv(1 << 16)
                    return
                with server_context(TOKEN).wrap_socket(client, server_side=True) as stream:
                    stream.recv(100)
                    for _ in range(100):
                        stream.sendall(b"X: y\r\n" * 100)

        thread = threading.Thread(target=run)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        if kind == "plain":
            with pytest.raises(ExchangeError, match="does not speak TLS as a run does"):
                send_request(DIALER, address, "/ping")
        else:
            with pytest.raises((OSError, ExchangeError)):
                open_stream(DIALER, address, "anything", timeout_s=5)
        thread.join(5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            DIALER.connect(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3)
        assert time.monotonic() - began_s < 2


def test_a_refusal_says_why_and_what_to_do(capfd: pytest.CaptureFixture) -> None:
    def broken(body: bytes) -> HttpReply:
        raise KeyError("no such worker")

    answer = {"error": "two have one identity", "do": "choose another"}
    routes = {
        ("GET", "/a"): lambda _: json_answer(answer, status=409),
        ("GET", "/b"): lambda _: HttpReply(status=400, body=b"[1]"),
        ("GET", "/c"): lambda _: HttpReply(body=b"{"),
        ("GET", "/e"): broken,
    }
    with serving(routes) as port:
        for path, kind, why in (
            ("/a", MismatchError, "two have one identity; do: choose another"),
            ("/b", MismatchError, "status 400"),
            ("/c", ExchangeError, "not JSON"),
            ("/d", MismatchError, "there is no GET /d"),
            ("/e", ExchangeError, "KeyError: 'no such worker'"),
        ):
            with pytest.raises(kind, match=why):
                send_request(DIALER, f"127.0.0.1:{port}", path).json()
        with pytest.raises(MismatchError, match=r"another token|another one"):
            send_request(Dialer(OTHER), f"127.0.0.1:{port}", "/ping")
    assert capfd.readouterr().err == ""


def test_a_closed_port_is_reported_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ExchangeError, match="refused"):
            send_request(DIALER, f"127.0.0.1:{taken.getsockname()[1]}", "/ping")
    for address in ("", "here", "here:", ":1", "h:abc", "h:65536", "h:-1"):
        with pytest.raises(ExchangeError, match="is not HOST:PORT"):
            send_request(DIALER, address, "/ping")


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
