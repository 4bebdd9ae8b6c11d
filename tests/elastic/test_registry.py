"""The rules by which workers join, are refused and forgotten, and which round carries a run on."""

import dataclasses

import pytest

from elastic_registry import DESCRIPTION, EXPIRY_S, OTHER, Clock, at
from thinwire.elastic.quorum import Member
from thinwire.elastic.registry import KnownRun, MemberRegistry
from thinwire.membership import Progress, WorkerMetrics


def member(identity: str, version: int, process: int) -> Member:
    nonce = f"{identity}{process}"
    return Member(identity=identity, nonce=nonce, address="10.0.0.1:4000", position=at(version))


class Rules:
    """A registry that `names` have joined, with a clock that is moved by hand."""

    def __init__(self, names: str = "") -> None:
        self.clock = Clock()
        self.registry = MemberRegistry(expiry_s=EXPIRY_S, clock=self.clock)
        for name in names:
            assert self.join(name) is None

    def join(self, identity: str, *, description=DESCRIPTION, version: int = 0, process: int = 0):
        return self.registry.join(member(identity, version, process), description)

    def beat(self, identity: str, *, version: int = 0, process: int = 0) -> bool:
        return self.registry.heartbeat(member(identity, version, process))

    def after(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.registry.expire()

    def end(self, name: str, how: str) -> None:
        if how == "leave":
            self.registry.leave(name, f"{name}0")
        else:
            self.after(EXPIRY_S + 0.1)

    def there(self) -> list[str]:
        return [found.identity for found in self.registry.others()]


def test_another_description_is_refused_on_all_sides_and_reported_once_a_minute() -> None:
    rules = Rules("ab")
    rules.registry.take_log()
    refusal = rules.join("c", description=OTHER)
    assert refusal is not None
    assert (refusal.status, refusal.reason) == (
        403,
        "method.sync_every is 10 here and 5 in the run",
    )
    line = "'c' at 10.0.0.1:4000: method.sync_every is 10 there and 5 in the run"
    assert rules.registry.take_log() == [f"refused {line}"]
    for name in ("a", "b"):
        assert rules.registry.take_refusals(name) == [line]
        assert rules.registry.take_refusals(name) == []
    assert rules.there() == ["a", "b"]
    for second in range(61):
        rules.after(1.0)
        rules.beat("a")
        if second < 7 or second == 60:
            rules.join("c", description=OTHER)
            assert len(rules.registry.take_refusals("a")) == (second == 60)
    rules.join("a", process=1)
    assert rules.registry.refusals == 3


def test_an_identity_is_taken_until_its_holder_has_been_silent_for_long_enough() -> None:
    rules = Rules("aa")  # its first answer may have been lost on the way
    assert len(rules.registry.take_log()) == 1
    rules.after(0.4)
    for description in (DESCRIPTION, OTHER):
        refusal = rules.join("a", process=1, description=description)
        assert refusal is not None
        assert refusal.status == 409
        assert refusal.reason == (
            "identity 'a' is taken by a worker at 10.0.0.1:4000, whose last heartbeat was 0.4 s ago"
        )
        assert "--identity NAME" in refusal.do
        assert refusal.retry_s == pytest.approx(EXPIRY_S - 0.4)
    rules.after(EXPIRY_S - 0.4)
    assert rules.there() == ["a"]  # at the limit and not beyond it
    rules.after(0.01)
    assert rules.there() == []
    assert rules.join("a", process=1, description=OTHER) is None
    assert not rules.beat("a")  # the old process is not the new one
    assert rules.beat("a", process=1)


@pytest.mark.parametrize("end", ["leave", "expire"])
def test_a_run_is_forgotten_with_its_last_worker_unless_it_took_an_outer_step(end: str) -> None:
    rules = Rules("ab")
    rules.registry.leave("a", "a0")
    assert rules.join("c", description=OTHER) is not None
    rules.end("b", end)
    assert rules.join("c", description=OTHER) is None
    log = rules.registry.take_log()
    assert log[-2].startswith("b left (" if end == "leave" else "b is gone (version 0, step 0): ")

    rules = Rules("a")
    rules.beat("a", version=7)
    rules.end("a", end)
    assert rules.there() == []
    for version in (0, 9):
        refusal = rules.join("b", description=OTHER, version=version)
        assert refusal is not None
        assert "a lighthouse of its own" in refusal.do
    assert rules.join("b") is None
    assert rules.registry.run.position == at(7)


def test_a_state_that_took_outer_steps_displaces_those_at_the_beginning_only() -> None:
    rules = Rules()
    rules.join("wrong", description=OTHER)
    rules.join("wrong2", description=OTHER)
    assert rules.join("new") is not None  # at the beginning itself
    assert rules.join("old", version=3) is None
    assert rules.there() == ["old"]
    said = "which 'old' continues (version 3, step 15)"
    assert any(said in line for line in rules.registry.take_log())
    assert not rules.beat("wrong")
    refusal = rules.join("wrong", description=OTHER)
    assert refusal is not None
    assert refusal.status == 403
    assert rules.join("c", description=OTHER, version=9) is not None
    assert rules.there() == ["old"]


def test_what_a_worker_says_of_itself_is_kept_and_counted_unless_it_cannot_be_true() -> None:
    rules = Rules("ab")
    registry = rules.registry
    registry.take_log()
    registry.note_metrics("a", {"loss": 2.5, "sent_bytes": 7})
    rules.after(1.0)
    assert rules.beat("a", version=1)
    rules.after(0.5)
    a, b = registry.statuses()
    assert (a.member.position, a.heartbeat_age_s) == (at(1), 0.5)
    assert a.metrics == WorkerMetrics(loss=2.5, sent_bytes=7)
    assert (b.metrics, b.heartbeat_age_s) == (WorkerMetrics(), 1.5)
    for loss in (float("nan"), float("inf"), float("nan")):
        registry.note_metrics("a", {"loss": loss, "sent_bytes": "7", "wait_s": 1.5})
        rules.after(1.0)
    flaws = [f"dropped a metric of a: {flaw}" for flaw in ("loss is nan", "sent_bytes is a str")]
    assert registry.take_log() == flaws
    assert registry.statuses()[0].metrics == WorkerMetrics(wait_s=1.5)
    # It is no refusal: the worker takes part, and the others need not know.
    assert (registry.refusals, registry.take_refusals("a")) == (0, [])

    rules.beat("a")
    registry.note_contributions("a", [[1, "b", "outlier"], [1, "c", "outlier"]])  # no member
    registry.note_contributions("b", [[1, "b", "outlier"], [2, "b", "clipped"]])
    registry.leave("b", "b0")
    registry.note_contributions("a", [[3, "b", "outlier"]])
    assert registry.contributions.counts.describe() == {"b": {"outlier": 1, "clipped": 1}}
    assert registry.take_log() == ["b left (version 0, step 0)"]
    for _ in range(2):
        registry.note_contributions("a", [[4, "a", "late"]])
        rules.after(1.0)
    flaw = "dropped what a says of contributions: one is [4, 'a', 'late']"
    assert registry.take_log() == [flaw]


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
    # Nor are they when all start again, and a state without an outer step carries no run on.
    assert "were dealt meanwhile" in begins(run, dealt(7, 21), "a:2", "b:2")
    assert "version 0" in begins(run, dealt(0, 35), "a:2", "b:2")
    assert begins(begun(0), dealt(0, 33, digest="other"), "d:1") == ""


def test_a_team_that_shrank_goes_on_and_a_worker_that_was_left_behind_does_not() -> None:
    run = begun()
    assert begins(run, dealt(11, 33), "a:1", "b:1") == ""
    why = begins(run, dealt(10, 35), "c:1")
    assert "the run is at version 11" in why
    assert "this worker has version 10" in why
    # What it says of workers that are gone, or have gone on, does not count.
    assert begins(run, dealt(10, 35), *TEAM, there=["c"]) == why
    assert (run.position, run.team) == (dealt(11, 35), {"a", "b"})
    refusal = run.begin_round(dealt(10, 35), ["c:1"], there=["c"])
    assert refusal is not None
    assert not refusal.is_final
    assert "start these again, with --resume: a b" in refusal.do
    for _ in range(2):
        assert begins(run, dealt(run.position.version + 1, run.position.dealt), "a:1") == ""


def test_the_state_that_most_have_goes_on_also_with_an_older_version() -> None:
    run = begun()
    other = dealt(10, 33, digest="other")
    assert "digest other" in begins(run, other, "d:1")
    assert begins(run, other, "a:1", "b:1") == ""  # most of those who had it
    assert run.position.digest == "other"
    run = begun()
    assert begins(run, dealt(7, 33), "a:2") != ""
    assert begins(run, dealt(7, 33), "a:2", "b:2") == ""
    assert run.position == dealt(7, 35)
    run.learn(dealt(8, 35))
    assert run.position.version == 8


def test_a_run_that_is_over_stays_so_for_all_that_do_not_have_it() -> None:
    run = begun()
    run.learn(dealt(9, 33, over=True))
    assert not run.position.over
    for progress in (dealt(10, 33, over=True, step=52), dealt(10, 33)):
        run.learn(progress)  # the second caught up, after fewer inner steps
        assert (run.position.over, run.position.step) == (True, 52)
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
    run = begun(allow_fork=True)
    run.learn(dealt(12, 33, over=True))
    assert begins(run, dealt(4, 33), "d:1") == ""
    assert (run.position, run.team) == (dealt(4, 34), {"d"})
