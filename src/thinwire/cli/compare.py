"""`thinwire compare`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from thinwire.cli.flags import RunFlags, default_out, recipe_values, typed_value
from thinwire.cli.grid_flags import GridFlags, experiment_of
from thinwire.errors import ConfigurationError, IncompleteError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from thinwire.experiments import Comparison, RunStatus


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Train the same model on the same data, tokens and seeds under several methods.

    --sync-every, --outer-lr and --outer-momentum act on the methods that have rounds, not on ddp;
    --bits and --density on those that have them. A comparison that was stopped goes on with the
    same command.

    thinwire compare --methods ddp,diloco,muloco:bits=2 --seeds 0,1,2 --jobs 2 --out runs/mine
    thinwire compare --workers 1,4,8 --sync-every 15,30 --out runs/grid
    """

    methods: str | None = None
    """Comma-separated; NAME or NAME:FIELD=NUMBER, such as muloco:bits=2."""
    seeds: str | None = None
    """Comma-separated."""
    out: Path | None = None
    """Folder of the run folders; finished runs in it are kept, unfinished ones continued."""
    jobs: int = 1
    """Runs at a time, each in a process with its share of the cores."""
    grid: Annotated[GridFlags, tyro.conf.arg(name="")] = field(default_factory=GridFlags)
    run: Annotated[RunFlags, tyro.conf.arg(name="")] = field(default_factory=RunFlags)

    @classmethod
    def in_force(cls, arguments: Sequence[str]) -> tuple[dict[str, str], str]:
        """What holds without a flag, by its name, and where these values are from.

        Args:
            arguments: those typed beside --help.
        """
        from thinwire.experiments import Experiment

        recipe = typed_value(arguments, "recipe", RunFlags.recipe)
        default = Experiment()
        values = recipe_values(recipe, default.methods[0])
        own = ("sync-every", "density", "bits", "inner-lr", "outer-lr", "outer-momentum")
        values |= dict.fromkeys(own, "each method's own") | {
            "methods": ",".join(default.methods),
            "seeds": ",".join(map(str, default.seeds)),
            "out": default_out("compare").as_posix(),
        }
        see = "put another one before --help to see its own"
        return values, f"Defaults are those of --recipe {recipe}; {see}."

    def main(self, console: Console) -> None:
        """Run the command."""
        from thinwire.experiments.grid import specs_of

        self._check_launch()
        experiment = experiment_of(self.grid, self.run, methods=self.methods, seeds=self.seeds)
        out = self.out or default_out("compare")
        specs_of(experiment)  # what does not fit is said before torch is loaded
        from thinwire.cli.compare_display import CompareDisplay
        from thinwire.experiments import ParallelRunner, SequentialRunner, compare

        runner = SequentialRunner() if self.jobs == 1 else ParallelRunner(self.jobs)
        with CompareDisplay(console) as display:
            comparison = compare(experiment, out, display.observe, runner, display.note_planned)
        _show(comparison, console)
        _check_complete(comparison.problems(), out)

    def _check_launch(self) -> None:
        from thinwire.train.workers.ranks import under_torchrun

        if under_torchrun():
            raise ConfigurationError(
                "compare under torchrun",
                because="compare simulates the workers in one process",
                do="run it without torchrun, or thinwire train for each method",
            )


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


def _check_complete(problems: Mapping[str, RunStatus], out: Path) -> None:
    if problems:
        first, status = next(iter(problems.items()))
        others = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise IncompleteError(
            f"compare all that was asked for in {out}",
            because=f"{first} has no result ({status}){others}",
            do="fix the cause and repeat the command, which keeps what is finished; move folders "
            "of other runs away, or pass another --out",
        )
