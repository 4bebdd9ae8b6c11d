"""The HTTP server: bounded in threads, bytes and seconds."""

import contextlib
import json
import socket
import struct
import threading
import time

import pytest

from elastic_http import DIALER, ECHO, TOKEN, connected, eventually, exchange, head, serving
from thinwire.elastic import http_server
from thinwire.elastic.http_server import LARGEST_REQUEST
from thinwire.elastic.https import HttpReply, RunServer, send_request


def test_a_length_that_is_not_a_number_is_refused(capfd: pytest.CaptureFixture) -> None:
    lengths = ("abc", "-1", "1e9", "0x10", "1.0", " ", "9" * 19, "9" * 5000, "\xb2", None)
    statuses = dict.fromkeys(lengths, 400) | dict.fromkeys(
        (str(LARGEST_REQUEST + 1), "9" * 18), 413
    )
    with serving(ECHO) as port:
        for length, status in statuses.items():
            answered, body = exchange(port, head(length=length))
            assert (answered, "error" in json.loads(body)) == (status, True), length
            assert send_request(DIALER, f"127.0.0.1:{port}", "/ping").body == b"pong"
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
        b"POST /echo HTTP/1.0\r\nX: \xff\xfe\r\nContent-Length: 0\r\n\r\n",
        b"POST /echo HTTP/1.0\r\nno colon\r\n\x00\r\n\r\n",
    ],
)
def test_garbage_is_survived_and_not_logged(raw: bytes, capfd: pytest.CaptureFixture) -> None:
    with serving(ECHO) as port:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=5) as stranger,
            contextlib.suppress(OSError),  # it has hung up already
        ):
            stranger.sendall(raw)
            stranger.shutdown(socket.SHUT_WR)
        with connected(port) as member:
            member.sendall(raw)
        assert send_request(DIALER, f"127.0.0.1:{port}", "/ping").body == b"pong"
    assert capfd.readouterr().err == ""


def drip(slow: socket.socket, port: int) -> None:
    """Send a byte now and then, for 5 s or until it fails; the others are served all the time."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        slow.sendall(b"P")
        assert send_request(DIALER, f"127.0.0.1:{port}", "/ping").body == b"pong"
        time.sleep(0.02)


def test_a_slow_request_is_dropped_and_delays_no_other(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "_REQUEST_S", 0.3)
    with serving(ECHO) as port, connected(port) as slow:
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
    large = HttpReply(body=bytes(32 << 20), on_sent=sent.set)
    with serving({("POST", "/echo"): lambda _: large}) as port, connected(port) as slow:
        slow.sendall(head())
        time.sleep(0.5)
        received = 0
        while piece := slow.recv(1 << 20):
            received += len(piece)
        assert received < 32 << 20
        assert not sent.is_set()
    assert capfd.readouterr().err == ""


def test_strangers_that_shake_no_hands_are_given_up_for_those_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[tuple[str, str]] = []

    def served() -> RunServer:
        return RunServer(TOKEN, ECHO, host="127.0.0.1", on_refusal=lambda *who: refused.append(who))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_server, "_MOST_HANDSHAKES", 2)
        server = served()
        idle = [socket.create_connection(("127.0.0.1", server.port), 5) for _ in range(9)]
        began_s = time.monotonic()
        assert send_request(DIALER, f"127.0.0.1:{server.port}", "/ping").body == b"pong"
        assert time.monotonic() - began_s < 2
        assert eventually(lambda: len(refused) >= 7)
        for stranger in idle:
            stranger.close()
        server.close()
    refused.clear()
    monkeypatch.setattr(http_server, "_HANDSHAKE_S", 0.2)
    server = served()
    with socket.create_connection(("127.0.0.1", server.port), 5) as stranger:
        assert stranger.recv(1) == b""  # it begins a handshake, and is silent
    server.close()
    assert refused == [("127.0.0.1", "it finished no handshake in 0.2 s")]


def test_strangers_that_talk_and_hang_up_at_once_leave_nothing(
    capfd: pytest.CaptureFixture,
) -> None:
    server = RunServer(TOKEN, ECHO, host="127.0.0.1")
    for number in range(200):
        stranger = socket.create_connection(("127.0.0.1", server.port), 5)
        stranger.sendall(b"x" * (number % 3))
        if number % 2:  # a reset, and not an end
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()
    assert send_request(DIALER, f"127.0.0.1:{server.port}", "/ping").body == b"pong"
    assert eventually(lambda: not server._listener._handshakes)
    server.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_an_ipv6_host_works(host: str) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with serving(ECHO, host=host) as port:
        assert send_request(DIALER, f"[::1]:{port}", "/ping").body == b"pong"
