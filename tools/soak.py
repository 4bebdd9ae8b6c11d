"""Elastic workers under random kills, stops and lost lighthouses: do all end with one digest?

    python tools/soak.py --seeds 0-9 --kinds kill,stop,lighthouse --method diloco,sparseloco
    python tools/soak.py --seeds 0-9 --bucket

With --bucket there is no lighthouse: workers share an S3 server, and lose the way to it. Every seed
is a run of three real workers of a toy model. Prints a row for each; the exit status is 1 if
digests differ, a data share was dealt twice, or a worker hangs or fails. A seed decides which
faults are injected and when; what follows also depends on how fast the machine is.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from elastic_bucket_team import BucketTeam
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
    parser.add_argument("--bucket", action="store_true", help="over an object store")
    chosen = parser.parse_args(arguments)
    first, _, last = chosen.seeds.partition("-")
    kinds, methods = chosen.kinds.split(","), chosen.method.split(",")
    if not set(kinds) <= set(KINDS):
        parser.error(f"there are only the kinds {', '.join(KINDS)}")
    print(f"{'seed':>4} {'method':24} {'rounds':>6} {'stall s':>7} {'took s':>6}  result")
    failed = 0
    with contextlib.ExitStack() as opened:
        s3 = None
        if chosen.bucket:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            s3 = opened.enter_context(s3_server(folder))
        for seed in range(int(first), int(last or first) + 1):
            method = methods[seed % len(methods)]
            failed += not soak(seed, kinds, method, chosen.faults, s3=s3)
    return int(failed > 0)


def soak(
    seed: int, kinds: Sequence[str], method: str, faults: int, *, s3: str | None = None
) -> bool:
    """One run and its row, over the S3 server at `s3` if there is one; whether it ended well."""
    began_s = time.monotonic()
    steps = OPTIONS["steps"] + faults * (200 if "long stop" in kinds else 60)
    options = {**OPTIONS, "method": method, "layers": 4, "steps": steps}
    with tempfile.TemporaryDirectory() as folder, team_in(Path(folder), s3, options) as team:
        done: list[str] = []
        try:
            done += inject_faults(team, seed, kinds, faults)
            # Over a store a worker finds the end of the run, however long it was away.
            team.finish(120, left_behind="long stop" in kinds and s3 is None)
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


def team_in(folder: Path, s3: str | None, options: Mapping[str, Any]) -> Team:
    """Workers with a lighthouse, or over an S3 server."""
    if s3 is None:
        return Team(folder, **options)
    # Snapshots often enough that messages and older snapshots are deleted in every run.
    more = {"terms": {"timeout_s": 3.0}, "snapshot_after": 4.0}
    return BucketTeam(folder, url=f"s3://run/{folder.name}", endpoint=s3, **options, **more)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
