"""Real processes that are killed, stopped and cut off: all that are left end alike.

They share a folder, or an S3 server where it says so. `Team.finish` is part of every test: all
workers end well, with equal digests, and no share of the data was dealt twice. Whatever else may
happen at any moment: test_elastic_simulation.
"""

import signal
import time

import pytest

from elastic_schedule import OPTIONS, inject_faults
from elastic_team import LEAST_WAIT_S, Team, Worker
from s3_server import s3_fixture  # noqa: F401 - the fixture

EVERY, STEP_S = 4, 0.03
# Who takes part is settled after one wait, and what was sent before it is missed after another. A
# machine of two cores may run two such tests at once, eight processes: they get the processor late.
LOST_S = 2 * (LEAST_WAIT_S + EVERY * STEP_S) + 1.5


@pytest.fixture
def team(tmp_path):
    with Team(tmp_path, steps=160, every=EVERY, step_s=STEP_S) as team:
        yield team


def check_stalls(team: Team, *workers: Worker) -> None:
    """None of `workers` stood still for longer, once it had seen how long a round lasts."""
    for worker in workers:
        assert worker.longest_stall_s(since=2) <= LOST_S, team.report()


KILLED = {
    "between rounds": (("step", 18), {}),
    "while payloads travel": (("started", 5), {"method": "muloco:bits=2"}),
    "with all payloads": (("landed", 5), {"method": "sparseloco:density=1/8"}),
    "as an owner": (("owner", 5), {"method": "muloco:bits=2", "exchange": "reduce_scatter"}),
    "with shards": (("landed", 5), {"method": "muloco:bits=2", "exchange": "reduce_scatter"}),
    "with fragments in flight": (("step", 19), {"method": "streaming_diloco:tau=2", "layers": 4}),
}


@pytest.mark.slow_cases(but=("between",))
@pytest.mark.parametrize("when", KILLED)
def test_a_killed_worker_costs_the_others_one_wait(team: Team, when: str) -> None:
    moment, options = KILLED[when]
    team.options |= options
    first, second, victim = team.start("w0"), team.start("w1"), team.start("w2", die=moment)
    team.until(lambda: victim.gone)
    assert victim.returncode == -signal.SIGKILL
    again = team.start("w2")
    team.finish()
    check_stalls(team, first, second)
    if when == "as an owner":
        assert not any(worker.events("discarded") for worker in (first, second)), team.report()
    assert again.events("healed")
    assert team.met(again, 3), team.report()
    for worker in (first, second):
        for kind in ("left", "arrived"):
            assert any("w2" in event["who"] for event in worker.events(kind)), team.report()


@pytest.mark.slow
def test_a_stopped_worker_costs_the_others_one_wait(team: Team) -> None:
    team.options["steps"] = 400
    first, second, victim = team.start_all("w0", "w1", "w2")
    team.until(lambda: first.version > 3)
    victim.send_signal(signal.SIGSTOP)
    began = first.version
    time.sleep(2 * LOST_S)
    assert first.version > began + 3, team.report()
    victim.send_signal(signal.SIGCONT)
    team.until(lambda: any(t["workers"] == 3 for t in first.steps()[-1:]))
    team.finish()
    check_stalls(team, first, second)
    assert victim.events("healed"), team.report()


@pytest.mark.slow
def test_a_worker_that_was_stopped_longer_than_all_timeouts_does_not_go_on_alone(
    tmp_path, s3
) -> None:
    with Team(tmp_path, endpoint=s3, **OPTIONS, terms={"timeout_s": 2.0}) as team:
        first, stopped = team.start_all("w0", "w1")
        stopped.send_signal(signal.SIGSTOP)
        team.until(lambda: first.gone, 60)
        stopped.send_signal(signal.SIGCONT)
        assert team.finish() == [first, stopped]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_random_schedule_ends_with_equal_digests(tmp_path, s3, seed: int) -> None:
    with Team(tmp_path, endpoint=s3, **OPTIONS, terms={"timeout_s": 3.0}) as team:
        inject_faults(team, seed)
        team.finish(90)


@pytest.mark.slow
def test_a_store_that_is_away_for_some_seconds_loses_no_worker(tmp_path, s3) -> None:
    with Team(tmp_path, endpoint=s3, **OPTIONS) as team:
        workers = team.start_all("w0", "w1")
        team.cut_store(3.0)
        team.finish()
        assert not any(worker.events("left") for worker in workers)
