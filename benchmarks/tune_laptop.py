"""Tunes the laptop recipe: a grid with seed 0, then the best two of each method with seeds 1 and 2.

    python benchmarks/tune_laptop.py OUT        resumable; about 40 s a run on two cores

The outer optimizer is the trap with few rounds: DiLoCo and MuLoCo get three settings each. DDP has
none and gets Muon as a second inner optimizer instead, so that no method is given fewer choices.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

from thinwire import inner, outer
from thinwire.inner import InnerOptimizer
from thinwire.method import Method
from thinwire.outer import OuterOptimizer
from thinwire.train.recipes import laptop
from thinwire.train.trainer import resume

OUTERS: dict[str, OuterOptimizer] = {
    "lr 1, momentum 0": outer.SGD(lr=1.0),
    "lr 0.8, momentum 0.6": outer.SGD(lr=0.8, momentum=0.6, nesterov=True),
    "lr 0.7, momentum 0.9": outer.SGD(lr=0.7, momentum=0.9, nesterov=True),
}
ADAMW_LRS, MUON_LRS = (2e-3, 4e-3, 8e-3, 1.6e-2), (2.5e-3, 5e-3, 1e-2, 2e-2)


def adamw(lr: float) -> InnerOptimizer:
    return inner.AdamW(lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def muon(lr: float) -> InnerOptimizer:
    return dataclasses.replace(laptop("muloco").method.inner, lr=lr)


def candidates() -> dict[str, Method]:
    ddp, diloco, muloco = (laptop(name).method for name in ("ddp", "diloco", "muloco"))
    grid: dict[str, Method] = {}
    for lr in ADAMW_LRS:
        grid[f"ddp AdamW {lr}"] = dataclasses.replace(ddp, inner=adamw(lr))
        for name, rule in OUTERS.items():
            grid[f"diloco AdamW {lr}, {name}"] = dataclasses.replace(
                diloco, inner=adamw(lr), outer=rule
            )
    for lr in MUON_LRS:
        grid[f"ddp Muon {lr}"] = dataclasses.replace(ddp, inner=muon(lr))
        for name, rule in OUTERS.items():
            grid[f"muloco Muon {lr}, {name}"] = dataclasses.replace(
                muloco, inner=muon(lr), outer=rule
            )
    return grid


def main() -> None:
    out, grid = Path(sys.argv[1]), candidates()
    rows = {name: val_loss(out, name, method, 0) for name, method in grid.items()}
    finals = {
        name: [rows[name], *(val_loss(out, name, grid[name], seed) for seed in (1, 2))]
        for kind in ("ddp AdamW", "ddp Muon", "diloco", "muloco")
        for name in sorted((n for n in rows if n.startswith(kind)), key=rows.__getitem__)[:2]
    }
    write(rows, finals)


def val_loss(out: Path, name: str, method: Method, seed: int) -> float:
    config = dataclasses.replace(laptop(method.name), method=method, seed=seed)
    folder = out / f"{name.replace(' ', '-').replace(',', '')}-seed{seed}"
    loss = resume(config, folder)["val_loss"]
    print(f"{loss:.4f}  {name}, seed {seed}", flush=True)
    return loss


def write(rows: dict[str, float], finals: dict[str, list[float]]) -> None:
    result = {
        "what": "validation loss of the laptop recipe, K=4, H=10, 400 steps",
        "command": "python benchmarks/tune_laptop.py OUT",
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "seed_0": rows,
        "best_two_seeds_0_1_2": finals,
    }
    path = Path(__file__).parent / "results" / "tune-laptop.json"
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
