"""Workers of several ranks over a shared folder, as real processes."""

import signal
from pathlib import Path

import pytest

from elastic_team import Team

pytest.importorskip("obstore")


def team(tmp_path: Path, **options) -> Team:
    given = {"steps": 60, "every": 4, "step_s": 0.02, **options}
    return Team(tmp_path, **given)


def test_a_worker_of_two_ranks_and_one_that_comes_late_end_alike(tmp_path) -> None:
    with team(tmp_path) as workers:
        first = workers.start("w0", ranks=2)
        workers.until(lambda: first.version > 2)
        late = workers.start("w1", ranks=2)
        assert set(workers.finish()) == {*first.ranks, *late.ranks}
        assert any("w1" in event["who"] for event in first.events("arrived"))


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp", "hsdp", "tensor"])
def test_a_worker_whose_rank_is_killed_comes_back_and_all_end_alike(tmp_path, sharding) -> None:
    options = {"sharding": sharding, "layers": True, "snapshot_after": 1e-9}
    with team(tmp_path, steps=120, **options) as workers:
        first, second = workers.start_all("w0", "w1", ranks=2)
        second.ranks[1].kill()
        workers.until(lambda: all(rank.gone for rank in second.ranks))
        version = first.version
        workers.until(lambda: first.version > version + 2)
        again = workers.start("w1", ranks=2)
        ended = workers.finish(90)
        assert set(ended) >= {*first.ranks, *again.ranks}


@pytest.mark.slow
def test_a_worker_that_is_stopped_longer_than_all_timeouts_ends_with_the_others(tmp_path) -> None:
    with team(tmp_path, steps=100, terms={"timeout_s": 2.0}) as workers:
        first, stopped = workers.start_all("w0", "w1", ranks=2)
        stopped.send_to_all(signal.SIGSTOP)
        first.wait(60)
        assert first.digest
        stopped.send_to_all(signal.SIGCONT)
        assert set(workers.finish()) == {*first.ranks, *stopped.ranks}


def test_workers_of_unequal_numbers_of_ranks_are_refused_by_name(tmp_path) -> None:
    with team(tmp_path) as workers:
        first = workers.start("w0", ranks=2)
        workers.until(lambda: first.version > 0)
        other = workers.start("w1")
        assert other.wait(30) == 1
        assert "ranks of a worker" in other.last("error")
        workers.workers.remove(other)
        other.end()
        workers.finish()
