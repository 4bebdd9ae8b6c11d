"""The two sizes at which claims are tested.

A setting holds what all runs share. A family is tuned as one, and lends its rates to all arms that
differ from it only in the subject of a claim (claim_tuning.py).
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from claim_corpora import sympy
from claim_tuning import WHOLE, Budget, Settings, with_settings
from thinwire.codecs import Identity
from thinwire.experiments import Rates
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
SEEDS, MORE_SEEDS = (0, 1, 2), (3, 4, 5)
"""Seeds of all arms, and further ones for arms where three leave much open."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A size, and the rates that were found for it.

    Args:
        name: small or medium.
        what: a line for tables.
        changes: values that all runs have, by field of a TrainConfig.
        workers: K of arms that are not about K.
        team_sizes: values of K for arms that are.
        sync_every: H of arms that are not about H.
        intervals: values of H for arms that are.
        few_rounds: H of an arm of one bit that sends 3,000 times fewer bytes; None for no such arm.
        pair_every: H of an arm of two workers and one bit; None for no such arm.
        jobs: runs at a time.
        step_s: seconds of an inner step, for planning wall-clock.
        links_bits_per_s: rates of the links to plan for.
        corpus: writes the corpus into a folder; None is the recipe's.
        budget: what the search for an arm's settings may spend.
        widened: families whose search is of all settings, whatever the budget names.
        only: arms to run, and to judge claims about; all by default.
        chosen: settings that a search chose for a family, or just for an arm of another K or H.
    """

    name: str
    what: str
    changes: Mapping[str, Any]
    workers: int
    team_sizes: tuple[int, ...]
    sync_every: int
    intervals: tuple[int, ...]
    few_rounds: int | None = None
    pair_every: int | None = None
    jobs: int
    step_s: float
    links_bits_per_s: Mapping[str, float]
    corpus: Callable[[Path], Path] | None = None
    budget: Budget = WHOLE
    widened: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    chosen: Mapping[str, Settings] = field(default_factory=dict)

    def budget_of(self, arm: str) -> Budget:
        """What the search for an arm may spend."""
        is_wide = arm in self.widened
        return dataclasses.replace(self.budget, names=()) if is_wide else self.budget

    def method(self, family: str) -> Method:
        """The recipe's method of a family, with this setting's H and rates."""
        method = _method(family)
        every = self.sync_every if method.sync_every > 1 else None
        method = with_rates(method, sync_every=every, rates=Rates())
        return with_settings(method, self.chosen.get(family, {}))

    def config(self, method: Method, workers: int | None = None) -> TrainConfig:
        """A run of `method`."""
        own = {"method": method, "workers": workers or self.workers}
        return with_changes(laptop("ddp"), {**self.changes, **own})


def _method(family: str) -> Method:
    """The laptop recipe's method of a family, or one that the recipe has no name for."""
    method = laptop(_TEXTS.get(family, family)).method
    if family == "ddp-muon":
        method = dataclasses.replace(method, inner=laptop("muloco").method.inner)
    if family == "noloco":
        # DiLoCo's codec, so that only the partners of an exchange differ.
        method = dataclasses.replace(method, codec=Identity())
    return dataclasses.replace(method, name=family)


_TEXTS = {
    "ddp-muon": "ddp",
    "sparseloco": "sparseloco:density=1/32",
    "sparse_muloco": "sparse_muloco:density=1/32",
    "streaming_diloco": "streaming_diloco:tau=2",
}


SMALL = Setting(
    name="small",
    what="0.25M parameters, bytes of Python's standard library, 480 steps of 16 x 128, K=4, H=10",
    changes={
        "steps": 480,
        "schedule.warmup_steps": 20,
        # One core on any machine: with more, sums have another order.
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
)

# Ten times the parameters and seven times the steps; the rest is the same: only size differs.
MEDIUM = Setting(
    name="medium",
    what="2.0M parameters, source of sympy 1.14.0, 3,200 steps of 16 x 128, K=4, H=10",
    changes={
        **SMALL.changes,
        "model.size": "2m",
        "data.tokenizer": "ids:256",
        "steps": 3200,
        "schedule.warmup_steps": 80,
        "periods.evaluate_steps": 400,
        # The most steps that a stopped command has to repeat.
        "periods.checkpoint_steps": 100,
    },
    workers=4,
    team_sizes=SMALL.team_sizes,
    sync_every=10,
    intervals=SMALL.intervals,
    few_rounds=267,
    pair_every=20,
    jobs=2,
    step_s=0.1,
    links_bits_per_s=SMALL.links_bits_per_s,
    corpus=sympy,
    # Outer settings come from the small size, and are tried for one family.
    budget=Budget(seeds=(10,), steps=800, names=("inner_lr",)),
    widened=("diloco",),
    only=(
        *FAMILIES,
        "muloco 2 bit",
        "muloco 1 bit",
        "muloco 1 bit, H=267",
        "muloco 1 bit K=2 H=20",
    ),
)
SETTINGS = {setting.name: setting for setting in (SMALL, MEDIUM)}


def tuning_file(setting: Setting) -> Path:
    """The committed file with the result of the search."""
    return Path(__file__).parent / "results" / f"claims-{setting.name}-tuning.json"


def searched(setting: Setting) -> dict[str, Any]:
    """Results of the searches so far, by arm."""
    file = tuning_file(setting)
    return json.loads(file.read_text())["rows"] if file.is_file() else {}


def tuned(setting: Setting) -> Setting:
    """`setting` with what searches chose for families, and for arms of another K or H.

    Arms that its own searches have not covered get what those of the small size chose.
    """
    rows = {arm: row for arm, row in searched(SMALL).items() if arm in (setting.only or (arm,))}
    rows |= searched(setting)
    return dataclasses.replace(setting, chosen={arm: row["chosen"] for arm, row in rows.items()})
