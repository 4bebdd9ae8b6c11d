"""Two workers at a lighthouse, in one process."""

import contextlib
import dataclasses
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest

from thinwire.elastic.events import EventLog
from thinwire.elastic.healing import fetch_position
from thinwire.elastic.lighthouse import LighthouseServer
from thinwire.elastic.options import ElasticOptions, ElasticSettings
from thinwire.elastic.token import Token
from thinwire.errors import ExchangeError, MismatchError
from thinwire.membership import Go, Load, Over, Phase, Progress, RoundPlan, SharedState, Snapshot


class Still(SharedState):
    """A state that a test moves, and that takes as long to be taken over as the test wants."""

    def __init__(self) -> None:
        self.at = Progress(version=1, step=4, digest="aa")
        self.loading, self.go = threading.Event(), threading.Event()
        self.asked_by: set[str] = set()

    def progress(self, *, anew: bool = False) -> Progress:
        self.asked_by.add(threading.current_thread().name)
        return self.at

    def glance(self) -> Progress:
        return self.at

    def shared_nbytes(self) -> int:
        return 0

    def capture(self) -> Snapshot:
        return Snapshot(facts=self.at.describe(), tensors={})

    def begin(self, session, phase: Phase) -> RoundPlan:
        """What a loop does with the answers of `session`."""
        for answer in session.begin_round(phase):
            match answer:
                case Load(snapshot):
                    self.loading.set()
                    assert self.go.wait(30)
                    self.at = Progress.read(snapshot.facts)
                case Go(plan) | Over(plan):
                    return plan
                case _:
                    raise AssertionError("no round was logged")
        raise AssertionError("neither Go nor Over")


@contextlib.contextmanager
def two_sessions(**options):
    """Two workers at a lighthouse that misses them soon."""
    pytest.importorskip("torchft")
    from thinwire.elastic.carrier import GlooCarrier
    from thinwire.elastic.session import ElasticSession

    token = Token("a secret of many characters")
    lighthouse = LighthouseServer(
        token, host="127.0.0.1", port=0, heartbeat_timeout_s=0.4, on_event=lambda line: None
    )
    with lighthouse, contextlib.ExitStack() as opened:
        sessions, states = [], [Still(), Still()]
        for identity, state in zip("ab", states, strict=True):
            chosen = ElasticSettings(
                lighthouse=f"127.0.0.1:{lighthouse.port}",
                token=token,
                identity=identity,
                host="127.0.0.1",
                options=ElasticOptions(**{"give_up_s": 10.0} | options),
            )
            carrier = GlooCarrier("127.0.0.1")
            session = ElasticSession(chosen, state, {"model": "toy"}, EventLog(), carrier)
            sessions.append(session)
            opened.callback(sessions[-1].close)
        yield sessions, states


@contextlib.contextmanager
def at_once():
    """Runs calls in threads, which end with their sessions."""
    with ThreadPoolExecutor(2) as pool:
        yield lambda session, phase: pool.submit(session._state.begin, session, phase)


def test_no_worker_waits_for_one_that_heals() -> None:
    """Of two, the one that does not heal is half of those who send heartbeats: no majority."""
    with at_once() as begin, two_sessions() as ((first, second), (ahead, behind)):
        together = [begin(session, Phase.JOIN) for session in (first, second)]
        assert {len(done.result(20).names) for done in together} == {2}
        ahead.at = dataclasses.replace(ahead.at, version=2)
        waiting, healing = (begin(session, Phase.ROUND) for session in (first, second))
        try:
            assert behind.loading.wait(20), healing.exception(1)
            assert len(waiting.result(10).names) == 1
            assert len(begin(first, Phase.ROUND).result(10).names) == 1
            assert not healing.done()
            stranger = Token("another secret of many characters")
            with pytest.raises(MismatchError):
                fetch_position(stranger, second._settings.lighthouse)
            while not any(event.kind == "refused" for event in second._events.events):
                assert not healing.done()
                time.sleep(0.01)
        finally:
            behind.go.set()
        first.close()
        assert len(healing.result(20).names) == 1
        assert behind.at == ahead.at
        # What holds the state, such as a step, stops neither beats nor heartbeats.
        assert not behind.asked_by & {"thinwire-heartbeat", "thinwire-lighthouse"}


def unconnected(monkeypatch, sessions) -> list[str]:
    """Let no group be formed; returns the keys of those that were tried."""
    tried = []

    def connect(self, at, *, key, **_):
        tried.append(key)
        raise RuntimeError("no route to host")

    monkeypatch.setattr(type(sessions[0].link._carrier), "connect", connect)
    return tried


def test_newcomers_that_cannot_connect_give_up_soon(monkeypatch) -> None:
    with at_once() as begin, two_sessions() as (sessions, _):
        tried = unconnected(monkeypatch, sessions)
        for end in [begin(session, Phase.JOIN) for session in sessions]:
            with pytest.raises(ExchangeError, match=r"form a group.* failed 4 times: .*connect"):
                end.result(20)
        assert len(tried) == 2 * 4
        assert len(set(tried)) == 4  # a broken group is never used again


def test_other_workers_that_cannot_connect_try_until_give_up_s(monkeypatch) -> None:
    with at_once() as begin, two_sessions(give_up_s=0.8, min_workers=2) as (sessions, _):
        tried = unconnected(monkeypatch, sessions)
        ends = [begin(session, Phase.ROUND) for session in sessions]
        first = wait(ends, 20, return_when=FIRST_COMPLETED).done.pop()
        with pytest.raises(ExchangeError, match=r"form a group.* times: .*could not connect"):
            first.result()
        assert len(tried) > 2 * 4
