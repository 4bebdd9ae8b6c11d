"""The search for rates: as many runs for every row, and more seeds before one is chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigurationError
from thinwire.experiments.experiment import Experiment, Tuning
from thinwire.experiments.grid import VariantSpec, with_candidates
from thinwire.experiments.runners import ExperimentRunner, RunKey
from thinwire.runs.folder import write_json
from thinwire.runs.statistics import estimate
from thinwire.runs.status import RunState, RunStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningResult:
    """What the search found for one variant.

    Args:
        spec: the variant as it was asked for.
        tried: the variant with each of the rates, and the status of their runs, by seed.
        chosen: the one of `tried` that was best; None if that cannot be said.
        why: how it was chosen, or why not.
    """

    spec: VariantSpec
    tried: Mapping[VariantSpec, Mapping[int, RunStatus]]
    chosen: VariantSpec | None
    why: str

    def edges(self) -> list[str]:
        """Rates whose chosen value is the lowest or highest that was tried.

        A better one may lie beyond.
        """
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
    """What is tried for each variant.

    Raises:
        ConfigurationError: not the same number for all.
    """
    tried = {
        spec: with_candidates(spec, tuning.of(spec.method), experiment.recipe) for spec in specs
    }
    fewest, most = (pick(tried, key=lambda spec: len(tried[spec])) for pick in (min, max))
    few, many = len(tried[fewest]), len(tried[most])
    if few != many:
        raise ConfigurationError(
            "tune with the same budget",
            because=f"{fewest.label} has {few} different candidates and {most.label} {many}",
            do=f"give {fewest.method} its own, such as --tune {fewest.method}:inner-lr=1e-3,2e-3",
        )
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


# -- what is written -------------------------------------------------------------------------------


def write_tuning(file: Path, tuning: Tuning, results: Sequence[TuningResult]) -> None:
    """Write what was tried, what came of it and what was chosen."""
    data = {
        "what": "validation loss in nats per token; all candidates with the first seed, the best "
        f"{tuning.repeated} with all seeds, and of these the one with the lowest mean",
        "candidates_per_row": len(results[0].tried),
        "rows": {result.spec.label: _described(result) for result in results},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, data)


def _described(result: TuningResult) -> dict[str, Any]:
    return {
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


def _outcome(status: RunStatus) -> dict[str, Any]:
    if status.run is not None:
        return {"val_loss": status.run.summary.val_loss}
    return {"state": str(status.state), "why": status.why}
