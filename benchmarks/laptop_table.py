"""The laptop recipe under four methods and three seeds: the table of the README.

python benchmarks/laptop_table.py OUT       resumable; about 40 s a run on two cores
"""

import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from setting import setting

from thinwire.train.config import TrainConfig
from thinwire.train.recipes import laptop
from thinwire.train.trainer import resume

SEEDS = (0, 1, 2)
# Not needed to tell one run from another, and different at every repetition.
TIMES = ("wall_s", "tokens_per_s", "wait_s", "versions")


def arms() -> dict[str, TrainConfig]:
    ddp, diloco, muloco = (laptop(name) for name in ("ddp", "diloco", "muloco"))
    muon = dataclasses.replace(muloco.method.inner, lr=1e-2)
    return {
        "ddp, AdamW": ddp,
        "ddp, Muon": dataclasses.replace(ddp, method=dataclasses.replace(ddp.method, inner=muon)),
        "diloco": diloco,
        "muloco": muloco,
    }


def main() -> None:
    out = Path(sys.argv[1])
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, config in arms().items():
        runs[name] = [
            resume(
                dataclasses.replace(config, seed=seed), out / f"{name.replace(', ', '-')}-{seed}"
            )
            for seed in SEEDS
        ]
        losses = [run["val_loss"] for run in runs[name]]
        print(
            f"{statistics.fmean(losses):.4f} ± {statistics.stdev(losses):.4f}  {name}", flush=True
        )
    write(runs)


def write(runs: dict[str, list[dict[str, Any]]]) -> None:
    base = [run["val_loss"] for run in runs["diloco"]]
    result = {
        "what": "validation loss in nats per byte, laptop recipe, K=4, H=10, 400 steps",
        "command": "python benchmarks/laptop_table.py OUT",
        **setting(),
        "seeds": SEEDS,
        "minus_diloco_paired": {
            name: [run["val_loss"] - b for run, b in zip(same, base, strict=True)]
            for name, same in runs.items()
        },
        "runs": {
            name: [{k: v for k, v in run.items() if k not in TIMES} for run in same]
            for name, same in runs.items()
        },
    }
    path = Path(__file__).parent / "results" / "laptop-table.json"
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
