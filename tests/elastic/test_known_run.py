"""Which round carries a run on: the rule on its own, without a network or a clock."""

import dataclasses

import pytest

from elastic_registry import at
from thinwire.elastic.registry import KnownRun
from thinwire.membership import Progress

TEAM = ["a:1", "b:1", "c:1"]


def dealt(version: int, shares: int, **fields) -> Progress:
    return dataclasses.replace(at(version), dealt=shares, **fields)


def begun(version: int = 10, names=TEAM, **options) -> KnownRun:
    """A run of which `names` have begun a round from `version`, with 30 shares dealt before."""
    run = KnownRun(**options)
    run.learn(dealt(version, 30))
    assert run.begin_round(dealt(version, 30), names, there=[]) is None
    return run


def begins(run: KnownRun, position: Progress, *names: str, there=None) -> str:
    """Why the round must not begin; "" if it may."""
    known = [name.partition(":")[0] for name in names] if there is None else there
    refusal = run.begin_round(position, names, there=known)
    return "" if refusal is None else refusal.reason


def test_all_workers_of_a_round_begin_it_and_its_shares_are_dealt_once() -> None:
    run = begun()
    assert begins(run, dealt(10, 30), *reversed(TEAM)) == ""
    assert run.position == dealt(10, 33)
    assert "shares up to 33 were dealt" in begins(run, dealt(10, 30), "a:1", "b:1")
    assert begins(run, dealt(10, 33), "a:1", "b:1") == ""  # the round before was discarded
    assert (run.position.dealt, run.team) == (35, {"a", "b"})


@pytest.mark.parametrize("left", [1, 2])
def test_a_team_that_shrank_goes_on_however_few_have_the_version_of_the_run(left: int) -> None:
    run = begun()
    assert begins(run, dealt(10, 33), *TEAM[:left]) == ""
    assert begins(run, dealt(11, 33 + left), *TEAM[:left]) == ""


def test_a_worker_that_was_left_behind_does_not_go_on() -> None:
    run = begun()
    assert begins(run, dealt(11, 33), "a:1", "b:1") == ""
    why = begins(run, dealt(10, 35), "c:1")
    assert "the run is at version 11" in why
    assert "this worker has version 10" in why
    # What it says of workers that are gone, or have gone on, does not count.
    assert begins(run, dealt(10, 35), *TEAM, there=["c"]) == why
    assert run.position == dealt(11, 35)
    assert run.team == {"a", "b"}
    refusal = run.begin_round(dealt(10, 35), ["c:1"], there=["c"])
    assert refusal is not None
    assert not refusal.is_final
    assert "start these again, with --resume: a b" in refusal.do


def test_another_state_of_the_same_version_is_another_run() -> None:
    run = begun()
    other = dealt(10, 33, digest="other")
    assert "digest other" in begins(run, other, "d:1")
    assert begins(run, other, "a:1", "b:1") == ""  # most of those who had it
    assert run.position.digest == "other"


@pytest.mark.parametrize("back", [1, 2])
def test_a_majority_that_starts_again_carries_an_older_version_on(back: int) -> None:
    run = begun()
    why = begins(run, dealt(7, 33), *(f"{name}:2" for name in "abc"[:back]))
    assert bool(why) == (back == 1)
    if not why:
        assert run.position == dealt(7, 35)
        run.learn(dealt(8, 35))
        assert run.position.version == 8


def test_no_share_is_dealt_again_when_all_start_again() -> None:
    run = begun()
    assert "were dealt meanwhile" in begins(run, dealt(7, 21), "a:2", "b:2", "c:2")
    assert run.position == dealt(10, 33)


def test_a_state_without_an_outer_step_carries_no_run_on() -> None:
    run = begun()
    assert "version 0" in begins(run, dealt(0, 33), "a:2", "b:2", "c:2")
    fresh = begun(0)
    assert begins(fresh, dealt(0, 33, digest="other"), "d:1") == ""


def test_a_run_that_is_over_stays_so_for_all_that_do_not_have_it() -> None:
    run = begun()
    run.learn(dealt(12, 33, over=True))
    run.learn(dealt(11, 36))
    assert run.position.over
    refusal = run.begin_round(dealt(11, 36), ["a:1", "b:1", "c:1"], there=["a", "b", "c"])
    assert refusal is not None
    assert refusal.is_final
    assert refusal.reason == f"the run is over: version 12, digest {at(12).digest}"
    assert "the model that a b c wrote" in refusal.do
    assert "--allow-fork" in refusal.do
    assert begins(run, dealt(12, 36), "a:1") == ""  # it trains further
    assert not run.position.over


def test_it_is_over_once_a_worker_says_so_of_its_version() -> None:
    run = begun()
    run.learn(dealt(9, 33, over=True))
    assert not run.position.over
    run.learn(dealt(10, 33, over=True, step=52))
    assert (run.position.over, run.position.step) == (True, 52)
    run.learn(dealt(10, 33))  # one that caught up, after fewer inner steps
    assert (run.position.over, run.position.step) == (True, 52)


def test_any_version_goes_on_where_that_is_allowed() -> None:
    run = begun(allow_fork=True)
    run.learn(dealt(12, 33, over=True))
    assert begins(run, dealt(4, 33), "d:1") == ""
    assert (run.position, run.team) == (dealt(4, 34), {"d"})
