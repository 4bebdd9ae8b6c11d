"""The two sizes at which claims are tested, and the search for each method's rates at them.

A setting says what all runs share; a family is what is tuned together and lends its rates to all
arms that differ in nothing but what is claimed about.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.codecs import Identity
from thinwire.experiments import Experiment, Rates, Tuning, product
from thinwire.experiments.grid import with_changes, with_rates
from thinwire.method import Method
from thinwire.train.config import TrainConfig
from thinwire.train.recipes import laptop

FAMILIES = (
    "ddp",
    "ddp-muon",
    "diloco",
    "muloco",
    "sparseloco",
    "sparse_muloco",
    "streaming_diloco",
    "noloco",
    "demo",
)
SEEDS = (0, 1, 2)
TUNING_SEEDS = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A size, and what was found for it.

    Args:
        name: small or gpu.
        what: a line for tables.
        changes: what all runs have, by field of a TrainConfig.
        workers: K of what is not about K.
        team_sizes: K of what is.
        sync_every: H of what is not about H.
        intervals: H of what is.
        jobs: runs at a time.
        step_s: of an inner step, where wall-clock is planned.
        links_bits_per_s: over which it is planned.
        candidates: what the search tries for each family; four for each.
        rates: what it chose for a family, or for an arm alone.
    """

    name: str
    what: str
    changes: Mapping[str, Any]
    workers: int
    team_sizes: tuple[int, ...]
    sync_every: int
    intervals: tuple[int, ...]
    jobs: int
    step_s: float
    links_bits_per_s: Mapping[str, float]
    candidates: Mapping[str, tuple[Rates, ...]]
    rates: Mapping[str, Rates] = field(default_factory=dict)

    def method(self, family: str) -> Method:
        """The recipe's method of a family, with this setting's H and rates."""
        method = _method(family)
        every = self.sync_every if method.sync_every > 1 else None
        return with_rates(method, sync_every=every, rates=self.rates.get(family, Rates()))

    def config(self, method: Method, workers: int | None = None) -> TrainConfig:
        """A run of `method`."""
        own = {"method": method, "workers": workers or self.workers}
        return with_changes(laptop("ddp"), {**self.changes, **own})


def _method(family: str) -> Method:
    """As the laptop recipe has it, with what it does not name."""
    method = laptop(_TEXTS.get(family, family)).method
    if family == "ddp-muon":
        method = dataclasses.replace(method, inner=laptop("muloco").method.inner)
    if family == "noloco":
        # As DiLoCo's: what is compared is who exchanges with whom.
        method = dataclasses.replace(method, codec=Identity())
    return dataclasses.replace(method, name=family)


_TEXTS = {
    "ddp-muon": "ddp",
    "sparseloco": "sparseloco:density=1/32",
    "sparse_muloco": "sparse_muloco:density=1/32",
    "streaming_diloco": "streaming_diloco:tau=2",
}


def search(setting: Setting, families: tuple[str, ...] = FAMILIES) -> Experiment:
    """The search for the families' rates: equally many candidates, the best two with two seeds."""
    untuned = dataclasses.replace(setting, rates={})

    def recipe(family: str) -> TrainConfig:
        return untuned.config(untuned.method(family))

    return Experiment(
        recipe=recipe,
        methods=families,
        seeds=TUNING_SEEDS,
        tuning=Tuning(candidates={f: setting.candidates[f] for f in families}, repeated=2),
    )


def _rates(*lrs: float) -> tuple[Rates, ...]:
    return product(inner_lr=lrs)


def _with_outers(
    *lrs: float, outers: tuple[tuple[float, float], ...] = ((1.0, 0.0), (0.8, 0.6))
) -> tuple[Rates, ...]:
    """Each rate with plain averaging and with momentum."""
    return tuple(
        Rates(inner_lr=lr, outer_lr=outer_lr, outer_momentum=momentum)
        for lr in lrs
        for outer_lr, momentum in outers
    )


_SMALL_CANDIDATES = {
    "ddp": _rates(2e-3, 4e-3, 8e-3, 1.6e-2),
    "ddp-muon": _rates(2.5e-3, 5e-3, 1e-2, 2e-2),
    "diloco": _with_outers(4e-3, 8e-3),
    "muloco": _with_outers(5e-3, 1e-2),
    "sparseloco": _rates(2e-3, 4e-3, 8e-3, 1.6e-2),
    "sparse_muloco": _rates(1.25e-3, 2.5e-3, 5e-3, 1e-2),
    "streaming_diloco": _with_outers(4e-3, 8e-3),
    "noloco": _with_outers(4e-3, 8e-3, outers=((1.0, 0.0), (0.7, 0.5))),
    "demo": _rates(1e-3, 2e-3, 4e-3, 8e-3),
}
# More tokens a step and a wider model: lower rates for AdamW.
_GPU_CANDIDATES = {
    **_SMALL_CANDIDATES,
    "ddp": _rates(1e-3, 2e-3, 4e-3, 8e-3),
    "diloco": _with_outers(2e-3, 4e-3),
    "sparseloco": _rates(2e-3, 4e-3, 8e-3, 1.6e-2),
    "streaming_diloco": _with_outers(2e-3, 4e-3),
    "noloco": _with_outers(2e-3, 4e-3, outers=((1.0, 0.0), (0.7, 0.5))),
}

SMALL = Setting(
    name="small",
    what="0.25M parameters, bytes of Python's standard library, 480 steps of 16 x 128, K=4, H=10",
    changes={
        "steps": 480,
        "schedule.warmup_steps": 20,
        # A run has one core, on any machine: with more, sums have another order.
        "machine.threads": 1,
        "periods.log_steps": 10,
        "periods.evaluate_steps": 80,
        "periods.checkpoint_steps": 240,
        "periods.keep_checkpoints": 1,
    },
    workers=4,
    team_sizes=(1, 4, 8, 16),
    sync_every=10,
    intervals=(5, 10, 30),
    jobs=2,
    step_s=0.1,
    links_bits_per_s={"1 Mbit/s": 1e6, "10 Mbit/s": 1e7, "100 Mbit/s": 1e8},
    candidates=_SMALL_CANDIDATES,
)

# Differs in everything that needs a GPU; has not been run yet.
GPU = Setting(
    name="gpu",
    what="10M parameters, bytes of site-packages, 3,000 steps of 256 x 256, K=8, H=30",
    changes={
        "model.size": "10m",
        "data.corpus": "site-packages",
        "data.sequence_length": 256,
        "global_batch": 256,
        "steps": 3000,
        "schedule.warmup_steps": 100,
        "machine.device": "cuda",
        "machine.precision": "bf16",
        "periods.log_steps": 30,
        "periods.evaluate_steps": 300,
        # What a command that runs out of time has to do again.
        "periods.checkpoint_steps": 150,
        "periods.keep_checkpoints": 1,
    },
    workers=8,
    team_sizes=(1, 4, 8, 16),
    sync_every=30,
    intervals=(15, 30, 100),
    jobs=1,
    step_s=0.1,
    links_bits_per_s={"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10},
    candidates=_GPU_CANDIDATES,
)
SETTINGS = {setting.name: setting for setting in (SMALL, GPU)}


def tuning_file(setting: Setting) -> Path:
    """Where the search's result is committed."""
    return Path(__file__).parent / "results" / f"claims-{setting.name}-tuning.json"


def tuned(setting: Setting) -> Setting:
    """`setting` with the rates that searches chose for families, and for arms of another K or H."""
    rows = json.loads(tuning_file(setting).read_text())["rows"]
    rates = {arm: Rates(**row["chosen"]) for arm, row in rows.items()}
    return dataclasses.replace(setting, rates=rates)
