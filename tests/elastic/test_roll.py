"""Who takes part in a round, as a pure function of what workers say of themselves."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from thinwire.elastic.roll import (
    LoggedRound,
    NewestState,
    View,
    WorkerReport,
    last_roll,
    latest_calls,
    leading_to,
    next_roll,
    read_as,
    text_of,
)
from thinwire.membership import Progress

LARGEST = 1000


def at(version: int = 0, digest: str = "", **fields) -> Progress:
    return Progress(version=version, step=10 * version, digest=digest or f"d{version}", **fields)


def call(
    name: str, version: int = 0, digest: str = "", phase: str = "round", **fields
) -> WorkerReport:
    given = {"phase": phase, "position": at(version, digest), **fields}
    return WorkerReport(name=f"{name}:1", **given)


def logged(version: int, nbytes: int = 10) -> LoggedRound:
    return LoggedRound(version=version, place=f"p{version}", nbytes=nbytes, facts=({"workers": 2},))


def first(*names: str, **fields) -> View:
    given = {"number": 1, "phase": "join", "position": at(0), **fields}
    return View(names=tuple(f"{name}:1" for name in names), **given)


def concluded(before: View | None, *calls: WorkerReport, me: str = "a", **fields) -> View | None:
    rounds = fields.pop("rounds", [logged(version) for version in range(1, 9)])
    options = {"min_workers": 1, "largest_log": LARGEST, **fields}
    told = []
    for each in calls:
        position = each.position
        if before is not None and not position.dealt:  # it took part in the last roll
            dealt = before.position.dealt + len(before.names)
            position = dataclasses.replace(position, dealt=dealt)
        known = leading_to(position.version, rounds, before)
        told.append(replace(each, rounds=known, position=position))
    return next_roll(before, told, me=f"{me}:1", **options)


def written(*given, **fields) -> View:
    roll = concluded(*given, **fields)
    assert roll is not None
    return roll


def names(roll: View) -> str:
    return "".join(name[0] for name in roll.names)


def test_what_lies_in_a_store_since_before_is_read_and_written_the_same() -> None:
    """A loss that was no number, too, which JSON does not know."""
    at = '"position": {"version": 3, "step": 30, "digest": "ab", "dealt": 4, "over": false}'
    state = '{"version": -1, "roll": 0, "writer": ""}'
    call = f'{{"name": "a:1", "phase": "round", {at}, "lacks": false, "leaves": false, '
    call += f'"round_s": 1.5, "settled": false, "state": {state}, "rounds": []}}'
    roll = f'{{"number": 4, "names": ["a:1"], "phase": "round", {at}, "new": [], "behind": [], '
    roll += '"lacking": [], "rounds": [{"version": 3, "place": "x", "nbytes": 5, "facts": '
    roll += f'[{{"kinds": {{"1": "clipped"}}}}]}}], "state": {state}, "next_state": {state}, '
    roll += '"log_nbytes": 9, "round_s": null}'
    assert text_of(read_as(WorkerReport, call)) == call
    assert text_of(read_as(View, roll)) == roll


def test_the_first_roll_has_those_that_the_most_began_alike() -> None:
    calls = [call("a", phase="join"), call("b", 0, "odd", "join"), call("c", phase="join")]
    roll = written(None, *calls, min_workers=3)
    assert (names(roll), roll.lacking, roll.phase, roll.number) == ("ac", ("b:1",), "join", 1)
    assert roll.new == ()
    assert roll.next_state == NewestState(version=0, roll=1, writer="c:1")
    assert concluded(None, *calls, min_workers=3, me="b") is None
    assert concluded(None, *calls, min_workers=4) is None


def test_the_digest_of_the_most_is_that_of_the_run_or_of_the_half_that_writes_first() -> None:
    for me, other in ("ab", "ba"):
        roll = written(first("a", "b"), call("a", 2), call("b", 2, "odd"), me=me)
        assert (names(roll), roll.lacking) == (me, (f"{other}:1",))
    calls = [call("a", 2, "odd"), call("b", 2), call("c", 2)]
    before = first("a", "b", "c")
    assert concluded(before, *calls, me="a") is None
    roll = written(before, *calls, me="b")
    assert (names(roll), roll.lacking, roll.position.digest) == ("bc", ("a:1",), "d2")


def test_whoever_writes_it_the_run_is_where_the_furthest_worker_is() -> None:
    calls = [call("a", 1), call("b", 2), call("c", 0)]
    before = first("a", "b", "c")
    roll = written(before, *calls, me="b")
    assert (names(roll), roll.behind) == ("abc", ("a:1", "c:1"))
    assert [each.version for each in roll.rounds] == [1, 2]
    assert (roll.position.version, roll.position.step) == (2, 20)
    assert concluded(before, *calls, me="a") == concluded(before, *calls, me="c") == roll
    # Not by a worker that the rounds do not lead there.
    assert concluded(before, *calls, me="c", rounds=[logged(2)]) is None


def test_steps_since_an_earlier_roll_count_only_if_nobody_has_the_last_one() -> None:
    before = first("a", "b", number=3, position=at(1, dealt=6))
    late = call("c", position=at(3, dealt=6))
    roll = written(before, call("a", 1), call("b", 2), late)
    assert (names(roll), roll.position.version, roll.lacking) == ("ab", 2, ("c:1",))
    assert concluded(before, call("a", 1), late, me="c") is None
    assert written(before, late, me="c").position.version == 3


def test_who_cannot_get_to_the_end_gets_a_snapshot_before_it() -> None:
    before = first("a", "b", position=at(1))
    calls = [call("a", 2, phase="last", settled=True), call("b", 2, "odd", phase="last")]
    roll = written(before, *calls)
    assert (roll.phase, roll.lacking, roll.next_state.writer) == ("last", ("b:1",), "a:1")
    again = [call("a", 2, phase="last", settled=True), call("b", 2, "odd", lacks=True)]
    assert written(roll, *again).is_over


def test_what_a_gap_of_rounds_does_not_lead_from_is_lacking() -> None:
    calls = [call("a", 0), call("b", 4), call("c", 3), call("d", 2)]
    rounds = [logged(version) for version in (1, 2, 4)]
    roll = written(first("a", "b", "c", "d"), *calls, me="b", rounds=rounds)
    assert (names(roll), roll.behind) == ("bc", ("c:1",))
    assert roll.lacking == ("a:1", "d:1")
    assert [each.version for each in roll.rounds] == [4]


def test_a_worker_that_lacks_or_was_left_behind_before_the_last_roll_is_lacking() -> None:
    before = first("a", "b", position=at(3))
    calls = [call("a", 4), call("b", 4, lacks=True), call("c", 2), call("d", 3, "odd")]
    roll = written(before, *calls)
    assert (names(roll), roll.lacking) == ("a", ("b:1", "c:1", "d:1"))
    assert concluded(before, *calls, me="b") is None
    assert concluded(before, call("a", 4, leaves=True), me="a") is None


def test_the_outer_steps_of_a_worker_that_left_count_if_they_lead_there() -> None:
    gone = call("b", 2, leaves=True)
    for phase in ("join", "round"):
        given = [call("a", 1, phase=phase), gone]
        roll = written(first("a", "b", position=at(1)), *given, rounds=[logged(2, LARGEST + 1)])
        assert (names(roll), roll.behind, roll.lacking) == ("a", ("a:1",), ())
        assert (roll.phase, roll.position.version, roll.position.step) == (phase, 2, 20)
        assert roll.next_state.writer == "a:1"
    assert concluded(first("a", "b"), call("a", 0), gone, rounds=[logged(2)]) is None


def test_with_fewer_than_min_workers_there_is_no_roll() -> None:
    calls = [call("a", 1), call("b", 1)]
    assert concluded(first("a", "b"), *calls, min_workers=3) is None
    assert concluded(first("a", "b"), *calls, min_workers=2) is not None
    leaving = [call("a", 1), call("b", 1, leaves=True)]
    assert concluded(first("a", "b"), *leaving, min_workers=2) is None
    roll = written(first("a", "b"), *leaving)
    assert (names(roll), roll.lacking, roll.behind) == ("a", (), ())
    # One that waits for a snapshot is there, or else no roll would ask for what it waits for.
    roll = written(first("a", "b"), call("a", 1), call("b", 1, lacks=True), min_workers=2)
    assert (names(roll), roll.lacking, roll.next_state.writer) == ("a", ("b:1",), "a:1")


@pytest.mark.parametrize(
    ("a", "b", "phase", "new"),
    [
        ("join", "join", "join", ()),
        ("round", "join", "round", ("b:1",)),
        ("join", "last", "last", ("a:1",)),
        ("round", "last", "last", ()),
        ("round", "round", "round", ()),
    ],
)
def test_the_phase_is_the_latest_of_all_and_the_step_is_its(a, b, phase, new) -> None:
    roll = written(first("a"), call("a", 1, phase=a), call("b", 1, phase=b))
    assert (roll.phase, roll.new) == (phase, new)
    far = call("b", phase="join", position=Progress(version=1, step=99, digest="d1"))
    assert written(first("a"), call("a", 1), far).position.step == 10


def test_when_all_is_exchanged_the_run_is_done() -> None:
    before = first("a", "b", position=at(1))
    last = [call("a", 2, phase="last", settled=True), call("b", 1, phase="join")]
    roll = written(before, *last)
    assert roll.is_over
    assert roll == last_roll(before, at(2), [logged(2)])
    assert (roll.names, roll.number, roll.position.over) == ((), 2, True)
    assert [each.version for each in roll.rounds] == [2]
    # Not while one has something to exchange, nor with the first roll.
    unsettled = [last[0], call("b", 2, phase="last")]
    assert written(before, *unsettled).phase == written(None, *last).phase == "last"


def test_what_is_under_way_is_given_up_when_others_take_part() -> None:
    one = first("a", "b")
    two = replace(one, number=2)
    assert not two.changes(one)
    assert two.changes(None)
    assert replace(one, number=3).changes(one)
    assert first("a", number=2).changes(one)
    assert replace(two, behind=("a:1",)).changes(one)


def test_of_one_identity_the_last_process_counts() -> None:
    at_start = [replace(call("a"), name=f"a:{process}") for process in ("02", "10", "1a")]
    assert [each.name for each in latest_calls(at_start[::-1])] == ["a:1a"]
    assert latest_calls([]) == []


def test_a_snapshot_is_due_after_so_many_bytes_and_where_no_rounds_lead() -> None:
    roll = written(first("a", "b"), call("a", 2), call("b", 2), rounds=[logged(2)])
    assert (roll.log_nbytes, bool(roll.next_state.writer)) == (LARGEST + 11, True)
    before = first("a", "b", log_nbytes=985)
    for nbytes, is_due in ((15, False), (16, True)):
        roll = written(before, call("a", 1), call("b", 1), rounds=[logged(1, nbytes)])
        assert roll.log_nbytes == 985 + nbytes
        assert bool(roll.next_state.writer) is is_due


def test_a_snapshot_that_is_being_written_is_waited_for_while_its_writer_is_there() -> None:
    coming = NewestState(version=1, roll=3, writer="b:1")
    before = first("a", "b", number=5, position=at(2), next_state=coming, log_nbytes=5000)
    roll = written(before, call("a", 3), call("b", 3))
    assert roll.next_state == coming
    roll = written(before, call("a", 3))
    assert roll.next_state == NewestState(version=3, roll=6, writer="a:1")
    # Once it is there, no other one is due.
    roll = written(before, call("a", 3), call("b", 3, state=coming))
    assert (roll.state, roll.next_state, roll.log_nbytes) == (coming, NewestState(), 10)


def test_a_snapshot_of_an_earlier_version_is_not_taken_for_the_newest() -> None:
    newest = NewestState(version=4, roll=4, writer="a:1")
    before = first("a", "b", number=5, position=at(5), state=newest, log_nbytes=7)
    old = NewestState(version=1, roll=1, writer="b:1")
    roll = written(before, call("a", 6), call("b", 6, state=old))
    assert (roll.state, roll.log_nbytes) == (newest, 17)


def test_another_worker_writes_each_time_and_none_that_is_behind() -> None:
    calls = [call("a", 1), call("b", 1), call("c", 0)]
    befores = (first("a", "b", "c", number=n, log_nbytes=5000) for n in range(1, 7))
    writers = {written(before, *calls).next_state.writer for before in befores}
    assert writers == {"a:1", "b:1"}


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_along_a_chain_of_rolls_no_share_is_dealt_twice_and_no_version_is_lost(data) -> None:
    before: View | None = None
    versions = dict.fromkeys("abcd", 0)
    known: dict[int, LoggedRound] = {}
    dealt: set[int] = set()
    for _ in range(6):
        present = data.draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True))
        phases, calls = ["join", "round"][: 1 + (before is not None)], []
        for name in present:
            digest = data.draw(st.sampled_from(["", "", "", "odd"]))
            phase = data.draw(st.sampled_from(phases))
            lacks = data.draw(st.booleans()) and name == "d"
            calls.append(call(name, versions[name], digest, phase, lacks=lacks))
        least = data.draw(st.integers(1, 3))
        rolls = {
            name: concluded(before, *calls, me=name, rounds=list(known.values()), min_workers=least)
            for name in present
        }
        found = {name: roll for name, roll in rolls.items() if roll is not None}
        if not found:
            continue
        writer, roll = sorted(found.items())[0]
        assert f"{writer}:1" in roll.names
        # All that may write conclude the same, but for a tie between digests.
        assert len({text_of(r) for r in found.values() if r.position == roll.position}) == 1
        assert read_as(View, text_of(roll)) == roll
        ours = range(roll.position.dealt, roll.position.dealt + len(roll.names))
        assert not dealt & set(ours)
        dealt |= set(ours)
        assert len(set(roll.names)) == len(roll.names)
        assert not set(roll.names) & set(roll.lacking)
        assert {*roll.names, *roll.lacking} == {each.name for each in calls}
        assert {*roll.new, *roll.behind} <= {*roll.names}
        if before is not None:
            assert roll.number == before.number + 1
            assert roll.position.version >= before.position.version
            last, logs = roll.position.version, [each.version for each in roll.rounds]
            assert logs == list(range(last - len(logs) + 1, last + 1))
        if roll.lacking:
            assert roll.next_state.writer in roll.names or roll.state.version >= 0
        before = roll
        for name in roll.names:
            versions[name[0]] = roll.position.version + data.draw(st.integers(0, 1))
        known |= {v: logged(v) for v in range(1, roll.position.version + 2)}
