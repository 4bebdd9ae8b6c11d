"""What one dishonest member of four costs, and what aggregates make of it.

python benchmarks/trust.py OUT            one core, 25 minutes; repeat it to go on
python benchmarks/trust.py OUT --steps 20 --cost-steps 20 --seeds 0       all code in two minutes

The laptop recipe's DiLoCo, cut short: K = 4, 12 rounds of 10 inner steps, three seeds. The last
worker trains like the others but sends something else. Its dishonesty is a part of the exchange
(`OneDishonest`), so that its contribution is encoded, sealed, checked and combined like any other.
Workers share one core. The cost of trimming among honest workers is also measured over all of the
recipe's steps; there the other rules change no bit.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import thinwire as tw
from setting import setting
from thinwire.aggregate import Aggregate
from thinwire.blocks import DenseVector
from thinwire.errors import NonFiniteError
from thinwire.exchange import ExchangeContext, ExchangeState, Gather
from thinwire.runs.folder import write_json
from thinwire.train.config import Runtime, TrainConfig
from thinwire.train.launch import assemble
from thinwire.train.recipes import laptop
from thinwire.train.workers.group import WorkerGroup

HERE = Path(__file__)
STEPS, COST_STEPS, SEEDS, EVALUATED = 120, 400, (0, 1, 2), 256

PROTECTIONS: Mapping[str, Aggregate] = {
    "none": tw.MeanOverWorkers(),
    "DropOutliers(limit=10)": tw.DropOutliers(),
    "ClipNorms(limit=2)": tw.ClipNorms(),
    "TrimmedMean(trim=1)": tw.TrimmedMean(),
}


@dataclass
class Seen:
    """What the dishonest member knows besides its own contribution in this round."""

    draws: torch.Generator
    before: Tensor | None = None
    of_another: Tensor | None = None


def noise(own: Tensor, seen: Seen) -> Tensor:
    drawn = torch.randn(len(own), generator=seen.draws)
    return drawn * (own.norm() / drawn.norm())


def stale(own: Tensor, seen: Seen) -> Tensor:
    sent, seen.before = own if seen.before is None else seen.before, own
    return sent


def copied(own: Tensor, seen: Seen) -> Tensor:
    return own if seen.of_another is None else seen.of_another


HONEST = "honest"
BEHAVIOURS: Mapping[str, Callable[[Tensor, Seen], Tensor]] = {
    HONEST: lambda own, _: own,
    "sends no numbers (NaN)": lambda own, _: torch.full_like(own, torch.nan),
    "noise of the same norm": noise,
    "sign flipped": lambda own, _: -own,
    "sign flipped, times 10": lambda own, _: -10 * own,
    "times 10": lambda own, _: 10 * own,
    "times 100": lambda own, _: 100 * own,
    "stale: its previous round's": stale,
    "copied: worker 0's": copied,
}


@dataclass(frozen=True, kw_only=True)
class OneDishonest(Gather):
    """A gather in which the last worker does not send what it has trained."""

    behaviour: str
    seen: Seen = field(compare=False, metadata={"describe": False})

    def bind(self, context: ExchangeContext) -> ExchangeState:
        if context.rank == context.workers - 1:
            behave = BEHAVIOURS[self.behaviour]
            # It would not refuse its own non-finite numbers.
            context = dataclasses.replace(context, refuses_own=False)
            return changed(Gather.bind(self, context), lambda own: behave(own, self.seen))
        state = Gather.bind(self, context)
        return changed(state, self._watched) if context.rank == 0 else state

    def _watched(self, own: Tensor) -> Tensor:
        self.seen.of_another = own.clone()
        return own


def changed(state: ExchangeState, change: Callable[[Tensor], Tensor]) -> ExchangeState:
    """`state`, whose worker sends `change` of its contribution."""
    encode = state.encode
    state.encode = lambda delta, tag: encode(DenseVector(change(delta.whole())), tag)
    return state


# -- one run ---------------------------------------------------------------------------------------


def config_of(behaviour: str, protection: str, *, seed: int, steps: int) -> TrainConfig:
    seen = Seen(draws=torch.Generator().manual_seed(1000 + seed))
    recipe = laptop("diloco")
    method = dataclasses.replace(
        recipe.method,
        aggregate=PROTECTIONS[protection],
        exchange=OneDishonest(behaviour=behaviour, seen=seen),
    )
    return dataclasses.replace(
        recipe,
        method=method,
        steps=steps,
        seed=seed,
        machine=Runtime(device="cpu", threads=1),
    )


def train(config: TrainConfig) -> dict[str, Any]:
    """The final validation loss, None if the run did not get there, and what aggregates did."""
    started_s, data = time.process_time(), config.data.load()
    group = assemble(config, data)
    loss: float | None = None
    try:
        for _ in range(config.steps):
            group.inner_step()
            group.outer_step()
        group.flush()
        loss = evaluated(group, data.validation[:EVALUATED])
    except NonFiniteError as error:
        print(error)
    stats = group.workers[0].outer.stats
    group.close()
    return {
        "val_loss": loss,
        "rounds": stats.rounds,
        "contributions": stats.contributions,
        "cpu_s": time.process_time() - started_s,
    }


def evaluated(group: WorkerGroup, windows: Tensor) -> float:
    sums = group.each(lambda worker: worker.validation_loss_sum(windows))
    return sum(sums) / windows[:, 1:].numel()


# -- all of them -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="What one dishonest member of four costs.")
    parser.add_argument("out", type=Path, help="folder of the runs' results")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--cost-steps", type=int, default=COST_STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    # On one core, workers of one thread encode in rank order, so that one can copy another.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[Any]]] = {}
    for seed, behaviour, protection in itertools.product(options.seeds, BEHAVIOURS, PROTECTIONS):
        cell = found.setdefault(behaviour, {}).setdefault(protection, [])
        cell.append(one(options.out, behaviour, protection, seed=seed, steps=options.steps))
    for seed, protection in itertools.product(options.seeds, ("none", "TrimmedMean(trim=1)")):
        cell = found.setdefault(f"{HONEST}, {options.cost_steps} steps", {})
        run = one(options.out, HONEST, protection, seed=seed, steps=options.cost_steps)
        cell.setdefault(protection, []).append(run)
    write(found, steps=options.steps, seeds=list(options.seeds))


def one(out: Path, behaviour: str, protection: str, *, seed: int, steps: int) -> dict[str, Any]:
    name = "".join(c if c.isalnum() else "-" for c in f"{behaviour} {protection}")
    file = out / f"{name}-{steps}-seed{seed}.json"
    if not file.exists():
        found = train(config_of(behaviour, protection, seed=seed, steps=steps))
        write_json(file, {"seed": seed, **found})
        print(f"seed {seed}  {behaviour}  {protection}: {found}", flush=True)
    return json.loads(file.read_text())


def write(found: Mapping[str, Mapping[str, list[Any]]], *, steps: int, seeds: list[int]) -> None:
    losses = {
        behaviour: {
            protection: loss_of([run["val_loss"] for run in runs])
            for protection, runs in cells.items()
        }
        for behaviour, cells in found.items()
    }
    for behaviour, cells in losses.items():
        print(behaviour, {protection: cell["mean"] for protection, cell in cells.items()})
    result = {
        "what": "validation loss (nats per token) of four workers of which the last is dishonest; "
        f"laptop recipe, diloco, {steps} steps in rounds of 10, by what it sends and how the "
        "others combine",
        "command": "python benchmarks/trust.py OUT",
        **setting(),
        "threads": 1,
        "steps": steps,
        "seeds": seeds,
        "evaluated_sequences": EVALUATED,
        "losses": losses,
        "runs": found,
    }
    (HERE.parent / "results" / "trust.json").write_text(json.dumps(result, indent=1) + "\n")


def loss_of(losses: Sequence[float | None]) -> dict[str, Any]:
    """Mean and standard error over the seeds; no mean if a run did not reach its end."""
    known = [loss for loss in losses if loss is not None]
    is_whole = len(known) == len(losses)
    spread = statistics.stdev(known) / len(known) ** 0.5 if is_whole and len(known) > 1 else None
    return {
        "mean": round(statistics.fmean(known), 4) if is_whole else None,
        "standard_error": None if spread is None else round(spread, 4),
        "by_seed": [None if loss is None else round(loss, 4) for loss in losses],
    }


if __name__ == "__main__":
    main()
