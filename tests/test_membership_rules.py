"""Who makes up a round, how workers agree on what they use, and how long they wait."""

import contextlib
import dataclasses
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.elastic import retry
from thinwire.elastic.events import EventLog
from thinwire.elastic.healing import fetch_position
from thinwire.elastic.heartbeat import Heartbeat, HeartbeatCallbacks
from thinwire.elastic.lighthouse import Lighthouse
from thinwire.elastic.options import ElasticOptions, ElasticSettings
from thinwire.elastic.quorum import Member, elect
from thinwire.elastic.registry import Peer
from thinwire.elastic.registry_server import HeartbeatReply, JoinReply
from thinwire.elastic.shared_state import Progress, RoundRecord, SharedState, Snapshot
from thinwire.elastic.timeouts import Timeouts
from thinwire.elastic.token import Token
from thinwire.elastic.votes import tally, vote
from thinwire.errors import ExchangeError, MismatchError
from thinwire.rejection import Rejection, RejectReason
from thinwire.transport import Phase


def standing(name: str, **fields) -> Member:
    where = {
        key: fields.pop(key) for key in ("version", "step", "digest", "dealt") if key in fields
    }
    position = Progress(**{"version": 4, "step": 12, "digest": "aa", "dealt": 9, **where})
    known = {"card": "c", "occasion": "round", "generation": 0, "oldest": 2}
    return Member(
        identity=name,
        nonce="1",
        address=f"{name}:1",
        store=f"{name}:2",
        position=position,
        **known | fields,
    )


STANDINGS = st.lists(
    st.builds(
        lambda identity, fields: (identity, fields),
        st.integers(0, 99),
        st.fixed_dictionaries(
            {
                "version": st.integers(0, 4),
                "step": st.integers(0, 4),
                "digest": st.sampled_from(["aa", "bb"]),
                "dealt": st.integers(0, 30),
                "card": st.sampled_from(["c", "d"]),
                "occasion": st.sampled_from(["enter", "round", "last"]),
                "generation": st.integers(0, 2),
                "oldest": st.integers(0, 4),
            }
        ),
    ),
    min_size=1,
    max_size=7,
    unique_by=lambda made: made[0],
)


@settings(max_examples=200, deadline=None)
@given(STANDINGS, st.randoms())
def test_all_conclude_the_same_in_whatever_order_they_hear(made, random) -> None:
    everyone = [standing(f"w{number:02}", **fields) for number, fields in made]
    shuffled = random.sample(everyone, len(everyone))
    team = elect(everyone)
    assert elect(shuffled) == team
    assert elect(shuffled).key == team.key
    assert sorted([*team.members, *team.behind, *team.refused], key=str) == sorted(
        everyone, key=str
    )
    assert team.leader in team.members
    assert team.position.version == max(s.position.version for s in everyone)
    assert all(s.card == team.leader.card for s in (*team.members, *team.behind))
    assert all(s.card != team.leader.card for s in team.refused)
    assert team.position.dealt >= max(s.position.dealt for s in (*team.members, *team.behind))
    for member in team.members:
        at = member.position
        same = (at.version, at.digest) == (team.position.version, team.position.digest)
        assert same or team.leader.oldest <= at.version < team.position.version


def test_the_state_of_most_of_those_who_came_furthest_is_that_of_the_run() -> None:
    everyone = [
        standing("a", digest="bb"),
        standing("b"),
        standing("c"),
        standing("d", version=3, digest="x"),
        standing("e", version=1, digest="x"),
        standing("f", version=3, card="other"),
    ]
    team = elect(everyone)
    assert [s.identity for s in team.members] == ["b", "c", "d"]  # d is a round behind
    assert [s.identity for s in team.behind] == ["a", "e"]  # drifted; older than the records
    assert [s.identity for s in team.refused] == ["f"]
    assert (team.position.version, team.position.digest) == (4, "aa")
    two = elect([standing("a", digest="bb"), standing("b")])
    assert two.position.digest == "bb"  # of equally many, the first by name, whoever asks


def test_the_occasion_is_that_of_those_who_have_something_to_contribute() -> None:
    newcomer = standing("a", occasion="enter", step=99)
    at_round, last = standing("b", step=30), standing("c", occasion="last", step=40)
    assert elect([newcomer]).occasion == "enter"
    team = elect([newcomer, at_round])
    assert (team.occasion, team.position.step) == ("round", 30)
    team = elect([newcomer, at_round, last])
    assert (team.occasion, team.position.step) == ("last", 40)


def test_a_group_is_not_formed_again_with_its_ruins() -> None:
    a, b = standing("a"), standing("b")
    later = dataclasses.replace(b, generation=1)
    assert elect([a, b]).key == elect([b, a]).key
    assert elect([a, later]).key != elect([a, b]).key
    assert elect([a]).key != elect([a, b]).key
    moved = dataclasses.replace(b, position=dataclasses.replace(b.position, version=3))
    assert elect([a, moved]).key == elect([a, b]).key


def test_shares_of_those_who_drifted_are_not_dealt_again() -> None:
    drifted = standing("a", digest="bb", dealt=50)
    assert elect([drifted, standing("b"), standing("c")]).position.dealt == 50


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 5))
def test_all_agree_on_the_worst_that_anybody_found(data, workers: int) -> None:
    codes = st.lists(st.integers(0, 5), min_size=workers, max_size=workers)
    found = [data.draw(codes) for _ in range(workers)]
    mine = [{s: Rejection(fault=RejectReason(c)) for s, c in enumerate(row) if c} for row in found]
    ballots = [vote(flaws, workers) for flaws in mine]
    agreed = [tally(ballots, flaws) for flaws in mine]
    worst = {s: RejectReason(max(row[s] for row in found)) for s in range(workers)}
    for one in agreed:
        assert {s: flaw.fault for s, flaw in one.items()} == {s: f for s, f in worst.items() if f}


def test_a_verdict_says_what_was_seen_or_who_saw_it() -> None:
    mine = {1: Rejection(fault=RejectReason.DAMAGED, detail="its checksum")}
    ballots = [vote(mine, 3), vote({}, 3), vote(mine, 3)]
    assert "its checksum" in str(tally(ballots, mine)[1])
    assert str(tally(ballots, {})[1]).endswith("(worker 0, 2 found)")
    assert (
        tally([torch.tensor([0, 77], dtype=torch.uint8)] * 2, {})[1].fault is RejectReason.DAMAGED
    )
    assert tally([vote({}, 2)] * 2, {}) == {}
    newcomer = tally([vote({0: Rejection(fault=RejectReason.NOTHING)}, 1)], {})[0]
    assert str(newcomer) == "it has just come and has nothing to contribute"


def made(fixed_s: float | None = None) -> Timeouts:
    return Timeouts(floor_s=5, patience=0.5, unmeasured_s=60, fixed_s=fixed_s)


def test_waits_double_until_an_exchange_succeeds() -> None:
    timeouts = made()
    assert timeouts.exchange(125_000) == 5 + 60 + 1
    timeouts.exchanged(1000, seconds=1.0)
    timeouts.finished_round(20.0)
    assert timeouts.exchange(1000) == 5 + 10 + 3
    assert timeouts.exchange(2000) == 5 + 10 + 6
    assert timeouts.exchange(0) == 5 + 10 + 3
    timeouts.timed_out()
    timeouts.timed_out()
    assert timeouts.exchange(1000) == 4 * 18
    timeouts.exchanged(1000, seconds=1.0)
    assert timeouts.exchange(1000) == 18
    for _ in range(2000):
        timeouts.timed_out()
    assert timeouts.exchange(1000) == 3600


def test_fixed_waits_stay_and_a_slow_round_is_forgotten() -> None:
    fixed = made(fixed_s=7.0)
    fixed.timed_out()
    fixed.exchanged(10, seconds=100.0)
    assert fixed.exchange(10**9) == 7.0
    timeouts = made()
    assert (timeouts.round_s, timeouts.late()) == (None, 60)
    timeouts.finished_round(1000.0)
    assert timeouts.late() == pytest.approx(500)
    for _ in range(20):
        timeouts.finished_round(10.0)
    assert timeouts.round_s == 10


def test_shares_that_were_dealt_without_a_worker_are_not_dealt_by_it() -> None:
    """It did not hear that a round began, and the others did."""

    class Door:
        def beat(self, position: Progress, *, waiting_s: float) -> HeartbeatReply:
            peer = Peer(identity="b", nonce="1", address="b:1", position=at(dealt=12))
            return HeartbeatReply(peers=(peer,), age_s=9.0)

        def leave(self) -> None: ...

    def at(dealt: int) -> Progress:
        return Progress(version=4, step=12, digest="aa", dealt=dealt)

    welcome = JoinReply(lighthouse="l:1", heartbeat_timeout_s=1.0, peers=(), age_s=9.0)
    concerns = HeartbeatCallbacks(
        team=frozenset,
        lenient_s=lambda: 0.0,
        on_awaited=lambda: None,
        on_gone=lambda _: None,
        on_refused=lambda _: None,
    )
    attendance = Heartbeat(
        Door(),  # pyright: ignore[reportArgumentType]
        lambda: at(dealt=9),
        welcome,
        every_s=60.0,
        concerns=concerns,
    )
    try:
        assert attendance.heard(at(dealt=9)) == at(dealt=9)
        attendance.ask()
        assert attendance.heard(at(dealt=9)) == at(dealt=12)
        assert attendance.heard(at(dealt=15)) == at(dealt=15)
    finally:
        attendance.close()


# -- how often and how long a worker tries again -------------------------------------------------


class Clock:
    """What a module sees in the place of time."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def tries(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(retry, "time", clock)
    return clock, retry.RetryBudget("10.0.0.7", give_up_s=300)


def test_a_newcomer_gives_up_at_its_fourth_failure(tries) -> None:
    _, persists = tries
    for _ in range(3):
        persists.failed_newcomer("form a group", because="nobody connects")
    persists.worked()
    for _ in range(3):
        persists.failed_newcomer("form a group", because="nobody connects")
    with pytest.raises(ExchangeError) as raised:
        persists.failed_newcomer("form a group", because="nobody connects")
    assert raised.value.cannot == "form a group"
    assert raised.value.because == "it failed 4 times: nobody connects"
    assert "the others reach 10.0.0.7" in raised.value.do


@pytest.mark.parametrize("kind", ["failed", "failed_newcomer"])
def test_others_give_up_when_nothing_has_worked_for_too_long(tries, kind: str) -> None:
    clock, persists = tries
    for _ in range(50):
        clock.now_s += 6.0
        persists.failed("form a group", because="nobody connects")
    persists.worked()
    clock.now_s += 1000.0
    getattr(persists, kind)("heal", because="it is gone")  # the first since something worked
    clock.now_s += 300.0
    getattr(persists, kind)("heal", because="it is gone")  # at the limit and not beyond it
    clock.now_s += 0.1
    with pytest.raises(ExchangeError, match="it failed 3 times: it is gone"):
        getattr(persists, kind)("heal", because="it is gone")


# -- two workers at a lighthouse, in one process -------------------------------------------------


class Still(SharedState):
    """A state that moves when told to, and takes as long to be taken over as it is told to."""

    def __init__(self) -> None:
        self.at = Progress(version=1, step=4, digest="aa")
        self.adopting, self.go = threading.Event(), threading.Event()
        self.asked_by: set[str] = set()

    def position(self) -> Progress:
        self.asked_by.add(threading.current_thread().name)
        return self.at

    def glance(self) -> Progress:
        return self.at

    def shared_nbytes(self) -> int:
        return 0

    def capture(self) -> Snapshot:
        return Snapshot(facts=self.at.describe(), tensors={})

    def adopt(self, snapshot: Snapshot) -> None:
        self.adopting.set()
        assert self.go.wait(30)
        self.at = Progress.read(snapshot.facts)

    def drop_work(self) -> None:
        pass

    def replay(self, record: RoundRecord) -> None:
        raise AssertionError("nothing was remembered")


@contextlib.contextmanager
def two_sessions(**terms):
    """Two workers at a lighthouse that misses them soon."""
    pytest.importorskip("torchft")
    from thinwire.elastic.session import ElasticSession

    token = Token("a secret of many characters")
    lighthouse = Lighthouse(
        token, host="127.0.0.1", port=0, heartbeat_timeout_s=0.4, on_event=lambda line: None
    )
    with lighthouse, contextlib.ExitStack() as opened:
        sessions, wards = [], [Still(), Still()]
        for identity, ward in zip("ab", wards, strict=True):
            chosen = ElasticSettings(
                lighthouse=f"127.0.0.1:{lighthouse.port}",
                token=token,
                identity=identity,
                host="127.0.0.1",
                terms=ElasticOptions(**{"give_up_s": 10.0} | terms),
            )
            sessions.append(ElasticSession(chosen, ward, {"model": "toy"}, EventLog()))
            opened.callback(sessions[-1].close)
        yield sessions, wards


@contextlib.contextmanager
def at_once():
    """Runs calls in threads, which end with their sessions."""
    with ThreadPoolExecutor(2) as pool:
        yield lambda session, occasion: pool.submit(session.convene, occasion)


def test_nobody_waits_for_a_worker_that_heals() -> None:
    """Of two, the one that does not heal is half of those who send heartbeats: no majority."""
    with at_once() as convene, two_sessions() as ((first, second), (ahead, behind)):
        together = [convene(session, Phase.ENTER) for session in (first, second)]
        assert {len(done.result(20).names) for done in together} == {2}
        ahead.at = dataclasses.replace(ahead.at, version=2)
        waiting, healing = (convene(session, Phase.ROUND) for session in (first, second))
        try:
            assert behind.adopting.wait(20)
            assert len(waiting.result(10).names) == 1
            assert len(convene(first, Phase.ROUND).result(10).names) == 1
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
        assert not behind.asked_by & {"thinwire-door", "thinwire-pulse"}


def unconnected(monkeypatch, sessions) -> list[str]:
    """Let no group be formed; returns the keys of those that were tried."""
    tried = []

    def connect(self, team):
        tried.append(team.key)
        raise RuntimeError("no route to host")

    monkeypatch.setattr(type(sessions[0]), "_connect", connect)
    return tried


def test_newcomers_that_cannot_connect_give_up_soon(monkeypatch) -> None:
    with at_once() as convene, two_sessions() as (sessions, _):
        tried = unconnected(monkeypatch, sessions)
        for end in [convene(session, Phase.ENTER) for session in sessions]:
            with pytest.raises(ExchangeError, match=r"form a group.* failed 4 times: .*connect"):
                end.result(20)
        assert len(tried) == 2 * 4
        assert len(set(tried)) == 4  # a group is not formed again with its ruins


def test_others_that_cannot_connect_try_for_as_long_as_they_were_told(monkeypatch) -> None:
    with at_once() as convene, two_sessions(give_up_s=0.8, min_workers=2) as (sessions, _):
        tried = unconnected(monkeypatch, sessions)
        ends = [convene(session, Phase.ROUND) for session in sessions]
        first = wait(ends, 20, return_when=FIRST_COMPLETED).done.pop()
        with pytest.raises(ExchangeError, match=r"form a group.* times: .*could not connect"):
            first.result()
        assert len(tried) > 2 * 4
