"""Tunes the laptop recipe: the same grid of inner rates for every method, one seed, then prints it.

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
    out = Path(sys.argv[1])
    rows: dict[str, float] = {}
    for name, method in candidates().items():
        config = dataclasses.replace(laptop(method.name), method=method)
        folder = out / name.replace(" ", "-").replace(",", "")
        rows[name] = resume(config, folder)["val_loss"]
        print(f"{rows[name]:.4f}  {name}", flush=True)
    result = {
        "what": "validation loss of the laptop recipe, K=4, H=10, 400 steps, seed 0",
        "command": "python benchmarks/tune_laptop.py OUT",
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "val_loss": rows,
    }
    path = Path(__file__).parent / "results" / "tune-laptop.json"
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
