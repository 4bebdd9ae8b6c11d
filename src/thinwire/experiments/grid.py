"""From a recipe to configurations: the rows of a comparison, and what a command line changes.

The rows are an experiment's grid without the seeds, equal rows taken together.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from inspect import signature
from typing import Any

from thinwire import presets
from thinwire.errors import ConfigurationError, ThinwireError
from thinwire.experiments.experiment import Experiment, Rates, number_text, unique
from thinwire.method import Method
from thinwire.outer import GradientAveraging
from thinwire.train.config import TrainConfig
from thinwire.train.recipes import Recipe
from thinwire.train.workers.ranks import count_workers


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantSpec:
    """What a variant of a comparison trains, for every seed.

    Args:
        method: as the experiment names it.
        text: what the recipe is asked for: `method` with its density and bits.
        workers: K; None is the recipe's.
        sync_every: H; None is the recipe's.
        rates: of the optimizers.
        coordinates: its values on those axes of the grid that have several and a meaning for it.
        searched: rates that a search tries, with their values; part of the name of a folder.
    """

    method: str
    text: str
    workers: int | None = None
    sync_every: int | None = None
    rates: Rates = dataclasses.field(default_factory=Rates)
    coordinates: tuple[tuple[str, str], ...] = ()
    searched: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The variant's name in tables.

        >>> VariantSpec(method="muloco", text="muloco:bits=2", coordinates=(("K", "8"),)).label
        'muloco:bits=2 K=8'
        """
        return " ".join([self.text, *(f"{axis}={value}" for axis, value in self._own())])

    def folder(self, seed: int) -> str:
        """The name of a run's folder.

        >>> VariantSpec(method="muloco", text="muloco:bits=2", coordinates=(("K", "8"),)).folder(0)
        'muloco-bits-2-K-8-seed0'
        """
        places = (*self._own(), *self.searched)
        name = "-".join([folder_name(self.text), *(f"{axis}-{value}" for axis, value in places)])
        return f"{name}-seed{seed}"

    def _own(self) -> list[tuple[str, str]]:
        return [place for place in self.coordinates if place[0] not in _IN_TEXT]


_IN_TEXT = ("density", "bits")


def folder_name(method: str) -> str:
    """A method's text as a name that every file system takes.

    >>> folder_name("sparseloco:density=1/32")
    'sparseloco-density-1-32'
    """
    return re.sub(r"[^\w.]+", "-", method)


def specs_of(experiment: Experiment) -> list[VariantSpec]:
    """The rows of `experiment`, each once.

    Raises:
        ConfigurationError: an axis has no meaning for any of the methods.

    >>> [spec.label for spec in specs_of(Experiment(methods=("ddp", "diloco"), sync_every=(5, 15)))]
    ['ddp', 'diloco H=5', 'diloco H=15']
    """
    found = {spec: None for method in experiment.methods for spec in _of_one(experiment, method)}
    for axis, values in (("density", experiment.density), ("bits", experiment.bits)):
        if values and not any(f":{axis}=" in spec.text for spec in found):
            raise ConfigurationError(
                f"compare over {axis}",
                because=f"none of {', '.join(experiment.methods)} has a {axis} to set",
                do=f"add a method that has, or leave {axis} out",
            )
    return list(found)


def _of_one(experiment: Experiment, method: str) -> Iterator[VariantSpec]:
    axes = {"K": experiment.workers, "H": experiment.sync_every} | {
        name: getattr(experiment, name) for name in ("inner_lr", "outer_lr", "outer_momentum")
    }
    swept = {name for name, values in axes.items() if len(unique(values)) > 1}
    for text, written in _texts(experiment, method):
        # An H in the method's own text stays as it is on an axis of several.
        keeps_h = "H" in swept and ":sync_every=" in method
        has_h = has_rounds(ask(experiment.recipe, text)) and not keeps_h
        for workers, sync_every, rates in itertools.product(
            unique(axes["K"]) or (None,),
            (has_h and unique(axes["H"])) or (None,),
            _rates(experiment.rates(), text, experiment.recipe),
        ):
            at = {"K": workers, "H": sync_every} | rates.given()
            place = {n: number_text(v) for n, v in at.items() if v is not None and n in swept}
            yield VariantSpec(
                method=method,
                text=text,
                workers=workers,
                sync_every=sync_every,
                rates=rates,
                coordinates=tuple((written | place).items()),
            )


def _texts(experiment: Experiment, method: str) -> list[tuple[str, dict[str, str]]]:
    """`method` with every density and bits it can have, and its place on those axes."""
    name = method.partition(":")[0]
    settable = signature(presets.by_name(name)).parameters if name in presets.names() else ()
    variants: list[tuple[str, dict[str, str]]] = [(method, {})]
    for axis, values in (
        ("density", [_fraction(value) for value in unique(experiment.density)]),
        ("bits", [str(value) for value in unique(experiment.bits)]),
    ):
        # What a method's own text says is not changed.
        if values and axis in settable and f":{axis}=" not in method:
            variants = [
                (f"{text}:{axis}={value}", at | ({axis: value} if len(values) > 1 else {}))
                for text, at in variants
                for value in values
            ]
    return variants


def _fraction(value: float) -> str:
    """A density as it is usually written: 1/32."""
    close = Fraction(value).limit_denominator(4096)
    return str(close) if float(close) == value else number_text(value)


def _rates(candidates: tuple[Rates, ...], text: str, recipe: Recipe) -> tuple[Rates, ...]:
    """`candidates` without an outer optimizer where the method has none; each once."""
    if has_rounds(ask(recipe, text)):
        return unique(candidates)
    return unique(Rates(inner_lr=candidate.inner_lr) for candidate in candidates)


def with_candidates(
    spec: VariantSpec, candidates: tuple[Rates, ...], recipe: Recipe
) -> list[VariantSpec]:
    """`spec` with each of the rates that a search tries for it."""
    return [
        dataclasses.replace(
            spec,
            rates=dataclasses.replace(spec.rates, **candidate.given()),
            searched=tuple((name, number_text(v)) for name, v in candidate.given().items()),
        )
        for candidate in _rates(candidates, spec.text, recipe)
    ]


def configure(experiment: Experiment, spec: VariantSpec, seed: int) -> TrainConfig:
    """The configuration of one run.

    Raises:
        ConfigurationError: values that do not fit each other.
    """
    config = ask(experiment.recipe, spec.text)
    method = with_rates(config.method, sync_every=spec.sync_every, rates=spec.rates)
    own: dict[str, Any] = {} if spec.workers is None else {"workers": spec.workers}
    return with_changes(config, {**experiment.changes, **own, "seed": seed, "method": method})


# -- one configuration -----------------------------------------------------------------------------


def ask(recipe: Recipe, text: str) -> TrainConfig:
    """The configuration that `recipe` returns for the method `text`.

    Raises:
        ConfigurationError: it returns something else, or fails.
    """
    try:
        made: Any = recipe(text)
    except ThinwireError:
        raise
    except Exception as error:  # it is the user's code, and may fail in any way
        raise ConfigurationError(
            f"use recipe {getattr(recipe, '__name__', '?')!r}",
            because=f"it raised {type(error).__name__}: {error}",
            do="correct it",
        ) from error
    if not isinstance(made, TrainConfig):
        raise ConfigurationError(
            f"use recipe {getattr(recipe, '__name__', '?')!r}",
            because=f"it returned {type(made).__name__} and not a TrainConfig",
            do="return one, for example dataclasses.replace(recipes.laptop(method), ...)",
        )
    return made


def has_rounds(config: TrainConfig) -> bool:
    """Whether workers train apart between exchanges, instead of averaging every gradient."""
    return not isinstance(config.method.outer, GradientAveraging)


def with_changes(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """`config` with several fields changed at once.

    Args:
        config: of a run.
        changes: fields, those of a part as `data.sequence_length`.

    Raises:
        ConfigurationError: there is no such field, or the values do not fit each other.

    >>> from thinwire.train import recipes
    >>> with_changes(recipes.laptop("ddp"), {"steps": 3, "data.sequence_length": 8}).steps
    3
    """
    parts: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        part, _, name = path.rpartition(".")
        parts.setdefault(part, {})[name] = value
    plain = parts.pop("", {})
    try:
        nested = {
            part: dataclasses.replace(getattr(config, part), **given)
            for part, given in parts.items()
        }
        machine = nested.get("machine", config.machine)
        # Here already: the batch has to fit the workers there will be, not those of the recipe.
        workers = count_workers(plain.pop("workers", config.workers), machine.worker_size)
        return dataclasses.replace(config, **nested, **plain, workers=workers)
    except (TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"change {', '.join(changes)} of a recipe",
            because=str(error),
            do="name fields of TrainConfig, such as steps or data.sequence_length",
        ) from error


def with_rates(method: Method, *, sync_every: int | None, rates: Rates) -> Method:
    """`method` with another H and other rates, where they are given.

    Raises:
        ConfigurationError: one of its slots has no such field.
    """
    changes: dict[str, Any] = {}
    if sync_every is not None:
        changes["sync_every"] = sync_every
    if rates.inner_lr is not None:
        changes["inner"] = _replace(method.inner, {"lr": rates.inner_lr}, "--inner-lr", method)
    momentum = rates.outer_momentum
    outer: dict[str, Any] = {} if rates.outer_lr is None else {"lr": rates.outer_lr}
    if momentum is not None:
        # Gossip has heavy-ball momentum and no other kind.
        nesterov = {"nesterov": momentum > 0} if hasattr(method.outer, "nesterov") else {}
        outer |= {"momentum": momentum, **nesterov}
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
