"""An experiment carried out, and what its rows say against each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from thinwire.errors import ConfigurationError
from thinwire.experiments.arms import Arm, arms_of
from thinwire.experiments.campaign import Campaign
from thinwire.experiments.description import Experiment
from thinwire.experiments.runs import InTurn, Runner, Tell, nobody
from thinwire.experiments.standing import Standing, State
from thinwire.experiments.statistics import Estimate, estimate, paired_difference
from thinwire.experiments.tuning import Choice, budget, search, write_tuning
from thinwire.train.run_folder import write_json

__all__ = ["Comparison", "Row", "compare"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row's runs.

    Args:
        arm: the row.
        standings: how its runs stand, by seed.
    """

    arm: Arm
    standings: Mapping[int, Standing]

    @property
    def runs(self) -> list[dict[str, Any]]:
        """Summaries of the finished runs, each with its seed and folder."""
        return [
            {**standing.summary, "seed": seed, "folder": self.arm.folder(seed)}
            for seed, standing in self.standings.items()
            if standing.summary is not None
        ]

    def values(self, name: str) -> dict[int, float]:
        """A field of the summaries, by seed."""
        return {run["seed"]: run[name] for run in self.runs}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All rows.

    Args:
        rows: in the order of the experiment.
        baselines: label of a row to that of the one it is compared with.
        choices: what a search chose; empty without one.
        strangers: folders that hold runs of something else.
    """

    rows: Sequence[Row]
    baselines: Mapping[str, str]
    choices: Sequence[Choice]
    strangers: Mapping[str, Standing]

    def loss(self, row: Row) -> Estimate | None:
        """Mean loss of a row; None if none of its runs ended."""
        values = row.values("val_loss")
        return estimate(values) if values else None

    def difference(self, row: Row) -> Estimate | None:
        """Loss of a row minus that of its baseline, paired by seed."""
        base = next((r for r in self.rows if r.arm.label == self.baselines.get(row.arm.label)), row)
        if base is row:
            return None
        return paired_difference(row.values("val_loss"), base.values("val_loss"))

    def troubles(self) -> dict[str, Standing]:
        """Folders of this comparison, and rows of its search, that have no result."""
        runs = {
            row.arm.folder(seed): standing
            for row in self.rows
            for seed, standing in row.standings.items()
        }
        for choice in self.choices:
            if choice.chosen is None:
                runs[choice.arm.label] = Standing(state=State.FAILED, why=choice.why)
            for candidate, by_seed in choice.tried.items():
                # That a rate diverges is a result of a search.
                runs |= {
                    candidate.folder(seed): standing
                    for seed, standing in by_seed.items()
                    if standing.state is not State.DIVERGED
                }
        return {folder: s for folder, s in runs.items() if s.state is not State.FINISHED}

    def statistics(self) -> dict[str, Any]:
        """Of every row, as JSON-able data."""
        return {row.arm.label: self._statistics(row) for row in self.rows}

    def _statistics(self, row: Row) -> dict[str, Any]:
        loss, difference = self.loss(row), self.difference(row)
        return {
            "val_loss": None if loss is None else loss.describe(),
            "baseline": self.baselines.get(row.arm.label),
            "val_loss_minus_baseline": None if difference is None else difference.describe(),
        }

    def write(self, out: Path) -> None:
        """Write compare.json (runs by row) and statistics.json into `out`."""
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "compare.json", {row.arm.label: row.runs for row in self.rows})
        others = {name: {"state": s.state, "why": s.why} for name, s in self._others().items()}
        write_json(out / "statistics.json", {"rows": self.statistics(), "left_out": others})

    def _others(self) -> dict[str, Standing]:
        return self.troubles() | dict(self.strangers)


def compare(
    experiment: Experiment, out: Path, tell: Tell = nobody, runner: Runner | None = None
) -> Comparison:
    """Carry out what is missing of `experiment` in `out`, and write what came of it.

    Finished runs are kept, unfinished ones continued. A folder that holds something else, or
    nothing readable, is left alone and its run has no result.

    Args:
        experiment: what is compared.
        out: folder of the run folders; gets compare.json, statistics.json and tuning.json.
        tell: makes who is told of a run's progress.
        runner: carries out the runs; default one after the other.

    Raises:
        ConfigurationError: a description that cannot work; nothing has run then.
    """
    arms = arms_of(experiment)
    baselines = _baselines(arms, experiment.baseline)
    campaign = Campaign(experiment, out, runner or InTurn(), tell)
    choices = _tuned(campaign, arms)
    chosen = {choice.arm: choice.chosen for choice in choices}
    wanted = {arm: chosen.get(arm, arm) for arm in arms}
    stands = campaign.complete([(a, s) for a in wanted.values() if a for s in experiment.seeds])
    rows = [
        # A search without a choice leaves the row without runs.
        Row(arm=final, standings={seed: stands[final, seed] for seed in experiment.seeds})
        if final is not None
        else Row(arm=arm, standings={})
        for arm, final in wanted.items()
    ]
    comparison = Comparison(
        rows=rows, baselines=baselines, choices=choices, strangers=campaign.strangers()
    )
    comparison.write(out)
    return comparison


def _tuned(campaign: Campaign, arms: Sequence[Arm]) -> list[Choice]:
    tuning = campaign.experiment.tuning
    if tuning is None:
        return []
    budget(campaign.experiment, tuning, arms)
    choices = search(campaign, tuning, arms)
    write_tuning(campaign.out / "tuning.json", tuning, choices)
    return choices


def _baselines(arms: Sequence[Arm], name: str | None) -> dict[str, str]:
    """With which row each is compared: that of the baseline at the same place on all axes.

    Axes that have no meaning for the baseline do not count.
    """
    if name is None:
        methods = [arm.method for arm in arms]
        name = "diloco" if "diloco" in methods else methods[0]
    exact = [arm for arm in arms if arm.label == name]
    bases = exact or [arm for arm in arms if arm.method == name]
    if not bases:
        raise ConfigurationError(
            f"take differences to {name!r}",
            because=f"the rows are {', '.join(arm.label for arm in arms)}",
            do="pass one of these, or one of the methods, as the baseline",
        )
    found: dict[str, str] = {}
    for arm in arms:
        matching = bases if len(bases) == 1 else [b for b in bases if _beside(arm, b)]
        if len(matching) == 1:
            found[arm.label] = matching[0].label
    return found


def _beside(arm: Arm, base: Arm) -> bool:
    places = dict(arm.coordinates)
    return all(places.get(axis) == value for axis, value in base.coordinates)
