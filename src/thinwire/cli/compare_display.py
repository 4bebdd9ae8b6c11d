"""What `thinwire compare` shows: its runs while they train, and tables of their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from thinwire.cli.output import say, table
from thinwire.experiments import Comparison
from thinwire.experiments.comparison import TuningResult
from thinwire.experiments.runners import PlannedRun
from thinwire.plan.units import nbytes_text, times_text
from thinwire.runs.statistics import Estimate
from thinwire.runs.status import RunStatus
from thinwire.runs.variants import Variant
from thinwire.train.observers import Observer, Terminal, shows_bars


class CompareDisplay:
    """A bar for each run in training and one for all runs; plain lines without a terminal.

    Args:
        console: console to show it on.
    """

    def __init__(self, console: Console) -> None:
        self.console, self.done = console, dict[Path, bool]()
        # Whatever does not fit is cut from the title, never from the seed.
        title = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self.progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=title),
            TextColumn("{task.fields[seed]}", table_column=Column(no_wrap=True)),
            BarColumn(8),
            MofNCompleteColumn(),
            TextColumn("{task.fields[measured]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not shows_bars(console),
            expand=True,
            refresh_per_second=2,  # training pays for it, as it may be in this process
            speed_estimate_period=24 * 3600.0,  # records may be minutes apart
        )
        self._all = self.progress.add_task("all runs", total=0, seed="", measured="")

    def note_planned(self, runs: Sequence[tuple[PlannedRun, RunStatus]]) -> None:
        """Count `runs`, including finished ones."""
        self.done |= {run.folder: status.run is not None for run, status in runs}
        self.count()

    def count(self) -> None:
        """Show how many of all runs are done."""
        self.progress.update(self._all, completed=sum(self.done.values()), total=len(self.done))

    def observe(self, run: PlannedRun) -> Observer:
        """The observer that shows the records of a run."""
        if shows_bars(self.console):
            return _Bar(self, run)
        # Lines name their run, because those of several runs may mix.
        return Terminal(self.console, title=run.title, steps=run.config.steps)


class _Bar(Observer):
    """A bar of a run, and a line above the bars when it ends."""

    def __init__(self, display: CompareDisplay, run: PlannedRun) -> None:
        self._display, self._run = display, run
        self._last: dict[str, Any] | None = None
        seed = f"seed {run.config.seed}"
        self._task = display.progress.add_task(
            run.title.removesuffix(seed), total=run.config.steps, seed=seed, measured="begins"
        )

    def record(self, record: dict[str, Any]) -> None:
        self._last, moved = record, record["sent_bytes"] + record["received_bytes"]
        measured = f"loss {record['loss']:.4f} {nbytes_text(moved):>7}"
        self._display.progress.update(self._task, completed=record["step"], measured=measured)

    def fail(self, why: str) -> None:
        say(self._display.console, why)

    def close(self) -> None:
        self._display.progress.remove_task(self._task)
        if self._last is not None and self._last["step"] >= self._run.config.steps:
            self._display.done[self._run.folder] = True
            self._display.count()
            loss = self._last.get("val_loss", self._last["loss"])
            say(self._display.console, f"{self._run.title}: loss {loss:.4f}")


# -- results ---------------------------------------------------------------------------------------


def comparison_tables(comparison: Comparison) -> Iterator[Table]:
    """Tables of the rates that a search chose, the means of each method, and the differences."""
    if comparison.tuning:
        yield table(
            f"rates, out of {len(comparison.tuning[0].tried)} tried for each; all in tuning.json",
            ("method", "chosen"),
            [(result.spec.label, _chosen_text(result)) for result in comparison.tuning],
            caption="* the lowest or highest that was tried: a better one may be beyond",
        )
    yield table(
        "validation loss of the outer parameters in nats per token; bytes per worker",
        ("method", "loss", "up", "down", "times fewer", "memory", "wall s"),
        [(row.spec.label, _text(row.loss), *_measured(row.variant)) for row in comparison.rows],
        caption="± standard error over seeds; up: through a store, point to point as much as down; "
        "times fewer: up + down, than a 16-bit all-reduce at every step, store and point to point; "
        "memory: weights, inner state, anchor, outer state and feedback, over the weights",
    )
    if len(comparison.rows) > 1:
        yield table(
            "differences of loss, paired by seed",
            ("difference", "of", "minus", "seeds"),
            _differences(comparison),
            caption="± standard error, which one seed does not have",
        )


def _text(estimate: Estimate | None) -> str:
    return "none" if estimate is None else estimate.text(".4f")


def _measured(variant: Variant | None) -> list[str]:
    if variant is None:
        return ["-"] * 5
    memory = variant.memory_ratio
    return [
        *map(nbytes_text, variant.up_and_down(relayed=True)),
        ", ".join(map(times_text, variant.times_fewer)),
        "not recorded" if memory is None else f"{memory:.2f} x",
        f"{variant.mean(lambda run: run.summary.wall_s):.1f}",
    ]


def _differences(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Each method's loss minus the baseline's."""
    for row in comparison.rows:
        base = comparison.baselines.get(row.spec.label, "none here")
        if base != row.spec.label:
            difference = comparison.difference(row)
            seeds = "" if difference is None else ",".join(map(str, difference.seeds))
            yield _text(difference), row.spec.label, base, seeds or "none"


def _chosen_text(result: TuningResult) -> str:
    if result.chosen is None:
        return f"none: {result.why}"
    edges = result.edges()
    return " ".join(
        f"{n}={v}{'*' if n in edges else ''}" for n, v in result.chosen.searched_texts()
    )
