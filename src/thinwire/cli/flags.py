"""The flags of `thinwire train` and `thinwire compare`, and what they change in a recipe."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from thinwire.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Settings of a recipe that flags can replace; without a flag the recipe's value stays."""

    recipe: str = "laptop"
    """laptop, paper, or FILE.py:FUNCTION of your own."""
    worker_size: int | None = None
    """Ranks of torchrun that share a worker, sharded by FSDP2."""
    steps: int | None = None
    """Inner steps of every worker."""
    corpus: str | None = None
    """python-stdlib, site-packages, a hub name, or a folder, .txt, .jsonl, .parquet or .bin."""
    tokenizer: str | None = None
    """bytes, bpe:SIZE (trained on the corpus), a hub name or a folder."""
    model: str | None = None
    """A built-in size (250k to 15b), a config.json, or a hub name."""
    sequence_length: int | None = None
    """Tokens in a sequence."""
    global_batch: int | None = None
    """Sequences per step over all workers."""
    accumulate: int | None = None
    """Micro-batches per rank and step."""
    warmup_steps: int | None = None
    """Inner steps in which the learning rate rises."""
    clip_norm: float | None = None
    """Largest gradient norm; 0 clips nothing."""
    device: str | None = None
    """auto, cpu, cuda."""
    outer_device: Literal["cpu"] | None = None
    """cpu keeps anchors, outer optimizer and feedback in the host's memory."""
    precision: Literal["fp32", "bf16"] | None = None
    """bf16 is autocast; weights stay fp32."""
    compile: Literal["no", "yes"] | None = None
    """torch.compile the model."""
    threads: int | None = None
    """CPU threads per rank; 0 shares the cores evenly."""
    timeout_s: float | None = None
    """After which a silent worker is an error (torchrun)."""
    log_steps: int | None = None
    """Between two records."""
    evaluate_steps: int | None = None
    """Between two evaluations; 0: only at the end."""
    checkpoint_steps: int | None = None
    """Between two checkpoints; 0: none."""
    keep_checkpoints: int | None = None
    """How many checkpoints stay on disk."""


@dataclass(frozen=True, kw_only=True)
class RateFlags:
    """The flags of which thinwire compare takes several values, and thinwire train one."""

    workers: int | None = None
    """How many; under torchrun the number of ranks decides."""
    sync_every: int | None = None
    """Inner steps between two exchanges."""
    inner_lr: float | None = None
    """Peak learning rate of the inner optimizer."""
    outer_lr: float | None = None
    """Learning rate of the outer optimizer."""
    outer_momentum: float | None = None
    """Momentum of the outer optimizer; 0 is plain SGD."""


_NONE = RateFlags()


@cache
def _paths() -> Mapping[str, str]:
    """Where in a configuration a flag's value goes."""
    from thinwire.train.config import Machine, Periods, WarmupCosine
    from thinwire.train.data import Data

    parts = {"data": Data, "schedule": WarmupCosine, "machine": Machine, "periods": Periods}
    # A flag has the name of the field that it sets; what is in no part is a field of TrainConfig.
    return {"model": "model.size"} | {
        field.name: f"{part}.{field.name}" for part, kind in parts.items() for field in fields(kind)
    }


def changes_of(flags: RunFlags) -> dict[str, Any]:
    """What `flags` change in a configuration: field to value, those of a part as `data.corpus`.

    >>> changes_of(RunFlags(steps=3, compile="yes"))
    {'steps': 3, 'machine.compile': True}
    """
    given = {f.name: v for f in fields(flags) if (v := getattr(flags, f.name)) is not None}
    del given["recipe"]
    if "compile" in given:
        given["compile"] = given["compile"] == "yes"
    return {_paths().get(name, name): value for name, value in given.items()}


def typed_value(arguments: Sequence[str], name: str, default: str) -> str:
    """What was typed after `--name`, or the default.

    >>> typed_value(["--method", "muloco", "--help"], "method", "diloco")
    'muloco'
    """
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        flag, equals, value = argument.partition("=")
        if flag == f"--{name}" and (equals or not following.startswith("-")):
            return value if equals else following
    return default


def recipe_values(recipe: str, method: str) -> dict[str, str]:
    """What holds without a flag, by the flag's name: the values of a recipe.

    Args:
        recipe: its name.
        method: that it is asked for.

    Raises:
        ConfigurationError: an unknown recipe or method.

    >>> recipe_values("laptop", "muloco")["sync-every"]
    '10'
    """
    from thinwire.experiments.grid import ask
    from thinwire.train import recipes

    config = ask(recipes.find(recipe), method)
    names = [field.name for field in fields(RunFlags) if field.name != "recipe"]
    found = {name: operator.attrgetter(_paths().get(name, name))(config) for name in names}
    found |= {
        "workers": config.workers,
        "sync_every": config.method.sync_every,
        "inner_lr": getattr(config.method.inner, "lr", None),
        "outer_lr": getattr(config.method.outer, "lr", None),
        "outer_momentum": getattr(config.method.outer, "momentum", None),
    }
    return {name.replace("_", "-"): _text(value) for name, value in found.items()}


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def apply_flags(flags: RunFlags, method: str, seed: int, rates: RateFlags = _NONE) -> TrainConfig:
    """The recipe's configuration for `method` with the flags that were given.

    Raises:
        ConfigurationError: an unknown recipe or method, or values that do not fit.
    """
    from thinwire.experiments.experiment import Rates
    from thinwire.experiments.grid import ask, with_changes, with_rates
    from thinwire.train import recipes

    config = ask(recipes.find(flags.recipe), method)
    changes = changes_of(flags) | {"seed": seed}
    if rates.workers is not None:
        changes["workers"] = rates.workers
    optimizer_rates = Rates(
        inner_lr=rates.inner_lr, outer_lr=rates.outer_lr, outer_momentum=rates.outer_momentum
    )
    changes["method"] = with_rates(
        config.method, sync_every=rates.sync_every, rates=optimizer_rates
    )
    return with_changes(config, changes)


def default_out(name: str) -> Path:
    """The first folder `runs/NAME-N` that does not exist."""
    from thinwire.experiments.grid import folder_name

    number = 1
    while (path := Path("runs") / f"{folder_name(name)}-{number}").exists():
        number += 1
    return path
