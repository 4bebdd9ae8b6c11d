"""Loss against bytes: what each way of sending less costs, over 1,600 steps and three seeds.

python benchmarks/wire_claims.py OUT       resumable; about two minutes a run on two cores

Model, data and batch are the laptop recipe's, K=4, with a warm-up of 40 steps. The uncompressed
methods were tuned at this length over two to four learning rates (docs/log.md); the compressed ones
inherit their settings, and SparseLoCo, which wants a higher rate, had three. Arms that decide
nothing have one seed. `wire_claims.py OUT ARM ARM` runs these alone and keeps the other rows.
"""

import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moved_bytes import megabytes, moved
from setting import write_runs
from thinwire.aggregate import MeanOverWorkers
from thinwire.plan.units import times_text
from thinwire.runs.statistics import Estimate, estimate, paired_difference
from thinwire.train.config import TrainConfig, WarmupCosine
from thinwire.train.recipes import laptop
from thinwire.train.trainer import resume

SEEDS = (0, 1, 2)
STEPS, WARMUP_STEPS = 1600, 40
BASELINES = ("ddp, AdamW", "ddp, Muon")


def arm(text: str, **inner: float) -> TrainConfig:
    """The laptop recipe's method, with other settings of its inner optimizer."""
    config = laptop(text)
    built = dataclasses.replace(config.method.inner, **inner)
    return dataclasses.replace(config, method=dataclasses.replace(config.method, inner=built))


def with_muon(config: TrainConfig) -> TrainConfig:
    muon = dataclasses.replace(laptop("muloco").method.inner, lr=1e-2)
    return dataclasses.replace(config, method=dataclasses.replace(config.method, inner=muon))


def arms() -> dict[str, tuple[TrainConfig, tuple[int, ...]]]:
    return {
        "ddp, AdamW": (arm("ddp"), SEEDS),
        "ddp, Muon": (with_muon(arm("ddp")), SEEDS),
        "diloco": (arm("diloco", lr=8e-3), SEEDS),
        "muloco": (arm("muloco"), SEEDS),
        "muloco, 2 bit": (arm("muloco:bits=2"), SEEDS),
        **{
            f"muloco, 1 bit, H={every}": (arm(f"muloco:bits=1:sync_every={every}"), SEEDS)
            for every in (20, 30, 64)
        },
        "streaming_diloco, E3M0": (arm("streaming_diloco:tau=2"), SEEDS),
        "streaming_muloco, E3M0": (arm("streaming_muloco:tau=2"), SEEDS),
        # The best of three rates for one, of two for the other.
        "sparse_muloco, k=128": (arm("sparse_muloco:density=1/32"), SEEDS),
        "sparseloco, k=128": (arm("sparseloco:density=1/32", lr=8e-3), SEEDS),
        **over_workers(),
    }


def over_workers() -> dict[str, tuple[TrainConfig, tuple[int, ...]]]:
    """The sparse arms as they were before the presets divided by senders, at their best rates."""
    rates = {"sparse_muloco": 5e-3, "sparseloco": 1.6e-2}
    kept = (("sparse_muloco", 128), ("sparseloco", 128), ("sparseloco", 64), ("sparseloco", 32))
    found: dict[str, tuple[TrainConfig, tuple[int, ...]]] = {}
    for name, k in kept:
        config = arm(f"{name}:density={k}/4096", lr=rates[name])
        method = dataclasses.replace(config.method, aggregate=MeanOverWorkers())
        seeds = SEEDS if k == 128 else SEEDS[:1]
        found[f"{name}, k={k}, over workers"] = (dataclasses.replace(config, method=method), seeds)
    return found


def main() -> None:
    out, chosen = Path(sys.argv[1]), sys.argv[2:]
    every = arms()
    unknown = set(chosen) - set(every)
    if unknown:
        sys.exit(f"cannot run {', '.join(sorted(unknown))}; arms are: {', '.join(every)}")
    runs = committed() if chosen else {}
    for name, (config, seeds) in every.items():
        if name in chosen or name not in runs:
            runs[name] = [one(out, name, config, seed) for seed in seeds]
        mean = statistics.fmean(run["val_loss"] for run in runs[name])
        print(f"{mean:.4f}  {name}, {len(runs[name])} seeds", flush=True)
    write({name: runs[name] for name in every})


def committed() -> dict[str, list[dict[str, Any]]]:
    file = Path(__file__).parent / "results" / "wire-claims.json"
    return json.loads(file.read_text())["runs"]


def one(out: Path, name: str, config: TrainConfig, seed: int) -> dict[str, Any]:
    config = dataclasses.replace(
        config,
        seed=seed,
        steps=STEPS,
        schedule=WarmupCosine(warmup_steps=WARMUP_STEPS),
        periods=dataclasses.replace(config.periods, evaluate_steps=400, checkpoint_steps=400),
    )
    return resume(config, out / f"{folder(name)}-seed{seed}")


def folder(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name)


def write(runs: dict[str, list[dict[str, Any]]]) -> None:
    what = "validation loss in nats per byte, laptop model, K=4, H=10 unless said, "
    what += f"{STEPS} steps, warm-up {WARMUP_STEPS}"
    write_runs(__file__, what, runs, seeds=SEEDS, rows=rows_of(runs))


def rows_of(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    losses = {n: dict(enumerate(run["val_loss"] for run in same)) for n, same in runs.items()}
    return {name: row(same[0], losses[name], losses) for name, same in runs.items()}


def row(run: dict[str, Any], own: dict[int, float], losses: dict[str, dict[int, float]]) -> Any:
    """What tables have of an arm: losses, beside both baselines, and bytes."""
    minus = {base: paired_difference(own, losses[base]) for base in BASELINES}
    size = {each: run[each] for each in ("workers", "parameters", "steps")}
    return {
        "val_loss": estimate(own).describe(),
        **{f"minus_{base}": by and by.describe() for base, by in minus.items()},
        **moved(run["sent_bytes_per_worker"], run["received_bytes_per_worker"], **size),
    }


def cells(name: str, row: Mapping[str, Any], *, baselines: bool) -> str:
    """A row of the README's table, or with the differences to both baselines.

    Data parallelism stands there with the all-reduce that others are compared with: ours sent fp32.
    """
    losses = [row["val_loss"], *(row[f"minus_{base}"] for base in BASELINES if baselines)]
    found = [Estimate(**loss).text("+.3f" if n else ".3f") for n, loss in enumerate(losses)]
    if name in BASELINES:
        return " | ".join([*found, *[megabytes(row["all_reduce_bytes_each_way"])] * 2, "1", "1"])
    found += [megabytes(row[f"{way}_bytes_per_worker"]) for way in ("sent", "received")]
    found += [times_text(row[f"times_fewer_{how}"]) for how in ("by_store", "point_to_point")]
    return " | ".join(found)


if __name__ == "__main__":
    main()
