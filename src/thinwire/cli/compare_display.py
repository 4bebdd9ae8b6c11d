"""What `thinwire compare` shows while its runs train."""

from __future__ import annotations

from collections.abc import Sequence
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
        # What does not fit is cut from the title.
        title = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self.progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=title),
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
        self.overall = self.progress.add_task("", total=0, measured="")
        self._total_steps = 0
        self._is_done: dict[Path, bool] = {}

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def note_planned(self, runs: Sequence[tuple[PlannedRun, RunStatus]]) -> None:
        """Count `runs`, those that are finished as well."""
        for run, status in runs:
            if status.run is None and run.folder not in self._is_done:
                self._total_steps += run.config.steps
            self.note_done(run.folder, is_done=status.run is not None)
        self.progress.update(self.overall, total=self._total_steps)

    def note_done(self, folder: Path, *, is_done: bool = True) -> None:
        """Note that a run is done, or planned."""
        self._is_done[folder] = is_done
        told = f"{sum(self._is_done.values())} of {len(self._is_done)} runs done"
        self.progress.update(self.overall, description=told)

    def observe(self, run: PlannedRun) -> Observer:
        """What shows the records of a run that begins."""
        return _Bar(self, run) if shows_bars(self.console) else _Lines(self.console, run)


class _Bar(Observer):
    """A bar of a run, and a line above the bars when it ends."""

    def __init__(self, display: CompareDisplay, run: PlannedRun) -> None:
        self._display, self._run = display, run
        self._last: dict[str, Any] | None = None
        steps = run.config.steps
        title = _shortened(run.title, display.console.width - 42 - 2 * len(str(steps)))
        self._task = display.progress.add_task(title, total=steps, measured="begins")

    def record(self, record: dict[str, Any]) -> None:
        progress, overall = self._display.progress, self._display.overall
        if self._last is None:
            # Of a run that goes on, these steps took no time here.
            progress.tasks[overall].completed += record["step"]
        else:
            progress.advance(overall, record["step"] - self._last["step"])
        self._last = record
        measured = f"loss {record['loss']:.4f} {nbytes_text(record['sent_bytes']):>7}"
        progress.update(self._task, completed=record["step"], measured=measured)

    def fail(self, why: str) -> None:
        _say_why(self._display.console, self._run, why)

    def close(self) -> None:
        self._display.progress.remove_task(self._task)
        if self._last is not None and self._last["step"] >= self._run.config.steps:
            self._display.note_done(self._run.folder)
            loss = self._last.get("val_loss", self._last["loss"])
            say(self._display.console, f"{self._run.title}: loss {loss:.4f}")


def _shortened(title: str, width: int) -> str:
    """`title`, if it is longer than `width`, without what stands before its seed.

    >>> _shortened("muloco:bits=2 K=4 H=15 seed 0", 20)
    'muloco:bits=… seed 0'
    """
    if len(title) <= width:
        return title
    name, before, seed = title.rpartition(" seed ")
    tail = before + seed if name else ""
    return f"{title[: max(0, width - 1 - len(tail))]}…{tail}"


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
