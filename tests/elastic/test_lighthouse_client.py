"""torchft's lighthouse as a worker asks it."""

import threading
import time
import types

import pytest

from elastic_registry import TOKEN, at
from thinwire.elastic import lighthouse as lighthouse_client
from thinwire.elastic.quorum import Member
from thinwire.errors import ExchangeError


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
    monkeypatch.setattr(lighthouse_client.torchft, "load", lambda name: module)
    changes: list[str] = []
    client = lighthouse_client.LighthouseClient(
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
        time.sleep(10 * lighthouse_client._LOOK_S)
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
    monkeypatch.setattr(lighthouse_client.torchft, "load", lambda name: module)
    member = ready()
    client = lighthouse_client.LighthouseClient(
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
    monkeypatch.setattr(lighthouse_client.torchft, "load", lambda name: module)
    client = lighthouse_client.LighthouseClient(
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
