"""The commands that train the runs of a report again."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

from thinwire.errors import ThinwireError
from thinwire.handshake import flatten_description
from thinwire.outer import GradientAveraging
from thinwire.runs.schema import MODEL_CONFIGURATION, FinishedRun
from thinwire.train import recipes
from thinwire.train.config import Machine, Periods, TrainConfig, WarmupCosine
from thinwire.train.data import Data

_RECIPES: Final = ("laptop", "paper")
_OF_ROUNDS: Final = ("sync-every", "outer-lr", "outer-momentum")
_PARTS: Final[Mapping[str, type]] = {
    "": TrainConfig,
    "data.": Data,
    "schedule.": WarmupCosine,
    "machine.": Machine,
    "periods.": Periods,
}
_WITHOUT_FLAG: Final = ("validation_sequences", "final_fraction")
# A flag has the name of the field that it sets, unless it sets one inside of a slot.
_FLAGS: Final[Mapping[str, str]] = {
    "model.size": "model",
    "method.sync_every": "sync-every",
    "method.inner.lr": "inner-lr",
    "method.outer.lr": "outer-lr",
    "method.outer.momentum": "outer-momentum",
} | {
    f"{part}{field.name}": field.name.replace("_", "-")
    for part, kind in _PARTS.items()
    for field in fields(kind)
    if field.name not in _WITHOUT_FLAG
}


def flags_of(run: FinishedRun) -> dict[str, str] | None:
    """The flags besides --method with which a built-in recipe trains what `run` trained.

    Args:
        run: whose.

    Returns:
        By name, without dashes; None if no built-in recipe and no flags make it.
    """
    found = (_flags(run, recipe) for recipe in _RECIPES)
    known = [flags for flags in found if flags is not None]
    return min(known, key=len) if known else None


def _flags(run: FinishedRun, recipe: str) -> dict[str, str] | None:
    try:
        made = recipes.find(recipe)(run.config.method).describe()
    except ThinwireError:  # a method of one's own
        return None
    base = flatten_description(made)
    its = flatten_description(run.config.described)
    flags = {} if recipe == _RECIPES[0] else {"recipe": recipe}
    # A field that it lacks came with a later version; of another kind of slot the kind is there.
    for field in sorted(its):
        if field.startswith(MODEL_CONFIGURATION):  # the flag of the file's name brings it
            continue
        if base.get(field) == its[field] or _follows(field, base, its):
            continue
        if field not in _FLAGS or its[field] == "None":
            return None
        flags[_FLAGS[field]] = its[field]
    return flags


def _follows(field: str, base: Mapping[str, str], its: Mapping[str, str]) -> bool:
    """Whether a flag of another field sets this one too."""
    momentum = "method.outer.momentum"
    if field != "method.outer.nesterov" or base.get(momentum) == its.get(momentum):
        return False
    return its[field] == str(float(its[momentum]) > 0)


def command_of(run: FinishedRun, out: str) -> str | None:
    """The command that trains `run` again in the folder `out`; None if no flags do."""
    flags = None if run.summary.is_elastic else flags_of(run)
    if flags is None:
        return None
    given = {"method": run.config.method, **flags, "out": out}
    return _command("train", given)


def compare_command(runs: Sequence[FinishedRun]) -> str | None:
    """One command for all of `runs`, if they are one comparison; else None.

    Args:
        runs: all.
    """
    common: dict[str, str] = {}
    for run in runs:
        common |= flags_of(run) or {}
    common.pop("seed", None)
    if not all(_is_made_by(common, run) for run in runs):
        return None
    methods = list(dict.fromkeys(run.config.method for run in runs))
    seeds = sorted({run.seed for run in runs})
    if len(runs) != len(methods) * len(seeds):
        return None
    given = {"methods": ",".join(methods), "seeds": ",".join(map(str, seeds)), **common}
    return _command("compare", given | {"out": "runs/compare"})


def _is_made_by(common: Mapping[str, str], run: FinishedRun) -> bool:
    flags = flags_of(run)
    if flags is None:
        return False
    # `thinwire compare` keeps these from a method that averages at every step.
    direct = (
        run.config.described["method"].get("outer", {}).get("kind") == GradientAveraging.__name__
    )
    hidden = _OF_ROUNDS if direct else ()
    wanted = {flag: value for flag, value in common.items() if flag not in hidden}
    return wanted == {flag: value for flag, value in flags.items() if flag != "seed"}


def report_command(paths: Sequence[Path], out: Path) -> str:
    """The command that wrote the page."""
    return " ".join(["thinwire report", *(shlex.quote(str(p)) for p in paths), "--out", str(out)])


def _command(name: str, flags: Mapping[str, str]) -> str:
    given = (f"--{flag} {shlex.quote(value)}" for flag, value in flags.items())
    return " ".join([f"thinwire {name}", *given])
