"""The lighthouse behind the registry's port, and a worker's connection to it."""

import socket
import sys
import threading
import time
import types
from datetime import timedelta

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
    with lighthouse_at() as lighthouse:
        address = f"127.0.0.1:{lighthouse.port}"
        forward = LoopbackForward(Dialer(TOKEN), address, "lighthouse")
        from torchft.coordination import LighthouseClient

        member = LighthouseClient(
            addr=f"http://{forward.address}", connect_timeout=timedelta(seconds=5)
        )
        quorum = member.quorum(
            replica_id="a", timeout=timedelta(seconds=5), address="", store_address=""
        )
        assert [p.replica_id for p in quorum.participants] == ["a"]
        forward.close()
    with lighthouse_at(lighthouse.port) as again:  # its ports are free once it is closed
        assert again.port == lighthouse.port


def test_a_port_that_is_taken_is_named() -> None:
    with lighthouse_at() as lighthouse:
        port = lighthouse.port
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port};") as e,
    ):
        lighthouse_at(port)
    with lighthouse_at(port):  # what was started before the error does not stay
        assert e.value.__traceback__ is not None  # though the error holds on to it


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 65536},
        {"port": -1},
        {"min_workers": 0},
        {"heartbeat_timeout_s": 0.0},
        {"heartbeat_timeout_s": float("nan")},
        {"join_timeout_s": -1.0},
    ],
)
def test_numbers_that_cannot_be_are_refused(wrong) -> None:
    with pytest.raises(
        ConfigurationError, match=f"cannot start a lighthouse with {next(iter(wrong))}="
    ):
        lighthouse_at(**wrong)


def test_without_torchft_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft.coordination", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'thinwire\[elastic\]'"):
        LighthouseServer(TOKEN, host="127.0.0.1", port=0, on_event=lambda _: None)


class Panic(BaseException):
    """As what torchft's client raises where its own code fails, which is not an Exception."""


def ready() -> Member:
    return Member(
        identity="a",
        nonce="1",
        description="c",
        address="a:1",
        position=at(3),
        phase="round",
        generation=0,
        oldest=3,
    )


def until(holds) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("begun", "asked"), [("before", 2), ("while it is lost", 1)])
def test_a_lighthouse_that_comes_back_is_asked_once(monkeypatch, begun: str, asked: int) -> None:
    """What was asked of the new one must not be asked again: it may have answered the others."""
    is_up, answers = threading.Event(), threading.Event()
    calls: list[str] = []

    class Client:
        def __init__(self, address, timeout) -> None:
            pass

        def heartbeat(self, name, timeout) -> None:
            if not is_up.is_set():
                raise RuntimeError("it is out")

        def quorum(self, name, timeout, **fields):
            calls.append(name)
            assert answers.wait(20)
            return types.SimpleNamespace(participants=[types.SimpleNamespace(**fields)])

    module = types.SimpleNamespace(LighthouseClient=Client)
    monkeypatch.setattr(lighthouse.torchft, "load", lambda name: module)
    changes: list[str] = []
    client = lighthouse.LighthouseClient(
        "h:1", "a:1", heartbeat_timeout_s=0.1, give_up_s=20.0, on_change=changes.append
    )
    found: list[list[Member]] = []
    ask = threading.Thread(
        target=lambda: found.append(client.quorum(ready, TOKEN, check=lambda: None))
    )
    try:
        client.resume()
        if begun == "before":
            is_up.set()
            ask.start()
            until(lambda: calls)
            is_up.clear()
        until(lambda: changes == ["it is out"])
        if begun != "before":
            ask.start()
            until(lambda: calls)
        is_up.set()
        until(lambda: changes[-1] == "")
        # Long enough to be asked again.
        time.sleep(10 * lighthouse._LOOK_S)
        assert len(calls) == asked
        answers.set()
        ask.join(20)
        assert found == [[ready()]]
    finally:
        answers.set()
        client.close()


def test_a_call_that_panics_is_made_again_by_another_client(monkeypatch) -> None:
    made = []

    class Client:
        def __init__(self, address, timeout) -> None:
            self.quorums = 0
            made.append(self)

        def heartbeat(self, name, timeout) -> None:
            pass

        def quorum(self, name, timeout, **fields):
            self.quorums += 1
            if len(made) == 1:
                raise Panic("called `Option::unwrap()` on a `None` value")
            return types.SimpleNamespace(participants=[types.SimpleNamespace(**fields)])

    module = types.SimpleNamespace(LighthouseClient=Client)
    monkeypatch.setattr(lighthouse.torchft, "load", lambda name: module)
    member = ready()
    client = lighthouse.LighthouseClient(
        "h:1", "a:1", heartbeat_timeout_s=100.0, give_up_s=5.0, on_change=lambda why: None
    )
    try:
        assert client.quorum(lambda: member, TOKEN, check=lambda: None) == [member]
        assert [client.quorums for client in made] == [1, 1]
        assert client.was_lost_lately()  # what answered may not have heard of the others yet
    finally:
        client.close()


def test_closing_ends_a_wait_for_a_quorum(monkeypatch) -> None:
    asked, ends = threading.Event(), threading.Event()

    class Client:
        def __init__(self, address, timeout) -> None:
            pass

        def heartbeat(self, name, timeout) -> None:
            pass

        def quorum(self, name, timeout, **fields):
            asked.set()
            assert ends.wait(20)
            raise RuntimeError("the test is over")

    module = types.SimpleNamespace(LighthouseClient=Client)
    monkeypatch.setattr(lighthouse.torchft, "load", lambda name: module)
    client = lighthouse.LighthouseClient(
        "h:1", "a:1", heartbeat_timeout_s=1.0, give_up_s=60.0, on_change=lambda why: None
    )
    raised: list[str] = []

    def wait() -> None:
        with pytest.raises(ExchangeError) as error:
            client.quorum(ready, TOKEN, check=lambda: None)
        raised.append(error.value.because)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert asked.wait(20)
    client.close()
    waiting.join(5)
    ends.set()
    assert raised == ["this worker has left the run"]
