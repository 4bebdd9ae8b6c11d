"""Workers that no machine can connect to, reached by way of the relay."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from elastic_http import DIALER, ECHO, TOKEN, eventually
from thinwire.elastic import relay as relay_module
from thinwire.elastic.dialer import Dialer, open_stream
from thinwire.elastic.https import RunServer, send_request
from thinwire.elastic.relay import LoopbackForward, Relay, RelayedServer, loopback_tunnel, pump
from thinwire.errors import ExchangeError
from thinwire.security.tls import client_context, server_context

HIDDEN = "127.0.0.1:1"  # where no worker listens


@contextlib.contextmanager
def relay_at(port: int = 0) -> Iterator[str]:
    server = RunServer(TOKEN, ECHO, host="127.0.0.1", port=port, tunnels=Relay().tunnels)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.close()


@contextlib.contextmanager
def worker_at() -> Iterator[str]:
    """A worker that others reach directly."""
    server = RunServer(TOKEN, ECHO, host="127.0.0.1")
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.close()


@contextlib.contextmanager
def hidden_worker(relay: str) -> Iterator[None]:
    """A worker that others know by an address at which it is not reached."""
    server = RunServer(TOKEN, ECHO, host="127.0.0.1")
    kept = RelayedServer(Dialer(TOKEN, relay), relay, HIDDEN, server.serve)
    try:
        assert eventually(lambda: answers(relay))
        yield
    finally:
        kept.close()
        server.close()


def hidden_dialer(relay: str) -> Dialer:
    dialer = Dialer(TOKEN, relay)
    dialer._relayed_until_s[HIDDEN] = time.monotonic() + 60  # it was tried in vain
    return dialer


def answers(relay: str) -> bool:
    try:
        return send_request(hidden_dialer(relay), HIDDEN, "/ping", timeout_s=2).body == b"pong"
    except ExchangeError:
        return False


def test_requests_reach_a_worker_that_cannot_be_connected_to() -> None:
    with relay_at() as relay, hidden_worker(relay):
        body = bytes(3_000_001)
        assert send_request(hidden_dialer(relay), HIDDEN, "/echo", body=body).body == body


def test_a_way_that_was_tried_in_vain_is_not_tried_again_at_once(monkeypatch) -> None:
    with relay_at() as relay, hidden_worker(relay):
        dialer, tried = Dialer(TOKEN, relay), []
        direct = Dialer._direct

        def counted(self, address: str, timeout_s: float):
            tried.append(address)
            if address == HIDDEN:
                raise OSError("no route to host")
            return direct(self, address, timeout_s)

        monkeypatch.setattr(Dialer, "_direct", counted)
        for _ in range(3):
            assert send_request(dialer, HIDDEN, "/ping").body == b"pong"
        assert tried.count(HIDDEN) == 1
        assert dialer.is_relayed(HIDDEN)


def test_a_relay_that_is_gone_hides_no_worker_that_is_reached_directly() -> None:
    with relay_at() as relay:
        dialer = Dialer(TOKEN, relay)
    with worker_at() as address:
        dialer._relayed_until_s[address] = time.monotonic() + 60  # it was unreachable for a moment
        assert send_request(dialer, address, "/ping").body == b"pong"
        assert not dialer.is_relayed(address)


def test_an_answer_that_comes_too_late_leaves_no_thread(monkeypatch) -> None:
    monkeypatch.setattr(relay_module, "_ANSWER_S", 0.2)
    relay = Relay()
    asked = relay_module._AskedStream()
    relay._asked["key"] = asked
    run = relay.tunnels["stream"]("key")
    thread = threading.Thread(target=run, args=(None,))
    thread.start()  # and who asked has given up
    thread.join(5)
    assert not thread.is_alive()
    with pytest.raises(OSError, match="no worker waits"):
        relay.tunnels["stream"]("key")


def test_a_worker_that_is_not_there_is_named_with_both_ways() -> None:
    with relay_at() as relay, pytest.raises(ExchangeError) as raised:
        send_request(Dialer(TOKEN, relay), "127.0.0.1:1", "/ping")
    assert "refused" in raised.value.because
    assert "no worker at 127.0.0.1:1 is connected to the relay" in raised.value.because


def test_a_worker_that_is_silent_is_waited_for_no_longer_than_stated(monkeypatch) -> None:
    monkeypatch.setattr(relay_module, "_ANSWER_S", 0.3)
    with relay_at() as relay:
        kept = open_stream(DIALER, relay, f"relay/{HIDDEN}", timeout_s=5)
        began_s = time.monotonic()
        with pytest.raises(ExchangeError, match=r"did not answer in 0\.3 s"):
            open_stream(DIALER, relay, f"worker/{HIDDEN}", timeout_s=5)
        assert time.monotonic() - began_s < 2
        kept.close()


def test_an_answer_to_what_was_never_asked_is_refused() -> None:
    with relay_at() as relay, pytest.raises(ExchangeError, match="no worker waits"):
        open_stream(DIALER, relay, "stream/0123456789abcdef", timeout_s=5)


def test_a_worker_comes_back_to_a_relay_that_was_started_again() -> None:
    with contextlib.ExitStack() as opened:
        relay = opened.enter_context(relay_at())
        server = RunServer(TOKEN, ECHO, host="127.0.0.1")
        kept = RelayedServer(Dialer(TOKEN, relay), relay, HIDDEN, server.serve)
        assert eventually(lambda: answers(relay))
        # As if the lighthouse's machine had been started again.
        socket.socket.shutdown(kept._stream, socket.SHUT_RDWR)
        assert eventually(lambda: answers(relay))
        kept.close()
        server.close()


def test_a_client_of_loopback_reaches_a_program_on_the_loopback_of_the_relays_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as program:

        def run() -> None:
            client, _ = program.accept()
            with client:
                client.sendall(client.recv(100)[::-1])

        thread = threading.Thread(target=run)
        thread.start()
        port = program.getsockname()[1]
        server = RunServer(TOKEN, {}, host="127.0.0.1", tunnels={"it": loopback_tunnel(port)})
        forward = LoopbackForward(DIALER, f"127.0.0.1:{server.port}", "it")
        host, _, there = forward.address.rpartition(":")
        with socket.create_connection((host, int(there)), timeout=5) as client:
            client.sendall(b"abc")
            assert client.recv(100) == b"cba"
        thread.join(5)
        forward.close()
        with pytest.raises(OSError):
            socket.create_connection((host, int(there)), timeout=1)
        server.close()


def within_tls() -> tuple[socket.socket, socket.socket]:
    here, there = socket.socketpair()
    ends: list[socket.socket] = []
    thread = threading.Thread(
        target=lambda: ends.append(server_context(TOKEN).wrap_socket(here, server_side=True))
    )
    thread.start()
    client = client_context(TOKEN).wrap_socket(there)
    thread.join(5)
    return client, ends[0]


KINDS = {"plain": socket.socketpair, "tls": within_tls}


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("nbytes", [1, 70_001, 3_000_001])
def test_what_one_end_says_the_other_hears(first: str, second: str, nbytes: int) -> None:
    (mine, inner), (outer, theirs) = KINDS[first](), KINDS[second]()
    carrying = threading.Thread(target=pump, args=(inner, outer))
    carrying.start()
    heard: dict[str, bytes] = {}

    def hear(name: str, stream: socket.socket) -> None:
        raw = b""
        while len(raw) < nbytes:
            raw += stream.recv(1 << 16)
        heard[name] = raw

    question, answer = bytes(nbytes), b"\x07" * nbytes
    there = threading.Thread(target=hear, args=("there", theirs))
    there.start()
    mine.sendall(question)
    there.join(20)
    here = threading.Thread(target=hear, args=("here", mine))
    here.start()
    theirs.sendall(answer)
    here.join(20)
    assert heard == {"there": question, "here": answer}
    mine.close()
    theirs.close()
    carrying.join(10)
    assert not carrying.is_alive()
    inner.close()
    outer.close()


def test_a_reader_that_stops_stops_its_sender() -> None:
    (mine, inner), (outer, theirs) = within_tls(), within_tls()
    carrying = threading.Thread(target=pump, args=(inner, outer), daemon=True)
    carrying.start()
    mine.settimeout(0.5)
    with pytest.raises(TimeoutError):
        mine.sendall(bytes(16 << 20))
    for stream in (mine, theirs, inner, outer):
        stream.close()
    carrying.join(10)
