"""Results of an experiment: the search for rates, the rows and their differences.

The search gives every row the same number of runs, then repeats the best few with more seeds before
it chooses one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from thinwire.errors import check
from thinwire.experiments.experiment import Experiment, Tuning
from thinwire.experiments.grid import VariantSpec, specs_of, with_candidates
from thinwire.experiments.runners import (
    ComparisonRow,
    ExperimentRunner,
    MakeObserver,
    NotePlanned,
    Runner,
    no_observer,
    one_by_one,
)
from thinwire.runs.folder import write_json
from thinwire.runs.statistics import Estimate, paired_difference
from thinwire.runs.status import RunState, RunStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningResult:
    """Result of the search for one variant.

    Args:
        spec: the variant, as requested.
        tried: the variant with each candidate's rates, and their runs.
        chosen: the best of `tried`; None if none could be chosen.
        why: reason for the choice, or for making none.
    """

    spec: VariantSpec
    tried: Sequence[ComparisonRow]
    chosen: VariantSpec | None
    why: str

    def edges(self) -> list[str]:
        """Rates whose chosen value is the lowest or highest tried: a better one may lie beyond."""
        found: list[str] = []
        for name, value in ({} if self.chosen is None else self.chosen.searched.given()).items():
            values = {row.spec.searched.given().get(name, value) for row in self.tried}
            if len(values) > 1 and value in (min(values), max(values)):
                found.append(name)
        return found


def search(
    runner: ExperimentRunner, tuning: Tuning, specs: Sequence[VariantSpec]
) -> list[TuningResult]:
    """Try all candidates with the first seed and the best few with all, and choose by the mean.

    Raises:
        ConfigurationError: some rows have more candidates than others, or values do not fit.
    """
    recipe = runner.experiment.recipe
    tried = {spec: with_candidates(spec, tuning.of(spec.method), recipe) for spec in specs}
    fewest, most = (pick(tried, key=lambda spec: len(tried[spec])) for pick in (min, max))
    few, many = len(tried[fewest]), len(tried[most])
    because = f"{fewest.label} has {few} different candidates and {most.label} {many}"
    do = f"give {fewest.method} its own, such as --tune {fewest.method}:inner-lr=1e-3,2e-3"
    check(few == many, "tune with the same budget", because=because, do=do)
    first, *more = runner.experiment.seeds
    runner.complete([(c, first) for own in tried.values() for c in own])
    best: dict[VariantSpec, list[VariantSpec]] = {}
    for spec, own in tried.items():
        losses = _mean_losses([runner.row(c) for c in own]) or {}
        best[spec] = sorted(losses, key=lambda c: losses[c])[: tuning.repeated]
    runner.complete([(c, seed) for own in best.values() for c in own for seed in more])
    return [
        _choose(spec, [runner.row(c) for c in own], [runner.row(c) for c in best[spec]])
        for spec, own in tried.items()
    ]


def _mean_losses(rows: Sequence[ComparisonRow]) -> dict[VariantSpec, float] | None:
    """Mean losses of candidates that did not diverge; None if a run, maybe the best, is missing."""
    ended = (RunState.FINISHED, RunState.DIVERGED)
    if any(status.state not in ended for row in rows for status in row.statuses.values()):
        return None
    finished = (row for row in rows if len(row.losses) == len(row.statuses))
    return {row.spec: row.loss.mean for row in finished if row.loss is not None}


def _choose(
    spec: VariantSpec, tried: Sequence[ComparisonRow], best: Sequence[ComparisonRow]
) -> TuningResult:
    losses = _mean_losses(best or tried)
    if not losses:
        diverged = "every candidate diverged with at least one seed"
        why = "runs are missing" if losses is None else diverged
        return TuningResult(spec=spec, tried=tried, chosen=None, why=why)
    seeds = ", ".join(str(seed) for seed in best[0].statuses)
    why = f"the lowest mean loss over seeds {seeds} of the best {len(best)} of {len(tried)}"
    chosen = min(losses, key=lambda c: losses[c])
    return TuningResult(spec=spec, tried=tried, chosen=chosen, why=why)


def write_tuning(file: Path, tuning: Tuning, results: Sequence[TuningResult]) -> None:
    """Write the candidates, their results and the choices."""
    data = {
        "what": "validation loss in nats per token; all candidates with the first seed, the best "
        f"{tuning.repeated} with all seeds, and of these the one with the lowest mean",
        "candidates_per_row": len(results[0].tried),
        "rows": {
            result.spec.label: {
                "chosen": result.chosen and result.chosen.searched.given(),
                "why": result.why,
                "at_the_edge_of": result.edges(),
                "candidates": [
                    {
                        "settings": candidate.spec.searched.given(),
                        "runs": {
                            str(seed): {"folder": candidate.spec.folder(seed)} | _outcome(status)
                            for seed, status in sorted(candidate.statuses.items())
                        },
                    }
                    for candidate in result.tried
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
class Comparison:
    """All rows.

    Args:
        rows: in the order of the experiment.
        baselines: maps the label of a row to that of its baseline.
        tuning: results of the search; empty without one.
    """

    rows: Sequence[ComparisonRow]
    baselines: Mapping[str, str]
    tuning: Sequence[TuningResult]

    def difference(self, row: ComparisonRow) -> Estimate | None:
        """Loss of a row minus its baseline's, paired by seed; None for the baseline itself."""
        base = self.baselines.get(row.spec.label)
        if base is None or base == row.spec.label:
            return None
        (losses,) = [other.losses for other in self.rows if other.spec.label == base]
        return paired_difference(row.losses, losses)

    def problems(self) -> dict[str, RunStatus]:
        """Folders of this comparison, and rows of its search, that have no result."""
        runs = {folder: s for row in self.rows for folder, s in row.by_folder().items()}
        for result in self.tuning:
            if result.chosen is None:
                runs[result.spec.label] = RunStatus(state=RunState.FAILED, why=result.why)
            for candidate in result.tried:
                # In a search, divergence is a result.
                found = candidate.by_folder().items()
                runs |= {folder: s for folder, s in found if s.state is not RunState.DIVERGED}
        return {folder: s for folder, s in runs.items() if s.state is not RunState.FINISHED}

    def statistics(self) -> dict[str, Any]:
        """Means and errors of every row, as JSON-able data."""
        return {
            row.spec.label: {
                "val_loss": to_builtins(row.loss),
                "baseline": self.baselines.get(row.spec.label),
                "val_loss_minus_baseline": to_builtins(apart),
            }
            for row in self.rows
            for apart in [self.difference(row)]
        }

    def write(self, out: Path) -> None:
        """Write compare.json (runs by row) and statistics.json into `out`."""
        out.mkdir(parents=True, exist_ok=True)
        summaries = {
            row.spec.label: [
                {
                    **status.run.summary.described,
                    "memory_bytes": status.run.records[-1].state_bytes,
                    "seed": seed,
                    "folder": row.spec.folder(seed),
                }
                for seed, status in row.statuses.items()
                if status.run is not None
            ]
            for row in self.rows
        }
        write_json(out / "compare.json", summaries)
        left_out = {n: {"state": s.state, "why": s.why} for n, s in self.problems().items()}
        write_json(out / "statistics.json", {"rows": self.statistics(), "left_out": left_out})


def compare(
    experiment: Experiment,
    out: Path,
    make_observer: MakeObserver = no_observer,
    runner: Runner = one_by_one,
    note_planned: NotePlanned | None = None,
) -> Comparison:
    """Carry out the missing runs of `experiment` in `out`, and write the results.

    Keeps finished runs and continues unfinished ones. A damaged folder, or one that holds another
    run, is left alone, and its run has no result.

    Args:
        experiment: experiment to carry out.
        out: folder for the run folders, compare.json, statistics.json, tuning.json and, from the
            beginning, planned.json.
        make_observer: makes the observer of a run.
        runner: carries out the runs; default one after the other.
        note_planned: receives the runs to carry out next, with their status before they begin; a
            search calls it several times.

    Raises:
        ConfigurationError: the experiment cannot work; nothing has run.
    """
    specs = specs_of(experiment)
    baselines = _baselines(specs, experiment.baseline)
    runs = ExperimentRunner(experiment, out, runner, make_observer, note_planned)
    tuning: list[TuningResult] = []
    if experiment.tuning is not None:
        tuning = search(runs, experiment.tuning, specs)
        write_tuning(out / "tuning.json", experiment.tuning, tuning)
    chosen = {result.spec: result.chosen for result in tuning}
    final = {spec: chosen.get(spec, spec) for spec in specs}
    # Seed by seed, so that a whole table is there early.
    runs.complete([(spec, seed) for seed in experiment.seeds for spec in final.values() if spec])
    comparison = Comparison(
        # If a search chose nothing, the row stays without runs.
        rows=[runs.row(spec or asked) for asked, spec in final.items()],
        baselines=baselines,
        tuning=tuning,
    )
    comparison.write(out)
    runs.note(is_over=True)
    return comparison


def _baselines(specs: Sequence[VariantSpec], name: str | None) -> dict[str, str]:
    """Map the label of each row to that of the baseline with the same values on all axes.

    Axes that do not apply to the baseline do not count.
    """
    if name is None:
        methods = [spec.method for spec in specs]
        name = "diloco" if "diloco" in methods else methods[0]
    exact = [spec for spec in specs if spec.label == name]
    bases = exact or [spec for spec in specs if spec.method == name]
    because = f"the rows are {', '.join(spec.label for spec in specs)}"
    do = "pass one of these, or one of the methods, as the baseline"
    check(bool(bases), f"take differences to {name!r}", because=because, do=do)
    found: dict[str, str] = {}
    for spec in specs:
        places = dict(spec.coordinates)
        beside = [b for b in bases if all(places.get(a) == v for a, v in b.coordinates)]
        matching = bases if len(bases) == 1 else beside
        if len(matching) == 1:
            found[spec.label] = matching[0].label
    return found
