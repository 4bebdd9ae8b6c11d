"""The laptop recipe under four methods and three seeds: the table of the README.

python benchmarks/laptop_table.py OUT       resumable; about 40 s a run on two cores
"""

import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

from setting import write_runs
from thinwire.train.config import TrainConfig
from thinwire.train.recipes import laptop
from thinwire.train.trainer import resume

SEEDS = (0, 1, 2)


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
    write_runs(
        __file__,
        "validation loss in nats per byte, laptop recipe, K=4, H=10, 400 steps",
        runs,
        seeds=SEEDS,
        minus_diloco_paired={
            name: [run["val_loss"] - b for run, b in zip(same, base, strict=True)]
            for name, same in runs.items()
        },
    )


if __name__ == "__main__":
    main()
