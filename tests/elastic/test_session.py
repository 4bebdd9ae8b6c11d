"""Two workers at a lighthouse, in one process."""

import contextlib
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from elastic_http import eventually
from elastic_hub import H, Player, method
from thinwire.elastic.dialer import Dialer
from thinwire.elastic.events import EventLog
from thinwire.elastic.healing import fetch_position
from thinwire.elastic.lighthouse import LighthouseServer
from thinwire.elastic.registry_server import RegistryClient
from thinwire.elastic.timeouts import ElasticOptions, ElasticSettings
from thinwire.elastic.transport import Elastic
from thinwire.errors import ExchangeError, MismatchError
from thinwire.membership import (
    Go,
    Load,
    Over,
    Phase,
    Progress,
    RoundPlan,
    RoundRecord,
    SharedState,
    Snapshot,
    WorkerMetrics,
)
from thinwire.security.token import Token

MODEL = {"model": "toy"}
RUN = {"ranks": "1", **MODEL}


class Still(SharedState):
    """A state that a test moves, and that takes as long to be taken over as the test wants."""

    def __init__(self) -> None:
        self.at = Progress(version=1, step=4, digest="aa")
        self.loading, self.go = threading.Event(), threading.Event()
        self.asked_by: set[str] = set()

    def progress(self, *, anew: bool = False, wait: bool = True) -> Progress:
        if wait:
            self.asked_by.add(threading.current_thread().name)
        return self.at

    def fully_synced(self) -> bool:
        return True

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
def two_sessions(lighthouse=None, **options):
    """Two workers at a lighthouse that misses them soon."""
    pytest.importorskip("torchft")
    from thinwire.elastic.rank_session import RankSession
    from thinwire.elastic.session import ElasticSession
    from thinwire.elastic.worker_ranks import WorkerRanks

    token = Token("a secret of many characters")
    given = {"heartbeat_timeout_s": 0.4, "on_event": lambda line: None} | (lighthouse or {})
    server = LighthouseServer(token, host="127.0.0.1", port=0, **given)
    with server, contextlib.ExitStack() as opened:
        sessions, states = [], [Still(), Still()]
        for identity, state in zip("ab", states, strict=True):
            chosen = ElasticSettings(
                lighthouse=f"127.0.0.1:{server.port}",
                token=token,
                identity=identity,
                host="127.0.0.1",
                options=ElasticOptions(**{"give_up_s": 10.0} | options),
            )
            here = RankSession(chosen, state, WorkerRanks(), EventLog())
            sessions.append(ElasticSession(here, MODEL))
            opened.callback(sessions[-1].close)
        yield sessions, states


def learn(session, **fields) -> None:
    """Tell the registry of `session` of a worker that is gone."""
    position = Progress(**{"version": 5, "step": 20, "digest": "ee", "dealt": 9, **fields})
    registry = RegistryClient(session._settings.token, session._settings.lighthouse, "gone", RUN)
    registry.join(position, "127.0.0.1:1")
    registry.leave()


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
                fetch_position(Dialer(stranger), second._settings.lighthouse)
            while not any(event.kind == "refused" for event in second._here.events.events):
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


def test_of_two_workers_that_do_not_reach_each_other_one_leaves_by_name(monkeypatch) -> None:
    with at_once() as begin, two_sessions(give_up_s=60.0) as ((first, second), _):
        unconnected(monkeypatch, [first, second])
        for session in (first, second):
            monkeypatch.setattr(session._here._reachability, "_look", not_there)
            session._lighthouse.resume()
        time.sleep(0.5)  # for some heartbeats: neither begins alone
        waits, leaves = (begin(session, Phase.ROUND) for session in (first, second))
        began_s = time.monotonic()
        with pytest.raises(ExchangeError, match="this worker and a do not reach each other"):
            leaves.result(20)
        assert time.monotonic() - began_s < 4.0
        second.close()
        assert waits.result(20).names == (first.name,)
        (left,) = (event for event in first._here.events.events if event.kind == "refused")
        assert (left.who, left.why) == (("b",), "it and a do not reach each other")


def not_there(address: str) -> None:
    raise ExchangeError(f"ask {address}", because="no route to host", do="look at the network")


def answered_wrongly(session) -> threading.Event:
    """Have `session` ask the registry with another token until the event is set."""
    registry, right = session._registry, session._registry._dialer
    ends = threading.Event()
    registry._dialer = Dialer(Token("another secret of many characters"))

    def restore() -> None:
        ends.wait(30)
        registry._dialer = right

    threading.Thread(target=restore, daemon=True).start()
    return ends


def test_a_registry_that_answers_wrongly_is_waited_for_and_named_when_it_takes_too_long() -> None:
    with at_once() as begin, two_sessions(give_up_s=2.0) as ((first, second), _):
        second.close()
        ends = answered_wrongly(first)
        waiting = begin(first, Phase.ROUND)
        time.sleep(1.0)  # ten heartbeats
        assert not waiting.done()
        ends.set()
        assert waiting.result(20).names == (first.name,)
        ends, began_s = answered_wrongly(first), time.monotonic()
        with pytest.raises(MismatchError, match="another token than this run's"):
            first._state.begin(first, Phase.ROUND)
        assert time.monotonic() - began_s >= 2.0
        ends.set()


# -- which version of the run goes on --------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "lighthouse", "error", "why"),
    [
        ({}, {}, ExchangeError, r"version 5, digest ee, .* has version 1.*fork"),
        ({"over": True}, {}, MismatchError, "the run is over: version 5, digest ee"),
        ({"over": True}, {"allow_fork": True}, None, ""),
    ],
)
def test_a_worker_goes_on_from_an_older_version_only_where_that_is_allowed(
    run: dict, lighthouse: dict, error: type | None, why: str
) -> None:
    with two_sessions(lighthouse=lighthouse, give_up_s=0.5) as ((first, second), _):
        learn(first, **run)
        second.close()
        if error is None:
            # Shares are not dealt again all the same.
            assert first._state.begin(first, Phase.ROUND).dealt == 9
        else:
            with pytest.raises(error, match=why):
                first._state.begin(first, Phase.ROUND)


# -- the end of a run ------------------------------------------------------------------------------


@contextlib.contextmanager
def players_at_a_lighthouse(*names: str):
    """Workers with outer loops, and their lighthouse, which misses them soon."""
    pytest.importorskip("torchft")
    token, quiet = Token("a secret of many characters"), {"on_event": lambda line: None}
    server = LighthouseServer(token, host="127.0.0.1", port=0, heartbeat_timeout_s=0.4, **quiet)
    with server, contextlib.ExitStack() as closing:

        def connect(name: str) -> Elastic:
            address = f"127.0.0.1:{server.port}"
            transport = Elastic(address, token=token, identity=name, host="127.0.0.1")
            closing.callback(transport.close)
            return transport

        hub = SimpleNamespace(connect=connect)
        yield server, [Player(hub, name, method(), number=n) for n, name in enumerate(names)]


def train_until(player: Player, step: int) -> None:
    while player.loop.inner_step < step:
        player.inner()
        player.loop.step()


def test_a_worker_that_comes_back_after_the_end_takes_no_outer_step_alone() -> None:
    with players_at_a_lighthouse("a", "b") as (server, (first, second)):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(train_until, (first, second), (H, H)))
            second.node._session._lighthouse.pause()  # as if it were stopped
            train_until(first, 3 * H)
            first.loop.flush()
            leaving = pool.submit(first.loop.close)
            assert eventually(lambda: server.status().run.over)
            train_until(second, 3 * H)
            second.loop.flush()
            second.loop.close()
            leaving.result(20)
        # The rounds that it missed do not say how many inner steps the others took for them.
        (healed,) = (e for e in second.node.events.events if e.kind == "healed")
        assert healed.why.startswith("by the rounds up to 3")
        assert (second.loop.stats.rounds, second.loop.inner_step) == (3, 3 * H)
        assert second.loop.digest() == first.loop.digest()


@pytest.mark.parametrize(
    ("phase", "leaves"),
    [*((phase, False) for phase in (Phase.JOIN, Phase.ROUND, Phase.LAST)), (Phase.ROUND, True)],
)
def test_a_worker_that_caught_up_just_before_the_others_ended_ends_with_them(
    phase: Phase, leaves: bool
) -> None:
    with at_once() as begin, two_sessions() as ((first, second), (ahead, behind)):
        ahead.at = Progress(version=2, step=8, digest="bb", over=leaves)
        first._heartbeat.send()
        coming_back = begin(second, phase)
        assert behind.loading.wait(20), coming_back.exception(1)
        if leaves:  # the one that it heals from, meanwhile
            ahead.at = dataclasses.replace(ahead.at, over=False)  # or else it waits for this one
            first.close()
        else:
            assert begin(first, Phase.LAST).result(20).names == (first.name,)
            ahead.at = dataclasses.replace(ahead.at, step=10, over=True)
            # As in close(), which would not return.
            first._lighthouse.pause()
            first._registry.finished = True
            first._heartbeat.send()
        behind.go.set()
        assert (plan := coming_back.result(20)).phase is Phase.DONE, plan
        assert leaves or (plan.step, plan.names) == (10, (second.name,))


# -- what a worker tells ---------------------------------------------------------------------------


def test_a_transport_reports_while_it_takes_part_and_is_silent_before_and_after() -> None:
    pytest.importorskip("torchft")
    token = Token("a secret of many characters")
    with LighthouseServer(token, host="127.0.0.1", port=0, on_event=lambda line: None) as server:
        transport = Elastic(f"127.0.0.1:{server.port}", token=token, identity="a")
        transport.report(WorkerMetrics(loss=3.5))
        transport.join(Still())
        transport.report(WorkerMetrics(loss=2.5))
        transport._session.names = ("a:1", "b:2", "x:y:3")
        assert [transport.member(rank) for rank in range(3)] == ["a", "b", "x:y"]
        facts = {"kinds": {1: "outlier", 2: "clipped"}, "flaws": {1: "far longer"}}
        record = RoundRecord(version=8, facts=facts | {"clipped": {2: 0.0251}}, messages=[])
        transport.log_round(record)
        events = [str(event).partition(": ")[2] for event in transport.events.events[-2:]]
        assert events == ["left out b far longer", "clipped x:y scaled to 0.025 of its length"]
        reported = [WorkerMetrics(loss=2.5)]
        assert eventually(lambda: [w.metrics for w in server.status().workers] == reported)
        transport.close()
        transport.report(WorkerMetrics(loss=1.5))
        assert server.status().workers == ()
