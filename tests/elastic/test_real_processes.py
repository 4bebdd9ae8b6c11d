"""Real processes that are killed, stopped and damaged: all that are left end alike.

They share a folder; elastic/test_bucket_processes.py has an S3 server in its place.
`Team.finish` is part of every test: all workers end well, with equal digests, and no share of the
data was dealt twice.
"""

import signal
import time
from itertools import pairwise

import pytest

from elastic_team import LEAST_WAIT_S, Team, Worker

pytest.importorskip("obstore")

EVERY, STEP_S = 4, 0.03
ROUND_S = EVERY * STEP_S
# A machine of two cores may run two such tests at once, eight processes: they get the processor
# late.
ALLOWANCE_S = 1.5
# Who takes part is settled after one wait, and what was sent before it is missed after another.
LOST_S = 2 * (LEAST_WAIT_S + ROUND_S) + ALLOWANCE_S


@pytest.fixture
def team(tmp_path):
    with Team(tmp_path, steps=160, every=EVERY, step_s=STEP_S) as team:
        yield team


def died(team: Team, victim: Worker) -> None:
    team.until(lambda: victim.gone)
    assert victim.wait(5) == -signal.SIGKILL


def check_stalls(team: Team, *workers: Worker, limit_s: float = LOST_S) -> None:
    """None of `workers` stood still for longer, once it had seen how long a round lasts."""
    for worker in workers:
        times = [t["at_s"] for t in worker.steps() if t["version"] > 1]
        assert max(b - a for a, b in pairwise(times)) <= limit_s, team.report()


# -- a worker is killed ---------------------------------------------------------------------------


@pytest.mark.slow_cases(but=("between",))
@pytest.mark.parametrize(
    "moment",
    [("step", 18), ("started", 5), ("landed", 5)],
    ids=["between rounds", "while payloads travel", "with all payloads"],
)
def test_a_killed_worker_costs_the_others_one_wait(team: Team, moment) -> None:
    first, second, victim = team.start("w0"), team.start("w1"), team.start("w2", die=moment)
    died(team, victim)
    again = team.start("w2")
    team.finish()
    check_stalls(team, first, second)
    assert again.events("healed")
    assert team.met(again, 3), team.report()
    for worker in (first, second):
        assert any("w2" in event["who"] for event in worker.events("left")), team.report()
        assert any("w2" in event["who"] for event in worker.events("arrived")), team.report()


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["adopting", "called"])
def test_a_worker_killed_as_it_joins_costs_the_others_little(team: Team, doing) -> None:
    # Without its own snapshot, it would take the rounds.
    first, second = team.start_all("w0", "w1", snapshot_after=1.0)
    team.until(lambda: first.version > 8)
    victim = team.start("w2", die=("while", doing))
    died(team, victim)
    assert not victim.steps()
    again = team.start("w2")
    team.finish()
    check_stalls(team, first, second)
    assert again.events("healed")


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_worker_killed_at_the_end_does_not_keep_the_others(team: Team, comes_back: bool) -> None:
    team.options["steps"] = 42  # half a round is left over
    victim, *_ = team.start("w2", die=("flushing", 0)), team.start("w0"), team.start("w1")
    died(team, victim)
    if comes_back:  # to what the others have
        again = team.start("w2")
        team.finish()
        assert again.last("last_step") == 42
        return
    for worker in team.finish():
        assert worker.last("last_step") == 42


# -- a worker is silent ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_worker_costs_the_others_one_wait(team: Team) -> None:
    team.options["steps"] = 400
    first, second, victim = team.start_all("w0", "w1", "w2")
    team.until(lambda: first.version > 3)
    victim.send(signal.SIGSTOP)
    began = first.version
    time.sleep(2 * LOST_S)
    assert first.version > began + 3, team.report()
    victim.send(signal.SIGCONT)
    team.until(lambda: any(t["workers"] == 3 for t in first.steps()[-1:]))
    team.finish()
    check_stalls(team, first, second)
    assert victim.events("healed"), team.report()


@pytest.mark.slow
def test_a_worker_that_was_stopped_until_the_others_were_killed_goes_on_with_them(
    team: Team,
) -> None:
    """It goes on from what they left in the store, and not from what it had."""
    team.options["steps"] = 300
    first, second, victim = team.start_all("w0", "w1", "w2")
    victim.send(signal.SIGSTOP)
    version = first.version
    team.until(lambda: first.version > version + 4)
    first.kill()
    second.kill()
    behind = max(first.version, second.version)
    victim.send(signal.SIGCONT)
    team.until(lambda: victim.version > behind)
    assert victim.events("healed"), team.report()
    team.start("w0")
    team.finish()


@pytest.mark.slow
def test_a_slow_worker_is_left_behind_and_its_work_comes_later(team: Team) -> None:
    team.options |= {"steps": 300, "terms": {"patience": 0.5}}
    first, second = team.start_all("w0", "w1")
    slow = team.start("w2", step_s=0.8)
    team.finish(100)
    assert slow.events("late"), team.report()
    late_at = slow.events("late")[0]["at_s"]
    later = [t for w in (first, second) for t in w.rounds() if t["at_s"] > late_at]
    assert any(name.startswith("w2:") for line in later for name in line["counted"])


# -- payloads are damaged -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_damaged_contribution_is_left_out_by_name_and_its_sender_heals(team: Team) -> None:
    """It has its message as it was, and so another mean than the others."""
    team.options |= {"steps": 80, "terms": {"min_workers": 3}}
    first = team.start("w0")
    damaged = [
        team.start("w1", damage={"how": "flip", "rounds": [4]}),
        team.start("w2", damage={"how": "fill", "rounds": [8]}),
    ]
    team.finish()
    assert first.last("contributions") == {"w1": {"damaged": 1}, "w2": {"damaged": 1}}
    counted = {t["round"]: {n.split(":")[0] for n in t["counted"]} for t in first.rounds()}
    left_out = {event["round"]: event for event in first.events("left out")}
    assert sorted(left_out) == [4, 8]
    for number, sender in zip((4, 8), damaged, strict=True):
        assert left_out[number]["who"] == [sender.identity]
        assert "did not arrive as it was sent" in left_out[number]["why"]
        assert counted[number] == {"w0", "w1", "w2"} - {sender.identity}
        assert counted[number + 3] == {"w0", "w1", "w2"}
        assert sender.events("healed")


# -- methods --------------------------------------------------------------------------------------


METHODS = {
    "muloco of 2 bits": {"method": "muloco:bits=2"},
    "reduce-scatter of 2 bits": {"method": "muloco:bits=2", "exchange": "reduce_scatter"},
    "sparseloco": {"method": "sparseloco:density=1/8"},
    "streaming": {"method": "streaming_diloco:tau=2", "layers": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_survives_a_kill_and_a_restart(team: Team, name: str) -> None:
    """In streaming runs, fragments are in flight at any step."""
    team.options |= METHODS[name]
    team.start("w0")
    team.start("w1")
    victim = team.start("w2", die=("step", 19))
    died(team, victim)
    again = team.start("w2")
    team.finish()
    assert again.events("healed"), team.report()
    assert team.met(again, 3), team.report()


# -- what cannot take part ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_of_another_run_is_refused_by_what_differs(team: Team) -> None:
    first, second = team.start_all("w0", "w1")
    strangers = {
        "token": team.start("t", token="another token, which is long, too"),
        "parameters": team.start("m", width=5),
        "sync_every": team.start("h", every=5),
        "method": team.start("o", method="sparseloco"),
    }
    for reason, stranger in strangers.items():
        team.until(lambda stranger=stranger: stranger.gone)
        assert stranger.wait(5) == 1, team.report()
        assert stranger.last("kind") == "MismatchError"
        said = stranger.last("error").lower()
        assert reason in said or (reason == "method" and "codec" in said), team.report()
        assert stranger.errors.read_text() == ""
    team.workers = [first, second]
    team.finish()
