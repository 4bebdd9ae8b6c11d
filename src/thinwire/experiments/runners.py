"""Begins or continues the missing runs of an experiment."""

import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from thinwire.errors import CheckpointError, ConfigurationError, ThinwireError
from thinwire.experiments.experiment import Experiment
from thinwire.experiments.grid import VariantSpec, configure
from thinwire.runs.comparable import check_comparable, not_comparable
from thinwire.runs.find import note_planned_runs
from thinwire.runs.schema import read_config
from thinwire.runs.statistics import Estimate
from thinwire.runs.status import RunState, RunStatus, forget_failure, note_failure, status_of
from thinwire.runs.variants import Variant
from thinwire.train.config import TrainConfig
from thinwire.train.observers import Observer, OnRecord
from thinwire.train.trainer import resume
from thinwire.train.workers.group import cores

RunKey: TypeAlias = tuple[VariantSpec, int]
"""A variant and a seed."""

_TO_DO = (RunState.ABSENT, RunState.UNFINISHED, RunState.FAILED)
_NOTED = (RunState.DIVERGED, RunState.FAILED)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """A run to carry out.

    Args:
        title: name of the run in messages.
        folder: folder of the run.
        config: configuration of the run.
    """

    title: str
    folder: Path
    config: TrainConfig

    @property
    def log(self) -> Path:
        """File for a traceback and, for a run in another process, its output; absent if empty.

        Not in the run's folder, which may belong to another run.
        """
        return self.folder.parent / "logs" / f"{self.folder.name}.log"

    def failed(self, failure: str) -> str:
        """The message to show for a failure of this run."""
        log = f"; its log: {self.log}" if self.log.exists() else ""
        return f"{self.title} failed: {failure}{log}"


MakeObserver: TypeAlias = Callable[[PlannedRun], Observer]
"""Makes the observer of a run."""

NotePlanned: TypeAlias = Callable[[Sequence[tuple[PlannedRun, RunStatus]]], None]
"""Receives the runs to carry out next, with their status before any of them begins."""


def no_observer(_: PlannedRun) -> Observer:
    """An observer that ignores the records of a run."""
    return Observer()


Runner: TypeAlias = Callable[[Sequence[PlannedRun], MakeObserver], list[str | None]]
"""Begins or continues runs, each in its own folder, and makes a run's observer when it starts.

Returns for each run, in order, why it failed, or None.
"""


def one_by_one(runs: Sequence[PlannedRun], make_observer: MakeObserver) -> list[str | None]:
    """The `Runner` that carries out runs one after the other, in this process."""
    return [carry_out(run, make_observer(run), len(cores())) for run in runs]


def carry_out(run: PlannedRun, shown: Observer, cores: int) -> str | None:
    """Begin or continue one run in this process; returns why it failed, or None.

    Args:
        run: run to carry out.
        shown: receives its records; closed at the end.
        cores: number of cores that it may use.
    """
    try:
        forget_failure(run.folder)
        # Records only: `shown` is closed below, once it is known how the run ended.
        watching = OnRecord(shown.record)
        resume(_with_threads(run, cores), run.folder, lambda _config, _step: [watching])
    except Exception as error:  # whatever it is, the other runs continue
        kind, why = type(error).__name__, str(error).strip() or repr(error)
        # After a ConfigurationError the folder may belong to another process that writes there.
        if not isinstance(error, ConfigurationError):
            note_failure(run.folder, kind, why)
        if not isinstance(error, ThinwireError):  # whose message has the remedy
            with suppress(OSError):  # a full disk may be what went wrong
                run.log.parent.mkdir(parents=True, exist_ok=True)
                with run.log.open("a", encoding="utf-8") as file:
                    traceback.print_exception(error, file=file)
        shown.fail(run.failed(f"{kind}: {why}"))
        return f"{kind}: {why}"
    finally:
        shown.close()
    return None


def _with_threads(run: PlannedRun, cores: int) -> TrainConfig:
    """The run's configuration with its share of the cores, or with the threads it began with."""
    machine = run.config.machine
    if machine.threads:
        return run.config
    try:
        # Sums depend on the number of threads, so a continued run keeps its own.
        threads = read_config(run.folder).threads
    except CheckpointError:
        threads = 0
    threads = threads or max(1, cores // run.config.workers)
    return dataclasses.replace(run.config, machine=dataclasses.replace(machine, threads=threads))


# -- the missing runs ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonRow:
    """One variant and the status of its runs.

    Args:
        spec: the variant, with the rates that a search chose.
        statuses: status of its runs, by seed.
    """

    spec: VariantSpec
    statuses: Mapping[int, RunStatus]

    def by_folder(self) -> dict[str, RunStatus]:
        """Status of the runs, by the name of their folder."""
        return {self.spec.folder(seed): status for seed, status in self.statuses.items()}

    @property
    def variant(self) -> Variant | None:
        """The row's finished runs; None if none has finished."""
        runs = tuple(s.run for _, s in sorted(self.statuses.items()) if s.run is not None)
        return Variant(label=self.spec.label, runs=runs) if runs else None

    @property
    def loss(self) -> Estimate | None:
        """Mean validation loss; None without finished runs."""
        return self.variant and self.variant.loss

    @property
    def losses(self) -> dict[int, float]:
        """Validation loss of the finished runs, by seed."""
        return {} if self.variant is None else self.variant.losses


@dataclass(eq=False)  # what it knows grows
class ExperimentRunner:
    """Variants times seeds, carried out until each has a result or a reason for having none.

    Args:
        experiment: the grid to which the variants belong.
        out: folder of the run folders.
        runner: carries out the runs.
        make_observer: makes the observer of a run.
        note_planned: receives the runs before any of them begins.

    `statuses` holds the status of all runs so far.
    """

    experiment: Experiment
    out: Path
    runner: Runner
    make_observer: MakeObserver
    note_planned: NotePlanned | None = None
    statuses: dict[RunKey, RunStatus] = field(init=False, default_factory=dict[RunKey, RunStatus])
    _runs: dict[RunKey, PlannedRun] = field(init=False, default_factory=dict[RunKey, PlannedRun])

    def complete(self, keys: Sequence[RunKey]) -> None:
        """Carry out those of `keys` that are missing, then set the status of each.

        Raises:
            ConfigurationError: values do not fit, or runs cannot be compared; nothing has run then.
        """
        runs = {(spec, seed): self._planned(spec, seed) for spec, seed in keys}
        self._runs |= runs
        check_comparable({run.title: run.config.describe() for run in self._runs.values()})
        statuses = {key: _status(run) for key, run in runs.items()}
        missing = [key for key, status in statuses.items() if status.state in _TO_DO]
        if self.note_planned is not None:
            self.note_planned([(runs[key], status) for key, status in statuses.items()])
        failures = self.runner([runs[key] for key in missing], self._begin)
        for key, failure in zip(missing, failures, strict=True):
            statuses[key] = _status(runs[key])
            if failure is not None and statuses[key].state not in _NOTED:
                statuses[key] = RunStatus(state=RunState.FAILED, why=failure)
        self.statuses |= statuses
        # A search and the runs that follow it form one comparison.
        apart = not_comparable([s.run for s in self.statuses.values() if s.run is not None])
        for key, run in self._runs.items():
            if run.folder in apart:
                why = apart[run.folder]
                self.statuses[key] = RunStatus(state=RunState.UNRELATED, why=why)

    def row(self, spec: VariantSpec) -> ComparisonRow:
        """A variant and the status of its runs so far."""
        found = {seed: status for (own, seed), status in self.statuses.items() if own == spec}
        return ComparisonRow(spec=spec, statuses=found)

    def note(self, *, is_over: bool) -> None:
        """Note in `out` which runs exist."""
        names = {run.folder.name for run in self._runs.values()}
        note_planned_runs(self.out, names, is_over=is_over)

    def _begin(self, run: PlannedRun) -> Observer:
        # Not earlier, because runs that a runner refuses leave no folder.
        self.note(is_over=False)
        return self.make_observer(run)

    def _planned(self, spec: VariantSpec, seed: int) -> PlannedRun:
        rates = "".join(f" {name}={value}" for name, value in spec.searched_texts())
        return PlannedRun(
            title=f"{spec.label}{rates} seed {seed}",
            folder=self.out / spec.folder(seed),
            config=configure(self.experiment, spec, seed),
        )


def _status(run: PlannedRun) -> RunStatus:
    return status_of(run.folder, run.config.describe())
