"""`thinwire compare`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from thinwire.cli.flags import (
    Option,
    RunFlags,
    arg,
    changes_of,
    default_out,
    given_in,
    reads,
    write_settings,
)
from thinwire.cli.output import say
from thinwire.errors import ConfigurationError, IncompleteError, check

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.experiments import Experiment, Tuning


def _listed(kind: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    try:
        return tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError as error:
        raise ConfigurationError(
            f"read the list {text!r}",
            because=str(error),
            do="pass values with commas between them, such as 1,2,4",
        ) from error


def _several(kind: Callable[[str], Any]) -> Any:
    return reads(partial(_listed, kind), "A,B,...")


_Names: TypeAlias = Annotated[tuple[str, ...] | None, _several(str.strip), arg()]
_Ints: TypeAlias = Annotated[tuple[int, ...] | None, _several(int), arg()]
_Floats: TypeAlias = Annotated[tuple[float, ...] | None, _several(float), arg()]


@dataclass(frozen=True, kw_only=True)
class CompareCommand(RunFlags):
    """Train the same model on the same data, tokens and seeds with several methods.

    Repeated with the same --out, it keeps finished runs and trains the rest.

    $ thinwire compare --methods ddp,diloco,muloco:bits=2 --seeds 0,1,2 --jobs 2 --out runs/mine
    $ thinwire compare --workers 1,4,8 --sync-every 15,30 --out runs/grid
    $ thinwire compare --tune inner-lr=1e-3,2e-3 ddp:inner-lr=4e-3,8e-3 --seeds 0,1
    """

    methods: _Names = None
    """NAME or NAME:FIELD=NUMBER, such as muloco:bits=2; default ddp,diloco,muloco."""
    workers: _Ints = None
    """K, the number of workers; the global batch is the same for all."""
    sync_every: _Ints = None
    """H: inner steps between two exchanges, of methods with rounds."""
    inner_lr: _Floats = None
    """Peak learning rate of the inner optimizer."""
    outer_lr: _Floats = None
    """Learning rate of the outer optimizer, of methods with rounds."""
    outer_momentum: _Floats = None
    """Momentum of the outer optimizer; 0 is plain SGD."""
    seeds: _Ints = None
    """Default 0."""
    tune: Annotated[tuple[str, ...] | None, arg(metavar="RATES ...")] = None
    """Search each method's rates, with as many runs for all; needs several seeds."""
    baseline: Option[str] = None
    """Method or row to take differences to; default diloco, or the first method."""
    experiment: Option[str] = None
    """FILE.py:FUNCTION that returns an Experiment; flags win over it."""
    jobs: int = 1
    """Runs at a time, each in a process with its share of the cores."""

    def main(self, console: Console) -> None:
        """Run the command."""
        from thinwire.cli.compare_display import CompareDisplay, comparison_tables
        from thinwire.experiments import compare
        from thinwire.experiments.grid import specs_of
        from thinwire.experiments.parallel import ParallelRunner
        from thinwire.experiments.runners import one_by_one
        from thinwire.runs.status import has_files_of_run
        from thinwire.train.workers.ranks import under_torchrun

        check(
            not under_torchrun(),
            "compare under torchrun",
            because="compare simulates the workers in one process",
            do="run it without torchrun, or thinwire train for each method",
        )
        experiment = self._experiment()
        out = self.out or default_out("compare")
        specs_of(experiment)  # refuses a bad experiment before a folder is made
        check(
            not has_files_of_run(out),
            f"compare in {out}",
            because="it is the folder of a run, whose run.toml would be replaced",
            do="pass another --out",
        )
        runner = one_by_one if self.jobs == 1 else ParallelRunner(self.jobs)
        write_settings(out, given_in(self))
        display = CompareDisplay(console)
        with display.progress:
            comparison = compare(experiment, out, display.observe, runner, display.note_planned)
        for each in comparison_tables(comparison):
            console.print(each)
        problems = comparison.problems()
        for folder, status in problems.items():
            say(console, f"left out {folder}: {status}")
        if problems:
            first, status = next(iter(problems.items()))
            others = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
            raise IncompleteError(
                f"compare everything in {out}",
                because=f"{first} has no result ({status}){others}",
                do="fix the cause, or pass another --out, and repeat the command",
            )

    def _experiment(self) -> Experiment:
        """The experiment that the flags describe.

        Raises:
            ConfigurationError: a value cannot be read, or values do not fit each other.
        """
        from thinwire.experiments import Experiment, load_experiment
        from thinwire.train import recipes

        fields = {field.name for field in dataclasses.fields(Experiment)}
        given = {name: value for name, value in given_in(self).items() if name in fields}
        if self.tune is not None:
            given["tuning"] = _tuning(self.tune)
        if self.recipe is not None:
            given["recipe"] = recipes.find(self.recipe)
        base = Experiment() if self.experiment is None else load_experiment(self.experiment)
        return dataclasses.replace(base, changes={**base.changes, **changes_of(self)}, **given)


def _tuning(texts: tuple[str, ...]) -> Tuning:
    """Candidates of each method: those for all, with a method's own values in place of some."""
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
        of_method = grids.setdefault(method, {})
        check(
            name not in of_method,
            f"tune {text!r}",
            because=f"{place} was given before",
            do="write all values of it in one list",
        )
        of_method[name] = _listed(float, values)
    candidates: dict[str, tuple[Rates, ...]] = {
        method: product(**{**grids[""], **own}) for method, own in grids.items() if own
    }
    return Tuning(candidates=candidates)
