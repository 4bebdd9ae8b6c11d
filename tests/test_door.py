"""The door of an elastic run, torchft's lighthouse beside it, and the command that starts both."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest

from thinwire.cli import lighthouse as command
from thinwire.elastic import heartbeat as heartbeat_module
from thinwire.elastic import lighthouse_client
from thinwire.elastic.address import address_text, split_address
from thinwire.elastic.heartbeat import Heartbeat, HeartbeatCallbacks
from thinwire.elastic.lighthouse import Lighthouse
from thinwire.elastic.quorum import Member
from thinwire.elastic.registry import MemberRegistry, Peer
from thinwire.elastic.registry_server import (
    HeartbeatReply,
    JoinReply,
    RegistryClient,
    RegistryServer,
)
from thinwire.elastic.shared_state import Progress
from thinwire.elastic.signed_http import ask_json, call
from thinwire.elastic.token import Token
from thinwire.errors import ConfigurationError, ExchangeError, MismatchError

TOKEN = Token("a secret of many characters")
CARD = {"method.sync_every": "5", "thinwire": "0.1.0"}
OTHER = CARD | {"method.sync_every": "10"}
EXPIRY_S = 5.0


def at(version: int) -> Progress:
    return Progress(version=version, step=5 * version, digest=f"{version:064x}")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Rules:
    """A register with a clock that is moved by hand."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.register = MemberRegistry(expiry_s=EXPIRY_S, clock=self.clock)

    def join(self, identity: str, *, card=CARD, version: int = 0, process: int = 0):
        peer = Peer(
            identity=identity,
            nonce=f"{identity}{process}",
            address="10.0.0.1:4000",
            position=at(version),
        )
        return self.register.join(peer, card)

    def beat(self, identity: str, *, process: int = 0, **changes):
        return self.register.beat(identity, f"{identity}{process}", **changes)

    def after(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.register.expire()

    def there(self) -> list[str]:
        return [peer.identity for peer in self.register.others()]


def test_the_first_card_is_the_runs_and_another_is_refused_on_all_sides() -> None:
    rules = Rules()
    assert rules.join("a") is None
    assert rules.join("b") is None
    rules.register.take_news()
    refusal = rules.join("c", card=OTHER)
    assert refusal is not None
    assert refusal.status == 403
    assert refusal.reason == "method.sync_every is 10 here and 5 in the run"
    line = "'c' at 10.0.0.1:4000: method.sync_every is 10 there and 5 in the run"
    assert rules.register.take_news() == [f"refused {line}"]
    for member in ("a", "b"):
        assert rules.register.take_untold(member) == [line]
        assert rules.register.take_untold(member) == []
    assert rules.there() == ["a", "b"]


def test_a_field_that_one_side_lacks_is_a_difference() -> None:
    rules = Rules()
    rules.join("a")
    refusal = rules.join("b", card={"thinwire": "0.1.0"})
    assert refusal is not None
    assert refusal.reason == "method.sync_every is none here and 5 in the run"


def test_who_asks_again_and_again_is_told_of_once() -> None:
    rules = Rules()
    rules.join("a")
    for _ in range(7):
        rules.join("c", card=OTHER)
        rules.after(0.5)
        rules.beat("a")
    assert len(rules.register.take_untold("a")) == 1
    for _ in range(61):
        rules.after(1.0)
        rules.beat("a")
    rules.join("c", card=OTHER)
    assert len(rules.register.take_untold("a")) == 1


def test_an_identity_is_taken_until_its_holder_has_been_silent_for_long_enough() -> None:
    rules = Rules()
    rules.join("a")
    rules.after(0.4)
    refusal = rules.join("a", process=1)
    assert refusal is not None
    assert refusal.status == 409
    taken = "identity 'a' is taken by a worker at 10.0.0.1:4000, last heard 0.4 s ago"
    assert refusal.reason == taken
    assert refusal.retry_s == pytest.approx(EXPIRY_S - 0.4)
    rules.after(EXPIRY_S - 0.4)
    assert rules.there() == ["a"]  # at the limit and not beyond it
    rules.after(0.01)
    assert rules.there() == []
    assert rules.join("a", process=1) is None
    assert rules.beat("a") is None  # the old process is not the new one
    assert rules.beat("a", process=1) is not None


def test_the_same_process_may_join_twice() -> None:
    """Its first answer may have been lost on the way."""
    rules = Rules()
    assert rules.join("a") is None
    assert rules.join("a") is None
    assert len(rules.register.take_news()) == 1


def test_a_worker_restarted_with_another_card_waits_for_its_own_past_only() -> None:
    rules = Rules()
    rules.join("a")
    refusal = rules.join("a", process=1, card=OTHER)
    assert refusal is not None
    assert refusal.status == 409
    rules.after(EXPIRY_S + 1)
    assert rules.join("a", process=1, card=OTHER) is None


@pytest.mark.parametrize("end", ["leave", "expire"])
def test_the_card_is_forgotten_with_the_last_worker(end: str) -> None:
    rules = Rules()
    rules.join("a")
    rules.join("b")
    rules.register.leave("a", "a0")
    assert rules.join("c", card=OTHER) is not None
    if end == "leave":
        rules.register.leave("b", "b0")
    else:
        rules.after(EXPIRY_S + 0.1)
    assert rules.join("c", card=OTHER) is None
    news = rules.register.take_news()
    assert news[-2].startswith("b left (" if end == "leave" else "b is gone (version 0, step 0): ")


def test_a_state_that_took_outer_steps_displaces_those_at_the_beginning() -> None:
    rules = Rules()
    rules.join("wrong", card=OTHER)
    rules.join("wrong2", card=OTHER)
    assert rules.join("new") is not None  # at the beginning itself
    assert rules.join("old", version=3) is None
    assert rules.there() == ["old"]
    assert any("as 'old' brings it (version 3, step 15)" in n for n in rules.register.take_news())
    assert rules.beat("wrong") is None
    refusal = rules.join("wrong", card=OTHER)
    assert refusal is not None
    assert refusal.status == 403


def test_nobody_is_displaced_who_took_outer_steps() -> None:
    rules = Rules()
    rules.join("a")
    rules.join("b")
    rules.beat("b", position=at(1))
    assert rules.join("c", card=OTHER, version=9) is not None
    assert rules.there() == ["a", "b"]


@pytest.mark.parametrize("address", ["", "node", ":1", "node:", "node:x", "node:65536", "::1:5"])
def test_addresses_without_host_or_port_are_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match="not HOST:PORT"):
        split_address(address)


@pytest.mark.parametrize("address", ["node:0", "10.0.0.1:65535", "[fe80::1]:7"])
def test_addresses_come_back_as_they_were(address: str) -> None:
    assert address_text(*split_address(address)) == address


@contextmanager
def door(*, expiry_s: float = EXPIRY_S, port: int = 0, told=None) -> Iterator[RegistryServer]:
    opened = RegistryServer(
        TOKEN,
        host="127.0.0.1",
        port=port,
        lighthouse_port=4321,
        heartbeat_timeout_s=expiry_s,
        on_event=([] if told is None else told).append,
    )
    try:
        yield opened
    finally:
        opened.close()


def client(port: int, identity: str, card=CARD, token: Token = TOKEN) -> RegistryClient:
    return RegistryClient(token, f"127.0.0.1:{port}", identity, card)


def test_workers_see_each_other_at_the_door() -> None:
    told: list[str] = []
    with door(told=told) as opened:
        a, b = client(opened.port, "a"), client(opened.port, "b")
        welcome = a.join(at(0), "10.0.0.1:4000")
        assert (welcome.lighthouse, welcome.peers) == ("127.0.0.1:4321", ())
        assert welcome.heartbeat_timeout_s == EXPIRY_S
        b.finish()
        (seen,) = b.join(at(2), "10.0.0.2:4000").peers
        expected = Peer(identity="a", nonce=a.nonce, address="10.0.0.1:4000", position=at(0))
        assert seen == expected
        (seen,) = a.beat(at(7)).peers
        assert (seen.identity, seen.finished, seen.position) == ("b", True, at(2))
        assert b.beat(at(2)).peers[0].position == at(7)
        with pytest.raises(MismatchError, match="sync_every is 10 here and 5 in the run"):
            client(opened.port, "c", OTHER).join(at(0), "10.0.0.3:4000")
        (line,) = a.beat(at(7)).refused
        assert "sync_every is 10 there and 5 in the run" in line
        a.leave()
        assert b.beat(at(2)).peers == ()
    assert told[0] == "a came from 10.0.0.1:4000 (version 0, step 0)"
    assert told[-1] == "a left (version 7, step 35)"
    assert sum(line.startswith("refused 'c'") for line in told) == 1


def test_the_silent_are_gone_without_anybody_asking() -> None:
    gone = threading.Event()

    def on_event(line: str) -> None:
        if line.startswith("a is gone"):
            gone.set()

    opened = RegistryServer(
        TOKEN,
        host="127.0.0.1",
        port=0,
        lighthouse_port=1,
        heartbeat_timeout_s=0.2,
        on_event=on_event,
    )
    client(opened.port, "a").join(at(0), "10.0.0.1:4000")
    assert gone.wait(5)
    opened.close()


def test_a_restarted_worker_waits_at_the_door_for_its_own_past() -> None:
    with door(expiry_s=0.5) as opened:
        client(opened.port, "a").join(at(0), "10.0.0.1:4000")
        assert client(opened.port, "a").join(at(0), "10.0.0.1:4001").peers == ()


def test_a_second_worker_of_one_identity_is_refused(monkeypatch) -> None:
    with door(expiry_s=0.4) as opened:
        holder, second = client(opened.port, "a"), client(opened.port, "a")
        holder.join(at(0), "10.0.0.1:4000")
        # In the place of its pause: the holder goes on beating.
        monkeypatch.setattr(
            "thinwire.elastic.registry_server.time.sleep", lambda _: holder.beat(at(0))
        )
        with pytest.raises(MismatchError, match=r"identity 'a' is taken .* 10\.0\.0\.1:4000, last"):
            second.join(at(0), "10.0.0.1:4001")
        assert len(holder.beat(at(0)).refused) == 0  # told with an earlier beat


def test_a_door_that_was_restarted_lets_everybody_in_again() -> None:
    with door() as opened:
        port = opened.port
        a = client(port, "a")
        a.join(at(0), "10.0.0.1:4000")
        assert not a.beat(at(1)).again
    with pytest.raises(ExchangeError, match=f"127.0.0.1:{port}"):
        a.beat(at(2))
    with door(port=port):
        wrong = client(port, "w", OTHER)
        wrong.join(at(0), "10.0.0.9:4000")
        beat = a.beat(at(2))  # it took outer steps: the one that came first has to go
        assert (beat.again, beat.peers) == (True, ())
        assert not a.beat(at(2)).again
        with pytest.raises(MismatchError, match="sync_every is 10 here and 5 in the run"):
            wrong.beat(at(0))


def test_a_beat_after_leaving_does_not_bring_a_worker_back() -> None:
    with door() as opened:
        a = client(opened.port, "a")
        with pytest.raises(ConfigurationError, match="call join first"):
            a.beat(at(0))
        a.join(at(0), "10.0.0.1:4000")
        a.leave()
        assert a.beat(at(1)).peers == ()
        assert ask_json(TOKEN, f"127.0.0.1:{opened.port}", "/peers")["peers"] == []


def test_another_token_is_refused_and_the_lighthouse_hears_of_it_once() -> None:
    told: list[str] = []
    stranger = Token("another secret of many characters")
    with door(told=told) as opened:
        member = client(opened.port, "a")
        member.join(at(0), "10.0.0.1:4000")
        for _ in range(3):
            with pytest.raises(MismatchError, match="not signed with this run's token"):
                client(opened.port, "b", token=stranger).join(at(0), "10.0.0.2:4000")
        (line,) = member.beat(at(0)).refused
    assert line == (
        "somebody at 127.0.0.1: the token is another one, or the request was changed on the way"
    )
    assert told.count(f"refused {line}") == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"identity": "a"}',
        b'{"identity": "", "nonce": "n", "address": "h:1", "card": {}, '
        b'"position": {"version": 0, "step": 0, "digest": ""}}',
        b'{"identity": "a\\u001b[2J", "nonce": "n", "address": "h:1", "card": {}, '
        b'"position": {"version": 0, "step": 0, "digest": ""}}',
        b'{"identity": "a", "nonce": "n", "address": "h", "card": {}, '
        b'"position": {"version": 0, "step": 0, "digest": ""}}',
        b'{"identity": "a", "nonce": "n", "address": "h:1", "card": [], '
        b'"position": {"version": 0, "step": 0, "digest": ""}}',
    ],
)
@pytest.mark.parametrize("path", ["/join", "/beat", "/leave", "/probe"])
def test_a_body_of_another_form_is_an_error_of_the_asker(body: bytes, path: str) -> None:
    with door() as opened:
        address = f"127.0.0.1:{opened.port}"
        status = call(TOKEN, address, path, body=body, accept=(200, 400, 410)).status
        assert status in ((400, 200) if path == "/leave" else (400, 410))
        assert ask_json(TOKEN, address, "/peers")["peers"] == []


def test_the_door_tries_a_port_once_and_looks_no_names_up() -> None:
    with door() as opened, socket.create_server(("127.0.0.1", 0)) as listener:
        address, port = f"127.0.0.1:{opened.port}", listener.getsockname()[1]
        reached = ask_json(TOKEN, address, "/probe", {"host": "127.0.0.1", "port": port})
        assert reached == {"reached": True, "why": ""}
        listener.accept()[0].close()
        listener.close()
        missed = ask_json(TOKEN, address, "/probe", {"host": "127.0.0.1", "port": port})
        assert not missed["reached"]
        assert "refused" in missed["why"]
        for odd in ({"host": "localhost", "port": port}, {"host": "127.0.0.1", "port": 0}):
            with pytest.raises(MismatchError, match="cannot be read"):
                ask_json(TOKEN, address, "/probe", odd)


# -- a worker's presence at the door -------------------------------------------------------------


class Answering:
    """A door that says what it is told to; beats come in the order in which they arrive."""

    def __init__(self) -> None:
        self.says: list[HeartbeatReply | Exception] = []
        self.arrived: list[int] = []
        self.on_way = lambda position: None

    def beat(self, position: Progress, *, waiting_s: float) -> HeartbeatReply:
        self.on_way(position)
        self.arrived.append(position.version)
        said = self.says.pop(0) if self.says else HeartbeatReply(peers=(), age_s=99.0)
        if isinstance(said, Exception):
            raise said
        return said

    def leave(self) -> None:
        pass


def peer(identity: str, **fields) -> Peer:
    address = "10.0.0.1:4000"
    return Peer(identity=identity, nonce="1", address=address, position=at(1), **fields)


@contextmanager
def attending(
    answering: Answering, *, position=lambda: at(1), every_s: float = 600.0, **concerns
) -> Iterator[Heartbeat]:
    """By default beats only when asked to."""
    known = {
        "team": lambda: frozenset({"a:1", "b:1"}),
        "lenient_s": lambda: 0.0,
        "on_awaited": lambda: None,
        "on_gone": lambda names: None,
        "on_refused": lambda line: None,
    }
    welcome = JoinReply(lighthouse="h:1", heartbeat_timeout_s=EXPIRY_S, peers=(), age_s=99.0)
    attendance = Heartbeat(
        answering,
        position,
        welcome,
        every_s=every_s,
        concerns=HeartbeatCallbacks(**known | concerns),
    )
    try:
        yield attendance
    finally:
        attendance.close()


def test_beats_go_on_whatever_fails_when_they_are_told_of(caplog) -> None:
    enough = threading.Event()
    answering = Answering()
    answering.says = [HeartbeatReply(peers=(), age_s=9.0, refused=("somebody",))] * 3
    answering.on_way = lambda _: enough.set() if len(answering.arrived) == 3 else None

    def fails(line: str) -> None:
        raise OSError("the terminal is gone")

    with attending(answering, every_s=0.001, on_refused=fails):
        assert enough.wait(5)
    assert caplog.text.count("a beat at the door failed") == 3


def test_one_odd_answer_of_the_door_ends_nothing_and_two_in_a_row_do() -> None:
    refused = [MismatchError("take part", because=str(n), do="nothing") for n in range(5)]
    answering = Answering()
    answering.says = [refused[0], HeartbeatReply(peers=(), age_s=1.0), *refused[1:4]]
    with attending(answering) as attendance:
        found = []
        for _ in range(6):
            attendance.ask()
            found.append(attendance.refusal)
    assert found == [None, None, None, refused[2], refused[3], None]


def test_a_door_that_does_not_answer_refuses_nobody() -> None:
    answering = Answering()
    answering.says = [HeartbeatReply(peers=(peer("a"),), age_s=1.0)]
    answering.says += [ExchangeError("reach the door", because="it is gone", do="start it")] * 5
    with attending(answering) as attendance:
        for _ in range(6):
            assert attendance.ask() == (peer("a"),)
            assert attendance.refusal is None


def test_a_beat_does_not_overtake_an_earlier_one() -> None:
    """Or the others would see this worker a round behind where it is, when it has finished."""
    versions, second = itertools.count(1), threading.Event()
    answering = Answering()
    answering.on_way = lambda position: position.version == 1 and second.wait(0.2)

    def position() -> Progress:
        where = at(next(versions))
        if where.version == 2:
            second.set()
        return where

    with attending(answering, position=position) as attendance:
        threads = [threading.Thread(target=attendance.ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answering.arrived == [1, 2]


class SlowlyRead:
    """An answer that the thread that got it is slow to read."""

    def __init__(self, peers: tuple[Peer, ...], read: threading.Event) -> None:
        self._peers, self._read = peers, read
        self.age_s, self.refused, self.again = 99.0, (), False

    @property
    def peers(self) -> tuple[Peer, ...]:
        self._read.wait(0.1)
        return self._peers


def test_an_earlier_answer_does_not_undo_a_later_one() -> None:
    later, gone = threading.Event(), []
    answering = Answering()
    answering.says = [
        SlowlyRead((peer("a"),), later),
        HeartbeatReply(peers=(peer("a"), peer("b")), age_s=99.0),
    ]
    with attending(answering, on_gone=gone.append) as attendance:
        slow = threading.Thread(target=attendance.ask)
        slow.start()
        while not answering.arrived:
            time.sleep(0.001)
        attendance.ask()
        later.set()
        slow.join()
        assert attendance.peers == (peer("a"), peer("b"))
    assert gone == []


def test_who_is_gone_is_told_and_who_came_again_is_not_missed() -> None:
    both, one = (peer("a"), peer("b"), peer("c")), (peer("a"),)
    gone, answering = [], Answering()
    answering.says = [
        HeartbeatReply(peers=both, age_s=9.0),
        HeartbeatReply(peers=one, age_s=9.0),
        HeartbeatReply(peers=both, age_s=9.0),
        HeartbeatReply(peers=one, age_s=0.1, again=True),  # a door that was opened anew
    ]
    with attending(answering, on_gone=gone.append) as attendance:
        for _ in range(4):
            attendance.ask()
    assert gone == [{"b:1"}]  # c is in no round with this worker


@pytest.mark.parametrize("arrives", ["never", "before", "meanwhile", "as it is told"])
def test_who_stands_at_the_end_of_its_round_is_late_for_nobody(monkeypatch, arrives: str) -> None:
    clock = Clock()
    monkeypatch.setattr(heartbeat_module, "time", types.SimpleNamespace(monotonic=clock))
    late, stands, arrivals = [], threading.Event(), []
    answering = Answering()
    answering.says = [HeartbeatReply(peers=(peer("a", waiting_s=3.0),), age_s=99.0)] * 2

    def team() -> frozenset[str]:
        if arrives == "meanwhile" and clock.now_s > 1000:
            attendance.wait_begins()
        return frozenset({"a:1"})

    def on_awaited() -> None:
        if arrives == "as it is told":
            arrivals.append(
                threading.Thread(target=lambda: (attendance.wait_begins(), stands.set()))
            )
            arrivals[0].start()
            # Whoever arrives sends heartbeats again: not before these were held back.
            assert not stands.wait(0.1)
        late.append(clock.now_s)

    with attending(answering, team=team, on_awaited=on_awaited) as attendance:
        attendance.wait_begins()
        attendance.wait_ends()
        attendance.ask()
        assert late == []  # they say so of a wait that this worker has just ended
        clock.now_s += 2.5 * 600 + 1
        if arrives == "before":
            attendance.wait_begins()
        attendance.ask()
        for thread in arrivals:
            thread.join()
    assert bool(late) == (arrives in ("never", "as it is told"))
    assert stands.is_set() == (arrives == "as it is told")


# -- torchft's lighthouse ------------------------------------------------------------------------


class Panic(BaseException):
    """What torchft's client raises where its own code fails is no Exception."""


def convening() -> Member:
    return Member(
        identity="a",
        nonce="1",
        card="c",
        address="a:1",
        store="a:2",
        position=at(3),
        occasion="round",
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
    shines, answers = threading.Event(), threading.Event()
    calls: list[str] = []

    class Client:
        def __init__(self, address, timeout) -> None:
            pass

        def heartbeat(self, name, timeout) -> None:
            if not shines.is_set():
                raise RuntimeError("it is out")

        def quorum(self, name, timeout, **standing):
            calls.append(name)
            assert answers.wait(20)
            return types.SimpleNamespace(participants=[types.SimpleNamespace(**standing)])

    module = types.SimpleNamespace(LighthouseClient=Client)
    monkeypatch.setattr(lighthouse_client.torchft, "load", lambda name: module)
    told: list[str] = []
    member = lighthouse_client.LighthouseClient(
        "h:1", "a:1", heartbeat_timeout_s=0.1, give_up_s=20.0, tell=told.append
    )
    found: list[list[Member]] = []
    ask = threading.Thread(
        target=lambda: found.append(member.quorum(convening, TOKEN, check=lambda: None))
    )
    try:
        member.beat_on()
        if begun == "before":
            shines.set()
            ask.start()
            until(lambda: calls)
            shines.clear()
        until(lambda: told == ["it is out"])
        if begun != "before":
            ask.start()
            until(lambda: calls)
        shines.set()
        until(lambda: told[-1] == "")
        # Long enough to be asked again by whoever would.
        time.sleep(10 * lighthouse_client._LOOK_S)
        assert len(calls) == asked
        answers.set()
        ask.join(20)
        assert found == [[convening()]]
    finally:
        answers.set()
        member.close()


def test_a_call_that_panics_is_made_again_by_another_client(monkeypatch) -> None:
    made = []

    class Client:
        def __init__(self, address, timeout) -> None:
            self.quorums = 0
            made.append(self)

        def heartbeat(self, name, timeout) -> None:
            pass

        def quorum(self, name, timeout, **standing):
            self.quorums += 1
            if len(made) == 1:
                raise Panic("called `Option::unwrap()` on a `None` value")
            return types.SimpleNamespace(participants=[types.SimpleNamespace(**standing)])

    module = types.SimpleNamespace(LighthouseClient=Client)
    monkeypatch.setattr(lighthouse_client.torchft, "load", lambda name: module)
    standing = convening()
    member = lighthouse_client.LighthouseClient(
        "h:1", "a:1", heartbeat_timeout_s=100.0, give_up_s=5.0, tell=lambda why: None
    )
    try:
        assert member.quorum(lambda: standing, TOKEN, check=lambda: None) == [standing]
        assert [client.quorums for client in made] == [1, 1]
        assert member.is_new()  # whatever answered may not have heard of the others yet
    finally:
        member.close()


def shining(port: int = 0, **settings) -> Lighthouse:
    pytest.importorskip("torchft")
    defaults = {"heartbeat_timeout_s": 1.0, "join_timeout_s": 1.0, "on_event": lambda _: None}
    return Lighthouse(TOKEN, host="127.0.0.1", port=port, **defaults | settings)


def test_a_lighthouse_forms_quorums_one_port_above_its_door() -> None:
    with shining() as lighthouse:
        welcome = client(lighthouse.port, "a").join(at(0), "10.0.0.1:4000")
        assert split_address(welcome.lighthouse)[1] == lighthouse.port + 1
        from torchft.coordination import LighthouseClient

        member = LighthouseClient(
            addr=f"http://{welcome.lighthouse}", connect_timeout=timedelta(seconds=5)
        )
        quorum = member.quorum(
            replica_id="a", timeout=timedelta(seconds=5), address="", store_address=""
        )
        assert [p.replica_id for p in quorum.participants] == ["a"]
    with shining(lighthouse.port) as again:  # its ports are free once it is closed
        assert again.port == lighthouse.port


@pytest.mark.parametrize("above", [0, 1])
def test_a_port_that_is_taken_is_named(above: int) -> None:
    with shining() as lighthouse:
        port = lighthouse.port
    with (
        socket.create_server(("127.0.0.1", port + above)),
        pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port + above};") as e,
    ):
        shining(port)
    with shining(port):  # what was started before the error does not stay
        assert e.value.__traceback__ is not None  # though the error holds on to it


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 65535},
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
        shining(**wrong)


def test_workers_are_told_an_address_that_others_reach(monkeypatch) -> None:
    def no_way_out() -> str:
        raise OSError(101, "Network is unreachable")

    assert command._seen_from_outside("10.0.0.1") == "10.0.0.1"
    monkeypatch.setattr(command, "local_address", lambda: "10.7.0.1")
    assert command._seen_from_outside("0.0.0.0") == "10.7.0.1"
    monkeypatch.setattr(command, "local_address", no_way_out)
    monkeypatch.setattr(
        command, "interface_addresses", lambda: {"lo": "127.0.0.1", "wg0": "192.168.0.2"}
    )
    assert command._seen_from_outside("0.0.0.0") == "192.168.0.2"
    monkeypatch.setattr(command, "interface_addresses", dict)
    assert command._seen_from_outside("0.0.0.0") == socket.gethostname()


def test_a_host_of_another_machine_is_refused() -> None:
    pytest.importorskip("torchft")
    for port in (0, 29400):
        with pytest.raises(ConfigurationError, match=r"cannot listen on 203\.0\.113\.1"):
            Lighthouse(TOKEN, host="203.0.113.1", port=port, on_event=lambda _: None)


def test_without_torchft_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft.coordination", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'thinwire\[elastic\]'"):
        Lighthouse(TOKEN, host="127.0.0.1", port=0, on_event=lambda _: None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_prints_token_address_and_events_and_ends_when_told(number) -> None:
    pytest.importorskip("torchft")
    environment = {k: v for k, v in os.environ.items() if k not in ("THINWIRE_TOKEN", "RUST_LOG")}
    with subprocess.Popen(
        [sys.executable, "-m", "thinwire", "lighthouse", "--bind", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"HF_HUB_OFFLINE": "1"},
    ) as process:
        stuck = threading.Timer(60, process.kill)
        stuck.start()
        assert process.stdout is not None
        export, ready = process.stdout.readline(), process.stdout.readline()
        secret = export.removeprefix("export THINWIRE_TOKEN=").strip()
        assert len(secret) == 32
        address = ready.removeprefix("ready; workers: thinwire train --elastic ").strip()
        RegistryClient(Token(secret), address, "a", CARD).join(at(0), "10.0.0.1:4000")
        assert process.stdout.readline() == "a came from 10.0.0.1:4000 (version 0, step 0)\n"
        process.send_signal(number)
        out, err = process.communicate()
        stuck.cancel()
    assert (process.returncode, out, err) == (0, "stopped\n", "")
