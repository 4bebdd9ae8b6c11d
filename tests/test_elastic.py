"""Workers that are killed, stopped, cut off and damaged, as real processes: what is left is equal.
"""

import signal
import time

import pytest

from elastic_team import HEARTBEAT_S, Team, Worker

EVERY, STEP_S = 4, 0.03
ROUND_S = EVERY * STEP_S
# A machine of two cores may run two such tests at once, eight processes: they get the processor
# late, and beats are sent every fifth of the heartbeat timeout. Less than a second timeout.
ALLOWANCE_S = 0.8


@pytest.fixture
def team(tmp_path):
    with Team(tmp_path, steps=120, every=EVERY, step_s=STEP_S) as team:
        yield team


def longest_stall_s(workers: list[Worker]) -> float:
    return max(worker.longest_stall_s() for worker in workers)


# -- a worker is killed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "moment",
    [("step", 30), ("started", 7), ("landed", 7)],
    ids=["between rounds", "while payloads travel", "before its vote"],
)
def test_a_killed_worker_costs_the_others_one_heartbeat_timeout(team: Team, moment) -> None:
    first, second, victim = team.start("w0"), team.start("w1"), team.start("w2", die=moment)
    team.until(lambda: victim.gone)
    assert victim.wait(5) == -signal.SIGKILL
    assert first.digest is None
    again = team.start("w2")
    team.finish()
    assert longest_stall_s([first, second]) <= HEARTBEAT_S + ROUND_S + ALLOWANCE_S, team.report()
    assert again.events("healed")
    assert team.met(again, 3)
    for worker in (first, second):
        assert any("w2" in event["who"] for event in worker.events("left"))
        assert any("w2" in event["who"] for event in worker.events("arrived"))
