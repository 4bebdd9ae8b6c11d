"""What a crew writes so that its run can go on, and how it does go on."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, final

from thinwire.errors import CheckpointError, MismatchError
from thinwire.handshake import check_same
from thinwire.train.checkpoint import Checkpoints
from thinwire.train.config import TrainConfig
from thinwire.train.crew import Crew
from thinwire.train.run_folder import WITH_WORKERS, RunFolder, what_counts, without

__all__ = ["Saves", "Spent"]

_LOG = logging.getLogger(__name__)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Seconds of a run before it was interrupted.

    Args:
        wall_s: in all.
        training_s: in inner and outer steps.
        inner_s: in inner steps; of all workers in turn, where they share a process.
    """

    wall_s: float = 0.0
    training_s: float = 0.0
    inner_s: float = 0.0


@final
class Saves:
    """The checkpoints of a crew.

    Args:
        config: of the run.
        folder: where they lie.
        crew: whose.
        corpus: fingerprint of the data.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder, crew: Crew, corpus: str) -> None:
        self._config, self._folder, self._crew, self._corpus = config, folder, crew, corpus
        self._ranks = 1 if crew.events is not None else config.workers * config.machine.worker_size
        self._saved_step = 0
        self._files = [
            Checkpoints(
                folder.checkpoints,
                worker=worker.rank,
                ranks=self._ranks,
                keep=config.periods.keep_checkpoints,
            )
            for worker in crew.workers
        ]

    # -- writing -----------------------------------------------------------------------------------

    def save_if_due(self, spent: Spent) -> None:
        """Write a checkpoint if a period has passed and nothing stands against it.

        Raises:
            CheckpointError: it cannot be written; older ones stay. An elastic run only notes it.
        """
        every, step = self._config.periods.checkpoint_steps, self._crew.step
        if every and step // every > self._saved_step // every and self._crew.rests:
            self.save(spent)

    def save(self, spent: Spent) -> None:
        """Write a checkpoint now.

        Raises:
            CheckpointError: as above. NonFiniteError: the weights are not worth keeping.
        """
        for worker in self._crew.workers:
            worker.check_finite()
        self._saved_step = self._crew.step
        try:
            self._write(spent)
        except CheckpointError as error:
            self.failed(error)

    def failed(self, error: CheckpointError) -> None:
        """Raise `error`; where others go on without this worker's files, only note it."""
        if self._crew.events is None:
            raise error
        self._crew.events.note("unsaved", round=self._crew.rounds, why=str(error))

    def _write(self, spent: Spent) -> None:
        # Nobody replaces a good checkpoint before everybody was found to be well.
        self._crew.everywhere([0.0] * len(self._files))
        run = {
            "config": what_counts(self._config.describe()),
            "step": self._crew.step,
            "corpus": self._corpus,
            **asdict(spent),
        }
        for worker, files in zip(self._crew.workers, self._files, strict=True):
            files.save(self._crew.step, {"run": run, **self._crew.capture(worker)})
        # Nobody forgets an old checkpoint before everybody has the new one.
        self._crew.everywhere([0.0] * len(self._files))
        for files in self._files:
            files.prune()

    # -- going on ----------------------------------------------------------------------------------

    def restore(self) -> Spent:
        """Load the newest step of which every worker has a checkpoint; without one, step 0."""
        step = self._newest_common_step()
        spent = Spent()
        if step:
            for worker, files in zip(self._crew.workers, self._files, strict=True):
                spent = self._load(worker, *files.load(step))
        self._saved_step = self._crew.step
        if self._crew.leads and self._folder.has_run():
            self._folder.cut_metrics(self._crew.step)
        return spent

    def _load(self, worker: Any, state: dict[str, Any], ranks: int) -> Spent:
        run: Mapping[str, Any] = state["run"]
        workers = ranks // self._config.machine.worker_size
        changed = self._crew.events is None and workers != self._config.workers
        may_differ = WITH_WORKERS if changed else ()
        check_same(
            without(run["config"], may_differ),
            without(what_counts(self._config.describe()), may_differ),
            cannot=f"resume {self._folder.path} from its checkpoint",
            whose="the checkpoint",
            do="put back the checkpoints of this run",
        )
        if run["corpus"] != self._corpus:
            raise MismatchError(
                f"resume {self._folder.path}: the corpus differs",
                because=f"it was {run['corpus'][:12]} and is {self._corpus[:12]}",
                do="restore the text the run was started with, or start anew with another --out",
            )
        self._crew.resume(worker, state, workers=workers)
        if changed and worker.rank == 0:
            mine = self._config.workers
            _LOG.warning(
                "%s was left with K=%d and goes on with K=%d", self._folder.path, workers, mine
            )
        # Older checkpoints lack some of them.
        return Spent(**{field.name: run.get(field.name, 0.0) for field in fields(Spent)})

    def _newest_common_step(self) -> int:
        common = set.intersection(*(set(files.steps()) for files in self._files))
        limit = max(common, default=0)
        while True:
            mine = max((step for step in common if step <= limit), default=0)
            newest = self._crew.everywhere([float(mine)] * len(self._files))
            if len(set(newest)) == 1:
                return mine
            limit = int(min(newest))
