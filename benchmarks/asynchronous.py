"""Asynchronous training against rounds, with workers of equal and of different speeds.

python benchmarks/asynchronous.py OUT           two cores, about an hour; repeat it to go on
python benchmarks/asynchronous.py OUT --steps 20 --seeds 0       a trial of all code in a minute

Uses the claims' small setting (claim_settings.py). Each arm has the same search: four candidates
with one seed, the best two with a second, with workers 1x to 2x apart in speed. Then all arms run
at all speeds with three seeds and equal tokens. A run in rounds computes the same at all speeds;
only its clock differs (`round_s`), so it runs once. "diloco, same time" takes as many steps as fit
into the virtual time in which asynchronous workers read all tokens, with a schedule of its own. The
fastest worker takes a step per virtual second; messages take no time.
"""

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins

from claim_settings import SEEDS, SMALL, tuned
from setting import setting as machine
from thinwire import outer
from thinwire.asynchronous import AsyncOptions
from thinwire.experiments import Rates
from thinwire.experiments.grid import with_changes, with_rates
from thinwire.method import Method
from thinwire.runs.folder import RunFolder, write_json
from thinwire.runs.statistics import estimate, paired_difference
from thinwire.train.asynchronous import train_here
from thinwire.train.config import TrainConfig
from thinwire.train.launch import resolve
from thinwire.train.trainer import resume

K = SMALL.workers
SPEEDS = {
    "equal": (1.0,) * K,
    "1x-2x": (1.0, 5 / 6, 4 / 6, 0.5),
    "1x-4x": (1.0, 0.75, 0.5, 0.25),
}
TUNED_AT = "1x-2x"
ROUNDS, SAME_TIME = "diloco", "diloco, same time"
ARMS = ("async", "async, all H", "async, Nesterov on arrival")
CANDIDATES = tuple(
    Rates(inner_lr=lr, outer_lr=outer_lr, outer_momentum=momentum)
    for lr in (4e-3, 8e-3)
    for outer_lr, momentum in ((1.0, 0.0), (0.8, 0.6))
)
EVALUATE_STEPS = 60
TUNING_SEEDS = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, whose result is in a file of its name."""

    arm: str
    speeds: str
    rates: Rates
    seed: int
    steps: int

    @property
    def name(self) -> str:
        rates = f"{self.rates.inner_lr}-{self.rates.outer_lr}-{self.rates.outer_momentum}"
        arm = "-".join(self.arm.replace(",", "").split())
        return f"{arm}-{self.speeds}-{rates}-{self.steps}-seed{self.seed}"

    def config(self) -> TrainConfig:
        method = with_rates(
            SMALL.method("diloco"),
            sync_every=SMALL.sync_every,
            rates=Rates(inner_lr=self.rates.inner_lr),
        )
        changes = {
            "seed": self.seed,
            "steps": self.steps,
            "periods.evaluate_steps": EVALUATE_STEPS,
            "periods.checkpoint_steps": 0,
        }
        return with_changes(SMALL.config(self._with_outer(method)), changes)

    def _with_outer(self, method: Method) -> Method:
        lr, momentum = self.rates.outer_lr or 0.0, self.rates.outer_momentum or 0.0
        nesterov = {"momentum": momentum, "nesterov": momentum > 0}
        step = {
            ROUNDS: outer.SGD(lr=lr, **nesterov),
            SAME_TIME: outer.SGD(lr=lr, **nesterov),
            "async, Nesterov on arrival": outer.SGD(lr=lr / K, **nesterov),
        }.get(self.arm, outer.DelayedNesterov(lr=lr, momentum=momentum, every=K))
        return dataclasses.replace(method, name=self.arm, outer=step)

    @property
    def options(self) -> AsyncOptions:
        return AsyncOptions(dynamic_steps=self.arm != "async, all H")


def run(job: Job, out: Path) -> None:
    torch.set_num_threads(1)
    started_s, config = time.perf_counter(), job.config()
    folder, found = out / job.name, dict[str, Any]()
    if job.arm in (ROUNDS, SAME_TIME):
        resume(config, folder)
    else:
        speeds, stop = SPEEDS[job.speeds], nullcontext(())
        stats = train_here(
            resolve(config), RunFolder(folder), None, stop, speeds=speeds, options=job.options
        )["asynchronous"]
        found = {
            "steps_of_workers": list(stats["steps_of"].values()),
            "staleness_counts": stats["staleness_counts"],
        }
    records = evaluations(folder)
    write_json(
        out / f"{job.name}.json",
        {
            "val_loss": records[-1]["val_loss"],
            "records": records,
            "run_s": time.perf_counter() - started_s,
            **found,
        },
    )


def evaluations(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kept = ("step", "tokens", "val_loss", "loss", "sent_bytes", "received_bytes")
    kept += ("virtual_s", "mean_staleness")
    return [{key: line[key] for key in kept if key in line} for line in lines if "val_loss" in line]


def results(jobs: Iterable[Job], out: Path, pool: Executor) -> dict[Job, dict[str, Any]]:
    """Results of `jobs`; runs those that are missing."""
    jobs = list(dict.fromkeys(jobs))
    missing = [job for job in jobs if not (out / f"{job.name}.json").is_file()]
    for job, done in [(job, pool.submit(run, job, out)) for job in missing]:
        done.result()
        print(job.name, flush=True)
    return {job: json.loads((out / f"{job.name}.json").read_text()) for job in jobs}


# -- the search ------------------------------------------------------------------------------------


def search(arm: str, steps: int, out: Path, pool: Executor) -> tuple[Rates, list[dict[str, Any]]]:
    """The claims' search: all candidates with the first seed, the best two with the second."""

    def losses(candidates: Iterable[Rates], seed: int) -> dict[Rates, float]:
        jobs = [Job(arm=arm, speeds=TUNED_AT, rates=r, seed=seed, steps=steps) for r in candidates]
        found = results(jobs, out, pool)
        return {job.rates: result["val_loss"] for job, result in found.items()}

    first = losses(CANDIDATES, TUNING_SEEDS[0])
    best = sorted(CANDIDATES, key=first.__getitem__)[:2]
    second = losses(best, TUNING_SEEDS[1])
    rows = [
        {**dataclasses.asdict(rates), "val_loss": [loss, *filter(None, [second.get(rates)])]}
        for rates, loss in first.items()
    ]
    return min(best, key=lambda rates: first[rates] + second[rates]), rows


# -- the table -------------------------------------------------------------------------------------


def round_s(speeds: tuple[float, ...]) -> float:
    """Virtual seconds of a round, in which all wait for the slowest worker."""
    return SMALL.sync_every / min(speeds)


def steps_in_the_same_time(speeds: tuple[float, ...], steps: int) -> int:
    """Whole rounds in the time in which all workers, never waiting, read the tokens of `steps`."""
    virtual_s = steps * K / sum(speeds)
    rounds = virtual_s / round_s(speeds)
    return max(1, int(rounds + 1e-9)) * SMALL.sync_every


def row(
    found: Mapping[int, dict[str, Any]], base: Mapping[int, float], speeds: tuple[float, ...]
) -> dict[str, Any]:
    losses = {seed: result["val_loss"] for seed, result in found.items()}
    difference = paired_difference(losses, base)
    curves = {seed: curve(result, speeds) for seed, result in found.items()}
    return {
        "val_loss_by_seed": losses,
        "val_loss": to_builtins(estimate(losses)),
        "minus_diloco": None if difference is None else difference.describe(),
        "virtual_s": statistics.mean(points[-1][1] for points in curves.values()),
        "virtual_s_to_diloco_loss": statistics.mean(times)
        # Per seed, to its own DiLoCo loss: seeds above a mean could never reach it.
        if all(times := [reached_s(points, base[seed]) for seed, points in curves.items()])
        else None,
        "curves_tokens_virtual_s_loss": curves,
        **{
            key: [result[key] for result in found.values()]
            for key in ("steps_of_workers", "staleness_counts")
            if key in next(iter(found.values()))
        },
        "mean_staleness": statistics.mean(
            result["records"][-1].get("mean_staleness", 0.0) for result in found.values()
        ),
    }


def curve(result: Mapping[str, Any], speeds: tuple[float, ...]) -> list[tuple[int, float, float]]:
    """Tokens, virtual seconds and loss at every evaluation."""
    return [
        (
            record["tokens"],
            record.get("virtual_s", record["step"] / SMALL.sync_every * round_s(speeds)),
            record["val_loss"],
        )
        for record in result["records"]
    ]


def reached_s(points: list[tuple[int, float, float]], target: float) -> float | None:
    """Virtual seconds at which the loss falls to `target`, interpolated between evaluations."""
    for (_, before_s, before), (_, after_s, after) in pairwise(points):
        if after <= target:
            share = (before - target) / (before - after) if before > after else 1.0
            return before_s + min(1.0, max(0.0, share)) * (after_s - before_s)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--steps", type=int, default=480, help="fewer only to try the script out")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, mp_context=context) as pool:
        result = measure(given, pool)
    committed = Path(__file__).parent / "results" / "asynchronous.json"
    write_json(committed if given.write else given.out / "asynchronous.json", result)
    show(result["rows"])


def measure(given: argparse.Namespace, pool: Executor) -> dict[str, Any]:
    chosen = {ROUNDS: Rates(**tuned(SMALL).chosen["diloco"])}
    searched: dict[str, Any] = {}
    for arm in given.arms:
        chosen[arm], searched[arm] = search(arm, given.steps, given.out, pool)

    def job(arm: str, speeds: str, seed: int, steps: int = given.steps) -> Job:
        rates = chosen[ROUNDS if arm == SAME_TIME else arm]
        return Job(arm=arm, speeds=speeds, rates=rates, seed=seed, steps=steps)

    wanted = {(ROUNDS, name): [job(ROUNDS, "any", s) for s in given.seeds] for name in SPEEDS}
    for name, speeds in SPEEDS.items():
        fewer = steps_in_the_same_time(speeds, given.steps)
        if fewer < given.steps:
            wanted[SAME_TIME, name] = [job(SAME_TIME, "any", s, fewer) for s in given.seeds]
        for arm in given.arms:
            wanted[arm, name] = [job(arm, name, seed) for seed in given.seeds]
    # Seed by seed, so that a whole table is there early.
    in_order = sorted((j for jobs in wanted.values() for j in jobs), key=lambda j: j.seed)
    found = results(in_order, given.out, pool)
    base = {j.seed: found[j]["val_loss"] for j in wanted[ROUNDS, "equal"]}
    rows = {
        f"{arm} | {name}": row({j.seed: found[j] for j in jobs}, base, SPEEDS[name])
        for (arm, name), jobs in wanted.items()
    }
    return {
        "what": f"asynchronous training against rounds: validation loss in nats per byte by tokens "
        f"and by virtual seconds, {SMALL.what}",
        "command": "python benchmarks/asynchronous.py OUT --write",
        **machine(),
        "speeds": {**SPEEDS},
        "rates": {arm: dataclasses.asdict(rates) for arm, rates in chosen.items()},
        "searched": searched,
        "rows": rows,
    }


def show(rows: Mapping[str, Mapping[str, Any]]) -> None:
    print(
        f"{'':38}{'loss':>8}{'- diloco':>10}{'virtual s':>11}{'to its loss':>13}{'staleness':>11}"
    )
    for name, each in rows.items():
        minus = each["minus_diloco"]
        mean = statistics.mean(each["val_loss_by_seed"].values())
        at_s = each["virtual_s_to_diloco_loss"]
        reached = "-" if at_s is None else f"{at_s:.0f}"
        print(
            f"{name:38}{mean:8.4f}{minus['mean'] if minus else 0.0:10.4f}{each['virtual_s']:11.0f}"
            f"{reached:>13}{each['mean_staleness']:11.2f}"
        )


if __name__ == "__main__":
    main()
