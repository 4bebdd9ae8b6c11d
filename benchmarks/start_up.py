"""How long commands take that compute nothing: seconds of wall clock and of the user's CPU.

    python benchmarks/start_up.py OUT --run FOLDER --before SRC

SRC is the src folder of an earlier checkout; both are timed in turn, after a run that caches
bytecode.
FOLDER holds finished runs, for `thinwire report`. OUT gets start-up.json.
"""

import argparse
import importlib.metadata
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from thinwire.runs.folder import write_json

TIMES = 5
PLAN = "plan --parameters 10B --layers 48 --workers 2 --step-time 0.8s --bandwidth 10Gbit/s"
COMMANDS = {
    "--help": "--help",
    "train --help": "train --help",
    "a wrong flag": "train --sync-evry 3",
    "plan": PLAN,
    "report": "report {run} --out {page}",
}


def measure(source: Path, arguments: Sequence[str]) -> tuple[float, float]:
    """Seconds of wall clock and of user CPU of one process."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"}
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.perf_counter()
    command = [sys.executable, "-m", "thinwire", *arguments]
    subprocess.run(command, env=environment, capture_output=True, check=False)
    wall_s = time.perf_counter() - began_s
    return wall_s, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def rows(sources: Mapping[str, Path], run: Path) -> dict[str, dict[str, dict[str, float]]]:
    """By command and checkout: medians of both."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, command in COMMANDS.items():
            arguments = command.format(run=run, page=f"{folder}/page.html").split()
            taken: dict[str, list[tuple[float, float]]] = {key: [] for key in sources}
            for time_of in range(TIMES + 1):
                for key, source in sources.items():
                    seconds = measure(source, arguments)
                    if time_of:  # the first one writes the bytecode
                        taken[key].append(seconds)
            found[name] = {
                key: {
                    "wall_s": round(statistics.median(wall for wall, _ in pairs), 3),
                    "user_s": round(statistics.median(user for _, user in pairs), 3),
                }
                for key, pairs in taken.items()
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--before", type=Path)
    given = parser.parse_args()
    sources = {"now": Path(__file__).parents[1] / "src"}
    if given.before is not None:
        sources = {"before": given.before} | sources
    record = {
        "what": f"seconds of commands that compute nothing, median of {TIMES}, taken in turn",
        "command": "python benchmarks/start_up.py OUT --run FOLDER --before SRC",
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "tyro")},
        "commands": COMMANDS,
        "seconds": rows(sources, given.run),
    }
    write_json(given.out / "start-up.json", record)


if __name__ == "__main__":
    main()
