"""The lighthouse behind the registry's port, and a worker's connection to it."""

import contextlib
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest

from elastic_registry import TOKEN, at
from thinwire.elastic import lighthouse
from thinwire.elastic.dialer import Dialer
from thinwire.elastic.lighthouse import LighthouseServer
from thinwire.elastic.quorum import Member
from thinwire.elastic.relay import LoopbackForward
from thinwire.errors import ConfigurationError, ExchangeError


def lighthouse_at(port: int = 0, **settings) -> LighthouseServer:
    pytest.importorskip("torchft")
    defaults = {"heartbeat_timeout_s": 1.0, "join_timeout_s": 1.0, "on_event": lambda _: None}
    return LighthouseServer(TOKEN, host="127.0.0.1", port=port, **defaults | settings)


def test_a_lighthouse_forms_quorums_behind_the_port_of_the_registry() -> None:
    with lighthouse_at() as server:
        forward = LoopbackForward(Dialer(TOKEN), f"127.0.0.1:{server.port}", "lighthouse")
        from torchft.coordination import LighthouseClient

        five = timedelta(seconds=5)
        member = LighthouseClient(addr=f"http://{forward.address}", connect_timeout=five)
        quorum = member.quorum(replica_id="a", timeout=five, address="", store_address="")
        assert [p.replica_id for p in quorum.participants] == ["a"]
        forward.close()
    # Its ports are free once it is closed; one that is taken is named.
    named = f"cannot listen on 127.0.0.1:{server.port};"
    with (
        socket.create_server(("127.0.0.1", server.port)),
        pytest.raises(ConfigurationError, match=named) as error,
    ):
        lighthouse_at(server.port)
    with lighthouse_at(server.port):  # what was started before the error does not stay
        assert error.value.__traceback__ is not None  # though the error holds on to it


def test_numbers_that_cannot_be_are_refused() -> None:
    wrong = [("heartbeat_timeout_s", 0.0), ("heartbeat_timeout_s", float("nan"))]
    wrong += [("port", 65536), ("port", -1), ("min_workers", 0), ("join_timeout_s", -1.0)]
    for field, value in wrong:
        with pytest.raises(ConfigurationError, match=f"cannot start a lighthouse with {field}="):
            lighthouse_at(**{field: value})


def test_without_torchft_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft.coordination", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'thinwire\[elastic\]'"):
        LighthouseServer(TOKEN, host="127.0.0.1", port=0, on_event=lambda _: None)


class Panic(BaseException):
    """As what torchft's client raises where its own code fails, which is not an Exception."""


def ready() -> Member:
    known = {"description": "c", "phase": "round", "generation": 0, "oldest": 3}
    return Member(identity="a", nonce="1", address="a:1", position=at(3), **known)


def until(holds) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def connected(monkeypatch, *, quorum, heartbeat=lambda: None, on_change=lambda why: None, **waits):
    """A client of torchft's, whose calls are those functions; `quorum` returns or raises."""

    class Client:
        def __init__(self, address, timeout) -> None:
            pass

        def heartbeat(self, name, timeout) -> None:
            heartbeat()

        def quorum(self, name, timeout, **fields):
            quorum(self)
            return SimpleNamespace(participants=[SimpleNamespace(**fields)])

    module = SimpleNamespace(LighthouseClient=Client)
    monkeypatch.setattr(lighthouse.torchft, "load", lambda name: module)
    client = lighthouse.LighthouseClient("h:1", "a:1", on_change=on_change, **waits)
    try:
        yield client, lambda: client.quorum(ready, TOKEN, check=lambda: None)
    finally:
        client.close()


@pytest.mark.parametrize(("begun", "asked"), [("before", 2), ("while it is lost", 1)])
def test_a_lighthouse_that_comes_back_is_asked_once(monkeypatch, begun: str, asked: int) -> None:
    """What was asked of the new one must not be asked again: it may have answered the others."""
    is_up, answers = threading.Event(), threading.Event()
    calls: list[object] = []
    changes: list[str] = []

    def heartbeat() -> None:
        if not is_up.is_set():
            raise RuntimeError("it is out")

    def quorum(client) -> None:
        calls.append(client)
        assert answers.wait(20)

    calling = {"quorum": quorum, "heartbeat": heartbeat, "on_change": changes.append}
    waits = {"heartbeat_timeout_s": 0.1, "give_up_s": 20.0}
    with connected(monkeypatch, **calling, **waits) as (client, ask), ThreadPoolExecutor(1) as pool:
        try:
            client.resume()
            if begun == "before":
                is_up.set()
                found = pool.submit(ask)
                until(lambda: calls)
                is_up.clear()
            until(lambda: changes == ["it is out"])
            if begun != "before":
                found = pool.submit(ask)
                until(lambda: calls)
            is_up.set()
            until(lambda: changes[-1] == "")
            # Long enough to be asked again.
            time.sleep(10 * lighthouse._LOOK_S)
            assert len(calls) == asked
            answers.set()
            assert found.result(20) == [ready()]
        finally:
            answers.set()


def test_a_call_that_panics_is_made_again_by_another_client(monkeypatch) -> None:
    calls: list[object] = []

    def quorum(client) -> None:
        calls.append(client)
        if len(calls) == 1:
            raise Panic("called `Option::unwrap()` on a `None` value")

    waits = {"heartbeat_timeout_s": 100.0, "give_up_s": 5.0}
    with connected(monkeypatch, quorum=quorum, **waits) as (client, ask):
        assert ask() == [ready()]
        assert len({*calls}) == len(calls) == 2
        assert client.was_lost_lately()  # what answered may not have heard of the others yet


def test_closing_ends_a_wait_for_a_quorum(monkeypatch) -> None:
    asked, ends = threading.Event(), threading.Event()

    def quorum(client) -> None:
        asked.set()
        assert ends.wait(20)
        raise RuntimeError("the test is over")

    waits = {"heartbeat_timeout_s": 1.0, "give_up_s": 60.0}
    with (
        connected(monkeypatch, quorum=quorum, **waits) as (client, ask),
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(ask)
        assert asked.wait(20)
        client.close()
        try:
            with pytest.raises(ExchangeError) as raised:
                waiting.result(5)
        finally:
            ends.set()
    assert raised.value.because == "this worker has left the run"
