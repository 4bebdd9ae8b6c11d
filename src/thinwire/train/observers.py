"""Who is told about a run while it goes on: a file, a terminal, TensorBoard, W&B."""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from thinwire.elastic.events import Event, EventLog
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.train.run_folder import RunFolder

__all__ = [
    "EventsFile",
    "MetricsFile",
    "Observer",
    "Relay",
    "Terminal",
    "bytes_text",
    "tensorboard",
    "wandb",
]

_LOG = logging.getLogger(__name__)


def bytes_text(count: float) -> str:
    """`count` bytes as people write them.

    >>> bytes_text(1234), bytes_text(5.6e9)
    ('1.23 kB', '5.60 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


class Observer(ABC):
    """Is shown every record of a run."""

    @abstractmethod
    def record(self, record: dict[str, Any]) -> None:
        """A record as metrics.jsonl has it."""

    def event(self, event: Event) -> None:
        """What happened to the membership of an elastic run; called from any thread."""
        del event

    def close(self) -> None:
        """The run is over."""
        return


@final
class MetricsFile(Observer):
    """Writes metrics.jsonl."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def record(self, record: dict[str, Any]) -> None:
        """Append a line."""
        self._folder.append(record)


@final
class EventsFile(Observer):
    """Writes events.jsonl."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def record(self, record: dict[str, Any]) -> None:
        """Nothing: metrics have their own file."""

    def event(self, event: Event) -> None:
        """Append a line."""
        try:
            self._folder.append_event(event.describe())
        except CheckpointError as error:
            # Whoever noted the event is in the middle of an exchange, and its log has it anyway.
            _LOG.warning("%s", error)


@final
class Relay:
    """Tells observers of every event, those that the log kept from before first.

    Args:
        log: of the events.
        observers: who is told.
    """

    def __init__(self, log: EventLog, observers: Sequence[Observer]) -> None:
        self._observers, self._lock = observers, threading.Lock()
        with self._lock:
            for event in log.listen(self._tell):
                self._pass_on(event)

    def _tell(self, event: Event) -> None:
        with self._lock:
            self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        for observer in self._observers:
            observer.event(event)


@final
class Terminal(Observer):
    """A progress bar where there is a terminal, a line per evaluation where there is none."""

    def __init__(self, console: Console, *, title: str, steps: int) -> None:
        self._console, self._title, self._steps = console, title, steps
        columns = [BarColumn(10), TimeRemainingColumn(), TextColumn("{task.description}")]
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._val_loss: float | None = None
        self._progress.start()
        self._task = self._progress.add_task(title, total=steps)

    def record(self, record: dict[str, Any]) -> None:
        """Move the bar."""
        lines = self._learning(record), _exchange(record)
        # Two lines, so that everything is seen in 80 columns.
        text = "\n".join(lines)
        self._progress.update(self._task, completed=record["step"], description=text)
        if not self._console.is_terminal and "val_loss" in record:
            self._console.print("  ".join(lines), highlight=False, soft_wrap=True)

    def event(self, event: Event) -> None:
        """A line, above the bar, which counts the rounds."""
        if event.kind == "committed":
            return
        self._console.print(str(event), highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()

    def _learning(self, record: dict[str, Any]) -> str:
        # The last validation loss stays on display until there is a newer one.
        self._val_loss = record.get("val_loss", self._val_loss)
        validation = "" if self._val_loss is None else f" val {self._val_loss:.4f}"
        return (
            f"{self._title}  {record['step']}/{self._steps}  loss {record['loss']:.4f}"
            f"{validation}  {record['tokens_per_s']:,.0f} tokens/s"
        )


def _exchange(record: dict[str, Any]) -> str:
    return (
        f"{record['rounds']} rounds  sent {bytes_text(record['sent_bytes'])}  "
        f"received {bytes_text(record['received_bytes'])}  waited {record['wait_s']:.1f} s"
    )


@final
class _Scalars(Observer):
    def __init__(self, write: Any, close: Any) -> None:
        self._write, self._close = write, close

    def record(self, record: dict[str, Any]) -> None:
        step = record["step"]
        self._write({key: value for key, value in record.items() if key != "step"}, step)

    def close(self) -> None:
        self._close()


def tensorboard(folder: Path) -> Observer:
    """Scalars for TensorBoard under `folder`.

    Raises:
        ConfigurationError: tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise _missing("tensorboard", error) from error
    writer = SummaryWriter(str(folder))

    def write(scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return _Scalars(write, writer.close)


def wandb(project: str, *, name: str, config: dict[str, Any]) -> Observer:
    """Scalars for Weights & Biases.

    Raises:
        ConfigurationError: wandb is not installed.
    """
    try:
        import wandb as client  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _missing("wandb", error) from error
    run: Any = client.init(project=project, name=name, config=config)
    return _Scalars(lambda scalars, step: run.log(scalars, step=step), run.finish)


def _missing(package: str, error: ImportError) -> ConfigurationError:
    return ConfigurationError(
        f"report to {package}", because=str(error), do=f"pip install {package}"
    )
