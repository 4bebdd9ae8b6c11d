"""Description of an experiment: the compared methods, and the search for their rates."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from thinwire.errors import ConfigurationError, check
from thinwire.train import recipes
from thinwire.train.recipes import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of a method; None keeps the recipe's value.

    Args:
        inner_lr: peak learning rate of the inner optimizer.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: Nesterov momentum of the outer optimizer; 0 is plain SGD.
    """

    inner_lr: float | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None

    def given(self) -> dict[str, float]:
        """The rates that are not None, by name."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}


def product(
    *,
    inner_lr: Sequence[float] = (),
    outer_lr: Sequence[float] = (),
    outer_momentum: Sequence[float] = (),
) -> tuple[Rates, ...]:
    """All combinations; an empty sequence keeps the recipe's value.

    >>> [rates.given() for rates in product(inner_lr=(0.1, 0.2), outer_lr=(1.0,))]
    [{'inner_lr': 0.1, 'outer_lr': 1.0}, {'inner_lr': 0.2, 'outer_lr': 1.0}]
    """
    axes = (inner_lr or (None,), outer_lr or (None,), outer_momentum or (None,))
    return tuple(
        Rates(inner_lr=i, outer_lr=o, outer_momentum=m) for i, o, m in itertools.product(*axes)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """A search for each method's rates: all candidates with the first seed, the best with all.

    A method that averages at every step has no outer optimizer; candidates that differ only in it
    count as one.

    Args:
        candidates: maps a method, as in `Experiment.methods`, to its rates; "" is for all others.
            Every method must have the same number.
        repeated: number of candidates to repeat with the other seeds before choosing one, because
            a single seed picks a rate at the edge of stability.

    Raises:
        ConfigurationError: there are no candidates, or none to repeat.
    """

    candidates: Mapping[str, tuple[Rates, ...]]
    repeated: int = 2

    def __post_init__(self) -> None:
        because = f"there are no candidates, or {self.repeated} of them would be repeated"
        do = "give every method at least one candidate, and pass repeated >= 1"
        is_some = bool(self.candidates) and all(self.candidates.values())
        check(is_some and self.repeated >= 1, "tune", because=because, do=do)

    def of(self, method: str) -> tuple[Rates, ...]:
        """The candidates for `method`.

        Raises:
            ConfigurationError: `method` has no candidates.
        """
        found = self.candidates.get(method, self.candidates.get(""))
        if found is None:
            because = f"there are candidates for {', '.join(self.candidates)} only"
            do = "add some for it, or for all methods"
            raise ConfigurationError(f"tune {method!r}", because=because, do=do)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """A grid of runs over the same model, data and tokens.

    Every method is combined with every axis that applies to it: a method that averages at every
    step has no H and no outer optimizer. An axis with a single value sets that value, and names of
    methods and folders do not mention it. The global batch stays the same as K changes.

    Args:
        recipe: maps a method's name to a configuration.
        methods: names that `recipe` takes.
        seeds: seeds to run every method with.
        workers: values of K.
        sync_every: values of H; a method whose name sets H keeps its own.
        inner_lr: peak learning rates of the inner optimizer.
        outer_lr: learning rates of the outer optimizer.
        outer_momentum: momenta of the outer optimizer.
        changes: fields that replace the recipe's, such as `{"steps": 1600,
            "periods.evaluate_steps": 400}`.
        baseline: method, or full label of a row, to take differences to; None is diloco if
            present, else the first method.
        tuning: search for rates; None does not search.

    Raises:
        ConfigurationError: an axis is empty, or is also searched by `tuning`.

    >>> Experiment(methods=("ddp", "muloco"), workers=(4, 8)).seeds
    (0,)
    """

    recipe: Recipe = recipes.laptop
    methods: tuple[str, ...] = ("ddp", "diloco", "muloco")
    seeds: tuple[int, ...] = (0,)
    workers: tuple[int, ...] = ()
    sync_every: tuple[int, ...] = ()
    inner_lr: tuple[float, ...] = ()
    outer_lr: tuple[float, ...] = ()
    outer_momentum: tuple[float, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    baseline: str | None = None
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        for name in ("methods", "seeds"):
            because, do = f"{name} is empty", f"pass at least one of {name}"
            check(bool(getattr(self, name)), "compare", because=because, do=do)
        for name, axis in (("seed", "seeds"), ("method", "methods")):
            because, do = f"{axis} sets it for every run", f"pass {axis}, and leave it out there"
            check(name not in self.changes, f"change {name}", because=because, do=do)
        if self.tuning is None:
            return
        unknown = ", ".join(sorted(self.tuning.candidates.keys() - {"", *self.methods}))
        because, do = "it is not compared", f"name one of {', '.join(self.methods)}"
        check(not unknown, f"tune {unknown}", because=because, do=do)
        because, do = "one seed picks a rate at the edge of stability", "pass more, such as 0,1,2"
        check(len(self.seeds) > 1, f"tune with seed {self.seeds[0]} alone", because=because, do=do)
        searched = {name for s in self.tuning.candidates.values() for c in s for name in c.given()}
        because, do = "it is an axis of the comparison, too", "leave one of the two out"
        for name in sorted(searched):
            check(not getattr(self, name), f"tune {name}", because=because, do=do)


def load_experiment(name: str) -> Experiment:
    """The experiment that a function in a file returns; `name` is `FILE.py:FUNCTION`.

    The function takes no arguments.

    Raises:
        ConfigurationError: there is no such function, or it returns something else.
    """
    made = recipes.load(name)()
    because = f"it returned {type(made).__name__} and not an Experiment"
    do = "return a thinwire.experiments.Experiment there"
    check(isinstance(made, Experiment), f"use experiment {name!r}", because=because, do=do)
    return made


def unique(values: Iterable[Any]) -> tuple[Any, ...]:
    """`values` without repetitions, in the order of first occurrence."""
    return tuple(dict.fromkeys(values))


def number_text(value: float) -> str:
    """The shortest text that parses to `value`.

    >>> number_text(4e-3), number_text(1.0), number_text(0.1234567)
    ('0.004', '1', '0.1234567')
    """
    return repr(value).removesuffix(".0")
