"""Loss against bytes: the cost of each way of sending less, over 1,600 steps and three seeds.

python benchmarks/wire_claims.py OUT       resumable; about two minutes a run on two cores

Model, data and batch are the laptop recipe's, K=4, with a warm-up of 40 steps. Data parallelism,
DiLoCo and MuLoCo have a search of their inner rates at this length (claim_tuning.py), few rounds of
one bit one of all settings. Other codes have the recipe's settings; SparseLoCo, which needs a
higher rate, had three. Arms that decide nothing have one seed; AdamW, and the front that is to be
below it, have six. `wire_claims.py OUT ARM ARM` runs only these arms, keeps the rows of all others,
and keeps existing seeds if some are missing and the others had the same settings.

Arms of two workers run for 3,200 steps. Each had three inner rates or more, by one seed; outer
settings are the recipe's for as many rounds.
"""

import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import to_builtins

import thinwire as tw
from claim_list import fingerprint
from claim_tuning import WHOLE, Budget, search_all, with_settings
from moved_bytes import megabytes, moved
from setting import write_runs
from thinwire.aggregate import MeanOverWorkers
from thinwire.codecs import PerRole, Quantise
from thinwire.feedback import NoFeedback
from thinwire.plan.units import times_text
from thinwire.runs.folder import write_json
from thinwire.runs.statistics import Estimate, estimate, paired_difference
from thinwire.train.config import TrainConfig, WarmupCosine
from thinwire.train.recipes import laptop
from thinwire.train.trainer import resume

SEEDS, SIX_SEEDS = (0, 1, 2), (0, 1, 2, 3, 4, 5)
STEPS, WARMUP_STEPS = 1600, 40
BASELINES = ("ddp, AdamW", "ddp, Muon")
TWO = "two workers, "
"""How the names of arms with two workers begin, which have baselines of their own."""
FRONT = {
    "muloco, 1 bit, H=64, own settings": (64, 1),
    "muloco, 1 bit, H=128, own settings": (128, 1),
    "muloco, 1 bit, H=200, own settings": (200, 1),
    "muloco, 1 bit, head 2 bit, H=200, own settings": (200, 2),
}
"""Arms by H and the bits of the output head."""
TUNING = Path(__file__).parent / "results" / "wire-claims-tuning.json"


def arm(text: str, **inner: float) -> TrainConfig:
    """The laptop recipe's method, with other settings of its inner optimizer."""
    config = laptop(text)
    built = dataclasses.replace(config.method.inner, **inner)
    return dataclasses.replace(config, method=dataclasses.replace(config.method, inner=built))


def with_muon(config: TrainConfig, lr: float = 1e-2) -> TrainConfig:
    muon = dataclasses.replace(laptop("muloco").method.inner, lr=lr)
    return dataclasses.replace(config, method=dataclasses.replace(config.method, inner=muon))


def with_interval(config: TrainConfig, every: int) -> TrainConfig:
    """`config` with another H; everything else stays as it was tuned at a smaller one."""
    return dataclasses.replace(config, method=dataclasses.replace(config.method, sync_every=every))


def arms() -> dict[str, tuple[TrainConfig, tuple[int, ...]]]:
    return {
        "ddp, AdamW": (searched("ddp, AdamW"), SIX_SEEDS),
        **{name: (searched(name), SEEDS) for name in ("ddp, Muon", "diloco", "muloco")},
        "muloco, 2 bit": (arm("muloco:bits=2"), SEEDS),
        **{
            f"muloco, 1 bit, H={every}": (with_interval(arm("muloco:bits=1"), every), SEEDS)
            for every in (20, 30, 64)
        },
        "streaming_diloco, E3M0": (arm("streaming_diloco:tau=2"), SEEDS),
        "streaming_muloco, E3M0": (arm("streaming_muloco:tau=2"), SEEDS),
        # The best of three rates for one, of two for the other.
        "sparse_muloco, k=128": (arm("sparse_muloco:density=1/32"), SEEDS),
        "sparseloco, k=128": (arm("sparseloco:density=1/32", lr=8e-3), SEEDS),
        **over_workers(),
        **{
            name: (searched(name), SIX_SEEDS if FRONT[name][0] < 200 else SEEDS)
            for name in FRONT
            if name in chosen()
        },
        **{
            name: (searched(name), seeds)
            for name, (_, seeds) in two_workers().items()
            if name in chosen()
        },
    }


def starts() -> dict[str, TrainConfig]:
    """Arms with a search, where it begins; few rounds of one bit without feedback, and with longer
    outer steps."""
    found = {
        "ddp, AdamW": long(arm("ddp")),
        "ddp, Muon": long(with_muon(arm("ddp"))),
        "diloco": long(arm("diloco", lr=8e-3)),
        "muloco": long(arm("muloco")),
    }
    for name, (every, head) in FRONT.items():
        codec = Quantise(bits=1)
        codec = codec if head == 1 else PerRole(default=codec, head=Quantise(bits=head))
        config = laptop(f"muloco:bits=1:sync_every={every}")
        slots = {"codec": codec, "feedback": NoFeedback(), "outer": tw.outer.SGD(lr=1.25)}
        method = dataclasses.replace(config.method, name=name, **slots)
        begin = {"outer_momentum": 0.3, "feedback_decay": 0.0}
        found[name] = long(dataclasses.replace(config, method=with_settings(method, begin)))
    return found | {name: config for name, (config, _) in two_workers().items()}


def two_workers() -> dict[str, tuple[TrainConfig, tuple[int, ...]]]:
    few_rounds = dataclasses.replace(laptop("muloco:bits=1:sync_every=64").method, sync_every=200)
    found = {
        "ddp, AdamW": (arm("ddp", lr=2e-3), SIX_SEEDS),
        "ddp, Muon": (with_muon(arm("ddp"), lr=5e-3), SEEDS),
        "muloco, 1 bit, H=20": (laptop("muloco:bits=1:sync_every=20"), SEEDS),
        "muloco, 1 bit, H=200": (
            dataclasses.replace(laptop("muloco"), method=few_rounds),
            SIX_SEEDS,
        ),
    }
    return {
        TWO + name: (long(dataclasses.replace(config, workers=2, steps=2 * STEPS)), seeds)
        for name, (config, seeds) in found.items()
    }


def chosen() -> dict[str, Any]:
    """Results of the search so far, by arm."""
    return json.loads(TUNING.read_text())["rows"] if TUNING.is_file() else {}


def searched(name: str) -> TrainConfig:
    config, settings = starts()[name], chosen()[name]["chosen"] if name in chosen() else {}
    return dataclasses.replace(config, method=with_settings(config.method, settings))


def search_missing(out: Path, only: list[str]) -> None:
    missing = {
        name: config for name, config in starts().items() if name in only and name not in chosen()
    }
    for name, row in search_all(missing, out / "tuning", jobs=2, known={}, budget_of=budget_of):
        rows = chosen() | {name: row}
        what = f"as in claims-small-tuning.json, {STEPS} steps, and inner rates alone but for one "
        what += f"bit; two workers: {2 * STEPS} steps, inner rates alone, by one seed"
        rows = {arm: rows[arm] for arm in starts() if arm in rows}
        write_json(TUNING, {"what": what, "rows": rows})
        print(f"{name}: {row['chosen']}, {row['why']}", flush=True)


def budget_of(name: str) -> Budget:
    """What the search for an arm may spend; all settings only for few rounds of one bit."""
    seeds = Budget.seeds[:1] if name.startswith(TWO) else Budget.seeds
    return WHOLE if name in FRONT else Budget(seeds=seeds, names=("inner_lr",))


def over_workers() -> dict[str, tuple[TrainConfig, tuple[int, ...]]]:
    """The sparse arms as they were before presets divided by senders, at their best rates."""
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
    out, only = Path(sys.argv[1]), sys.argv[2:]
    search_missing(out, only)
    every = arms()
    unknown = set(only) - set(every)
    if unknown:
        sys.exit(f"cannot run {', '.join(sorted(unknown))}; arms are: {', '.join(every)}")
    runs = committed() if only else {}
    for name, (config, seeds) in every.items():
        if name in only or name not in runs:
            known = kept(runs.get(name, []), config, seeds)
            runs[name] = known + [one(out, name, config, seed) for seed in seeds[len(known) :]]
        mean = statistics.fmean(run["val_loss"] for run in runs[name])
        print(f"{mean:.4f}  {name}, {len(runs[name])} seeds", flush=True)
    write({name: runs[name] for name in every})


def kept(
    known: list[dict[str, Any]], config: TrainConfig, seeds: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Runs to add seeds to: none if all are there, or if one may have had other settings."""
    own = fingerprint(config.method)
    is_own = all(run.get("fingerprint") == own for run in known)
    return known if is_own and len(known) < len(seeds) else []


def committed() -> dict[str, list[dict[str, Any]]]:
    file = Path(__file__).parent / "results" / "wire-claims.json"
    return json.loads(file.read_text())["runs"]


def one(out: Path, name: str, config: TrainConfig, seed: int) -> dict[str, Any]:
    run = resume(dataclasses.replace(long(config), seed=seed), out / f"{folder(name)}-seed{seed}")
    return {**run, "fingerprint": fingerprint(config.method)}


def long(config: TrainConfig) -> TrainConfig:
    """`config` at this length, or at its own if that is longer."""
    return dataclasses.replace(
        config,
        steps=max(STEPS, config.steps),
        schedule=WarmupCosine(warmup_steps=WARMUP_STEPS),
        periods=dataclasses.replace(config.periods, evaluate_steps=400, checkpoint_steps=400),
    )


def folder(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name)


def write(runs: dict[str, list[dict[str, Any]]]) -> None:
    what = "validation loss in nats per byte, laptop model, K=4, H=10 unless said, "
    what += f"{STEPS} steps ({2 * STEPS} with two workers), warm-up {WARMUP_STEPS}"
    write_runs(__file__, what, runs, seeds=SEEDS, rows=rows_of(runs))


def rows_of(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    losses = {n: dict(enumerate(run["val_loss"] for run in same)) for n, same in runs.items()}
    return {name: row(name, same[0], losses) for name, same in runs.items()}


def row(name: str, run: dict[str, Any], losses: dict[str, dict[int, float]]) -> Any:
    """An arm's row in tables: losses, differences to both baselines, and bytes."""
    own, of = losses[name], TWO if name.startswith(TWO) else ""
    minus = {base: paired_difference(own, losses[of + base]) for base in BASELINES}
    size = {each: run[each] for each in ("workers", "parameters", "steps")}
    return {
        "val_loss": to_builtins(estimate(own)),
        **{f"minus_{base}": to_builtins(by) for base, by in minus.items()},
        **moved(run["sent_bytes_per_worker"], run["received_bytes_per_worker"], **size),
    }


def cells(name: str, row: Mapping[str, Any], *, baselines: bool) -> str:
    """A row of the README's table, or one with the differences to both baselines.

    Data parallelism is shown with the all-reduce that others are compared with; ours sent fp32.
    """
    losses = [row["val_loss"], *(row[f"minus_{base}"] for base in BASELINES if baselines)]
    found = [Estimate(**loss).text("+.3f" if n else ".3f") for n, loss in enumerate(losses)]
    if name.removeprefix(TWO) in BASELINES:
        return " | ".join([*found, *[megabytes(row["all_reduce_bytes_each_way"])] * 2, "1", "1"])
    found += [megabytes(row[f"{way}_bytes_per_worker"]) for way in ("sent", "received")]
    found += [times_text(row[f"times_fewer_{how}"]) for how in ("by_store", "point_to_point")]
    return " | ".join(found)


if __name__ == "__main__":
    main()
