"""Observers of a run: its folder, a terminal, TensorBoard, W&B, trackio."""

import importlib.metadata
import logging
import platform
import textwrap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from thinwire.elastic.events import Event, EventLog
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.plan.units import counted, nbytes_text
from thinwire.runs.folder import RunFolder

_LOG = logging.getLogger(__name__)


_PACKAGES = ("thinwire", "torch", "transformers", "datasets", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python, this machine and the packages that decide what a run computes."""
    return {
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {torch.get_num_threads()} threads",
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }


class Observer:
    """Receives the records of a run, and the events of an elastic one; ignores them by default."""

    def record(self, record: dict[str, Any]) -> None:
        """Receive a record as metrics.jsonl has it."""

    def event(self, event: Event) -> None:
        """Receive an event: a worker joined, a round counted, ...; called from any thread."""

    def fail(self, why: str) -> None:
        """Receive, before `close`, which run of a comparison has no result and why."""

    def close(self) -> None:
        """Release resources; the run is over."""


class FolderWriter(Observer):
    """Writes metrics.jsonl and, in an elastic run, events.jsonl."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def record(self, record: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        self._folder.append(record)

    def event(self, event: Event) -> None:
        """Append a line to events.jsonl."""
        try:
            self._folder.append(event.describe(), "events.jsonl")
        except CheckpointError as error:
            # The thread that logged the event may be in an exchange, which a full disk must not
            # fail; the event is also in the log and the summary.
            _LOG.warning("%s", error)


def forward_events(log: EventLog, observers: Sequence[Observer]) -> None:
    """Pass every event to observers, beginning with those that are already in the log.

    Args:
        log: the log of events.
        observers: receive them, one event at a time.
    """
    # A new event waits until the logged ones are passed on; re-entrant for `forward` below.
    lock = threading.RLock()

    def forward(event: Event) -> None:
        with lock:
            for observer in observers:
                observer.event(event)

    with lock:
        for event in log.listen(forward):
            forward(event)


def shows_bars(console: Console) -> bool:
    """True if `console` can redraw lines: it is a terminal that can move its cursor."""
    return console.is_terminal and not console.is_dumb_terminal


# Window for estimating the remaining time. Records may be minutes apart: the 30 s of rich would
# contain only one of them, which gives no rate.
_SPEED_OVER_S = 24 * 3600.0
_BAR, _BAR_AND_TIME = 10, 19


class Terminal(Observer):
    """A progress bar on a terminal, a line per evaluation elsewhere."""

    def __init__(self, console: Console, *, title: str, steps: int) -> None:
        self._console, self._title, self._steps = console, title, steps
        self._draws = shows_bars(console)
        self._progress = Progress(
            BarColumn(_BAR),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            disable=not self._draws,
            speed_estimate_period=_SPEED_OVER_S,
        )
        self._val_loss: float | None = None
        self._progress.start()
        self._task = self._progress.add_task(title, total=steps)

    def record(self, record: dict[str, Any]) -> None:
        """Move the bar."""
        # The last validation loss stays on display.
        self._val_loss = record.get("val_loss", self._val_loss)
        validation = "" if self._val_loss is None else f" val {self._val_loss:.4f}"
        parts = [
            self._title,
            f"{record['step']}/{self._steps}",
            f"loss {record['loss']:.4f}{validation}",
            f"{record['tokens_per_s']:,.0f} tokens/s",
            f"{record['rounds']} rounds",
            f"sent {nbytes_text(record['sent_bytes'])}",
            f"received {nbytes_text(record['received_bytes'])}",
            f"waited {record['wait_s']:.1f} s",
        ]
        if "workers" in record:  # in an elastic run
            parts.append(counted(record["workers"], "worker"))
        if self._draws:
            # Break lines between parts, not within one.
            whole = "  ".join(part.replace(" ", "\0") for part in parts)
            room = max(1, self._console.width - _BAR_AND_TIME)
            lines = textwrap.wrap(whole, room, break_long_words=False, break_on_hyphens=False)
            shown = "\n".join(lines).replace("\0", " ")
            self._progress.update(self._task, completed=record["step"], description=shown)
        elif "val_loss" in record:
            self._say("  ".join(parts))

    def event(self, event: Event) -> None:
        """Print a line above the bar."""
        if event.kind == "committed":  # the bar counts the rounds
            return
        self._say(str(event))

    def fail(self, why: str) -> None:
        """Print the reason."""
        self._say(why)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()

    def _say(self, line: str) -> None:
        # Names that users choose may look like rich's markup.
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class OnRecord(Observer):
    """Calls `act` with each record, and `close` at the end."""

    def __init__(self, act: Callable[..., object], close: Callable[..., object] = bool) -> None:
        self._act, self._close = act, close

    def record(self, record: dict[str, Any]) -> None:
        """Pass on the record."""
        self._act(record)

    def close(self) -> None:
        """Pass on the end."""
        self._close()


def tensorboard(folder: Path) -> Observer:
    """Scalars for TensorBoard under `folder`.

    Raises:
        ConfigurationError: tensorboard is not installed.
    """
    writer = _package("tensorboard", "torch.utils.tensorboard").SummaryWriter(str(folder))

    def write(record: dict[str, Any]) -> None:
        for name in record.keys() - {"step"}:
            writer.add_scalar(name, record[name], record["step"])

    return OnRecord(write, writer.close)


def tracker(package: str, project: str, **described: Any) -> Observer:
    """Scalars for a client with the interface of Weights & Biases: `init`, `log` and `finish`.

    Args:
        package: wandb or trackio.
        project: the project to report to.
        described: passed to `init`: name of the curve, group of related curves, config.

    Raises:
        ConfigurationError: the package is not installed, or refuses the project.
    """
    client = _package(package, package)
    try:
        run = client.init(project=project, **described)
    except Exception as error:  # of many kinds, all about the request
        what = f"report to {package} project {project!r}"
        because = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        do = f"correct the project's name or {package}'s settings, or leave --{package} out"
        raise ConfigurationError(what, because=because, do=do) from error

    def log(record: dict[str, Any]) -> None:
        run.log({k: value for k, value in record.items() if k != "step"}, step=record["step"])

    return OnRecord(log, run.finish)


def _package(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what, do = f"report to {name}", f"pip install {name}"
        raise ConfigurationError(what, because=str(error), do=do) from error
