"""Signed requests and answers, and what is not one."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from elastic_http import (
    ECHO,
    OK,
    OTHER,
    TOKEN,
    exchange,
    other_program,
    read_request,
    serving,
    signed_head,
)
from thinwire.elastic import signed_http
from thinwire.elastic.http_server import LARGEST_REQUEST
from thinwire.elastic.signed_http import SignedReply, json_answer, send_request
from thinwire.elastic.snapshot import memory_file
from thinwire.errors import (
    ExchangeError,
    ExchangeTimeout,
    MismatchError,
)


def test_an_answer_comes_back() -> None:
    with serving(ECHO) as port:
        address = f"127.0.0.1:{port}"
        assert send_request(TOKEN, address, "/ping").body == b"pong"
        assert send_request(TOKEN, address, "/echo", body=b"").body == b""
        assert send_request(TOKEN, address, "/echo", body=bytes(3_000_001)).body == bytes(3_000_001)
        assert send_request(TOKEN, address, "/echo", {"a": [1]}).json() == {"a": [1]}


def test_a_request_can_be_made_once() -> None:
    with serving(ECHO) as port:
        raw = signed_head(b"abc") + b"abc"
        assert exchange(port, raw) == (200, b"abc")
        status, body = exchange(port, raw)
        assert status == 403
        assert b"received before" in body


def test_nonces_are_forgotten_when_time_alone_refuses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verifier = signed_http._RequestVerifier(TOKEN, {}, None)
    assert verifier._is_new("a")
    assert not verifier._is_new("a")
    later = time.monotonic() + 2 * signed_http._SKEW_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert verifier._is_new("b")
    assert verifier._seen == {"b"}


@pytest.mark.parametrize(
    ("ahead_s", "why"), [(300, b"clock is +300 s"), (-3600, b"clock is -3600 s")]
)
def test_a_wrong_clock_is_refused_and_its_error_said(ahead_s: float, why: bytes) -> None:
    with serving(ECHO) as port:
        status, body = exchange(port, signed_head(sent=repr(time.time() + ahead_s)))
        assert status == 403
        assert why in body
        assert b"NTP" in json.loads(body)["do"].encode()
        assert exchange(port, signed_head(sent=repr(time.time() + 60)))[0] == 200


@pytest.mark.parametrize("sent", ["abc", "", "nan", "inf", "-inf", "1e400", "0x10", "\xff"])
def test_a_time_that_is_not_a_number_is_refused(sent: str, capfd: pytest.CaptureFixture) -> None:
    with serving(ECHO) as port:
        assert exchange(port, signed_head(sent=sent))[0] == 403
        assert send_request(TOKEN, f"127.0.0.1:{port}", "/ping").body == b"pong"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("nonce", ["", "n" * 65])
def test_a_nonce_must_be_there_and_short(nonce: str) -> None:
    with serving(ECHO) as port:
        assert exchange(port, signed_head(nonce=nonce))[0] == 403


def test_what_a_handler_raises_is_answered(capfd: pytest.CaptureFixture) -> None:
    def broken(body: bytes) -> SignedReply:
        raise KeyError("no such worker")

    with (
        serving({("POST", "/broken"): broken, **ECHO}) as port,
        pytest.raises(ExchangeError, match="KeyError: 'no such worker'"),
    ):
        send_request(TOKEN, f"127.0.0.1:{port}", "/broken", body=b"")
    assert capfd.readouterr().err == ""


def test_a_refusal_says_why_and_what_to_do() -> None:
    answer = {"error": "two have one identity", "do": "choose another"}
    routes = {
        ("GET", "/a"): lambda _: json_answer(answer, status=409),
        ("GET", "/b"): lambda _: SignedReply(status=400, body=b"[1]"),
        ("GET", "/c"): lambda _: SignedReply(body=b"{"),
    }
    with serving(routes) as port:
        address = f"127.0.0.1:{port}"
        with pytest.raises(MismatchError, match="two have one identity; do: choose another"):
            send_request(TOKEN, address, "/a")
        with pytest.raises(MismatchError, match="status 400"):
            send_request(TOKEN, address, "/b")
        with pytest.raises(ExchangeError, match="not JSON"):
            send_request(TOKEN, address, "/c").json()
        with pytest.raises(MismatchError, match="there is no GET /d"):
            send_request(TOKEN, address, "/d")


def test_another_token_is_refused() -> None:
    with serving(ECHO) as port, pytest.raises(MismatchError, match="not signed"):
        send_request(OTHER, f"127.0.0.1:{port}", "/ping")


def test_a_request_that_is_too_large_is_not_sent() -> None:
    with serving(ECHO) as port, pytest.raises(MismatchError, match="than a request's"):
        send_request(TOKEN, f"127.0.0.1:{port}", "/echo", body=bytes(LARGEST_REQUEST + 1))


def test_an_answer_that_is_too_large_is_not_read() -> None:
    with serving(ECHO) as port:
        address = f"127.0.0.1:{port}"
        with pytest.raises(ExchangeError, match="announces 11 bytes and at most 10"):
            send_request(TOKEN, address, "/echo", body=bytes(11), largest=10)
        assert send_request(TOKEN, address, "/echo", body=bytes(10), largest=10).body == bytes(10)


@pytest.mark.parametrize("address", ["", "here", "here:", ":1", "h:abc", "h:0", "h:65536", "h:-1"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ExchangeError, match="is not HOST:PORT"):
        send_request(TOKEN, address, "/ping")


def test_a_closed_port_is_reported_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ExchangeError, match="refused"):
            send_request(TOKEN, f"127.0.0.1:{taken.getsockname()[1]}", "/ping")


@contextmanager
def relay(port: int, change: Callable[[bytes], bytes]) -> Iterator[str]:
    """The address of a relay that changes the one request that it passes on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            client, _ = listener.accept()
            with client, socket.create_connection(("127.0.0.1", port)) as server:
                server.sendall(change(read_request(client)))
                answer = b""
                while piece := server.recv(1 << 16):
                    answer += piece
                client.sendall(change(answer))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join(5)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"abc", b"abd"), (b"ABC", b"ABD"), (b"/loud", b"/lout"), (b" 200 ", b" 201 ")],
)
def test_what_was_changed_on_the_way_is_refused(old: bytes, new: bytes) -> None:
    routes = {
        ("POST", path): lambda body: SignedReply(body=body.upper()) for path in ("/loud", "/lout")
    }
    with serving(routes) as port:
        with relay(port, lambda raw: raw) as address:
            assert send_request(TOKEN, address, "/loud", body=b"abc").body == b"ABC"
        with (
            relay(port, lambda raw: raw.replace(old, new)) as address,
            pytest.raises(MismatchError, match="changed on the way"),
        ):
            send_request(TOKEN, address, "/loud", body=b"abc")


def test_an_answer_to_another_request_is_refused() -> None:
    answers: list[bytes] = []

    def replay(raw: bytes) -> bytes:
        if raw.startswith(b"HTTP"):
            answers.append(raw)
            return answers[0]
        return raw

    with serving(ECHO) as port:
        with relay(port, replay) as address:
            assert send_request(TOKEN, address, "/ping").body == b"pong"
        with relay(port, replay) as address, pytest.raises(MismatchError, match="not signed"):
            send_request(TOKEN, address, "/ping")


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([], "without response"),
        ([b"SSH-2.0-OpenSSH\r\n"], "SSH"),
        ([b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello"], "not signed"),
        ([b"HTTP/1.0 404 Not Found\r\n\r\n<html>"], "not signed"),
        ([OK, b"\r\n"], "does not say how many"),
        *[([OK, b"Content-Length: %s\r\n\r\n" % n], "announces") for n in (b"x", b"-1", b"1e3")],
        ([OK, b"Content-Length: 63\r\n\r\n"], "announces -1 bytes"),
        ([OK, b"Content-Length: 999999999999999999\r\n\r\n"], "at most"),
        ([OK, b"Content-Length: 1064\r\n\r\n", bytes(999)], "it sent 999 bytes of 1000"),
        ([OK, b"Content-Length: 1064\r\n\r\n", bytes(1063)], "ends before its signature"),
        ([OK, b"Content-Length: 74\r\n\r\n", b"\xff" * 74], "not signed"),
    ],
)
def test_an_answer_of_another_program_is_refused(pieces: list[bytes], why: str) -> None:
    with (
        other_program(*pieces) as address,
        pytest.raises((ExchangeError, MismatchError), match=why),
    ):
        send_request(TOKEN, address, "/ping")


@pytest.mark.parametrize(
    "pieces", [[], [OK], [OK, b"Content-Length: 1064\r\n\r\n"], [OK[:9], OK[9:20]]]
)
def test_silence_ends_in_time(pieces: list[bytes]) -> None:
    began = time.monotonic()
    with (
        other_program(*pieces, silent_s=10) as address,
        pytest.raises(ExchangeTimeout, match=r"no byte came from there for 0\.2 s"),
    ):
        send_request(TOKEN, address, "/ping", timeout_s=0.2)
    assert time.monotonic() - began < 2


def test_a_body_with_more_parts_is_sent_from_where_it_lies() -> None:
    parts = [memoryview(b"x" * n) for n in (0, 1, (1 << 20) + 3)]
    sent = threading.Event()
    answer = SignedReply(body=b"first", more=parts, on_sent=sent.set)
    with serving({("GET", "/parts"): lambda _: answer}) as port:
        found = send_request(TOKEN, f"127.0.0.1:{port}", "/parts").body
        assert found == b"first" + b"".join(parts)
        assert sent.wait(5)


def test_a_large_answer_lies_in_a_file_and_nowhere_else() -> None:
    import tracemalloc

    nbytes = 48 << 20
    part = memoryview(bytes(1 << 20))
    answer = SignedReply(more=[part] * 48)
    with serving({("GET", "/large"): lambda _: answer}) as port, memory_file() as file:
        address = f"127.0.0.1:{port}"
        tracemalloc.start()
        try:
            send_request(TOKEN, address, "/large", largest=nbytes, into=file)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert file.tell() == nbytes
    assert peak < 8 << 20
