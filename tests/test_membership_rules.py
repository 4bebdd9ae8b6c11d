"""Who makes up a round, how workers agree on what they use, and how long they wait."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.flaws import Fault, Flaw
from thinwire.membership.attendance import Attendance, Concerns
from thinwire.membership.door import Beat, Welcome
from thinwire.membership.register import Peer
from thinwire.membership.roster import Standing, choose_team
from thinwire.membership.timeouts import Timeouts
from thinwire.membership.ward import Position
from thinwire.transport.votes import tally, vote


def standing(name: str, **fields) -> Standing:
    where = {
        key: fields.pop(key) for key in ("version", "step", "digest", "dealt") if key in fields
    }
    position = Position(**{"version": 4, "step": 12, "digest": "aa", "dealt": 9, **where})
    known = {"card": "c", "occasion": "round", "generation": 0, "oldest": 2}
    return Standing(
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
    team = choose_team(everyone)
    assert choose_team(shuffled) == team
    assert choose_team(shuffled).key == team.key
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
    team = choose_team(everyone)
    assert [s.identity for s in team.members] == ["b", "c", "d"]  # d is a round behind
    assert [s.identity for s in team.behind] == ["a", "e"]  # drifted; older than the records
    assert [s.identity for s in team.refused] == ["f"]
    assert (team.position.version, team.position.digest) == (4, "aa")
    two = choose_team([standing("a", digest="bb"), standing("b")])
    assert two.position.digest == "bb"  # of equally many, the first by name, whoever asks


def test_the_occasion_is_that_of_those_who_have_something_to_contribute() -> None:
    newcomer = standing("a", occasion="enter", step=99)
    at_round, last = standing("b", step=30), standing("c", occasion="last", step=40)
    assert choose_team([newcomer]).occasion == "enter"
    team = choose_team([newcomer, at_round])
    assert (team.occasion, team.position.step) == ("round", 30)
    team = choose_team([newcomer, at_round, last])
    assert (team.occasion, team.position.step) == ("last", 40)


def test_a_group_is_not_formed_again_with_its_ruins() -> None:
    a, b = standing("a"), standing("b")
    later = dataclasses.replace(b, generation=1)
    assert choose_team([a, b]).key == choose_team([b, a]).key
    assert choose_team([a, later]).key != choose_team([a, b]).key
    assert choose_team([a]).key != choose_team([a, b]).key
    moved = dataclasses.replace(b, position=dataclasses.replace(b.position, version=3))
    assert choose_team([a, moved]).key == choose_team([a, b]).key


def test_shares_of_those_who_drifted_are_not_dealt_again() -> None:
    drifted = standing("a", digest="bb", dealt=50)
    assert choose_team([drifted, standing("b"), standing("c")]).position.dealt == 50


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 5))
def test_all_agree_on_the_worst_that_anybody_found(data, workers: int) -> None:
    codes = st.lists(st.integers(0, 5), min_size=workers, max_size=workers)
    found = [data.draw(codes) for _ in range(workers)]
    mine = [{s: Flaw(fault=Fault(c)) for s, c in enumerate(row) if c} for row in found]
    ballots = [vote(flaws, workers) for flaws in mine]
    agreed = [tally(ballots, flaws) for flaws in mine]
    worst = {s: Fault(max(row[s] for row in found)) for s in range(workers)}
    for one in agreed:
        assert {s: flaw.fault for s, flaw in one.items()} == {s: f for s, f in worst.items() if f}


def test_a_verdict_says_what_was_seen_or_who_saw_it() -> None:
    mine = {1: Flaw(fault=Fault.DAMAGED, detail="its checksum")}
    ballots = [vote(mine, 3), vote({}, 3), vote(mine, 3)]
    assert "its checksum" in str(tally(ballots, mine)[1])
    assert str(tally(ballots, {})[1]).endswith("(worker 0, 2 found)")
    assert tally([torch.tensor([0, 77], dtype=torch.uint8)] * 2, {})[1].fault is Fault.DAMAGED
    assert tally([vote({}, 2)] * 2, {}) == {}
    newcomer = tally([vote({0: Flaw(fault=Fault.NOTHING)}, 1)], {})[0]
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
        def beat(self, position: Position, *, waiting_s: float) -> Beat:
            peer = Peer(identity="b", nonce="1", address="b:1", position=at(dealt=12))
            return Beat(peers=(peer,), age_s=9.0)

        def leave(self) -> None: ...

    def at(dealt: int) -> Position:
        return Position(version=4, step=12, digest="aa", dealt=dealt)

    welcome = Welcome(lighthouse="l:1", heartbeat_timeout_s=1.0, peers=(), age_s=9.0)
    concerns = Concerns(
        team=frozenset,
        lenient_s=lambda: 0.0,
        on_awaited=lambda: None,
        on_gone=lambda _: None,
        on_refused=lambda _: None,
    )
    attendance = Attendance(
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
