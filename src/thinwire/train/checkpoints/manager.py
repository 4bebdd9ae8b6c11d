"""When a run writes checkpoints, and how it goes on from the newest that all workers have."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from thinwire.errors import CheckpointError, MismatchError
from thinwire.handshake import check_same
from thinwire.runs.folder import WITH_WORKERS, RunFolder, without
from thinwire.runs.identity import identities, identity_fields
from thinwire.train.checkpoints.files import Checkpoints
from thinwire.train.config import TrainConfig
from thinwire.train.workers.group import WorkerGroup

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElapsedTime:
    """Seconds of a run before it was interrupted.

    Args:
        wall_s: in all.
        training_s: in inner and outer steps.
        inner_s: in inner steps; of all workers in turn, where they share a process.
    """

    wall_s: float = 0.0
    training_s: float = 0.0
    inner_s: float = 0.0


class CheckpointManager:
    """Writes and loads the checkpoints of the workers of this process.

    Args:
        config: of the run.
        folder: of the run.
        group: the workers.
        corpus: fingerprint of the data.
    """

    def __init__(
        self, config: TrainConfig, folder: RunFolder, group: WorkerGroup, corpus: str
    ) -> None:
        self._config, self._folder, self._group, self._corpus = config, folder, group, corpus
        self._saved_step = 0
        self._files = [
            Checkpoints(
                folder.checkpoints,
                worker=worker.rank,
                ranks=group.checkpoint_ranks,
                keep=config.periods.keep_checkpoints,
            )
            for worker in group.workers
        ]

    # -- writing -----------------------------------------------------------------------------------

    def save_if_due(self, elapsed: ElapsedTime) -> None:
        """Write a checkpoint if a period has passed and the workers are between two rounds.

        Raises:
            CheckpointError: it cannot be written; older ones stay. An elastic run only notes it.
        """
        every, step = self._config.periods.checkpoint_steps, self._group.step
        if every and step // every > self._saved_step // every and self._group.can_checkpoint:
            self.save(elapsed)

    def save(self, elapsed: ElapsedTime) -> bool:
        """Write a checkpoint now.

        Returns:
            Whether it was written.

        Raises:
            CheckpointError: as above. NonFiniteError: a weight is not finite.
        """
        for worker in self._group.workers:
            worker.check_finite()
        self._saved_step = self._group.step
        try:
            self._write(elapsed)
        except CheckpointError as error:
            self._group.file_failed(error)
            return False
        return True

    def _write(self, elapsed: ElapsedTime) -> None:
        # No rank writes before all ranks have found their weights finite.
        self._group.barrier()
        run = {
            "config": identity_fields(self._config.describe()),
            "step": self._group.step,
            "corpus": self._corpus,
            **asdict(elapsed),
        }
        for worker, files in zip(self._group.workers, self._files, strict=True):
            files.save(self._group.step, {"run": run, **self._group.capture(worker)})
        # No rank removes an old checkpoint before all ranks have written the new one.
        self._group.barrier()
        for files in self._files:
            files.prune()

    # -- going on ----------------------------------------------------------------------------------

    def restore(self) -> ElapsedTime:
        """Load the newest step of which every worker has a checkpoint; without one, step 0."""
        step = self._newest_common_step()
        elapsed = ElapsedTime()
        if step:
            for worker, files in zip(self._group.workers, self._files, strict=True):
                state, ranks = files.load(step)
                try:
                    elapsed = self._load(worker, state, ranks)
                except (AttributeError, IndexError, KeyError, TypeError) as error:
                    why = f"it lacks a part, or one is of another kind: {error}"
                    raise files.damaged(step, why) from error
        self._saved_step = self._group.step
        if self._group.leads and self._folder.has_run():
            self._folder.cut_metrics(self._group.step)
        return elapsed

    def _load(self, worker: Any, state: dict[str, Any], ranks: int) -> ElapsedTime:
        run: Mapping[str, Any] = state["run"]
        changed = ranks != self._group.checkpoint_ranks
        may_differ = WITH_WORKERS if changed else ()
        theirs, mine = identities(run["config"], self._config.describe())
        check_same(
            without(theirs, may_differ),
            without(mine, may_differ),
            cannot=f"resume {self._folder.path} from its checkpoint",
            whose="the checkpoint",
            do="put back the checkpoints of this run",
        )
        if run["corpus"] != self._corpus:
            raise MismatchError(
                f"resume {self._folder.path}: the corpus differs",
                because=f"its fingerprint was {run['corpus'][:12]} and is {self._corpus[:12]}",
                do="restore the text the run was started with, or start anew with another --out",
            )
        workers = ranks // self._config.machine.worker_size
        self._group.resume(worker, state, workers=workers)
        if changed and worker.rank == 0:
            mine = self._config.workers
            _LOG.warning(
                "%s was left with K=%d and goes on with K=%d", self._folder.path, workers, mine
            )
        # Checkpoints of older versions lack some of these times.
        return ElapsedTime(**{f.name: run.get(f.name, 0.0) for f in fields(ElapsedTime)})

    def _newest_common_step(self) -> int:
        common = set.intersection(*(set(files.steps()) for files in self._files))
        limit = max(common, default=0)
        while True:
            mine = max((step for step in common if step <= limit), default=0)
            newest = self._group.all_gather([float(mine)] * len(self._files))
            if len(set(newest)) == 1:
                return mine
            limit = int(min(newest))
