"""What coming and going costs: the demo's task with and without churn, as real elastic workers.

python benchmarks/churn.py OUT       resumable; about two minutes a pair of runs on two cores

Four workers, each a process of `thinwire join`, share a folder; model, data, batch and 400 steps
(40 rounds) are the laptop recipe's. Undisturbed, all four stay. With churn, one is killed after
rounds 4 and 22, and another starts at once with an empty folder and is ready to take part some ten
rounds later: every ten rounds somebody leaves or joins.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from setting import write_runs

SEEDS = (0, 1, 2)
METHODS = ("diloco",)
WORKERS = 4
ROUNDS = 40
FEWEST = 3
KILLED_AFTER = (4, 22)


def main() -> None:
    out = Path(sys.argv[1])
    runs = {
        f"{method}{', churn' if churn else ''}": [one(out, method, seed, churn) for seed in SEEDS]
        for method in METHODS
        for churn in (False, True)
    }
    costs = {method: cost(runs, method) for method in METHODS}
    print(json.dumps(costs, indent=2))
    write_runs(__file__, str(__doc__).splitlines()[0], runs, cost=costs)


def cost(runs: Mapping[str, list[dict[str, Any]]], method: str) -> dict[str, Any]:
    """Validation loss with churn relative to that without, paired by seed."""
    calm, stormy = runs[method], runs[f"{method}, churn"]
    ratios = [s["val_loss"] / c["val_loss"] - 1 for c, s in zip(calm, stormy, strict=True)]
    return {
        "undisturbed": statistics.fmean(run["val_loss"] for run in calm),
        "churn": statistics.fmean(run["val_loss"] for run in stormy),
        "ratio minus 1": statistics.fmean(ratios),
        "by seed": ratios,
    }


def one(out: Path, method: str, seed: int, churn: bool) -> dict[str, Any]:
    folder = out / f"{method}-{'churn' if churn else 'calm'}-{seed}"
    result = folder / "result.json"
    if not result.exists():
        folder.mkdir(parents=True, exist_ok=True)
        result.write_text(json.dumps(run(folder, method, seed, churn), indent=2))
    found: dict[str, Any] = json.loads(result.read_text())
    print(f"{found['val_loss']:.4f}  {folder.name}", flush=True)
    return found


def run(folder: Path, method: str, seed: int, churn: bool) -> dict[str, Any]:
    with ExitStack() as opened:
        address = f"file://{folder.resolve()}/store/churn"

        def start(name: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "thinwire", "join", address]
            command += ["--method", method, "--seed", str(seed), "--workers", str(WORKERS)]
            command += ["--threads", "1", "--identity", name, "--out", str(folder / name)]
            command += ["--min-workers", str(FEWEST), "--log-steps", "10"]
            process = subprocess.Popen(
                command,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=(folder / f"{name}.txt").open("wb"),
                stderr=subprocess.STDOUT,
            )
            opened.callback(process.kill)
            return process

        workers = {f"w{n}": start(f"w{n}") for n in range(WORKERS)}
        if churn:
            disturb(folder, workers, start)
        for name in workers:
            if workers[name].wait() != 0:
                raise SystemExit((folder / f"{name}.txt").read_text())
    return conclude(folder, list(workers))


def disturb(folder: Path, workers: dict[str, Any], start: Any) -> None:
    """Kill a worker after each round of KILLED_AFTER, and start another at once."""
    survivor = folder / "w0" / "metrics.jsonl"
    for victim, last in enumerate(KILLED_AFTER, start=1):
        until_round(survivor, last)
        workers.pop(f"w{victim}").kill()
        newcomer = f"w{WORKERS + victim - 1}"
        workers[newcomer] = start(newcomer)


def until_round(metrics: Path, number: int) -> None:
    """Wait until a worker has taken part in `number` rounds."""
    while rounds_of(metrics) < number:
        time.sleep(0.05)


def rounds_of(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return json.loads(lines[-1])["rounds"] if lines else 0


def conclude(folder: Path, names: list[str]) -> dict[str, Any]:
    """The summary of the first worker, compared with those of all that reached the end."""
    summaries = {name: json.loads((folder / name / "summary.json").read_text()) for name in names}
    digests = {summary["outer_digest"] for summary in summaries.values()}
    assert len(digests) == 1, summaries
    first = next(iter(summaries.values()))
    rows = (folder / names[0] / "metrics.jsonl").read_text().splitlines()
    present = {json.loads(row)["rounds"]: json.loads(row)["workers"] for row in rows}
    tokens = sum(summary["tokens"] for summary in summaries.values())
    return {**first, "workers_by_round": present, "tokens_of_those_left": tokens}


if __name__ == "__main__":
    main()
