"""Real workers over a real S3 server, killed, stopped and cut off: all that are left end alike."""

import signal
import time
from pathlib import Path

import pytest

from elastic_schedule import OPTIONS, inject_faults
from elastic_team import Team
from s3_server import s3_fixture  # noqa: F401 - the fixture

pytestmark = pytest.mark.slow

pytest.importorskip("obstore")


def team(tmp_path: Path, s3: str, **options) -> Team:
    return Team(tmp_path, endpoint=s3, **{"steps": 120, "every": 4, "step_s": 0.03, **options})


def test_four_workers_of_which_one_leaves_one_is_late_and_one_joins(tmp_path, s3) -> None:
    with team(tmp_path, s3) as workers:
        first, leaving = workers.start("w0"), workers.start("w1")
        slow = workers.start("w2", step_s=0.6)
        workers.until(lambda: first.version > 2)
        joining = workers.start("w3")
        workers.until(lambda: joining.version > first.version - 3 and joining.version)
        leaving.kill()
        ended = workers.finish()
        assert {worker.identity for worker in ended} == {"w0", "w2", "w3"}
        after = workers.start("w9")  # it takes the final weights
        assert after in workers.finish()
        assert not after.steps()
        assert any("w3" in event["who"] for event in first.events("arrived"))
        assert any("w1" in event["who"] for event in first.events("left"))
        assert slow.events("late"), workers.report()


def test_all_killed_at_once_go_on_from_what_lies_in_the_store(tmp_path, s3) -> None:
    with team(tmp_path, s3) as workers:
        before = workers.start_all("w0", "w1")
        workers.until(lambda: before[0].version > 5)
        for worker in before:
            worker.kill()
        version = max(worker.version for worker in before)
        again = [workers.start("w0"), workers.start("w1")]
        ended = workers.finish()
        assert ended == again
        # The first round that they saw was not the run's first.
        assert all(worker.steps()[0]["version"] >= version - 1 for worker in again)


def test_a_worker_that_was_stopped_longer_than_all_timeouts_does_not_go_on_alone(
    tmp_path, s3
) -> None:
    with team(tmp_path, s3, terms={"timeout_s": 2.0}) as workers:
        first, stopped = workers.start_all("w0", "w1")
        stopped.send(signal.SIGSTOP)
        first.wait(40)
        assert first.digest
        stopped.send(signal.SIGCONT)
        assert {worker.identity for worker in workers.finish()} == {"w0", "w1"}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_random_schedule_ends_with_equal_digests(tmp_path, s3, seed: int) -> None:
    options = {**OPTIONS, "terms": {"timeout_s": 3.0}}
    with team(tmp_path, s3, **options) as workers:
        inject_faults(workers, seed)
        workers.finish(90)


def test_a_store_that_is_away_for_some_seconds_loses_no_worker(tmp_path, s3) -> None:
    with team(tmp_path, s3) as workers:
        first, second = workers.start_all("w0", "w1")
        workers.cut_store()
        time.sleep(3)
        workers.mend_store()
        workers.finish()
        assert not first.events("left")
        assert not second.events("left")
