"""The rules by which workers join, are refused and forgotten, and which round carries a run on."""

import dataclasses

import pytest
from msgspec import structs

from elastic_registry import DESCRIPTION, EXPIRY_S, OTHER, Clock, at
from thinwire.elastic.quorum import Member
from thinwire.elastic.registry import KnownRun, MemberRegistry
from thinwire.membership import Progress, WorkerMetrics


def member(identity: str, version: int, process: int) -> Member:
    nonce = f"{identity}{process}"
    return Member(identity=identity, nonce=nonce, address="10.0.0.1:4000", position=at(version))


class Rules:
    """A registry with a clock that is moved by hand."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.registry = MemberRegistry(expiry_s=EXPIRY_S, clock=self.clock)

    def join(self, identity: str, *, description=DESCRIPTION, version: int = 0, process: int = 0):
        return self.registry.join(member(identity, version, process), description)

    def beat(self, identity: str, *, version: int = 0, process: int = 0) -> bool:
        return self.registry.heartbeat(member(identity, version, process))

    def after(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.registry.expire()

    def there(self) -> list[str]:
        return [found.identity for found in self.registry.others()]


def test_the_first_description_is_the_runs_and_another_is_refused_on_all_sides() -> None:
    rules = Rules()
    assert rules.join("a") is None
    assert rules.join("b") is None
    rules.registry.take_log()
    refusal = rules.join("c", description=OTHER)
    assert refusal is not None
    assert refusal.status == 403
    assert refusal.reason == "method.sync_every is 10 here and 5 in the run"
    line = "'c' at 10.0.0.1:4000: method.sync_every is 10 there and 5 in the run"
    assert rules.registry.take_log() == [f"refused {line}"]
    for name in ("a", "b"):
        assert rules.registry.take_refusals(name) == [line]
        assert rules.registry.take_refusals(name) == []
    assert rules.there() == ["a", "b"]


def test_a_worker_that_asks_repeatedly_is_reported_once() -> None:
    rules = Rules()
    rules.join("a")
    for _ in range(7):
        rules.join("c", description=OTHER)
        rules.after(0.5)
        rules.beat("a")
    assert len(rules.registry.take_refusals("a")) == 1
    for _ in range(61):
        rules.after(1.0)
        rules.beat("a")
    rules.join("c", description=OTHER)
    assert len(rules.registry.take_refusals("a")) == 1


def test_an_identity_is_taken_until_its_holder_has_been_silent_for_long_enough() -> None:
    rules = Rules()
    rules.join("a")
    rules.after(0.4)
    refusal = rules.join("a", process=1)
    assert refusal is not None
    assert refusal.status == 409
    taken = "identity 'a' is taken by a worker at 10.0.0.1:4000, whose last heartbeat was 0.4 s ago"
    assert refusal.reason == taken
    assert "--identity NAME" in refusal.do
    assert refusal.retry_s == pytest.approx(EXPIRY_S - 0.4)
    rules.after(EXPIRY_S - 0.4)
    assert rules.there() == ["a"]  # at the limit and not beyond it
    rules.after(0.01)
    assert rules.there() == []
    assert rules.join("a", process=1) is None
    assert not rules.beat("a")  # the old process is not the new one
    assert rules.beat("a", process=1)


def test_the_same_process_may_join_twice() -> None:
    """Its first answer may have been lost on the way."""
    rules = Rules()
    assert rules.join("a") is None
    assert rules.join("a") is None
    assert len(rules.registry.take_log()) == 1


def test_a_worker_restarted_with_another_description_waits_until_it_is_forgotten() -> None:
    rules = Rules()
    rules.join("a")
    refusal = rules.join("a", process=1, description=OTHER)
    assert refusal is not None
    assert refusal.status == 409
    rules.after(EXPIRY_S + 1)
    assert rules.join("a", process=1, description=OTHER) is None


@pytest.mark.parametrize("end", ["leave", "expire"])
def test_the_description_is_forgotten_with_the_last_worker(end: str) -> None:
    rules = Rules()
    rules.join("a")
    rules.join("b")
    rules.registry.leave("a", "a0")
    assert rules.join("c", description=OTHER) is not None
    if end == "leave":
        rules.registry.leave("b", "b0")
    else:
        rules.after(EXPIRY_S + 0.1)
    assert rules.join("c", description=OTHER) is None
    log = rules.registry.take_log()
    assert log[-2].startswith("b left (" if end == "leave" else "b is gone (version 0, step 0): ")


@pytest.mark.parametrize("end", ["leave", "expire"])
def test_a_run_that_took_an_outer_step_is_remembered_after_its_last_worker(end: str) -> None:
    rules = Rules()
    rules.join("a")
    rules.beat("a", version=7)
    if end == "leave":
        rules.registry.leave("a", "a0")
    else:
        rules.after(EXPIRY_S + 0.1)
    assert rules.there() == []
    for version in (0, 9):
        refusal = rules.join("b", description=OTHER, version=version)
        assert refusal is not None
        assert "a lighthouse of its own" in refusal.do
    assert rules.join("b") is None
    assert rules.registry.run.position == at(7)


def test_workers_that_have_gone_on_or_are_gone_are_no_majority() -> None:
    rules = Rules()
    for name in "abc":
        rules.join(name)
    team = ["a0", "b0", "c0"]
    names = [f"{name[0]}:{name}" for name in team]

    def begins(names: list[str], version: int) -> bool:
        position = dataclasses.replace(at(version), dealt=rules.registry.run.position.dealt)
        asks = structs.replace(member("c", version, 0), position=position)
        return rules.registry.begin_round(asks, names) is None

    assert begins(names, 0)
    assert begins(names[:2], 1)
    rules.beat("a", version=2)
    assert begins(names[:1], 2)
    rules.beat("a", version=3)
    rules.registry.leave("b", "b0")
    for _ in range(3):
        assert not begins(names, 1)  # as c says of a, which has gone on, and b, which is gone
        rules.after(0.2)
    (line,) = (line for line in rules.registry.take_log() if "refused" in line)
    assert line.startswith("refused a round to 'c': the run is at version 3")
    assert len(rules.registry.take_refusals("a")) == 1
    rules.registry.leave("a", "a0")
    rules.join("b", version=2, process=1)
    assert not begins(["b:b1"], 2)
    rules.join("a", version=2, process=1)
    assert begins(["a:a1", "b:b1"], 2)


def test_a_state_that_took_outer_steps_displaces_those_at_the_beginning() -> None:
    rules = Rules()
    rules.join("wrong", description=OTHER)
    rules.join("wrong2", description=OTHER)
    assert rules.join("new") is not None  # at the beginning itself
    assert rules.join("old", version=3) is None
    assert rules.there() == ["old"]
    assert any(
        "which 'old' continues (version 3, step 15)" in line for line in rules.registry.take_log()
    )
    assert not rules.beat("wrong")
    refusal = rules.join("wrong", description=OTHER)
    assert refusal is not None
    assert refusal.status == 403


def test_a_worker_that_took_outer_steps_is_not_displaced() -> None:
    rules = Rules()
    rules.join("a")
    rules.join("b")
    rules.beat("b", version=1)
    assert rules.join("c", description=OTHER, version=9) is not None
    assert rules.there() == ["a", "b"]


def test_what_a_worker_measured_is_kept_until_it_says_something_else() -> None:
    rules = Rules()
    rules.join("a")
    rules.join("b")
    rules.registry.note_metrics("a", {"loss": 2.5, "sent_bytes": 7})
    rules.after(1.0)
    assert rules.beat("a", version=1)
    rules.after(0.5)
    a, b = rules.registry.statuses()
    assert (a.member.position, a.heartbeat_age_s) == (at(1), 0.5)
    assert a.metrics == WorkerMetrics(loss=2.5, sent_bytes=7)
    assert (b.metrics, b.heartbeat_age_s) == (WorkerMetrics(), 1.5)
    rules.registry.note_metrics("a", {"loss": 2.25})
    assert rules.registry.statuses()[0].metrics == WorkerMetrics(loss=2.25)


def test_contributions_are_counted_of_members_and_kept_when_they_leave() -> None:
    rules = Rules()
    rules.join("a")
    rules.join("b")
    rules.registry.take_log()
    rules.registry.note_contributions("a", [[1, "b", "outlier"], [1, "c", "outlier"]])
    rules.registry.note_contributions("b", [[1, "b", "outlier"], [2, "b", "clipped"]])
    rules.registry.leave("b", "b0")
    rules.registry.note_contributions("a", [[3, "b", "outlier"]])
    assert rules.registry.contributions.counts.describe() == {"b": {"outlier": 1, "clipped": 1}}
    assert rules.registry.take_log() == ["b left (version 0, step 0)"]
    for _ in range(2):
        rules.registry.note_contributions("a", [[4, "a", "late"]])
        rules.after(1.0)
    flaw = "dropped what a says of contributions: one is [4, 'a', 'late']"
    assert rules.registry.take_log() == [flaw]


def test_metrics_that_cannot_be_true_are_told_by_name_once_a_minute() -> None:
    rules = Rules()
    rules.join("a")
    rules.registry.take_log()
    for loss in (float("nan"), float("inf"), float("nan")):
        rules.registry.note_metrics("a", {"loss": loss, "sent_bytes": "7", "wait_s": 1.5})
        rules.after(1.0)
    assert rules.registry.take_log() == [
        "dropped a metric of a: loss is nan",
        "dropped a metric of a: sent_bytes is a str",
    ]
    assert rules.registry.statuses()[0].metrics == WorkerMetrics(wait_s=1.5)
    # It is no refusal: the worker takes part, and the others need not know.
    assert (rules.registry.refusals, rules.registry.take_refusals("a")) == (0, [])


def test_refusals_are_counted_as_they_are_reported() -> None:
    rules = Rules()
    rules.join("a")
    assert rules.registry.refusals == 0
    for _ in range(3):
        assert rules.join("b", description=OTHER) is not None
        rules.after(1.0)
    rules.join("a", process=1)
    assert rules.registry.refusals == 2


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
