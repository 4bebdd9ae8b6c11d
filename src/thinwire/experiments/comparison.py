"""An experiment carried out, and what its rows say against each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigurationError
from thinwire.experiments.experiment import Experiment
from thinwire.experiments.grid import VariantSpec, specs_of
from thinwire.experiments.runners import (
    ExperimentRunner,
    MakeObserver,
    NotePlanned,
    Runner,
    SequentialRunner,
    no_observer,
)
from thinwire.experiments.tuning import TuningResult, search, write_tuning
from thinwire.runs.folder import write_json
from thinwire.runs.planned import note_planned_runs
from thinwire.runs.statistics import Estimate, paired_difference
from thinwire.runs.status import RunState, RunStatus
from thinwire.runs.variants import Variant


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonRow:
    """One variant and the status of its runs.

    Args:
        spec: the variant as it was asked for.
        statuses: of its runs, by seed.
    """

    spec: VariantSpec
    statuses: Mapping[int, RunStatus]

    @property
    def label(self) -> str:
        """The row's name in tables."""
        return self.spec.label

    @property
    def variant(self) -> Variant | None:
        """The row's finished runs; None if none has finished."""
        runs = [status.run for status in self.statuses.values() if status.run is not None]
        if not runs:
            return None
        return Variant(label=self.label, runs=tuple(sorted(runs, key=lambda run: run.seed)))

    @property
    def loss(self) -> Estimate | None:
        """Mean validation loss; None without finished runs."""
        return None if (variant := self.variant) is None else variant.loss

    @property
    def losses(self) -> dict[int, float]:
        """Validation loss of the finished runs, by seed."""
        return {} if (variant := self.variant) is None else variant.losses


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All rows.

    Args:
        rows: in the order of the experiment.
        baselines: label of a row to that of the one it is compared with.
        tuning: what a search chose for each row; empty without one.
        unrelated: folders that hold runs of something else.
    """

    rows: Sequence[ComparisonRow]
    baselines: Mapping[str, str]
    tuning: Sequence[TuningResult]
    unrelated: Mapping[str, RunStatus]

    def difference(self, row: ComparisonRow) -> Estimate | None:
        """Loss of a row minus that of its baseline, paired by seed; None of the baseline itself."""
        base = self.baselines.get(row.label)
        if base is None or base == row.label:
            return None
        (losses,) = [other.losses for other in self.rows if other.label == base]
        return paired_difference(row.losses, losses)

    def problems(self) -> dict[str, RunStatus]:
        """Folders of this comparison, and rows of its search, that have no result."""
        runs = {
            row.spec.folder(seed): status
            for row in self.rows
            for seed, status in row.statuses.items()
        }
        for result in self.tuning:
            if result.chosen is None:
                runs[result.spec.label] = RunStatus(state=RunState.FAILED, why=result.why)
            for candidate, by_seed in result.tried.items():
                # That a rate diverges is a result of a search.
                runs |= {
                    candidate.folder(seed): status
                    for seed, status in by_seed.items()
                    if status.state is not RunState.DIVERGED
                }
        return {folder: s for folder, s in runs.items() if s.state is not RunState.FINISHED}

    def statistics(self) -> dict[str, Any]:
        """Means and errors of every row, as JSON-able data."""
        return {
            row.label: {
                "val_loss": _described(row.loss),
                "baseline": self.baselines.get(row.label),
                "val_loss_minus_baseline": _described(self.difference(row)),
            }
            for row in self.rows
        }

    def write(self, out: Path) -> None:
        """Write compare.json (runs by row) and statistics.json into `out`."""
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "compare.json", {row.label: _summaries(row) for row in self.rows})
        others = self.problems() | dict(self.unrelated)
        left_out = {name: {"state": s.state, "why": s.why} for name, s in others.items()}
        write_json(out / "statistics.json", {"rows": self.statistics(), "left_out": left_out})


def _described(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else estimate.describe()


def _summaries(row: ComparisonRow) -> list[dict[str, Any]]:
    """Summaries of the finished runs, each with its memory, seed and folder."""
    return [
        {
            **status.run.summary.described,
            "memory_bytes": status.run.memory_bytes,
            "seed": seed,
            "folder": row.spec.folder(seed),
        }
        for seed, status in row.statuses.items()
        if status.run is not None
    ]


def compare(
    experiment: Experiment,
    out: Path,
    make_observer: MakeObserver = no_observer,
    runner: Runner | None = None,
    note_planned: NotePlanned | None = None,
) -> Comparison:
    """Carry out what is missing of `experiment` in `out`, and write what came of it.

    Finished runs are kept, unfinished ones continued. A folder that holds another run, or a
    damaged one, is left alone, and the run that belongs there has no result.

    Args:
        experiment: what is compared.
        out: folder of the run folders; gets compare.json, statistics.json, tuning.json and, at the
            beginning, planned.json.
        make_observer: makes what is shown the records of a run.
        runner: carries out the runs; default one after the other.
        note_planned: is told which runs are wanted next, with their status before they begin; a
            search calls it several times.

    Raises:
        ConfigurationError: a description that cannot work; nothing has run then.
    """
    specs = specs_of(experiment)
    baselines = _baselines(specs, experiment.baseline)
    runs = ExperimentRunner(
        experiment, out, runner or SequentialRunner(), make_observer, note_planned
    )
    tuning: list[TuningResult] = []
    if experiment.tuning is not None:
        tuning = search(runs, experiment.tuning, specs)
        write_tuning(out / "tuning.json", experiment.tuning, tuning)
    chosen = {result.spec: result.chosen for result in tuning}
    final = {spec: chosen.get(spec, spec) for spec in specs}
    wanted = [(spec, seed) for spec in final.values() if spec for seed in experiment.seeds]
    statuses = runs.complete(wanted)
    rows = [
        # A search without a choice leaves the row without runs.
        ComparisonRow(spec=asked, statuses={})
        if spec is None
        else ComparisonRow(spec=spec, statuses={s: statuses[spec, s] for s in experiment.seeds})
        for asked, spec in final.items()
    ]
    comparison = Comparison(
        rows=rows, baselines=baselines, tuning=tuning, unrelated=runs.unrelated()
    )
    comparison.write(out)
    note_planned_runs(out, runs.known, is_over=True)
    return comparison


def _baselines(specs: Sequence[VariantSpec], name: str | None) -> dict[str, str]:
    """Label of each row to that of the baseline at the same place on all axes.

    Axes that have no meaning for the baseline do not count.
    """
    if name is None:
        methods = [spec.method for spec in specs]
        name = "diloco" if "diloco" in methods else methods[0]
    exact = [spec for spec in specs if spec.label == name]
    bases = exact or [spec for spec in specs if spec.method == name]
    if not bases:
        raise ConfigurationError(
            f"take differences to {name!r}",
            because=f"the rows are {', '.join(spec.label for spec in specs)}",
            do="pass one of these, or one of the methods, as the baseline",
        )
    found: dict[str, str] = {}
    for spec in specs:
        matching = bases if len(bases) == 1 else [b for b in bases if _beside(spec, b)]
        if len(matching) == 1:
            found[spec.label] = matching[0].label
    return found


def _beside(spec: VariantSpec, base: VariantSpec) -> bool:
    places = dict(spec.coordinates)
    return all(places.get(axis) == value for axis, value in base.coordinates)
