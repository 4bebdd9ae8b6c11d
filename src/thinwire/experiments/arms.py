"""The rows of a comparison: an experiment's grid without the seeds, equal rows taken together."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from inspect import signature
from typing import Any, final

from thinwire import presets
from thinwire.errors import ConfigurationError
from thinwire.experiments.configuring import ask, has_rounds, with_changes, with_rates
from thinwire.experiments.description import Experiment, Settings, number_text, unique
from thinwire.train.config import TrainConfig
from thinwire.train.recipes import Recipe

__all__ = ["Arm", "arms_of", "configure", "folder_name", "tuned"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """What one row runs, for every seed.

    Args:
        method: as the experiment names it.
        text: what the recipe is asked for: `method` with its density and bits.
        workers: K; None is the recipe's.
        sync_every: H; None is the recipe's.
        settings: rates.
        coordinates: where it lies on the axes of several values that have a meaning for it.
        chosen: settings that a search tries; folders name them.
    """

    method: str
    text: str
    workers: int | None = None
    sync_every: int | None = None
    settings: Settings = dataclasses.field(default_factory=Settings)
    coordinates: tuple[tuple[str, str], ...] = ()
    chosen: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """As tables call it.

        >>> Arm(method="muloco", text="muloco:bits=2", coordinates=(("K", "8"),)).label
        'muloco:bits=2 K=8'
        """
        return " ".join([self.text, *(f"{axis}={value}" for axis, value in self._own())])

    def folder(self, seed: int) -> str:
        """The name of a run's folder.

        >>> Arm(method="muloco", text="muloco:bits=2", coordinates=(("K", "8"),)).folder(0)
        'muloco-bits-2-K-8-seed0'
        """
        places = (*self._own(), *self.chosen)
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


def arms_of(experiment: Experiment) -> list[Arm]:
    """The rows of `experiment`, each once.

    Raises:
        ConfigurationError: an axis has no meaning for any of the methods.

    >>> [arm.label for arm in arms_of(Experiment(methods=("ddp", "diloco"), sync_every=(5, 15)))]
    ['ddp', 'diloco H=5', 'diloco H=15']
    """
    found = {arm: None for method in experiment.methods for arm in _of_one(experiment, method)}
    for axis, values in (("density", experiment.density), ("bits", experiment.bits)):
        if values and not any(f":{axis}=" in arm.text for arm in found):
            raise ConfigurationError(
                f"compare over {axis}",
                because=f"none of {', '.join(experiment.methods)} has a {axis} to set",
                do=f"add a method that has, or leave {axis} out",
            )
    return list(found)


def _of_one(experiment: Experiment, method: str) -> Iterator[Arm]:
    for text, written in _texts(experiment, method):
        rounds = has_rounds(ask(experiment.recipe, text))
        for_h = experiment.sync_every if rounds else ()
        if len(for_h) > 1 and ":sync_every=" in method:
            for_h = ()
        for workers in unique(experiment.workers) or (None,):
            for sync_every in unique(for_h) or (None,):
                for settings in _settings(experiment.settings(), text, experiment.recipe):
                    arm = Arm(
                        method=method,
                        text=text,
                        workers=workers,
                        sync_every=sync_every,
                        settings=settings,
                    )
                    yield _placed(arm, experiment, written)


def _placed(arm: Arm, experiment: Experiment, written: Mapping[str, str]) -> Arm:
    """`arm` with its place on the axes of several values."""
    at = {"K": arm.workers, "H": arm.sync_every} | arm.settings.given()
    axes = {"K": experiment.workers, "H": experiment.sync_every} | {
        name: getattr(experiment, name) for name in at if name not in ("K", "H")
    }
    swept = {
        name: number_text(value)
        for name, value in at.items()
        if value is not None and len(unique(axes[name])) > 1
    }
    return dataclasses.replace(arm, coordinates=tuple({**written, **swept}.items()))


def _texts(experiment: Experiment, method: str) -> Iterator[tuple[str, dict[str, str]]]:
    """`method` with every density and bits it can have, and its place on those axes."""
    variants: list[tuple[str, dict[str, str]]] = [(method, {})]
    axes = {
        "density": [_fraction(value) for value in unique(experiment.density)],
        "bits": [str(value) for value in unique(experiment.bits)],
    }
    for axis, values in axes.items():
        # What a method's own text says is not changed.
        if values and _takes(method, axis) and f":{axis}=" not in method:
            several = len(values) > 1
            variants = [
                (f"{text}:{axis}={value}", {**at, axis: value} if several else at)
                for text, at in variants
                for value in values
            ]
    yield from variants


def _fraction(value: float) -> str:
    """As people write a density: 1/32."""
    close = Fraction(value).limit_denominator(4096)
    return str(close) if float(close) == value else number_text(value)


def _takes(method: str, field: str) -> bool:
    name = method.partition(":")[0]
    return name in presets.names() and field in signature(presets.by_name(name)).parameters


def _settings(candidates: tuple[Settings, ...], text: str, recipe: Recipe) -> tuple[Settings, ...]:
    """`candidates` without an outer optimizer where the method has none; each once."""
    if has_rounds(ask(recipe, text)):
        return unique(candidates)
    return unique(Settings(inner_lr=candidate.inner_lr) for candidate in candidates)


def tuned(arm: Arm, candidates: tuple[Settings, ...], recipe: Recipe) -> list[Arm]:
    """`arm` with each of the settings that a search tries for it."""
    return [
        dataclasses.replace(
            arm,
            settings=dataclasses.replace(arm.settings, **candidate.given()),
            chosen=tuple((name, number_text(v)) for name, v in candidate.given().items()),
        )
        for candidate in _settings(candidates, arm.text, recipe)
    ]


def configure(experiment: Experiment, arm: Arm, seed: int) -> TrainConfig:
    """The configuration of one run.

    Raises:
        ConfigurationError: values that do not fit each other.
    """
    config = ask(experiment.recipe, arm.text)
    method = with_rates(config.method, sync_every=arm.sync_every, settings=arm.settings)
    own: dict[str, Any] = {} if arm.workers is None else {"workers": arm.workers}
    return with_changes(config, {**experiment.changes, **own, "seed": seed, "method": method})
