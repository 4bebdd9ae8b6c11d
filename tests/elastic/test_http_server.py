"""The HTTP server: bounded in threads, bytes and seconds."""

import json
import socket
import threading
import time

import pytest

from elastic_http import ECHO, TOKEN, exchange, serving, signed_head
from thinwire.elastic import http_server
from thinwire.elastic.http_server import LARGEST_REQUEST
from thinwire.elastic.signed_http import SignedReply, send_request
from thinwire.errors import (
    ExchangeError,
)


@pytest.mark.parametrize(
    ("length", "status"),
    [
        *[
            (text, 400)
            for text in ("abc", "-1", "1e9", "0x10", "1.0", " ", "9" * 19, "9" * 5000, "\xb2")
        ],
        (None, 400),
        ("17", 400),  # more than are sent
        (str(LARGEST_REQUEST + 1), 413),
        ("9" * 18, 413),
    ],
)
def test_a_length_that_is_not_a_number_is_refused(
    length: str | None, status: int, capfd: pytest.CaptureFixture
) -> None:
    with serving(ECHO) as port:
        answered, body = exchange(port, signed_head(length=length))
        assert answered == status
        assert "error" in json.loads(body)
        assert send_request(TOKEN, f"127.0.0.1:{port}", "/ping").body == b"pong"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01" + bytes(range(256)),
        b"GET /ping\r\n\r\n",
        b"BREW /pot HTTP/1.0\r\n\r\n",
        b"POST /echo HTTP/9.9\r\n\r\n",
        b"POST /echo HTTP/1.0\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"POST /echo HTTP/1.0\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
        b"POST " + b"/" * 70_000 + b" HTTP/1.0\r\n\r\n",
        b"POST /echo HTTP/1.0\r\nThinwire-Signature: \xff\xfe\r\nContent-Length: 0\r\n\r\n",
        b"POST /echo HTTP/1.0\r\nno colon\r\n\x00\r\n\r\n",
    ],
)
def test_garbage_is_survived_and_not_logged(raw: bytes, capfd: pytest.CaptureFixture) -> None:
    with serving(ECHO) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(raw)
            client.shutdown(socket.SHUT_WR)
        assert send_request(TOKEN, f"127.0.0.1:{port}", "/ping").body == b"pong"
    assert capfd.readouterr().err == ""


def drip(slow: socket.socket, port: int) -> None:
    """Send a byte now and then, for 5 s or until it fails; the others are served all the time."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        slow.sendall(b"P")
        assert send_request(TOKEN, f"127.0.0.1:{port}", "/ping").body == b"pong"
        time.sleep(0.02)


def test_a_slow_request_is_dropped_and_delays_no_other(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "_REQUEST_S", 0.3)
    with serving(ECHO) as port, socket.create_connection(("127.0.0.1", port), 5) as slow:
        began = time.monotonic()
        with pytest.raises(OSError):
            drip(slow, port)
        assert 0.2 < time.monotonic() - began < 2
    assert capfd.readouterr().err == ""


def test_a_client_that_does_not_take_the_answer_is_dropped(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "_SEND_S", 0.2)
    sent = threading.Event()
    large = SignedReply(body=bytes(32 << 20), on_sent=sent.set)
    with (
        serving({("POST", "/echo"): lambda _: large}) as port,
        socket.create_connection(("127.0.0.1", port), 5) as slow,
    ):
        slow.sendall(signed_head())
        time.sleep(0.5)
        received = 0
        while piece := slow.recv(1 << 20):
            received += len(piece)
        assert received < 32 << 20
        assert not sent.is_set()
    assert capfd.readouterr().err == ""


def test_one_connection_too_many_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_MOST_AT_ONCE", 2)
    with serving(ECHO) as port:
        address = f"127.0.0.1:{port}"
        idle = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(2)]
        with pytest.raises(ExchangeError):
            send_request(TOKEN, address, "/ping")
        for client in idle:
            client.close()
        until = time.monotonic() + 5
        while True:
            try:
                assert send_request(TOKEN, address, "/ping").body == b"pong"
                break
            except ExchangeError:
                assert time.monotonic() < until


@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_an_ipv6_host_works(host: str) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with serving(ECHO, host=host) as port:
        assert send_request(TOKEN, f"[::1]:{port}", "/ping").body == b"pong"
