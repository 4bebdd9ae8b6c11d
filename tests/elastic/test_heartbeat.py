"""A worker's heartbeats, and what it learns from them."""

import itertools
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elastic_registry import EXPIRY_S, Clock, at
from thinwire.elastic import heartbeat as heartbeat_module
from thinwire.elastic.heartbeat import Heartbeat
from thinwire.elastic.quorum import Member
from thinwire.elastic.registry_server import RefusedError, RegistryReply
from thinwire.errors import ExchangeError, MismatchError
from thinwire.membership import Progress


def reply(**fields) -> RegistryReply:
    return RegistryReply(heartbeat_timeout_s=EXPIRY_S, **fields)


class FakeRegistry:
    """Answers with `replies`; records heartbeats in the order in which they arrive."""

    def __init__(self) -> None:
        self.replies: list[RegistryReply | Exception] = []
        self.arrived: list[int] = []
        self.on_way = lambda position: None

    def heartbeat(self, position: Progress, *, waiting_s: float) -> RegistryReply:
        self.on_way(position)
        self.arrived.append(position.version)
        found = self.replies.pop(0) if self.replies else reply(peers=(), age_s=99.0)
        if isinstance(found, Exception):
            raise found
        return found

    def leave(self) -> None:
        pass


def peer(identity: str, **fields) -> Member:
    address = "10.0.0.1:4000"
    return Member(identity=identity, nonce="1", address=address, position=at(1), **fields)


@contextmanager
def sending(
    registry: FakeRegistry, *, position=lambda: at(1), every_s: float = 600.0, **callbacks
) -> Iterator[Heartbeat]:
    """By default beats only when asked to."""
    known = {
        "members": lambda: frozenset({"a:1", "b:1"}),
        "lenient_s": lambda: 0.0,
        "on_awaited": lambda: None,
        "on_gone": lambda names: None,
        "on_refused": lambda line: None,
    }
    joined = reply(peers=(), age_s=99.0)
    heartbeat = Heartbeat(registry, position, joined, every_s=every_s, **known | callbacks)
    try:
        yield heartbeat
    finally:
        heartbeat.close()


def test_only_a_registry_that_has_checked_a_worker_refuses_it() -> None:
    refused = RefusedError("take part", because="its identity is taken", do="take another")
    # The registry is gone, another server has its port, or a clock is wrong.
    gone = [
        kind("ask", because="it is gone", do="start it") for kind in (ExchangeError, MismatchError)
    ]
    there = reply(peers=(peer("a"),), age_s=1.0)
    registry = FakeRegistry()
    registry.replies = [there, *gone, refused, refused, there, *gone]
    with sending(registry) as heartbeat:
        found = [(heartbeat.send(), heartbeat.refusal) for _ in range(8)]
    assert found == [
        ((peer("a"),), is_refused) for is_refused in [None] * 3 + [refused] * 2 + [None] * 3
    ]


def test_a_heartbeat_does_not_overtake_an_earlier_one() -> None:
    """Or the others would see this worker a round behind where it is, when it has finished."""
    versions, second = itertools.count(1), threading.Event()
    registry = FakeRegistry()
    registry.on_way = lambda position: position.version == 1 and second.wait(0.2)

    def position() -> Progress:
        where = at(next(versions))
        if where.version == 2:
            second.set()
        return where

    with sending(registry, position=position) as heartbeat:
        threads = [threading.Thread(target=heartbeat.send) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert registry.arrived == [1, 2]


def test_gone_members_are_reported_and_those_that_joined_again_are_not() -> None:
    both, one = (peer("a"), peer("b"), peer("c")), (peer("a"),)
    gone, registry = [], FakeRegistry()
    registry.replies = [
        reply(peers=both, age_s=9.0),
        reply(peers=one, age_s=9.0),
        reply(peers=both, age_s=9.0),
        reply(peers=one, age_s=0.1, rejoined=True),  # the registry was restarted
    ]
    with sending(registry, on_gone=gone.append) as heartbeat:
        for _ in range(4):
            heartbeat.send()
    assert gone == [{"b:1"}]  # c is in no round with this worker


@pytest.mark.parametrize("arrives", ["never", "before", "meanwhile", "in the callback"])
def test_a_worker_at_the_end_of_its_round_is_not_late(monkeypatch, arrives: str) -> None:
    clock = Clock()
    monkeypatch.setattr(heartbeat_module, "time", types.SimpleNamespace(monotonic=clock))
    late, stands, arrivals = [], threading.Event(), []
    registry = FakeRegistry()
    registry.replies = [reply(peers=(peer("a", waiting_s=3.0),), age_s=99.0)] * 2

    def members() -> frozenset[str]:
        if arrives == "meanwhile" and clock.now_s > 1000:
            heartbeat.wait_begins()
        return frozenset({"a:1"})

    def on_awaited() -> None:
        if arrives == "in the callback":
            arrivals.append(
                threading.Thread(target=lambda: (heartbeat.wait_begins(), stands.set()))
            )
            arrivals[0].start()
            # A worker that arrives resumes its heartbeats: not before they were paused.
            assert not stands.wait(0.1)
        late.append(clock.now_s)

    with sending(registry, members=members, on_awaited=on_awaited) as heartbeat:
        heartbeat.wait_begins()
        heartbeat.wait_ends()
        heartbeat.send()
        assert late == []  # they say so of a wait that this worker has just ended
        clock.now_s += 2.5 * 600 + 1
        if arrives == "before":
            heartbeat.wait_begins()
        heartbeat.send()
        for thread in arrivals:
            thread.join()
    assert bool(late) == (arrives in ("never", "in the callback"))
    assert stands.is_set() == (arrives == "in the callback")
