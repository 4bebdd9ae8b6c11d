"""Elastic workers under random kills, stops and lost stores: do all end with one digest?

    python tools/soak.py --seeds 0-9 --kinds kill,stop,store --method diloco,sparseloco
    python tools/soak.py --seeds 0-9 --folder

Every seed is a run of three real workers of a toy model, which share an S3 server (SeaweedFS), or
with --folder a folder. Prints a row for each; the exit status is 1 if digests differ, a data share
was dealt twice, or a worker hangs or fails. A seed decides which faults are injected and when; what
follows also depends on how fast the machine is.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from elastic_schedule import KINDS, OPTIONS, inject_faults
from elastic_team import Team
from s3_server import s3_server

METHODS = "diloco,muloco:bits=2,sparseloco:density=1/8,streaming_diloco:tau=2"


def main(arguments: Sequence[str]) -> int:
    """Run the schedules; returns 1 if one hangs or ends with different digests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0-9", help="such as 3 or 0-9")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--method", default=METHODS, help="one or more, after each other by seed")
    parser.add_argument("--faults", type=int, default=6, help="in each run")
    parser.add_argument("--folder", action="store_true", help="instead of a server, without store")
    chosen = parser.parse_args(arguments)
    first, _, last = chosen.seeds.partition("-")
    kinds, methods = chosen.kinds.split(","), chosen.method.split(",")
    if not set(kinds) <= set(KINDS):
        parser.error(f"there are only the kinds {', '.join(KINDS)}")
    if chosen.folder:
        kinds = [kind for kind in kinds if kind != "store"]
    print(f"{'seed':>4} {'method':24} {'rounds':>6} {'stall s':>7} {'took s':>6}  result")
    failed = 0
    with contextlib.ExitStack() as opened:
        s3 = None
        if not chosen.folder:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            s3 = opened.enter_context(s3_server(folder))
        for seed in range(int(first), int(last or first) + 1):
            method = methods[seed % len(methods)]
            failed += not soak(seed, kinds, method, chosen.faults, s3)
    return int(failed > 0)


def soak(seed: int, kinds: Sequence[str], method: str, faults: int, s3: str | None) -> bool:
    """One run and its row, over the S3 server at `s3` or a folder; whether it ended well."""
    began_s = time.monotonic()
    steps = OPTIONS["steps"] + faults * (200 if "long stop" in kinds else 60)
    # Snapshots often enough that messages and older snapshots are deleted in every run.
    more = {"terms": {"timeout_s": 3.0}, "snapshot_after": 4.0}
    options = {**OPTIONS, **more, "method": method, "layers": 4, "steps": steps}
    with (
        tempfile.TemporaryDirectory() as folder,
        Team(Path(folder), endpoint=s3, **options) as team,
    ):
        done: list[str] = []
        try:
            done += inject_faults(team, seed, kinds, faults)
            team.finish(120)
            result = "equal"
        except AssertionError as error:
            result = f"FAILED\n{error}"
        rounds = max((worker.version for worker in team.workers), default=0)
        stall_s = max((worker.longest_stall_s() for worker in team.workers), default=0.0)
    took_s = time.monotonic() - began_s
    print(f"{seed:4} {method:24} {rounds:6} {stall_s:7.1f} {took_s:6.1f}  {result}", flush=True)
    if result != "equal":
        print("\n".join(done), flush=True)
    return result == "equal"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
