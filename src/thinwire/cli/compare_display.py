"""What `thinwire compare` shows while its runs train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from thinwire.cli.output import say
from thinwire.experiments.runners import PlannedRun
from thinwire.plan.units import nbytes_text
from thinwire.runs.status import RunStatus
from thinwire.train.observers import Observer, Terminal, shows_bars


class CompareDisplay:
    """A bar for each run that trains and one for all of them; off a terminal, plain lines.

    Args:
        console: where it is shown.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        # What does not fit is cut from the title, and never from the seed.
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
            refresh_per_second=2,  # training pays for them: it may be in this very process
            speed_estimate_period=24 * 3600.0,  # records may be minutes apart
        )
        self._all = self.progress.add_task("all runs", total=0, seed="", measured="")
        self._is_done: dict[Path, bool] = {}

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def note_planned(self, runs: Sequence[tuple[PlannedRun, RunStatus]]) -> None:
        """Count `runs`, finished ones as well."""
        self.note({run.folder: status.run is not None for run, status in runs})

    def note(self, is_done: Mapping[Path, bool]) -> None:
        """Count runs, by their folders."""
        self._is_done.update(is_done)
        done, known = sum(self._is_done.values()), len(self._is_done)
        self.progress.update(self._all, completed=done, total=known)

    def observe(self, run: PlannedRun) -> Observer:
        """What shows the records of a run that begins."""
        return _Bar(self, run) if shows_bars(self.console) else _Lines(self.console, run)


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
        self._last = record
        measured = f"loss {record['loss']:.4f} {nbytes_text(record['sent_bytes']):>7}"
        self._display.progress.update(self._task, completed=record["step"], measured=measured)

    def fail(self, why: str) -> None:
        _say_why(self._display.console, self._run, why)

    def close(self) -> None:
        self._display.progress.remove_task(self._task)
        if self._last is not None and self._last["step"] >= self._run.config.steps:
            self._display.note({self._run.folder: True})
            loss = self._last.get("val_loss", self._last["loss"])
            say(self._display.console, f"{self._run.title}: loss {loss:.4f}")


class _Lines(Terminal):
    """Lines that name their run, because those of several may follow each other."""

    def __init__(self, console: Console, run: PlannedRun) -> None:
        plain = Console(file=console.file, force_terminal=False)
        super().__init__(plain, title=run.title, steps=run.config.steps)
        self._run = run

    def fail(self, why: str) -> None:
        _say_why(self._console, self._run, why)


def _say_why(console: Console, run: PlannedRun, why: str) -> None:
    log = f"; its log: {run.log}" if run.log.exists() else ""
    say(console, f"{run.title} failed: {why}{log}")
