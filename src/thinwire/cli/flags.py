"""Flags that several commands have, and the file that can hold them."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, TypeVar

import tyro

from thinwire.address import Address
from thinwire.errors import ConfigurationError, check, unknown_name
from thinwire.files import replace_text
from thinwire.security.token import TOKEN_VARIABLE

if TYPE_CHECKING:
    from thinwire.train.config import TrainConfig

T = TypeVar("T")

RARE: Final = "rare"
"""Marks a flag that --help leaves out."""

arg = partial(tyro.conf.arg, help_behavior_hint="")
"""Help text of a flag, without a default."""
Switch: TypeAlias = Annotated[bool, tyro.conf.FlagCreatePairsOff, arg()]
"""A flag without a value."""
Option: TypeAlias = Annotated[T | None, arg()]
"""An optional flag."""
Rare: TypeAlias = Annotated[T | None, arg(), RARE]
"""An optional flag that --help leaves out."""
At: TypeAlias = Annotated[str | None, tyro.conf.Positional, arg(metavar="[ADDRESS]")]
"""The address of a run; default THINWIRE_AT."""


def reads(parse: Callable[[str], Any], metavar: str) -> Any:
    """A flag whose text `parse` reads.

    Args:
        parse: raises `ConfigurationError`, which tyro shows with the name of the flag.
        metavar: the value, as help shows it.
    """
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda texts: parse(texts[0]),
        is_instance=lambda _: True,
        str_from_instance=lambda value: [str(value)],
    )


@dataclass(frozen=True, kw_only=True)
class StoreFlags:
    """The address of a run, and its token."""

    at: At = None
    """s3://BUCKET/RUN, hub://TOKEN@HOST:PORT/RUN, ...; default THINWIRE_AT."""
    token_file: Option[Path] = None
    """File with the run's token, which seals messages; default THINWIRE_TOKEN."""


# What a repetition of a run chooses anew.
_OF_ONE_RUN: Final = ("at", "config", "out", "resume", "identity", "token_file")


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Settings of a recipe that flags can replace; without a flag the recipe's value stays.

    Rare ones have the names of fields of `TrainConfig` and its parts. tyro takes comments for help.
    """

    out: Option[Path] = None
    """Folder of the run; default runs/METHOD-N."""
    config: Option[Path] = None
    """TOML file of flags, such as run.toml in the folder of a run."""
    recipe: Option[str] = None
    """All defaults: laptop (itself the default), paper, or FILE.py:FUNCTION."""
    steps: Option[int] = None
    """Inner steps of every worker."""
    model: Option[str] = None
    """A built-in size (250k to 15b), a config.json, or a hub name."""
    corpus: Option[str] = None
    """python-stdlib, site-packages, a path, or a hub name."""
    tokenizer: Option[str] = None
    """bytes, bpe:SIZE (trained on the corpus), a hub name or a folder."""
    sequence_length: Option[int] = None
    """Tokens in a sequence."""
    global_batch: Option[int] = None
    """Sequences per step over all workers."""
    device: Option[str] = None
    """auto, cpu or cuda."""
    precision: Option[Literal["fp32", "bf16"]] = None
    """bf16 is autocast; weights stay fp32."""
    accumulate: Rare[int] = None
    warmup_steps: Rare[int] = None
    clip_norm: Rare[float] = None
    outer_device: Rare[Literal["cpu"]] = None
    compile: Rare[Literal["no", "yes"]] = None
    threads: Rare[int] = None
    worker_size: Rare[int] = None
    timeout_s: Rare[float] = None
    log_steps: Rare[int] = None
    evaluate_steps: Rare[int] = None
    checkpoint_steps: Rare[int] = None
    keep_checkpoints: Rare[int] = None


@dataclass(frozen=True, kw_only=True)
class MethodFlags:
    """A method, its rates, and who trains with it."""

    method: str = "diloco"
    """async_diloco, ddp, decoupled_momentum, demo, diloco, muloco, noloco,
    sparse_muloco, sparseloco, streaming_diloco or streaming_muloco;
    muloco:bits=2 sets its bits."""
    workers: Option[int] = None
    """K, the number of workers; under torchrun that of its ranks."""
    sync_every: Option[int] = None
    """H: inner steps between two exchanges."""
    inner_lr: Option[float] = None
    """Peak learning rate of the inner optimizer; Muon's is that of matrices."""
    outer_lr: Option[float] = None
    """Learning rate of the outer optimizer."""
    outer_momentum: Option[float] = None
    """Momentum of the outer optimizer; 0 is plain SGD."""
    seed: Option[int] = None
    """Of weights, dropout and data order (a hub corpus keeps its own)."""


@dataclass(frozen=True, kw_only=True)
class TrainFlags(RunFlags, MethodFlags):
    """Everything that decides what a run computes."""

    def train_config(self, *, is_member: bool = False) -> TrainConfig:
        """The recipe's configuration with the flags that were given.

        Args:
            is_member: the ranks of this torchrun are one of several workers.

        Raises:
            ConfigurationError: an unknown recipe or method, or values that do not fit.
        """
        from thinwire.experiments.experiment import Rates
        from thinwire.experiments.grid import ask, with_changes, with_rates
        from thinwire.train import recipes

        check(
            self.sync_every is None or ":sync_every=" not in self.method,
            f"use --sync-every {self.sync_every} with method {self.method!r}",
            because="it has an H of its own",
            do="leave one of them out",
        )
        config = ask(recipes.find(self.recipe or "laptop"), self.method)
        check(
            self.clip_norm is None or getattr(config.method.outer, "clip_norm", None) is None,
            f"use --clip-norm with method {self.method!r}",
            because="each worker clips its own gradient, and the mean's length changes nothing",
            do="leave it out, or set GradientAveraging(clip_norm=...) in a recipe",
        )
        rates = Rates(
            inner_lr=self.inner_lr, outer_lr=self.outer_lr, outer_momentum=self.outer_momentum
        )
        changes = changes_of(self) | {
            "method": with_rates(config.method, sync_every=self.sync_every, rates=rates),
        }
        own = {"workers": self.workers, "seed": self.seed}
        changes |= {name: value for name, value in own.items() if value is not None}
        return with_changes(config, changes, is_member=is_member)

    def arrivals_config(self) -> TrainConfig:
        """`train_config` with a method for workers that do not wait for each other."""
        from thinwire.train import asynchronous, launch

        config = launch.resolve(self.train_config())
        return replace(config, method=asynchronous.without_rounds(config.method, config.workers))

    def settings(self, config: TrainConfig) -> dict[str, Any]:
        """All settings of the run `config`, by the names of their flags."""
        settings = {name: attrgetter(path)(config) for name, path in _paths().items()}
        settings["compile"] = "yes" if config.machine.compile else "no"
        # Not this host's "cuda:1". Threads stay, because they decide the order of sums.
        settings["device"] = self.device
        found = given_in(self) | settings | {"workers": config.workers}
        return {field.name: found.get(field.name) for field in fields(self)}


@cache
def _paths() -> Mapping[str, str]:
    """Fields of a configuration, by the names of the flags that set them."""
    from thinwire.train.config import Intervals, Runtime, WarmupCosine
    from thinwire.train.data import Data

    parts = {"data": Data, "schedule": WarmupCosine, "machine": Runtime, "periods": Intervals}
    # A flag has the name of its field, which is in one of the parts or else in TrainConfig itself.
    paths = {"model": "model.size"} | {
        field.name: f"{part}.{field.name}" for part, kind in parts.items() for field in fields(kind)
    }
    names = [field.name for field in fields(RunFlags)]
    return {n: paths.get(n, n) for n in names if n not in ("out", "config", "recipe")}


def changes_of(flags: RunFlags) -> dict[str, Any]:
    """What `flags` change in a configuration: values by field; parts as in `data.corpus`.

    >>> changes_of(RunFlags(steps=3, compile="yes"))
    {'steps': 3, 'machine.compile': True}
    """
    given = {p: v for n, p in _paths().items() if (v := getattr(flags, n)) is not None}
    if flags.compile:
        given["machine.compile"] = flags.compile == "yes"
    return given


def given_in(flags: Any) -> dict[str, Any]:
    """The flags of a dataclass that differ from its defaults: values by name.

    >>> given_in(RunFlags(steps=2))
    {'steps': 2}
    """
    return {f.name: v for f in fields(flags) if (v := getattr(flags, f.name)) != f.default}


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write run.toml, with which --config repeats the run, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "run.toml", to_toml(settings))


def to_toml(settings: Mapping[str, Any]) -> str:
    """A file for --config, without settings of one run alone, such as its folder.

    >>> to_toml({"method": "ddp", "steps": 3, "out": Path("runs/a"), "device": None})
    'method = "ddp"\\nsteps = 3\\n'
    """
    # TOML and JSON write text, numbers and lists of them alike.
    return "".join(
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
        for name, value in settings.items()
        if value is not None and name not in _OF_ONE_RUN
    )


def from_toml(file: Path, kind: Any) -> Iterator[str]:
    """The settings of a file as command-line arguments.

    Args:
        file: TOML, with the flags of the command as keys.
        kind: dataclass of the command.

    Raises:
        ConfigurationError: the file cannot be read, or has a key that is not a flag.
    """
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"read {file}", because=str(error), do="pass a TOML file, such as run.toml of a run"
        ) from error
    defaults = {f.name: f.default for f in fields(kind) if f.name not in ("at", "config")}
    for key, value in settings.items():
        name = key.replace("-", "_")
        if name not in defaults:
            raise unknown_name(
                f"use {key!r} in {file}",
                name,
                defaults,
                because="its keys are flags of the command, and this is not one",
                do="see the run.toml of any run, which has all of them",
            )
        check(
            value != "",
            f"use {key!r} in {file}",
            because="an empty text names nothing",
            do="write a value, or leave it out",
        )
        if name == "tune" and isinstance(value, list):  # each value is a word of its own
            yield from (flag(name), *map(str, value))
        elif isinstance(value, list):
            yield f"{flag(name)}={','.join(map(str, value))}"
        elif isinstance(defaults[name], bool) and isinstance(value, bool):
            if value:
                yield flag(name)
        else:
            yield f"{flag(name)}={value}"


def default_out(name: str, *, resume: bool = False) -> Path:
    """The first folder `runs/NAME-N` that does not exist; to resume, the last that does."""
    from thinwire.experiments.grid import folder_name

    number = 1
    while (path := Path("runs") / f"{folder_name(name)}-{number}").exists():
        number += 1
    return path.with_name(f"{folder_name(name)}-{max(1, number - 1)}") if resume else path


def flag(name: str) -> str:
    """A flag as written on the command line.

    >>> flag("step_time")
    '--step-time'
    """
    return "--" + name.replace("_", "-")


def read_address(text: str | None) -> Address:
    """The address of a run in an object store; its token becomes that of the process.

    Raises:
        ConfigurationError: `text` cannot be read, is not an address in a store, or has a token that
            differs from THINWIRE_TOKEN.
    """
    address = Address.read(text)
    check(
        bool(address.run),
        f"use {address} here",
        because="tcp:// has no store: its workers send only to each other",
        do="pass s3://BUCKET/RUN, hub://TOKEN@HOST:PORT/RUN, file:///FOLDER/RUN, or the like",
    )
    if address.secret:
        os.environ[TOKEN_VARIABLE] = address.secret
    return replace(address, secret="")
