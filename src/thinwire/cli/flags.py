"""The flags of `thinwire train` and `thinwire compare`, and what they change in a recipe."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from thinwire.errors import ConfigurationError
from thinwire.method import Method
from thinwire.train import recipes
from thinwire.train.config import TrainConfig
from thinwire.train.launch import count_workers

__all__ = ["RunFlags", "apply_flags", "default_out", "without_rounds"]


@final
@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """What the command line can change in a recipe; without a flag the recipe's value stays."""

    recipe: str = "laptop"
    """laptop, paper, or FILE.py:FUNCTION of your own."""
    workers: int | None = None
    """K; under torchrun the number of ranks decides."""
    worker_size: int | None = None
    """Ranks of torchrun that share a worker, whose model is sharded over them by FSDP2."""
    steps: int | None = None
    """Inner steps of every worker."""
    corpus: str | None = None
    """python-stdlib, site-packages, a path (.txt, .jsonl, .parquet, .bin, folder) or a hub name."""
    tokenizer: str | None = None
    """bytes, bpe:SIZE (trained on the corpus and cached), or a hub name or folder."""
    model: str | None = None
    """A built-in size (250k to 15b), a config.json, or a hub name."""
    sequence_length: int | None = None
    """Tokens in a sequence."""
    global_batch: int | None = None
    """Sequences per step over all workers."""
    accumulate: int | None = None
    """Micro-batches per rank and step."""
    sync_every: int | None = None
    """H: inner steps between two exchanges."""
    inner_lr: float | None = None
    """Peak learning rate of the inner optimizer."""
    outer_lr: float | None = None
    """Learning rate of the outer optimizer."""
    outer_momentum: float | None = None
    """Momentum of the outer optimizer; 0 is plain SGD."""
    warmup_steps: int | None = None
    """Inner steps of warm-up."""
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
    """Seconds after which a silent worker is an error (torchrun)."""
    log_steps: int | None = None
    """Inner steps between two records."""
    evaluate_steps: int | None = None
    """Inner steps between two evaluations; 0: only at the end."""
    checkpoint_steps: int | None = None
    """Inner steps between two checkpoints; 0: none."""
    keep_checkpoints: int | None = None
    """How many checkpoints stay on disk."""


_GROUPS: dict[str, dict[str, str]] = {
    "": {f: f for f in ("workers", "steps", "global_batch", "accumulate", "clip_norm")},
    "data": {f: f for f in ("corpus", "tokenizer", "sequence_length")},
    "model": {"model": "size"},
    "schedule": {"warmup_steps": "warmup_steps"},
    "machine": {
        f: f
        for f in (
            "device",
            "outer_device",
            "precision",
            "compile",
            "threads",
            "timeout_s",
            "worker_size",
        )
    },
    "periods": {
        f: f for f in ("log_steps", "evaluate_steps", "checkpoint_steps", "keep_checkpoints")
    },
}


def apply_flags(flags: RunFlags, method: str, seed: int) -> TrainConfig:
    """The recipe's configuration for `method` with the flags that were given.

    Raises:
        ConfigurationError: an unknown recipe or method, or values that do not fit.
    """
    made: Any = recipes.find(flags.recipe)(method)
    if not isinstance(made, TrainConfig):
        raise ConfigurationError(
            f"use recipe {flags.recipe!r}",
            because=f"it returned {type(made).__name__} and not a TrainConfig",
            do="return one, for example dataclasses.replace(recipes.laptop(method), ...)",
        )
    config: TrainConfig = made
    changes: dict[str, Any] = {"seed": seed, "method": _method(flags, config.method)}
    for part, fields in _GROUPS.items():
        given = {to: v for f, to in fields.items() if (v := getattr(flags, f)) is not None}
        if part == "":
            changes |= given
        elif given:
            changes[part] = dataclasses.replace(getattr(config, part), **given)
    machine = changes.get("machine", config.machine)
    workers = changes.get("workers", config.workers)
    # Here already: the batch has to fit the workers there will be, not those of the recipe.
    changes["workers"] = count_workers(workers, machine.worker_size)
    return dataclasses.replace(config, **changes)


def without_rounds(flags: RunFlags) -> RunFlags:
    """`flags` without those that a method which averages at every step cannot have."""
    return dataclasses.replace(flags, sync_every=None, outer_lr=None, outer_momentum=None)


def _method(flags: RunFlags, method: Method) -> Method:
    changes: dict[str, Any] = {}
    if flags.sync_every is not None:
        changes["sync_every"] = flags.sync_every
    if flags.inner_lr is not None:
        changes["inner"] = _replace(method.inner, {"lr": flags.inner_lr}, "--inner-lr", method)
    outer: dict[str, Any] = {}
    if flags.outer_lr is not None:
        outer["lr"] = flags.outer_lr
    if flags.outer_momentum is not None:
        outer |= {"momentum": flags.outer_momentum, "nesterov": flags.outer_momentum > 0}
    if outer:
        changes["outer"] = _replace(method.outer, outer, "--outer-lr and --outer-momentum", method)
    return dataclasses.replace(method, **changes)


def _replace(slot: Any, fields: dict[str, Any], flag: str, method: Method) -> Any:
    known = {field.name for field in dataclasses.fields(slot)}
    if not fields.keys() <= known:
        raise ConfigurationError(
            f"use {flag} with method {method.name!r}",
            because=f"its {type(slot).__name__} has no {', '.join(sorted(fields.keys() - known))}",
            do="leave the flag out, or write a recipe that sets the method's slots",
        )
    return dataclasses.replace(slot, **fields)


def folder_name(method: str) -> str:
    """A method's text as a name that every file system takes.

    >>> folder_name("sparseloco:density=1/32")
    'sparseloco-density-1-32'
    """
    return re.sub(r"[^\w.]+", "-", method)


def default_out(name: str) -> Path:
    """The first folder `runs/NAME-N` that does not exist."""
    number = 1
    while (path := Path("runs") / f"{folder_name(name)}-{number}").exists():
        number += 1
    return path
