"""Runs of an experiment: carried out one after the other here, or side by side in processes."""

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

from thinwire.errors import ConfigurationError
from thinwire.experiments.standing import forget_failure, note_failure
from thinwire.train.config import TrainConfig
from thinwire.train.cores import cores
from thinwire.train.observers import Observer
from thinwire.train.trainer import resume

__all__ = ["Failure", "InTurn", "Run", "Runner", "Tell", "carry_out", "nobody"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run.

    Args:
        title: what people call it.
        folder: where it goes.
        config: what it is.
    """

    title: str
    folder: Path
    config: TrainConfig


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a run ended without a result.

    Args:
        kind: of the error.
        why: its text.
    """

    kind: str
    why: str


Tell: TypeAlias = Callable[[Run], Observer]


@final
class _Silent(Observer):
    def record(self, record: dict[str, Any]) -> None:
        del record


def nobody(run: Run) -> Observer:
    """Tells nobody of `run`."""
    del run
    return _Silent()


class Runner(ABC):
    """Carries out runs."""

    @abstractmethod
    def carry_out(self, runs: Sequence[Run], tell: Tell) -> list[Failure | None]:
        """Begin or continue each of `runs`; what went wrong with each, in their order.

        Args:
            runs: each in a folder of its own.
            tell: makes who is told of a run's progress.
        """


@final
class InTurn(Runner):
    """One after the other, in this process."""

    def carry_out(self, runs: Sequence[Run], tell: Tell) -> list[Failure | None]:
        """See `Runner`."""
        return [carry_out(run, lambda run=run: tell(run), len(cores())) for run in runs]


def carry_out(run: Run, observer: Callable[[], Observer], cores: int) -> Failure | None:
    """Begin or continue one run here.

    Args:
        run: which.
        observer: makes who is told of its progress.
        cores: its share of them.
    """
    try:
        forget_failure(run.folder)
        resume(_with_threads(run, cores), run.folder, lambda _config, _step: [observer()])
    except Exception as error:  # the other runs go on, whatever it is
        failure = Failure(kind=type(error).__name__, why=str(error).strip() or repr(error))
        # Such a run may belong to somebody else, who writes in its folder now.
        if not isinstance(error, ConfigurationError):
            note_failure(run.folder, failure.kind, failure.why)
        return failure
    return None


def _with_threads(run: Run, cores: int) -> TrainConfig:
    """The run's configuration with its share of the cores, or what it was begun with."""
    machine = run.config.machine
    if machine.threads:
        return run.config
    # Sums depend on it: a run that goes on keeps what it had.
    threads = _threads_of(run.folder) or max(1, cores // run.config.workers)
    return dataclasses.replace(run.config, machine=dataclasses.replace(machine, threads=threads))


def _threads_of(folder: Path) -> int:
    try:
        return int(json.loads((folder / "config.json").read_text())["machine"]["threads"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
