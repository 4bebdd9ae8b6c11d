"""Rows times seeds, begun or continued until each has a result or a reason why not."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, final

from thinwire.experiments.arms import Arm, configure
from thinwire.experiments.comparable import apart, check_comparable, most_common
from thinwire.experiments.description import Experiment
from thinwire.experiments.runs import Run, Runner, Tell
from thinwire.experiments.standing import Standing, State, look, strangers
from thinwire.train.config import TrainConfig

__all__ = ["Campaign", "Place", "Standings"]

Place: TypeAlias = tuple[Arm, int]
Standings: TypeAlias = Mapping[Place, Standing]

_TO_DO = (State.ABSENT, State.UNFINISHED, State.FAILED)
_NOTED = (State.DIVERGED, State.FAILED)


@final
class Campaign:
    """The runs of an experiment in a folder.

    Args:
        experiment: which.
        out: folder of the run folders.
        runner: carries them out.
        tell: makes who is told of a run's progress.
    """

    def __init__(self, experiment: Experiment, out: Path, runner: Runner, tell: Tell) -> None:
        self.experiment, self.out = experiment, out
        self._runner, self._tell = runner, tell
        self._first: tuple[str, TrainConfig] | None = None
        self._origin: Mapping[str, str] | None = None
        self._known: set[str] = set()

    def complete(self, places: Sequence[Place]) -> Standings:
        """Carry out what is missing of `places`, and say how each stands then.

        Raises:
            ConfigurationError: values that do not fit, or runs that cannot be compared; nothing has
                run then.
        """
        runs = self._runs(places)
        stands = {place: look(run.folder, run.config) for place, run in runs.items()}
        missing = [place for place, standing in stands.items() if standing.state in _TO_DO]
        failures = self._runner.carry_out([runs[place] for place in missing], self._tell)
        for place, failure in zip(missing, failures, strict=True):
            stands[place] = look(runs[place].folder, runs[place].config)
            if failure is not None and stands[place].state not in _NOTED:
                why = f"{failure.kind}: {failure.why}"
                stands[place] = Standing(state=State.FAILED, why=why)
        return self._of_one_origin(stands)

    def strangers(self) -> dict[str, Standing]:
        """Folders of runs that no call of `complete` asked for."""
        if self._first is None:
            return {}
        return strangers(self.out, self._known, self._first[1])

    def _runs(self, places: Sequence[Place]) -> dict[Place, Run]:
        runs: dict[Place, Run] = {}
        for arm, seed in places:
            folder = arm.folder(seed)
            settings = "".join(f" {name}={value}" for name, value in arm.chosen)
            runs[arm, seed] = Run(
                title=f"{arm.label}{settings} seed {seed}",
                folder=self.out / folder,
                config=configure(self.experiment, arm, seed),
            )
            self._known.add(folder)
        if runs and self._first is None:
            first = next(iter(runs.values()))
            self._first = first.title, first.config
        if self._first is not None:
            configs = {run.title: run.config for run in runs.values()}
            check_comparable(dict([self._first]) | configs)
        return runs

    def _of_one_origin(self, stands: dict[Place, Standing]) -> Standings:
        """`stands`, with runs of another corpus or size than the most told apart."""
        if self._origin is None:
            self._origin = most_common([s.origin for s in stands.values() if s.origin is not None])
        for place, standing in stands.items():
            if standing.origin is not None and standing.origin != self._origin:
                assert self._origin is not None
                why = apart(standing.origin, self._origin)
                stands[place] = Standing(state=State.STRANGER, why=why)
        return stands
