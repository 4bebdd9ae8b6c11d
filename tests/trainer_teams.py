"""Two workers in real processes, each under a trainer of another library."""

import json
import os
from pathlib import Path

from forked import Forked
from processes import free_port

SCRIPT = str(Path(__file__).parent / "trainer_workers.py")


def run_team(library: str, method: str, mode: str, out: Path) -> list[dict]:
    """What the two workers print at the end; nothing where they were killed."""
    port = free_port()
    team = [
        Forked(
            [SCRIPT, library, method, mode, str(out)],
            os.environ
            | {
                "THINWIRE_MEET": f"127.0.0.1:{port}",
                "THINWIRE_WORKERS": "2",
                "THINWIRE_WORKER": str(worker),
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            },
        )
        for worker in range(2)
    ]
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


def check_a_killed_team_resumes(library: str, method: str, out: Path) -> None:
    """Digests, bytes and losses equal those of a run that was left alone."""
    straight = run_team(library, method, "straight", out / "straight")
    first, second = straight
    assert first["digest"] == second["digest"]
    assert first["losses"] == second["losses"]
    assert first["model_is_anchor"]
    run_team(library, method, "kill", out / "killed")
    resumed = run_team(library, method, "resume", out / "killed")
    for before, after in zip(straight, resumed, strict=True):
        # Lightning's list is of this process, Trainer's of the run.
        assert before["losses"][-2:] == after["losses"][-2:]
        for key in ("digest", "rounds", "steps", "sent_bytes", "model_is_anchor"):
            assert before[key] == after[key], key
