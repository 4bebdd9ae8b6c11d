"""Bytes between two streams."""

import socket
import threading

import pytest

from elastic_http import TOKEN
from thinwire.elastic.relay import pump
from thinwire.security.tls import client_context, server_context


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
