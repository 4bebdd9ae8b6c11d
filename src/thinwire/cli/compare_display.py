"""What `thinwire compare` shows while its runs train."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from thinwire.cli.output import say
from thinwire.experiments.runners import PlannedRun
from thinwire.plan.units import duration_text
from thinwire.runs.status import RunState, RunStatus
from thinwire.train.observers import Observer, Terminal, shows_bars

_REFRESHES_PER_S = 2
"""Training pays for them: the simplest comparison trains in this very process."""
_TRAINS, _WAITS, _DONE = "trains", "waits", "done"
_FIRST = (_TRAINS, "failed", "diverged", _WAITS)
"""States whose runs are shown where there are more than a terminal has lines, in this order."""


class _Row:
    """How far a run is.

    Args:
        run: the run.
        clock: seconds, from anywhere.
    """

    def __init__(self, run: PlannedRun, clock: Callable[[], float]) -> None:
        self.run, self.state, self.why = run, _WAITS, ""
        self.step, self.steps = 0, run.config.steps
        self.loss: float | None = None
        self.val_loss: float | None = None
        self._clock = clock
        self._first: tuple[float, int] | None = None
        self._start: int | None = None
        self.seconds_left: float | None = None

    def begin(self) -> None:
        self.state, self.why, self._first, self.seconds_left = _TRAINS, "", None, None

    def record(self, record: dict[str, Any]) -> None:
        self.step, self.loss = record["step"], record["loss"]
        self.val_loss = record.get("val_loss", self.val_loss)
        # Where it goes on is not known before it has: then its first record stands for that.
        self._start = self.step if self._start is None else self._start
        now_s = self._clock()
        # Counted from the first record: what comes before it is setting up.
        first_s, first = self._first = self._first or (now_s, self.step)
        if self.step > first:
            self.seconds_left = (self.steps - self.step) * (now_s - first_s) / (self.step - first)

    def fail(self, why: str) -> None:
        kind, _, rest = why.partition(": ")
        diverged = kind == "NonFiniteError"
        self.state, self.why = ("diverged", rest) if diverged else ("failed", why)

    def end(self) -> None:
        if self.state == _TRAINS:
            self.state = _DONE if self.step >= self.steps else "stopped"

    def begins_anew(self) -> None:
        """Note that there is nothing of it yet."""
        self._start = 0

    @property
    def taken(self) -> int:
        """Steps that it took here, without those of before."""
        return 0 if self._start is None else self.step - self._start

    @property
    def to_come(self) -> int:
        """Steps that it has still to take."""
        return self.steps - self.step if self.state in (_TRAINS, _WAITS) else 0

    @property
    def share(self) -> float:
        """How much of it is behind it; all, if it will not go on."""
        return 1.0 if self.state not in (_TRAINS, _WAITS) else self.step / self.steps

    @property
    def time_or_state(self) -> str:
        if self.state != _TRAINS:
            return self.state
        return "begins" if self.seconds_left is None else _duration(self.seconds_left)


def _row_of(run: PlannedRun, status: RunStatus, clock: Callable[[], float]) -> _Row:
    row = _Row(run, clock)
    if status.run is not None:
        row.state, row.step = _DONE, row.steps
        row.val_loss = status.run.summary.val_loss
    elif status.state is RunState.ABSENT:
        row.begins_anew()
    elif status.state is RunState.DIVERGED:
        row.state = "diverged"
    elif status.state not in (RunState.UNFINISHED, RunState.FAILED):
        row.state, row.why = "failed", str(status)
    return row


class CompareDisplay:
    """A line for each run on a terminal, and lines that follow each other elsewhere.

    Args:
        console: where it is shown.
        clock: seconds, from anywhere.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._rows: dict[Path, _Row] = {}
        self._begun_s: float | None = None
        self._live: Live | None = None
        if shows_bars(console):
            # It asks for what is shown in a thread of its own, as often as it draws.
            self._live = Live(
                get_renderable=self.shown, console=console, refresh_per_second=_REFRESHES_PER_S
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def note_planned(self, runs: Sequence[tuple[PlannedRun, RunStatus]]) -> None:
        """Show `runs`, those that are finished as well."""
        added = {run.folder: _row_of(run, status, self._clock) for run, status in runs}
        # Another dict, because another thread may read the one that there is.
        self._rows = {**self._rows, **added}

    def observe(self, run: PlannedRun) -> Observer:
        """What shows the records of a run that begins."""
        if self._live is None:
            return _Lines(self._console, run)
        if run.folder not in self._rows:
            self._rows = {**self._rows, run.folder: _Row(run, self._clock)}
        if self._begun_s is None:
            self._begun_s = self._clock()
        row = self._rows[run.folder]
        row.begin()
        return _RowObserver(row)

    def shown(self) -> RenderableType:
        """What is shown now: nothing before it is known which runs there are."""
        return _Shown(self) if self._rows else Text("")

    def overall(self, width: int) -> Table:
        """A bar over all runs, how many are in which state, and for how long it will go on."""
        rows = list(self._rows.values())
        counts = Counter(row.state for row in rows)
        told = [f"{counts[_DONE]} of {len(rows)} runs done"]
        taken, to_come = sum(row.taken for row in rows), sum(row.to_come for row in rows)
        if self._begun_s is not None and taken and to_come:
            # As many steps a second as until now, whatever the methods that are still to come.
            left_s = to_come * (self._clock() - self._begun_s) / taken
            told.append(f"about {_duration(left_s)} left")
        told += [f"{counts[s]} {s}" for s in ("failed", "diverged") if counts[s]]
        share = sum(row.share for row in rows) / max(1, len(rows))
        grid = Table.grid(padding=(0, 1, 0, 0))
        bar = ProgressBar(total=1.0, completed=share, width=max(5, min(20, width // 6)))
        grid.add_row(bar, Text(", ".join(told), no_wrap=True, overflow="ellipsis"))
        return grid

    def lines(self, width: int, height: int) -> list[RenderableType]:
        """The runs, and why some have failed."""
        rows = list(self._rows.values())
        troubled = [row for row in rows if row.why][: 3 if height >= 20 else 1]
        told = [line for row in troubled for line in _trouble(row, width)]
        # Left are the head, what is not shown, the bar and the cursor's line.
        room = height - 4 - sum(-(-line.cell_len // width) for line in told)
        chosen = _most_wanted(rows, max(1, room))
        found: list[RenderableType] = [_table(chosen, rows, width)]
        hidden = Counter(row.state for row in rows if row not in chosen)
        if hidden:
            counts = ", ".join(f"{count} {state}" for state, count in hidden.items())
            found.append(Text(f"not shown: {counts}", style="dim"))
        return [*found, *told]


@dataclass(frozen=True, slots=True)
class _Shown:
    display: CompareDisplay

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, console.size.height
        yield Group(*self.display.lines(width, height), self.display.overall(width))


def _most_wanted(rows: Sequence[_Row], room: int) -> list[_Row]:
    """As many of `rows` as there is room for, in their order."""
    if len(rows) <= room:
        return list(rows)
    rank = {state: number for number, state in enumerate(_FIRST)}
    wanted = sorted(rows, key=lambda row: rank.get(row.state, len(rank)))[:room]
    return [row for row in rows if row in wanted]


def _table(rows: Sequence[_Row], all_rows: Sequence[_Row], width: int) -> Table:
    # As wide as all of them need, so that it stays as it is while others are shown.
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    most = max((row.steps for row in all_rows), default=0)
    steps_width = 2 * len(str(most)) + 1
    left = max(16, width - steps_width - 6 - 8 - 9 - 4 * 2)
    longest = max((len(row.run.title) for row in all_rows), default=3)
    table.add_column("run", no_wrap=True, width=min(left, max(3, longest)))
    for name, least in (("step", steps_width), ("loss", 6), ("val loss", 8)):
        table.add_column(name, justify="right", no_wrap=True, min_width=least)
    table.add_column("time left", no_wrap=True, min_width=9)
    for row in rows:
        step = f"{row.step}/{row.steps}"
        numbers = (step, _number(row.loss), _number(row.val_loss))
        cells = [_shortened(row.run.title, left), *numbers, row.time_or_state]
        table.add_row(*map(Text, cells), style=_style(row))
    return table


def _style(row: _Row) -> str:
    if row.state in ("failed", "diverged"):
        return "red"
    return {_TRAINS: "bold", _WAITS: "dim"}.get(row.state, "")


def _trouble(row: _Row, width: int) -> list[Text]:
    why = row.why.partition("\n")[0]
    title = _shortened(row.run.title, max(16, width // 2))
    told = [Text(f"{title}: {why}", style="red", no_wrap=True, overflow="ellipsis")]
    if row.run.log.exists():  # a path that is cut is of no use
        told.append(Text(f"  its log: {row.run.log}", overflow="fold"))
    return told


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


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _duration(seconds: float) -> str:
    return duration_text(max(1.0, float(round(seconds))))


class _RowObserver(Observer):
    def __init__(self, row: _Row) -> None:
        self._row = row

    def record(self, record: dict[str, Any]) -> None:
        self._row.record(record)

    def fail(self, why: str) -> None:
        self._row.fail(why)

    def close(self) -> None:
        self._row.end()


class _Lines(Observer):
    """Lines that name their run, because those of several may follow each other."""

    def __init__(self, console: Console, run: PlannedRun) -> None:
        self._console, self._run = console, run
        plain = Console(file=console.file, force_terminal=False)
        self._terminal = Terminal(plain, title=run.title, steps=run.config.steps)

    def record(self, record: dict[str, Any]) -> None:
        self._terminal.record(record)

    def fail(self, why: str) -> None:
        log = f"; its log: {self._run.log}" if self._run.log.exists() else ""
        say(self._console, f"{self._run.title} failed: {why}{log}")

    def close(self) -> None:
        self._terminal.close()
