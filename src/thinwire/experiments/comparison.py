"""Results of an experiment: the search for rates, the rows and their differences.

The search gives every row the same number of runs, and the best few more seeds before one is
chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigurationError
from thinwire.experiments.experiment import Experiment, Tuning
from thinwire.experiments.grid import VariantSpec, specs_of, with_candidates
from thinwire.experiments.runners import (
    ExperimentRunner,
    MakeObserver,
    NotePlanned,
    RunKey,
    Runner,
    SequentialRunner,
    no_observer,
)
from thinwire.runs.find import note_planned_runs
from thinwire.runs.folder import write_json
from thinwire.runs.statistics import Estimate, estimate, paired_difference
from thinwire.runs.status import RunState, RunStatus
from thinwire.runs.variants import Variant


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningResult:
    """Result of the search for one variant.

    Args:
        spec: the variant, as requested.
        tried: the variant with each candidate's rates, and the status of their runs, by seed.
        chosen: the best one of `tried`; None if none could be chosen.
        why: reason of the choice, or for none.
    """

    spec: VariantSpec
    tried: Mapping[VariantSpec, Mapping[int, RunStatus]]
    chosen: VariantSpec | None
    why: str

    def edges(self) -> list[str]:
        """Rates whose chosen value is the lowest or highest tried: a better one may be beyond."""
        found: list[str] = []
        for name, value in _searched(self.chosen).items():
            values = {s[name] for candidate in self.tried if name in (s := _searched(candidate))}
            if len(values) > 1 and value in (min(values), max(values)):
                found.append(name)
        return found


def _searched(spec: VariantSpec | None) -> dict[str, float]:
    return {} if spec is None else {name: float(value) for name, value in spec.searched}


def candidates_of(
    experiment: Experiment, tuning: Tuning, specs: Sequence[VariantSpec]
) -> dict[VariantSpec, list[VariantSpec]]:
    """Candidates of each variant.

    Raises:
        ConfigurationError: not the same number for all.
    """
    tried = {
        spec: with_candidates(spec, tuning.of(spec.method), experiment.recipe) for spec in specs
    }
    fewest, most = (pick(tried, key=lambda spec: len(tried[spec])) for pick in (min, max))
    few, many = len(tried[fewest]), len(tried[most])
    if few != many:
        because = f"{fewest.label} has {few} different candidates and {most.label} {many}"
        do = f"give {fewest.method} its own, such as --tune {fewest.method}:inner-lr=1e-3,2e-3"
        raise ConfigurationError("tune with the same budget", because=because, do=do)
    return tried


def search(
    runner: ExperimentRunner, tuning: Tuning, specs: Sequence[VariantSpec]
) -> list[TuningResult]:
    """Try all candidates with the first seed and the best few with all, and choose by the mean.

    Raises:
        ConfigurationError: as `candidates_of`, or values that do not fit.
    """
    tried = candidates_of(runner.experiment, tuning, specs)
    first, *more = runner.experiment.seeds
    statuses = runner.complete([(c, first) for own in tried.values() for c in own])
    best = {
        spec: _best({c: statuses[c, first] for c in own}, tuning.repeated)
        for spec, own in tried.items()
    }
    statuses |= runner.complete([(c, seed) for own in best.values() for c in own for seed in more])
    return [_choose(spec, own, best[spec], statuses) for spec, own in tried.items()]


def _best(statuses: Mapping[VariantSpec, RunStatus], count: int) -> list[VariantSpec]:
    """The `count` of lowest loss; none where a run is missing, for it might be one of them."""
    if any(s.state not in (RunState.FINISHED, RunState.DIVERGED) for s in statuses.values()):
        return []
    losses = {c: s.run.summary.val_loss for c, s in statuses.items() if s.run is not None}
    return sorted(losses, key=lambda c: losses[c])[:count]


def _choose(
    spec: VariantSpec,
    tried: list[VariantSpec],
    best: list[VariantSpec],
    statuses: Mapping[RunKey, RunStatus],
) -> TuningResult:
    by_seed = {c: {seed: s for (own, seed), s in statuses.items() if own == c} for c in tried}
    states = [s.state for c in best for s in by_seed[c].values()]
    chosen = None
    if not best:
        all_states = {s.state for own in by_seed.values() for s in own.values()}
        diverged = all_states == {RunState.DIVERGED}
        why = "all diverged" if diverged else "runs with the first seed are missing"
    elif any(state not in (RunState.FINISHED, RunState.DIVERGED) for state in states):
        why = "runs with the other seeds are missing"
    else:
        steady = {c: mean for c in best if (mean := _mean_loss(by_seed[c])) is not None}
        chosen = min(steady, key=lambda c: steady[c], default=None)
        seeds = ", ".join(str(seed) for seed in by_seed[best[0]])
        why = f"the lowest mean loss over seeds {seeds} of the best {len(best)} of {len(tried)}"
        if chosen is None:
            why = "each of the best diverged with one of the seeds"
    return TuningResult(spec=spec, tried=by_seed, chosen=chosen, why=why)


def _mean_loss(by_seed: Mapping[int, RunStatus]) -> float | None:
    """Over all seeds; None if one of them has no result."""
    losses = {seed: s.run.summary.val_loss for seed, s in by_seed.items() if s.run is not None}
    return estimate(losses).mean if len(losses) == len(by_seed) else None


def write_tuning(file: Path, tuning: Tuning, results: Sequence[TuningResult]) -> None:
    """Write the candidates, their results and the choices."""
    data = {
        "what": "validation loss in nats per token; all candidates with the first seed, the best "
        f"{tuning.repeated} with all seeds, and of these the one with the lowest mean",
        "candidates_per_row": len(results[0].tried),
        "rows": {
            result.spec.label: {
                "chosen": None if result.chosen is None else _searched(result.chosen),
                "why": result.why,
                "at_the_edge_of": result.edges(),
                "candidates": [
                    {
                        "settings": _searched(candidate),
                        "runs": {
                            str(seed): {"folder": candidate.folder(seed)} | _outcome(status)
                            for seed, status in sorted(by_seed.items())
                        },
                    }
                    for candidate, by_seed in result.tried.items()
                ],
            }
            for result in results
        },
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, data)


def _outcome(status: RunStatus) -> dict[str, Any]:
    if status.run is not None:
        return {"val_loss": status.run.summary.val_loss}
    return {"state": str(status.state), "why": status.why}


# -- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonRow:
    """One variant and the status of its runs.

    Args:
        spec: the variant, as requested.
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
        baselines: label of a row to that of its baseline.
        tuning: results of the search; empty without one.
        unrelated: folders with other runs.
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
                # A rate that diverges is a result of a search.
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
                "val_loss": None if row.loss is None else row.loss.describe(),
                "baseline": self.baselines.get(row.label),
                "val_loss_minus_baseline": None if apart is None else apart.describe(),
            }
            for row in self.rows
            for apart in [self.difference(row)]
        }

    def write(self, out: Path) -> None:
        """Write compare.json (runs by row) and statistics.json into `out`."""
        out.mkdir(parents=True, exist_ok=True)
        summaries = {
            row.label: [
                {
                    **status.run.summary.described,
                    "memory_bytes": status.run.memory_bytes,
                    "seed": seed,
                    "folder": row.spec.folder(seed),
                }
                for seed, status in row.statuses.items()
                if status.run is not None
            ]
            for row in self.rows
        }
        write_json(out / "compare.json", summaries)
        others = self.problems() | dict(self.unrelated)
        left_out = {name: {"state": s.state, "why": s.why} for name, s in others.items()}
        write_json(out / "statistics.json", {"rows": self.statistics(), "left_out": left_out})


def compare(
    experiment: Experiment,
    out: Path,
    make_observer: MakeObserver = no_observer,
    runner: Runner | None = None,
    note_planned: NotePlanned | None = None,
) -> Comparison:
    """Carry out the missing runs of `experiment` in `out`, and write the results.

    Finished runs are kept, unfinished ones continued. A folder with another run, or a damaged one,
    is left alone, and its run has no result.

    Args:
        experiment: to carry out.
        out: folder of the run folders, compare.json, statistics.json, tuning.json and, from the
            beginning, planned.json.
        make_observer: makes the observer of a run.
        runner: carries out the runs; default one after the other.
        note_planned: receives the runs to carry out next, with their status before they begin; a
            search calls it several times.

    Raises:
        ConfigurationError: a description that cannot work; nothing has run.
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

    Axes that do not apply to the baseline do not count.
    """
    if name is None:
        methods = [spec.method for spec in specs]
        name = "diloco" if "diloco" in methods else methods[0]
    exact = [spec for spec in specs if spec.label == name]
    bases = exact or [spec for spec in specs if spec.method == name]
    if not bases:
        because = f"the rows are {', '.join(spec.label for spec in specs)}"
        do = "pass one of these, or one of the methods, as the baseline"
        raise ConfigurationError(f"take differences to {name!r}", because=because, do=do)
    found: dict[str, str] = {}
    for spec in specs:
        places = dict(spec.coordinates)
        beside = [b for b in bases if all(places.get(a) == v for a, v in b.coordinates)]
        matching = bases if len(bases) == 1 else beside
        if len(matching) == 1:
            found[spec.label] = matching[0].label
    return found
