"""From a recipe to the configuration of one run: what a command line or a grid changes in it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from thinwire.errors import ConfigurationError, ThinwireError
from thinwire.experiments.experiment import Rates
from thinwire.method import Method
from thinwire.outer import GradientAveraging
from thinwire.train.config import TrainConfig
from thinwire.train.recipes import Recipe
from thinwire.train.torchrun import count_workers


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
