"""Connections with the run's token."""

import socket
import threading
import time

import pytest

from elastic_http import DIALER, ECHO, OTHER, serving
from thinwire.elastic.dialer import Dialer, open_stream
from thinwire.errors import ExchangeError, MismatchError


def test_no_byte_after_the_answer_is_lost() -> None:
    """A server that speaks first, at once, is heard from its first byte on."""
    from elastic_http import TOKEN
    from thinwire.elastic.https import RunServer

    first = {"greeting": lambda _: lambda stream: stream.sendall(b"hello")}
    server = RunServer(TOKEN, {}, host="127.0.0.1", tunnels=first)
    with open_stream(DIALER, f"127.0.0.1:{server.port}", "greeting", timeout_s=5) as stream:
        assert stream.recv(100) == b"hello"
    server.close()


def test_a_server_with_another_token_is_named() -> None:
    with serving(ECHO) as port, pytest.raises(MismatchError, match="another token"):
        Dialer(OTHER).connect(f"127.0.0.1:{port}", timeout_s=5)


def test_a_server_that_accepts_and_says_nothing_is_left_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            DIALER.connect(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3)
        assert time.monotonic() - began_s < 2


def test_an_answer_that_never_ends_is_left() -> None:
    from elastic_http import TOKEN
    from thinwire.security.tls import server_context

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            plain, _ = listener.accept()
            with server_context(TOKEN).wrap_socket(plain, server_side=True) as client:
                client.recv(100)
                try:
                    for _ in range(100):
                        client.sendall(b"X: y\r\n" * 100)
                except OSError:
                    return

        thread = threading.Thread(target=run)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises((OSError, ExchangeError)):
            open_stream(DIALER, address, "anything", timeout_s=5)
        thread.join(5)
