"""Workers in real processes, each under a trainer of another library."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_team import Team
from forked import Forked
from processes import free_port, rank_environment
from trainer_elastic import RATE, STEPS, H, factor

SCRIPT = str(Path(__file__).parent / "trainer_workers.py")


def run_team(library: str, method: str, mode: str, out: Path, *, ranks: int = 1) -> list[dict]:
    """What each rank of the two workers prints at the end; nothing where they were killed."""
    meeting = {"THINWIRE_MEET": f"127.0.0.1:{free_port()}", "THINWIRE_WORKERS": "2"}
    environment = os.environ | meeting | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    team = []
    for worker in range(2):
        own = environment | {"THINWIRE_WORKER": str(worker)}
        port = free_port()
        for rank in range(ranks):
            joined = rank_environment(rank, ranks, port) if ranks > 1 else {}
            team.append(Forked([SCRIPT, library, method, mode, str(out)], joined | own))
    said = []
    try:
        for process in team:
            stdout, stderr = process.communicate(timeout=120)
            # Of two that are killed one may die of the other's death.
            assert (process.returncode != 0) == (mode == "kill"), stderr
            if mode != "kill":
                said.append(json.loads(stdout.splitlines()[-1]))
    finally:
        for process in team:
            process.kill()
    return said


def check_a_killed_team_resumes(
    library: str, method: str, out: Path, *, ranks: int = 1
) -> list[dict]:
    """Digests, bytes and losses equal those of a run that was left alone; returns what it said."""
    straight = run_team(library, method, "straight", out / "straight", ranks=ranks)
    assert len({each["digest"] for each in straight}) == 1
    assert straight[0]["losses"] == straight[ranks]["losses"]
    assert straight[0]["model_is_anchor"]
    run_team(library, method, "kill", out / "killed", ranks=ranks)
    resumed = run_team(library, method, "resume", out / "killed", ranks=ranks)
    for before, after in zip(straight, resumed, strict=True):
        # Lightning's list is of this process, Trainer's of the run.
        assert before["losses"][-2:] == after["losses"][-2:]
        for key in ("digest", "rounds", "steps", "model_is_anchor"):
            assert before[key] == after[key], key
        # Trainer saves what its first rank holds, whose parts may be a byte shorter each.
        assert abs(before["sent_bytes"] - after["sent_bytes"]) <= (0 if ranks == 1 else 32)
    return straight


def check_an_elastic_worker_comes_back(
    work: str, folder: Path, last_checkpoint: Callable[[Path], Any] | None
) -> list[list[dict]]:
    """Of three workers from different weights one is killed and started again; all end alike.

    Args:
        work: as `elastic_team.Team` has it.
        folder: for what they write.
        last_checkpoint: finds in a worker's folder what it is to resume from; None for nothing.

    Returns:
        What each worker that came to the end has logged; the restarted one is the last.
    """
    with Team(folder, work=work) as team:
        workers = team.start_all(*"abc", out=str(folder / "out"))
        killed = workers[1]
        # In the middle of a round, with a checkpoint of the middle of an earlier one.
        team.until(lambda: killed.steps()[-1]["step"] > 16 and killed.steps()[-1]["step"] % H > 1)
        killed.kill()
        resume = None if last_checkpoint is None else last_checkpoint(folder / "out" / "b")
        restarted = team.start("b", out=str(folder / "out"), resume=resume)
        alive = team.finish(90)
        assert alive == [workers[0], workers[2], restarted]
        assert restarted.events("healed"), team.report()
        assert restarted.steps()[0]["step"] > killed.steps()[-1]["step"]
        rows = [line["row"] for w in team.workers for line in w.records if "row" in line]
        assert len(rows) == len(set(rows))
        for worker in alive:
            ends = [worker.last(key) for key in ("last_step", "trainer_steps", "model_is_anchor")]
            assert ends == [STEPS, STEPS, True]
            steps = [line["step"] for line in worker.steps()]
            assert steps == sorted(set(steps))
            assert steps[-1] == STEPS - 1
            for line in worker.steps():
                assert line["rate"] == pytest.approx(RATE * factor(line["step"]), rel=1e-9)
        return [worker.last("logs") for worker in alive]
