"""The commands that begin the runs of a report anew."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from thinwire.errors import ThinwireError
from thinwire.experiments.records import Finished
from thinwire.handshake import flatten_description
from thinwire.train import recipes

__all__ = ["command_of", "compare_command", "flags_of", "report_command"]

_RECIPES: Final = ("laptop", "paper")
_OF_ROUNDS: Final = ("sync-every", "outer-lr", "outer-momentum")
_FLAGS: Final[Mapping[str, str]] = {
    "workers": "workers",
    "steps": "steps",
    "global_batch": "global-batch",
    "accumulate": "accumulate",
    "clip_norm": "clip-norm",
    "seed": "seed",
    "data.corpus": "corpus",
    "data.tokenizer": "tokenizer",
    "data.sequence_length": "sequence-length",
    "model.size": "model",
    "schedule.warmup_steps": "warmup-steps",
    "method.sync_every": "sync-every",
    "method.inner.lr": "inner-lr",
    "method.outer.lr": "outer-lr",
    "method.outer.momentum": "outer-momentum",
    "machine.device": "device",
    "machine.outer_device": "outer-device",
    "machine.precision": "precision",
    "machine.compile": "compile",
    "machine.simulation": "simulation",
    "machine.threads": "threads",
    "machine.timeout_s": "timeout-s",
    "machine.worker_size": "worker-size",
    "periods.log_steps": "log-steps",
    "periods.evaluate_steps": "evaluate-steps",
    "periods.checkpoint_steps": "checkpoint-steps",
    "periods.keep_checkpoints": "keep-checkpoints",
    "periods.statistics_steps": "statistics-steps",
}


def flags_of(run: Finished) -> dict[str, str] | None:
    """The flags besides --method with which a built-in recipe is what `run` was.

    Args:
        run: whose.

    Returns:
        By name, without dashes; None if no built-in recipe and no flags make it.
    """
    found = (_flags(run, recipe) for recipe in _RECIPES)
    known = [flags for flags in found if flags is not None]
    return min(known, key=len) if known else None


def _flags(run: Finished, recipe: str) -> dict[str, str] | None:
    try:
        made = recipes.find(recipe)(run.method).describe()
    except ThinwireError:  # a method of one's own
        return None
    base = flatten_description(json.loads(json.dumps(made)))
    its = flatten_description(dict(run.config))
    flags = {} if recipe == _RECIPES[0] else {"recipe": recipe}
    # A field that it lacks came with a later version; of another kind of slot the kind is there.
    for field in sorted(its):
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


def command_of(run: Finished, out: str) -> str | None:
    """What begins `run` anew in the folder `out`; None if no flags do."""
    flags = None if run.is_elastic else flags_of(run)
    if flags is None:
        return None
    given = {"method": run.method, **flags, "out": out}
    return _command("train", given)


def compare_command(runs: Sequence[Finished]) -> str | None:
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
    methods = list(dict.fromkeys(run.method for run in runs))
    seeds = sorted({run.seed for run in runs})
    if len(runs) != len(methods) * len(seeds):
        return None
    given = {"methods": ",".join(methods), "seeds": ",".join(map(str, seeds)), **common}
    return _command("compare", given | {"out": "runs/compare"})


def _is_made_by(common: Mapping[str, str], run: Finished) -> bool:
    flags = flags_of(run)
    if flags is None:
        return False
    # `thinwire compare` keeps these from a method that averages at every step.
    direct = run.config["method"].get("outer", {}).get("kind") == "Direct"
    hidden = _OF_ROUNDS if direct else ()
    wanted = {flag: value for flag, value in common.items() if flag not in hidden}
    return wanted == {flag: value for flag, value in flags.items() if flag != "seed"}


def report_command(paths: Sequence[Path], out: Path) -> str:
    """What wrote the page."""
    return " ".join(["thinwire report", *(shlex.quote(str(p)) for p in paths), "--out", str(out)])


def _command(name: str, flags: Mapping[str, str]) -> str:
    given = (f"--{flag} {shlex.quote(value)}" for flag, value in flags.items())
    return " ".join([f"thinwire {name}", *given])
