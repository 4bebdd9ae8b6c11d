"""Workers that no machine can connect to, reached by way of the relay."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic_http import DIALER, ECHO, TOKEN, eventually
from thinwire.elastic.dialer import Dialer, open_stream
from thinwire.elastic.https import RunServer, send_request
from thinwire.elastic.relay import Relay, RelayedServer, pump
from thinwire.errors import ExchangeError
from thinwire.security.tls import client_context, server_context

HIDDEN = "127.0.0.1:1"  # where no worker listens


@contextlib.contextmanager
def serving(**tunnels) -> Iterator[tuple[RunServer, str]]:
    """A server of the run, and where it is reached."""
    server = RunServer(TOKEN, ECHO, host="127.0.0.1", tunnels=tunnels)
    try:
        yield server, f"127.0.0.1:{server.port}"
    finally:
        server.close()


@contextlib.contextmanager
def hidden_worker() -> Iterator[tuple[str, RelayedServer]]:
    """A relay, and a worker that others know by an address at which it is not reached."""
    with serving(**Relay().tunnels) as (_, relay), serving() as (worker, _):
        kept = RelayedServer(Dialer(TOKEN, relay), relay, HIDDEN, worker.serve)
        try:
            assert eventually(lambda: answers(relay))
            yield relay, kept
        finally:
            kept.close()


def hidden_dialer(relay: str) -> Dialer:
    dialer = Dialer(TOKEN, relay)
    dialer._relayed_until_s[HIDDEN] = time.monotonic() + 60  # it was tried in vain
    return dialer


def answers(relay: str) -> bool:
    try:
        return send_request(hidden_dialer(relay), HIDDEN, "/ping", timeout_s=2).body == b"pong"
    except ExchangeError:
        return False


def test_requests_reach_a_hidden_worker_also_once_its_relay_was_started_again() -> None:
    with hidden_worker() as (relay, kept):
        body = bytes(3_000_001)
        assert send_request(hidden_dialer(relay), HIDDEN, "/echo", body=body).body == body
        # As if the lighthouse's machine had been started again.
        socket.socket.shutdown(kept._stream, socket.SHUT_RDWR)
        assert eventually(lambda: answers(relay))


def test_a_way_that_was_tried_in_vain_is_not_tried_again_at_once(monkeypatch) -> None:
    with hidden_worker() as (relay, _):
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
    with serving(**Relay().tunnels) as (_, relay):
        dialer = Dialer(TOKEN, relay)
    with serving() as (_, address):
        dialer._relayed_until_s[address] = time.monotonic() + 60  # it was unreachable for a moment
        assert send_request(dialer, address, "/ping").body == b"pong"
        assert not dialer.is_relayed(address)


def test_a_worker_that_is_not_there_is_named_with_both_ways() -> None:
    with serving(**Relay().tunnels) as (_, relay):
        with pytest.raises(ExchangeError) as raised:
            send_request(Dialer(TOKEN, relay), "127.0.0.1:1", "/ping")
        # An answer to what was never asked.
        with pytest.raises(ExchangeError, match="no worker waits"):
            open_stream(DIALER, relay, "stream/0123456789abcdef", timeout_s=5)
    assert "refused" in raised.value.because
    assert "no worker at 127.0.0.1:1 is connected to the relay" in raised.value.because


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


@pytest.mark.parametrize(
    ("ends", "nbytes"),
    [("plain-tls", 1), ("tls-tls", 70_001), ("tls-plain", 3_000_001), ("plain-plain", 70_001)],
)
def test_what_one_end_says_the_other_hears(ends: str, nbytes: int) -> None:
    kinds = {"plain": socket.socketpair, "tls": within_tls}
    (mine, inner), (outer, theirs) = (kinds[kind]() for kind in ends.split("-"))
    carrying = threading.Thread(target=pump, args=(inner, outer))
    carrying.start()

    def hear(stream: socket.socket) -> bytes:
        raw = b""
        while len(raw) < nbytes:
            raw += stream.recv(1 << 16)
        return raw

    with ThreadPoolExecutor(1) as pool:
        for said, here, there in ((b"\0", mine, theirs), (b"\7", theirs, mine)):
            heard = pool.submit(hear, there)
            here.sendall(said * nbytes)
            assert heard.result(20) == said * nbytes
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
