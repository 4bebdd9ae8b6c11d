"""Links between the workers of a round, and who is said to be unreachable."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from thinwire.elastic.carrier import GroupLink
from thinwire.elastic.group import RankLink
from thinwire.elastic.quorum import Member, Quorum, elect
from thinwire.elastic.timeouts import Timeouts
from thinwire.membership import Progress
from thinwire.transport.backend import Backend


class Link(GroupLink):
    workers = 2

    def backend(self, number: int, *, timeout_s: float) -> Backend:
        raise AssertionError("no exchange is begun")

    def abort(self) -> None:
        pass


class Connecting:
    """Connects for as long as the test wants."""

    def __init__(self, work: Callable[[], Any] = lambda: None) -> None:
        self.work, self.addresses = work, [""]

    def connect(self, addresses: Sequence[str], **_: Any) -> GroupLink:
        self.addresses = list(addresses)
        self.work()
        return Link()

    def close(self) -> None:
        pass


def quorum(**rounds: int) -> Quorum:
    """Of members that have begun so many rounds."""
    position = Progress(version=4, step=12, digest="aa")
    return elect(
        [
            Member(identity=name, nonce="1", address=f"{name}:1", position=position, rounds=count)
            for name, count in rounds.items()
        ]
    )


def timeouts(floor_s: float) -> Timeouts:
    return Timeouts(floor_s=floor_s, patience=0.5, unmeasured_s=60, fixed_s=None)


@pytest.fixture
def never():
    """What is waited for until the test is over."""
    ends = threading.Event()
    yield lambda: ends.wait(60)
    ends.set()


def test_a_worker_that_stands_still_while_workers_connect_is_left_behind(never) -> None:
    waits = timeouts(0.3)
    link = RankLink(Connecting(never), lambda why, lost_s: None)
    began_s = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        why = pool.submit(link.form, quorum(a=1, b=1), "a:1", waits).result(10)
    assert "could not connect: it took longer than 0.3 s" in why
    assert time.monotonic() - began_s < 2.0
    assert waits.connect() == 0.6
    assert link.usable_key == ""


def test_a_worker_that_is_gone_is_not_waited_for(never) -> None:
    connecting = threading.Event()
    carrier = Connecting(lambda: (connecting.set(), never()))
    link, waits = RankLink(carrier, lambda why, lost_s: None), timeouts(60.0)
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(link.form, quorum(a=1, b=1), "a:1", waits)
        assert connecting.wait(10)
        link.lose(frozenset({"c:1"}))  # of an earlier round
        time.sleep(0.3)
        assert not forming.done()
        link.lose(frozenset({"b:1"}))
        assert "b is gone" in forming.result(10)
    assert waits.connect() == 60.0
    assert link.form(quorum(a=1), "a:1", waits) == ""  # it goes on alone
    carrier = Connecting()
    link = RankLink(carrier, lambda why, lost_s: None)
    assert link.form(quorum(a=0, b=7, c=7), "a:1", timeouts(9.0)) == ""
    assert carrier.addresses == ["a:1", "b:1", "c:1"]  # in rank order
