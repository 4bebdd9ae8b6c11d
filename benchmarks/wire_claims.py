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
from pathlib import Path
from typing import Any

from setting import write_runs
from thinwire.aggregate import MeanOverWorkers
from thinwire.train.config import TrainConfig, WarmupCosine
from thinwire.train.recipes import laptop
from thinwire.train.trainer import resume

SEEDS = (0, 1, 2)
STEPS, WARMUP_STEPS = 1600, 40


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
    losses = {name: [run["val_loss"] for run in same] for name, same in runs.items()}
    # Gradients of 16 bits are what data parallelism usually sends; ours sent fp32 and headers.
    reference_bytes = runs["ddp, AdamW"][0]["sent_bytes_per_worker"] / 2
    rows = {
        name: {
            "val_loss_mean": statistics.fmean(losses[name]),
            "val_loss_stderr": stderr(losses[name]),
            "minus_ddp_adamw_paired": paired(losses[name], losses["ddp, AdamW"]),
            "minus_diloco_paired": paired(losses[name], losses["diloco"]),
            "minus_muloco_paired": paired(losses[name], losses["muloco"]),
            "sent_bytes_per_worker": same[0]["sent_bytes_per_worker"],
            "fewer_bytes_than_16_bit_ddp": reference_bytes / same[0]["sent_bytes_per_worker"],
        }
        for name, same in runs.items()
    }
    write_runs(
        __file__,
        f"validation loss in nats per byte, laptop model, K=4, H=10 unless said, {STEPS} "
        f"steps, warm-up {WARMUP_STEPS}",
        runs,
        seeds=SEEDS,
        rows=rows,
    )


def stderr(losses: list[float]) -> float | None:
    return statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else None


def paired(losses: list[float], base: list[float]) -> list[float]:
    """Differences seed by seed; an arm may have fewer seeds than its base."""
    return [loss - b for loss, b in zip(losses, base, strict=False)]


if __name__ == "__main__":
    main()
