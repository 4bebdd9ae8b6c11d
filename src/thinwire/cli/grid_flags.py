"""The flags of `thinwire compare` that take several values, and the experiment they describe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

from thinwire.cli.flags import RunFlags, changes_of
from thinwire.errors import ConfigurationError

if TYPE_CHECKING:
    from thinwire.experiments import Experiment, Rates, Tuning

T = TypeVar("T", int, float)


@dataclass(frozen=True, kw_only=True)
class GridFlags:
    """What is crossed with the methods that have it; one value sets it for all of them."""

    workers: str | None = None
    """How many; several, such as 1,4,8, keep the global batch."""
    sync_every: str | None = None
    """Inner steps between two exchanges; several with commas."""
    density: str | None = None
    """Share of the numbers that a sparse method sends; several with commas, such as 1/32,1/64."""
    bits: str | None = None
    """Of a number that muloco sends; several with commas."""
    inner_lr: str | None = None
    """Peak learning rate of the inner optimizer; several with commas."""
    outer_lr: str | None = None
    """Learning rate of the outer optimizer; several with commas."""
    outer_momentum: str | None = None
    """Momentum of the outer optimizer, 0 is plain SGD; several with commas."""
    tune: tuple[str, ...] = ()
    """Search for each method's rates, with as many runs for all: inner-lr=1e-3,2e-3 outer-lr=0.7,1
    for all methods, METHOD:inner-lr=4e-3,8e-3 for one. Needs several seeds."""
    baseline: str | None = None
    """The method, or a row, that differences are taken to; default diloco, or the first method."""
    experiment: str | None = None
    """FILE.py:FUNCTION that returns an Experiment; flags that are given replace its values."""


_KINDS: dict[str, Callable[[str], int | float]] = {
    "workers": int,
    "sync_every": int,
    "density": lambda text: float(Fraction(text)),
    "bits": int,
    "inner_lr": float,
    "outer_lr": float,
    "outer_momentum": float,
}


def experiment_of(
    grid: GridFlags, run: RunFlags, *, methods: str | None, seeds: str | None
) -> Experiment:
    """What the command line describes.

    Args:
        grid: values, several each.
        run: what all runs have.
        methods: with commas between them.
        seeds: with commas between them.

    Raises:
        ConfigurationError: a value cannot be read, or they do not fit.
    """
    given: dict[str, Any] = {
        name: _numbers(name, text, kind)
        for name, kind in _KINDS.items()
        if (text := getattr(grid, name)) is not None
    }
    if methods is not None:
        given["methods"] = tuple(dict.fromkeys(m.strip() for m in methods.split(",")))
    if seeds is not None:
        given["seeds"] = _numbers("seeds", seeds, int)
    if grid.baseline is not None:
        given["baseline"] = grid.baseline
    if grid.tune:
        given["tuning"] = _tuning(grid.tune)
    base = _base(grid, run)
    return dataclasses.replace(base, changes={**base.changes, **changes_of(run)}, **given)


def _base(grid: GridFlags, run: RunFlags) -> Experiment:
    from thinwire.experiments import Experiment, load_experiment
    from thinwire.train import recipes

    if grid.experiment is None:
        return Experiment(recipe=recipes.find(run.recipe))
    if run.recipe != RunFlags().recipe:
        raise ConfigurationError(
            f"use recipe {run.recipe!r} with --experiment",
            because="the experiment has its own",
            do="leave one of the two out",
        )
    return load_experiment(grid.experiment)


def _numbers(name: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    try:
        return tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigurationError(
            f"compare with --{name.replace('_', '-')} {text!r}",
            because=str(error),
            do="pass numbers with commas between them, such as "
            + {"seeds": "0,1,2", "density": "1/32,1/64"}.get(name, "1,2,4"),
        ) from error


def _tuning(texts: tuple[str, ...]) -> Tuning:
    """Candidates of each method: for all, with what one has of its own in place of it."""
    from thinwire.experiments import Rates, Tuning, product

    tuned = [field.name for field in dataclasses.fields(Rates)]
    grids: dict[str, dict[str, tuple[float, ...]]] = {"": {}}
    for text in texts:
        place, _, values = text.rpartition("=")
        method, _, field = place.rpartition(":")
        name = field.replace("-", "_")
        if name not in tuned:
            raise ConfigurationError(
                f"tune {text!r}",
                because=f"none of {', '.join(f.replace('_', '-') for f in tuned)} has that name",
                do="write it like inner-lr=1e-3,2e-3 or ddp:inner-lr=1e-3,2e-3",
            )
        grids.setdefault(method, {})[name] = _numbers("tune", values, float)
    candidates: dict[str, tuple[Rates, ...]] = {
        method: product(**{**grids[""], **own}) for method, own in grids.items() if own
    }
    return Tuning(candidates=candidates)
