"""The search for rates: as many runs for every row, and more seeds before one is chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from thinwire.errors import ConfigurationError
from thinwire.experiments.arms import Arm, tuned
from thinwire.experiments.campaign import Campaign, Standings
from thinwire.experiments.description import Experiment, Tuning
from thinwire.experiments.standing import Standing, State
from thinwire.experiments.statistics import estimate
from thinwire.train.run_folder import write_json

__all__ = ["Choice", "budget", "search", "write_tuning"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What the search found for one row.

    Args:
        arm: the row as it was asked for.
        tried: the row with each of the settings, and how their runs stand, by seed.
        chosen: the one of `tried` that was best; None if that cannot be said.
        why: how it was chosen, or why not.
    """

    arm: Arm
    tried: Mapping[Arm, Mapping[int, Standing]]
    chosen: Arm | None
    why: str

    def edges(self) -> list[str]:
        """Settings whose chosen value is the lowest or highest that was tried.

        A better one may lie beyond.
        """
        found: list[str] = []
        for name, value in _searched(self.chosen).items():
            values = {s[name] for candidate in self.tried if name in (s := _searched(candidate))}
            if len(values) > 1 and value in (min(values), max(values)):
                found.append(name)
        return found


def _searched(arm: Arm | None) -> dict[str, float]:
    """The settings of `arm` that a search varied or set."""
    return {} if arm is None else {name: float(value) for name, value in arm.chosen}


def budget(experiment: Experiment, tuning: Tuning, arms: Sequence[Arm]) -> dict[Arm, list[Arm]]:
    """What is tried for each row.

    Raises:
        ConfigurationError: not the same number for all.
    """
    tried = {arm: tuned(arm, tuning.of(arm.method), experiment.recipe) for arm in arms}
    fewest, most = (pick(tried, key=lambda arm: len(tried[arm])) for pick in (min, max))
    few, many = len(tried[fewest]), len(tried[most])
    if few != many:
        raise ConfigurationError(
            "tune with the same budget",
            because=f"{fewest.label} has {few} different candidates and {most.label} {many}",
            do=f"give {fewest.method} its own, such as --tune {fewest.method}:inner-lr=1e-3,2e-3",
        )
    return tried


def search(campaign: Campaign, tuning: Tuning, arms: Sequence[Arm]) -> list[Choice]:
    """Try everything with the first seed and the best few with all, and choose by the mean.

    Raises:
        ConfigurationError: as `budget`, or values that do not fit.
    """
    tried = budget(campaign.experiment, tuning, arms)
    first, *more = campaign.experiment.seeds
    stands = dict(campaign.complete([(c, first) for own in tried.values() for c in own]))
    best = {arm: _best(own, first, stands, tuning.repeated) for arm, own in tried.items()}
    stands |= campaign.complete([(c, seed) for own in best.values() for c in own for seed in more])
    return [_choose(arm, own, best[arm], stands) for arm, own in tried.items()]


def _best(candidates: list[Arm], seed: int, stands: Standings, count: int) -> list[Arm]:
    """The `count` of lowest loss; none where a run is missing, for it might be one of them."""
    if any(stands[c, seed].state not in (State.FINISHED, State.DIVERGED) for c in candidates):
        return []
    ended = [c for c in candidates if stands[c, seed].state is State.FINISHED]
    return sorted(ended, key=lambda c: _loss(stands[c, seed]))[:count]


def _loss(standing: Standing) -> float:
    assert standing.summary is not None
    return standing.summary["val_loss"]


def _choose(arm: Arm, tried: list[Arm], best: list[Arm], stands: Standings) -> Choice:
    by_seed = {c: {seed: s for (a, seed), s in stands.items() if a == c} for c in tried}
    states = [s.state for c in best for s in by_seed[c].values()]
    chosen = None
    if not best:
        diverged = all(s.state is State.DIVERGED for own in by_seed.values() for s in own.values())
        why = "all diverged" if diverged else "runs with the first seed are missing"
    elif any(state not in (State.FINISHED, State.DIVERGED) for state in states):
        why = "runs with the other seeds are missing"
    else:
        steady = [c for c in best if all(s.summary is not None for s in by_seed[c].values())]
        chosen = min(steady, key=lambda c: _mean(by_seed[c]), default=None)
        seeds = ", ".join(str(seed) for seed in by_seed[best[0]])
        why = f"the lowest mean loss over seeds {seeds} of the best {len(best)} of {len(tried)}"
        if chosen is None:
            why = "each of the best diverged with one of the seeds"
    return Choice(arm=arm, tried=by_seed, chosen=chosen, why=why)


def _mean(by_seed: Mapping[int, Standing]) -> float:
    return estimate({seed: _loss(standing) for seed, standing in by_seed.items()}).mean


# -- what is written -------------------------------------------------------------------------------


def write_tuning(file: Path, tuning: Tuning, choices: Sequence[Choice]) -> None:
    """Write what was tried, what came of it and what was chosen."""
    data = {
        "what": "validation loss in nats per token; all candidates with the first seed, the best "
        f"{tuning.repeated} with all seeds, and of these the one with the lowest mean",
        "candidates_per_row": len(choices[0].tried),
        "rows": {choice.arm.label: _described(choice) for choice in choices},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, data)


def _described(choice: Choice) -> dict[str, Any]:
    return {
        "chosen": None if choice.chosen is None else _searched(choice.chosen),
        "why": choice.why,
        "at_the_edge_of": choice.edges(),
        "candidates": [
            {
                "settings": _searched(candidate),
                "runs": {
                    str(seed): {"folder": candidate.folder(seed)} | _result(standing)
                    for seed, standing in sorted(by_seed.items())
                },
            }
            for candidate, by_seed in choice.tried.items()
        ],
    }


def _result(standing: Standing) -> dict[str, Any]:
    if standing.summary is not None:
        return {"val_loss": standing.summary["val_loss"]}
    return {"state": str(standing.state), "why": standing.why}
