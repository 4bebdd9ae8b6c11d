"""The rows of a comparison, and the configurations of their runs.

The rows are the grid of an experiment without its seeds, each row once.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.errors import ConfigurationError, ThinwireError, check
from thinwire.experiments.experiment import Experiment, Rates, number_text, product, unique
from thinwire.method import Method
from thinwire.outer import GradientAveraging
from thinwire.train.config import TrainConfig
from thinwire.train.recipes import Recipe
from thinwire.train.workers.ranks import count_workers


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantSpec:
    """A variant of a comparison, for every seed.

    Args:
        method: text of the method, as the recipe takes it.
        workers: K; None keeps the recipe's.
        sync_every: H; None keeps the recipe's.
        rates: rates of the optimizers.
        coordinates: values on the axes that apply to the variant and have several values.
        searched: rates of a search, which are also among `rates`, and in the names of folders.
    """

    method: str
    workers: int | None = None
    sync_every: int | None = None
    rates: Rates = field(default_factory=Rates)
    coordinates: tuple[tuple[str, str], ...] = ()
    searched: Rates = field(default_factory=Rates)

    @property
    def label(self) -> str:
        """The variant's name in tables.

        >>> VariantSpec(method="muloco:bits=2", coordinates=(("K", "8"),)).label
        'muloco:bits=2 K=8'
        """
        return " ".join([self.method, *(f"{axis}={value}" for axis, value in self.coordinates)])

    def searched_texts(self) -> list[tuple[str, str]]:
        """Names and values of the rates of a search."""
        return [(name, number_text(value)) for name, value in self.searched.given().items()]

    def folder(self, seed: int) -> str:
        """The name of a run's folder.

        >>> VariantSpec(method="muloco:bits=2", coordinates=(("K", "8"),)).folder(0)
        'muloco-bits-2-K-8-seed0'
        """
        places = (*self.coordinates, *self.searched_texts())
        name = "-".join([folder_name(self.method), *(f"{axis}-{value}" for axis, value in places)])
        return f"{name}-seed{seed}"


def folder_name(method: str) -> str:
    """A method's text as a name for every file system.

    >>> folder_name("sparseloco:density=1/32")
    'sparseloco-density-1-32'
    """
    return re.sub(r"[^\w.]+", "-", method)


def specs_of(experiment: Experiment) -> list[VariantSpec]:
    """The rows of `experiment`, each once.

    >>> [spec.label for spec in specs_of(Experiment(methods=("ddp", "diloco"), sync_every=(5, 15)))]
    ['ddp', 'diloco H=5', 'diloco H=15']
    """
    return list(unique(s for method in experiment.methods for s in _of_one(experiment, method)))


def _of_one(experiment: Experiment, method: str) -> Iterator[VariantSpec]:
    grid = {rate.name: getattr(experiment, rate.name) for rate in dataclasses.fields(Rates)}
    axes = {"K": experiment.workers, "H": experiment.sync_every} | grid
    swept = {name for name, values in axes.items() if len(unique(values)) > 1}
    has_h = has_rounds(ask(experiment.recipe, method)) and ":sync_every=" not in method
    for workers, sync_every, rates in itertools.product(
        unique(axes["K"]) or (None,),
        (has_h and unique(axes["H"])) or (None,),
        _rates(product(**grid), method, experiment.recipe),
    ):
        at = {"K": workers, "H": sync_every} | rates.given()
        place = {n: number_text(v) for n, v in at.items() if v is not None and n in swept}
        yield VariantSpec(
            method=method,
            workers=workers,
            sync_every=sync_every,
            rates=rates,
            coordinates=tuple(place.items()),
        )


def _rates(candidates: tuple[Rates, ...], method: str, recipe: Recipe) -> tuple[Rates, ...]:
    """`candidates`, each once, and without outer rates if the method has no outer optimizer."""
    if has_rounds(ask(recipe, method)):
        return unique(candidates)
    return unique(Rates(inner_lr=candidate.inner_lr) for candidate in candidates)


def with_candidates(
    spec: VariantSpec, candidates: tuple[Rates, ...], recipe: Recipe
) -> list[VariantSpec]:
    """`spec` with each of the candidates of a search."""
    return [
        dataclasses.replace(spec, rates=dataclasses.replace(spec.rates, **c.given()), searched=c)
        for c in _rates(candidates, spec.method, recipe)
    ]


def configure(experiment: Experiment, spec: VariantSpec, seed: int) -> TrainConfig:
    """The configuration of one run.

    Raises:
        ConfigurationError: values that do not fit each other.
    """
    config = ask(experiment.recipe, spec.method)
    method = with_rates(config.method, sync_every=spec.sync_every, rates=spec.rates)
    own: dict[str, Any] = {} if spec.workers is None else {"workers": spec.workers}
    return with_changes(config, {**experiment.changes, **own, "seed": seed, "method": method})


# -- one configuration -----------------------------------------------------------------------------


def ask(recipe: Recipe, text: str) -> TrainConfig:
    """The configuration that `recipe` returns for the method `text`.

    Raises:
        ConfigurationError: the recipe returns something else, or fails.
    """
    what = f"use recipe {getattr(recipe, '__name__', '?')!r}"
    try:
        made: Any = recipe(text)
    except ThinwireError:
        raise
    except Exception as error:  # it is the user's code, and may fail in any way
        because = f"it raised {type(error).__name__}: {error}"
        raise ConfigurationError(what, because=because, do="correct it") from error
    because = f"it returned {type(made).__name__} and not a TrainConfig"
    do = "return one, for example dataclasses.replace(recipes.laptop(method), ...)"
    check(isinstance(made, TrainConfig), what, because=because, do=do)
    return made


def has_rounds(config: TrainConfig) -> bool:
    """True if workers train apart between exchanges, false if they average every gradient."""
    return not isinstance(config.method.outer, GradientAveraging)


def with_changes(
    config: TrainConfig, changes: Mapping[str, Any], *, is_member: bool = False
) -> TrainConfig:
    """`config` with several fields changed at once.

    Args:
        config: configuration of a run.
        changes: values by field; a field of a part is written like `data.sequence_length`.
        is_member: the ranks of this torchrun are one of the workers, not all of them.

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
        # Counted now, because the batch has to fit these workers and not those of the recipe.
        workers = plain.pop("workers", config.workers)
        if not is_member:
            workers = count_workers(workers, machine.worker_size)
        return dataclasses.replace(config, **nested, **plain, workers=workers)
    except (TypeError, AttributeError) as error:
        what = f"change {', '.join(changes)} of a recipe"
        do = "name fields of TrainConfig, such as steps or data.sequence_length"
        raise ConfigurationError(what, because=str(error), do=do) from error


def with_rates(method: Method, *, sync_every: int | None, rates: Rates) -> Method:
    """`method` with the H and rates that are given.

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
        # Gossip has only heavy-ball momentum.
        nesterov = {"nesterov": momentum > 0} if hasattr(method.outer, "nesterov") else {}
        outer |= {"momentum": momentum, **nesterov}
    if outer:
        changes["outer"] = _replace(method.outer, outer, "--outer-lr and --outer-momentum", method)
    return dataclasses.replace(method, **changes)


def _replace(slot: Any, fields: dict[str, Any], flag: str, method: Method) -> Any:
    unknown = fields.keys() - {own.name for own in dataclasses.fields(slot)}
    because = f"its {type(slot).__name__} has no {', '.join(sorted(unknown))}"
    do = "leave the flag out, or write a recipe that sets the method's slots"
    check(not unknown, f"use {flag} with method {method.name!r}", because=because, do=do)
    return dataclasses.replace(slot, **fields)
