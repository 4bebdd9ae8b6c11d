"""The loss with each of Muon's iterations, by the number of matrix products.

    python benchmarks/newton_schulz.py OUT [--steps 400] [--seeds 0,1,2]    a minute a run

Every row is the laptop recipe's MuLoCo with four workers and another iteration in the inner Muon,
at the learning rates that were tuned for the first.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.optim.newton_schulz import PAPER_COEFFICIENTS, NewtonSchulz
from thinwire.train.config import Intervals, TrainConfig
from thinwire.train.recipes import laptop
from thinwire.train.trainer import resume

PRODUCTS = 3
ITERATIONS: Mapping[str, NewtonSchulz] = {
    "MuLoCo, 5": NewtonSchulz(),
    "Turbo-Muon, 4": NewtonSchulz.turbo(),
    "MuLoCo, last 4": NewtonSchulz(coefficients=PAPER_COEFFICIENTS[1:]),
}


def configuration(name: str, *, seed: int, steps: int) -> TrainConfig:
    """The configuration of one run."""
    config = laptop("muloco")
    muon: Any = config.method.inner
    inner = dataclasses.replace(muon, iteration=ITERATIONS[name])
    return dataclasses.replace(
        config,
        method=dataclasses.replace(config.method, inner=inner),
        machine=dataclasses.replace(config.machine, threads=1),
        periods=Intervals(),
        seed=seed,
        steps=steps,
        workers=4,
    )


def measure(out: Path, *, seeds: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """A row for each iteration; keeps runs that are already in `out`."""
    rows: list[dict[str, Any]] = []
    for name, iteration in ITERATIONS.items():
        folder = "".join(c if c.isalnum() else "-" for c in name)
        losses = [
            resume(configuration(name, seed=seed, steps=steps), out / f"{folder}-{seed}")[
                "val_loss"
            ]
            for seed in seeds
        ]
        rows.append(
            {
                "name": name,
                "products": PRODUCTS * len(iteration.coefficients),
                "val_loss": dict(zip(map(str, seeds), losses, strict=True)),
                "mean": statistics.mean(losses),
            }
        )
    return rows


def main(arguments: Sequence[str]) -> None:
    """Measure, and write OUT/newton-schulz.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", default="0,1,2")
    given = parser.parse_args(arguments)
    seeds = [int(seed) for seed in given.seeds.split(",")]
    found = {
        "command": f"python benchmarks/newton_schulz.py OUT --steps {given.steps}",
        "rows": measure(given.out, seeds=seeds, steps=given.steps),
        "machine": platform.machine(),
        "torch": importlib.metadata.version("torch"),
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "newton-schulz.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
