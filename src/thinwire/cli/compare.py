"""`thinwire compare`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from thinwire.cli.flags import Flat, Option, RunFlags, arg, changes_of, default_out, flag
from thinwire.errors import ConfigurationError, IncompleteError

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.experiments import Comparison, Experiment, Tuning

T = TypeVar("T", int, float)

_List: TypeAlias = Annotated[str | None, arg(metavar="A,B,...")]


_KINDS: dict[str, Callable[[str], Any]] = {
    "methods": str.strip,
    "seeds": int,
    "workers": int,
    "sync_every": int,
    "inner_lr": float,
    "outer_lr": float,
    "outer_momentum": float,
}


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Train the same model on the same data, tokens and seeds under several methods.

    A comparison that was stopped goes on with the same command.

    $ thinwire compare --methods ddp,diloco,muloco:bits=2 --seeds 0,1,2 --jobs 2 --out runs/mine
    $ thinwire compare --workers 1,4,8 --sync-every 15,30 --out runs/grid
    $ thinwire compare --tune inner-lr=1e-3,2e-3 ddp:inner-lr=4e-3,8e-3 --seeds 0,1
    """

    methods: _List = None
    """NAME or NAME:FIELD=NUMBER, such as muloco:bits=2; default ddp,diloco,muloco."""
    seeds: _List = None
    """Default 0."""
    workers: _List = None
    """How many; several, such as 1,4,8, keep the global batch."""
    sync_every: _List = None
    """H: inner steps between two exchanges, of the methods that have rounds."""
    inner_lr: _List = None
    """Peak learning rate of the inner optimizer."""
    outer_lr: _List = None
    """Learning rate of the outer optimizer, of the methods that have rounds."""
    outer_momentum: _List = None
    """Momentum of the outer optimizer; 0 is plain SGD."""
    tune: Annotated[tuple[str, ...], arg(metavar="RATES ...")] = ()
    """Search for each method's rates, with as many runs for all; needs several seeds."""
    baseline: Option[str] = None
    """The method, or a row, that differences are taken to; default diloco, or the first method."""
    experiment: Option[str] = None
    """FILE.py:FUNCTION that returns an Experiment; flags that are given replace its values."""
    out: Option[Path] = None
    """Folder of the run folders; finished runs in it are kept; default runs/compare-N."""
    jobs: int = 1
    """Runs at a time, each in a process with its share of the cores."""
    run: Flat[RunFlags] = field(default_factory=RunFlags)

    def main(self, console: Console) -> None:
        """Run the command."""
        from thinwire.cli.compare_display import CompareDisplay
        from thinwire.experiments import ParallelRunner, SequentialRunner, compare
        from thinwire.experiments.grid import specs_of
        from thinwire.train.workers.ranks import under_torchrun

        if under_torchrun():
            raise ConfigurationError(
                "compare under torchrun",
                because="compare simulates the workers in one process",
                do="run it without torchrun, or thinwire train for each method",
            )
        experiment = self._experiment()
        out = self.out or default_out("compare")
        specs_of(experiment)  # what does not fit is said before a folder is made
        runner = SequentialRunner() if self.jobs == 1 else ParallelRunner(self.jobs)
        with CompareDisplay(console) as display:
            comparison = compare(experiment, out, display.observe, runner, display.note_planned)
        _show(comparison, console)
        problems = comparison.problems()
        if problems:
            first, status = next(iter(problems.items()))
            others = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
            raise IncompleteError(
                f"compare all that was asked for in {out}",
                because=f"{first} has no result ({status}){others}",
                do="fix the cause and repeat the command, which keeps what is finished",
            )

    def _experiment(self) -> Experiment:
        """What the flags describe.

        Raises:
            ConfigurationError: a value cannot be read, or they do not fit.
        """
        from thinwire.experiments import Experiment, load_experiment
        from thinwire.train import recipes

        given: dict[str, Any] = {
            name: _numbers(name, text, kind)
            for name, kind in _KINDS.items()
            if (text := getattr(self, name)) is not None
        }
        if self.baseline is not None:
            given["baseline"] = self.baseline
        if self.tune:
            given["tuning"] = _tuning(self.tune)
        if self.experiment is None:
            base = Experiment(recipe=recipes.find(self.run.recipe))
        elif self.run.recipe != RunFlags.recipe:
            raise ConfigurationError(
                f"use recipe {self.run.recipe!r} with --experiment",
                because="the experiment has its own",
                do="leave one of the two out",
            )
        else:
            base = load_experiment(self.experiment)
        return dataclasses.replace(base, changes={**base.changes, **changes_of(self.run)}, **given)


def _show(comparison: Comparison, console: Console) -> None:
    from thinwire.cli.tables import difference_table, problem_table, row_table, tuning_table

    if comparison.tuning:
        console.print(tuning_table(comparison.tuning))
    console.print(row_table(comparison))
    if len(comparison.rows) > 1:
        console.print(difference_table(comparison))
    left_out = {**comparison.problems(), **comparison.unrelated}
    if left_out:
        console.print(problem_table(left_out))


def _numbers(name: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    try:
        return tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError as error:
        raise ConfigurationError(
            f"compare with {flag(name)} {text!r}",
            because=str(error),
            do="pass numbers with commas between them, such as 0,1,2",
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
