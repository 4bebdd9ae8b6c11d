"""Elastic workers under random kills, stops and lost lighthouses: do all end with one digest?

    python tools/soak.py --seeds 0-9 --kinds kill,stop,lighthouse --method diloco,sparseloco

Every seed is a run of three real workers of a toy model. Prints a row for each; the exit status is
1 if digests differ, a data share was dealt twice, or a worker hangs or fails. A seed decides which
faults are injected and when; what follows also depends on how fast the machine is.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from elastic_schedule import KINDS, OPTIONS, inject_faults
from elastic_team import Team

METHODS = "diloco,muloco:bits=2,sparseloco:density=1/8,streaming_diloco:tau=2"


def main(arguments: Sequence[str]) -> int:
    """Run the schedules; returns 1 if one hangs or ends with different digests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0-9", help="such as 3 or 0-9")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--method", default=METHODS, help="one or more, after each other by seed")
    parser.add_argument("--faults", type=int, default=6, help="in each run")
    chosen = parser.parse_args(arguments)
    first, _, last = chosen.seeds.partition("-")
    kinds, methods = chosen.kinds.split(","), chosen.method.split(",")
    if not set(kinds) <= set(KINDS):
        parser.error(f"there are only the kinds {', '.join(KINDS)}")
    print(f"{'seed':>4} {'method':24} {'rounds':>6} {'stall s':>7} {'took s':>6}  result")
    failed = 0
    for seed in range(int(first), int(last or first) + 1):
        failed += not soak(seed, kinds, methods[seed % len(methods)], chosen.faults)
    return int(failed > 0)


def soak(seed: int, kinds: Sequence[str], method: str, faults: int) -> bool:
    """One run and its row; whether it ended well."""
    began_s = time.monotonic()
    steps = OPTIONS["steps"] + faults * (200 if "long stop" in kinds else 60)
    options = {**OPTIONS, "method": method, "layers": 4, "steps": steps}
    with tempfile.TemporaryDirectory() as folder, Team(Path(folder), **options) as team:
        done: list[str] = []
        try:
            done += inject_faults(team, seed, kinds, faults)
            team.finish(120, left_behind="long stop" in kinds)
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
