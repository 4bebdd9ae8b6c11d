"""Flags that several commands have, and what they change in a recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

import tyro

from thinwire.address import Address
from thinwire.errors import ConfigurationError, check
from thinwire.security.token import TOKEN_VARIABLE, Token, find_token

if TYPE_CHECKING:
    from thinwire.train.config import TrainConfig

T = TypeVar("T")

arg = partial(tyro.conf.arg, help_behavior_hint="")
"""What help shows of a flag, without a default."""
Flat: TypeAlias = Annotated[T, tyro.conf.arg(name="")]
"""A dataclass of flags whose names do not begin with that of its field."""
Switch: TypeAlias = Annotated[bool, tyro.conf.FlagCreatePairsOff, arg()]
"""A flag that stands alone."""
Option: TypeAlias = Annotated[T | None, arg()]
"""A flag that may be left out."""
Setting: TypeAlias = Annotated[T | None, arg(help_behavior_hint="(default: the recipe's)")]
"""A flag that replaces what the recipe says."""


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Settings of a recipe that flags can replace; without a flag the recipe's value stays."""

    recipe: str = "laptop"
    """laptop, paper, or FILE.py:FUNCTION of your own."""
    steps: Setting[int] = None
    """Inner steps of every worker."""
    corpus: Setting[str] = None
    """python-stdlib, site-packages, a hub name, a folder, or .txt, .jsonl, .parquet or .bin."""
    tokenizer: Setting[str] = None
    """bytes, bpe:SIZE (trained on the corpus), a hub name or a folder."""
    model: Setting[str] = None
    """A built-in size (250k to 15b), a config.json, or a hub name."""
    sequence_length: Setting[int] = None
    """Tokens in a sequence."""
    global_batch: Setting[int] = None
    """Sequences per step over all workers."""
    accumulate: Setting[int] = None
    """Micro-batches per rank and step."""
    warmup_steps: Setting[int] = None
    """Inner steps in which the learning rate rises."""
    clip_norm: Setting[float] = None
    """Largest gradient norm; 0 clips nothing."""
    device: Setting[str] = None
    """auto, cpu or cuda."""
    outer_device: Setting[Literal["cpu"]] = None
    """cpu keeps anchors, outer optimizer and feedback in the host's memory."""
    precision: Setting[Literal["fp32", "bf16"]] = None
    """bf16 is autocast; weights stay fp32."""
    compile: Setting[Literal["no", "yes"]] = None
    """torch.compile the model."""
    threads: Setting[int] = None
    """CPU threads per rank; 0 shares the cores evenly."""
    worker_size: Setting[int] = None
    """Ranks of torchrun that share a worker, sharded by FSDP2."""
    timeout_s: Setting[float] = None
    """Seconds after which a silent worker is an error, where their number is fixed."""
    log_steps: Setting[int] = None
    """Steps between two records."""
    evaluate_steps: Setting[int] = None
    """Steps between two evaluations; 0: only at the end."""
    checkpoint_steps: Setting[int] = None
    """Steps between two checkpoints; 0: none."""
    keep_checkpoints: Setting[int] = None
    """How many checkpoints stay on disk."""


@dataclass(frozen=True, kw_only=True)
class RateFlags:
    """The flags of which thinwire compare takes several values, and thinwire train one."""

    workers: Setting[int] = None
    """How many; under torchrun the number of ranks decides."""
    sync_every: Setting[int] = None
    """H: inner steps between two exchanges."""
    inner_lr: Setting[float] = None
    """Peak learning rate of the inner optimizer."""
    outer_lr: Setting[float] = None
    """Learning rate of the outer optimizer."""
    outer_momentum: Setting[float] = None
    """Momentum of the outer optimizer; 0 is plain SGD."""


_NONE = RateFlags()


@cache
def _paths() -> Mapping[str, str]:
    """Where in a configuration a flag's value goes."""
    from thinwire.train.config import Intervals, Runtime, WarmupCosine
    from thinwire.train.data import Data

    parts = {"data": Data, "schedule": WarmupCosine, "machine": Runtime, "periods": Intervals}
    # A flag has the name of the field that it sets; what is in no part is a field of TrainConfig.
    return {"model": "model.size"} | {
        field.name: f"{part}.{field.name}" for part, kind in parts.items() for field in fields(kind)
    }


def changes_of(flags: RunFlags) -> dict[str, Any]:
    """What `flags` change in a configuration: field to value, those of a part as `data.corpus`.

    >>> changes_of(RunFlags(steps=3, compile="yes"))
    {'steps': 3, 'machine.compile': True}
    """
    given = given_in(flags)
    del given["recipe"]
    if "compile" in given:
        given["compile"] = given["compile"] == "yes"
    return {_paths().get(name, name): value for name, value in given.items()}


def apply_flags(flags: RunFlags, method: str, seed: int, rates: RateFlags = _NONE) -> TrainConfig:
    """The recipe's configuration for `method` with the flags that were given.

    Raises:
        ConfigurationError: an unknown recipe or method, or values that do not fit.
    """
    from thinwire.experiments.experiment import Rates
    from thinwire.experiments.grid import ask, with_changes, with_rates
    from thinwire.train import recipes

    config = ask(recipes.find(flags.recipe), method)
    given = given_in(rates)
    changes = changes_of(flags) | {"seed": seed}
    if "workers" in given:
        changes["workers"] = given.pop("workers")
    sync_every = given.pop("sync_every", None)
    changes["method"] = with_rates(config.method, sync_every=sync_every, rates=Rates(**given))
    return with_changes(config, changes)


def given_in(flags: Any) -> dict[str, Any]:
    """The flags of a dataclass that were given: name to value.

    >>> given_in(RateFlags(workers=2))
    {'workers': 2}
    """
    return {f.name: v for f in fields(flags) if (v := getattr(flags, f.name)) is not None}


def default_out(name: str) -> Path:
    """The first folder `runs/NAME-N` that does not exist."""
    from thinwire.experiments.grid import folder_name

    number = 1
    while (path := Path("runs") / f"{folder_name(name)}-{number}").exists():
        number += 1
    return path


def flag(name: str) -> str:
    """A flag as it is written on the command line.

    >>> flag("step_time")
    '--step-time'
    """
    return "--" + name.replace("_", "-")


def read_flag(name: str, parse: Callable[[str], T], text: str) -> T:
    """`text`, parsed.

    Raises:
        ConfigurationError: it cannot be read, with the flag `name` in the message.
    """
    try:
        return parse(text)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"read {flag(name)} {text!r}", because=error.because, do=error.do
        ) from error


def read_address(text: str) -> Address:
    """The address of a run in an object store; a token in it is from now on that of the process.

    Raises:
        ConfigurationError: `text` cannot be read, is no address in a store, or has another token
            than THINWIRE_TOKEN.
    """
    address = Address.read(text)
    check(
        bool(address.run),
        f"find a run at {address}",
        because="no store is there, in which workers would leave anything",
        do="pass s3://BUCKET/RUN, hub://TOKEN@HOST:PORT/RUN or file:///FOLDER/RUN",
    )
    if address.secret:
        os.environ[TOKEN_VARIABLE] = address.secret
    return replace(address, secret="")


def optional_token(file: Path | None) -> Token | None:
    """The token of a run in a store; None where neither `file` nor THINWIRE_TOKEN has one."""
    return find_token(file) if file is not None or os.environ.get(TOKEN_VARIABLE) else None
