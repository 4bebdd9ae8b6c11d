"""Checkpoints of a run, one file per rank and step, and the lock of a run's folder."""

import errno
import hashlib
import json
import logging
import re
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import torch
from filelock import FileLock, Timeout

from thinwire.errors import CheckpointError, ConfigurationError, MismatchError
from thinwire.files import replace_file, replace_text
from thinwire.handshake import check_same
from thinwire.runs.folder import WITH_WORKERS, RunFolder, without
from thinwire.runs.schema import identities, identity_fields
from thinwire.train.config import TrainConfig
from thinwire.train.workers.group import WorkerGroup
from thinwire.train.workers.worker import Worker, worker_state

_LOG = logging.getLogger(__name__)
_NAME: Final = re.compile(r"step-(\d{8,})\.worker-(\d+)\.(json|pt)", re.ASCII)
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Create `folder` and lock it against all other processes; remove the lock at the end.

    Raises:
        ConfigurationError: another process has the lock, or the folder cannot be written.
    """
    # The lock file may just have been removed, which is seen only after locking it: try once more.
    lock = FileLock(folder / "lock", timeout=0.1, poll_interval=0.02, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ConfigurationError(
            f"start a run in {folder}",
            because="another process is writing a run there now",
            do="pass another --out, or wait for that one to end or stop it",
        ) from error
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise ConfigurationError(
                f"start a run in {folder}", because=str(error), do="pass another --out"
            ) from error
        # Some network file systems have no locks. That is no reason not to train there.
        _LOG.warning("nothing keeps a second process out of %s: %s", folder, error)
    try:
        yield
    finally:
        # Removed before it is released: a process that opened it meanwhile sees that it is gone.
        with suppress(OSError):
            (folder / "lock").unlink()
            folder.rmdir()  # only a start that failed left it empty
        lock.release()


class _Seal(msgspec.Struct):
    """The `.json` file beside a checkpoint; earlier versions did not write `ranks`."""

    sha256: str
    ranks: Annotated[int, msgspec.Meta(ge=1)] | msgspec.UnsetType = msgspec.UNSET
    bytes: int | None = None


class Checkpoints:
    """The checkpoints of one worker, or of one rank of a worker that is sharded.

    A checkpoint is a `.pt` file and a `.json` file with its size and SHA-256, which is written last
    and makes it complete. A process that is killed leaves older checkpoints intact.

    Args:
        folder: created when the first checkpoint is written.
        worker: its number, over all ranks of the run.
        ranks: of the run now.
        keep: number of checkpoints that stay.
    """

    def __init__(self, folder: Path, *, worker: int, ranks: int, keep: int) -> None:
        self._folder, self._worker, self._ranks, self._keep = folder, worker, ranks, keep

    def steps(self) -> list[int]:
        """Steps of complete checkpoints from which this worker can resume, ascending.

        If a run had R ranks, those of rank `worker` modulo R.
        """
        return sorted(
            step
            for step in {step for step, _ in self._found("json")}
            if self._files(step, self._source(step))[1].exists()
        )

    def _source(self, step: int) -> int:
        return self._worker % self._ranks_at(step)

    def _ranks_at(self, step: int) -> int:
        """Ranks of the run that wrote `step`, by its first seal."""
        # It may be missing or damaged, for which `load` raises an error.
        with suppress(OSError, ValueError):
            first = min(worker for its, worker in self._found("json") if its == step)
            return self._read_seal(self._files(step, first)[1]).ranks or self._ranks
        return self._ranks

    def _found(self, ending: str) -> Iterator[tuple[int, int]]:
        """Steps and workers of the files in the folder; files of other names are ignored."""
        for file in self._folder.glob(f"step-*.worker-*.{ending}"):
            name = _NAME.fullmatch(file.name)
            if name is not None:
                yield int(name[1]), int(name[2])

    def _read_seal(self, seal: Path) -> _Seal:
        return msgspec.json.decode(seal.read_bytes(), type=_Seal)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write `state` as the checkpoint of `step`.

        Raises:
            CheckpointError: the folder cannot be written (full, read-only); older ones stay.
        """
        data, seal = self._files(step, self._worker)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(data, lambda path: torch.save(state, path))
            facts = {"step": step, "bytes": data.stat().st_size, "sha256": _sha256(data)}
            replace_text(seal, json.dumps(facts | {"ranks": self._ranks}))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"write checkpoint {data}",
                because=str(error),
                do="free space or fix permissions, then add --resume: older ones are intact",
            ) from error

    def prune(self) -> None:
        """Remove all but the newest `keep`; call it after every worker has written its own."""
        mine = sorted(step for step, worker in self._found("json") if worker == self._worker)
        old = {step: [self._worker] for step in mine[: -self._keep]}
        newest = max(old, default=0)
        for step, worker in list(self._found("pt")):
            # Files of ranks from when the run had more workers.
            if self._worker == 0 and step <= newest and worker >= self._ranks:
                old.setdefault(step, []).append(worker)
        for step, workers in old.items():
            for worker in workers:
                data, seal = self._files(step, worker)
                seal.unlink(missing_ok=True)
                data.unlink(missing_ok=True)

    def load(self, step: int) -> tuple[dict[str, Any], int]:
        """The state saved at `step` from which this worker resumes, and the ranks of that run.

        Raises:
            CheckpointError: the file is missing or not what was written; names it.
        """
        data, seal = self._files(step, self._source(step))
        try:
            facts = self._read_seal(seal)
            if _sha256(data) != facts.sha256:
                raise ValueError(
                    f"it has {data.stat().st_size} bytes of {facts.bytes}, or others than were "
                    "written"
                )
            state = torch.load(data, weights_only=True)
        except Exception as error:  # damaged bytes raise anything
            raise self.damaged(step, str(error).partition("\n")[0]) from error
        run = state.get("run") if isinstance(state, dict) else None
        if not isinstance(run, dict) or not {"config", "corpus"} <= run.keys():
            raise self.damaged(step, "it does not name its run")
        return state, self._ranks_at(step)

    def damaged(self, step: int, because: str) -> CheckpointError:
        """The error for a checkpoint of this worker that cannot be used.

        Args:
            step: of the checkpoint.
            because: the reason.
        """
        data, seal = self._files(step, self._source(step))
        return CheckpointError(
            f"load checkpoint {data}",
            because=because,
            do=f"remove {seal.name} beside it to resume from the one before",
        )

    def _files(self, step: int, worker: int) -> tuple[Path, Path]:
        stem = f"step-{step:08d}.worker-{worker}"
        return self._folder / f"{stem}.pt", self._folder / f"{stem}.json"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class RunTimer:
    """Seconds of a run, including those before it was interrupted.

    `training_s` are in inner and outer steps, `inner_s` in inner steps; of all workers in turn, if
    they share a process.
    """

    def __init__(self) -> None:
        self.training_s = self.inner_s = 0.0
        self._began_s = time.perf_counter()

    @property
    def wall_s(self) -> float:
        """Seconds since the run began, without interruptions."""
        return time.perf_counter() - self._began_s

    @contextmanager
    def measuring(self, name: Literal["training_s", "inner_s"]) -> Generator[None]:
        """Add the seconds of a block to `name`."""
        started_s = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - started_s)

    def state_dict(self) -> dict[str, float]:
        """The seconds so far."""
        return {name: getattr(self, name) for name in ("wall_s", "training_s", "inner_s")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`; checkpoints of older versions lack some of these times."""
        self._began_s = time.perf_counter() - state.get("wall_s", 0.0)
        self.training_s, self.inner_s = state.get("training_s", 0.0), state.get("inner_s", 0.0)


class CheckpointManager:
    """Writes and loads the checkpoints of the workers of this process.

    Args:
        config: of the run.
        folder: of the run.
        group: the workers.
        corpus: fingerprint of the data.
        timer: of the run.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        group: WorkerGroup,
        corpus: str,
        timer: RunTimer,
    ) -> None:
        self._config, self._folder, self._group, self._corpus = config, folder, group, corpus
        self._timer = timer
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

    def save_if_due(self) -> None:
        """Write a checkpoint if a period has passed and the workers are between two rounds.

        Raises:
            CheckpointError: it cannot be written; older ones stay. An elastic run only notes it.
        """
        every, step = self._config.periods.checkpoint_steps, self._group.step
        if every and step // every > self._saved_step // every and self._group.can_checkpoint:
            self.save()

    def save(self) -> bool:
        """Write a checkpoint now.

        Returns:
            False if it could not be written, in an elastic run.

        Raises:
            CheckpointError: as above. NonFiniteError: a weight is not finite.
        """
        for worker in self._group.workers:
            worker.check_finite()
        step = self._saved_step = self._group.step
        # No rank writes before all ranks have found their weights finite.
        self._group.barrier()
        run = {
            "config": identity_fields(self._config.describe()),
            "step": step,
            "corpus": self._corpus,
            **self._timer.state_dict(),
        }
        try:
            for worker, files in zip(self._group.workers, self._files, strict=True):
                files.save(step, {"run": run, "worker": worker.state_dict()})
            # No rank removes an old checkpoint before all ranks have written the new one.
            self._group.barrier()
            for files in self._files:
                files.prune()
        except CheckpointError as error:
            self._group.file_failed(error)
            return False
        return True

    # -- resuming ----------------------------------------------------------------------------------

    def restore(self) -> None:
        """Load the newest step of which every worker has a checkpoint; without one, step 0."""
        step = self._newest_common_step()
        if step:
            for worker, files in zip(self._group.workers, self._files, strict=True):
                state, ranks = files.load(step)
                try:
                    self._load(worker, state, ranks)
                except (AttributeError, IndexError, KeyError, TypeError) as error:
                    why = f"it lacks a part, or one is of another kind: {error}"
                    raise files.damaged(step, why) from error
        self._group.follow()
        self._saved_step = self._group.step
        if self._group.leads and self._folder.has_run():
            self._folder.cut_metrics(self._group.step)

    def _load(self, worker: Worker, state: dict[str, Any], ranks: int) -> None:
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
                do="restore the text of the run, or start another run with another --out",
            )
        worker.load_state_dict(worker_state(state), sources=ranks if changed else None)
        if changed and worker.rank == 0:
            before, now = ranks // self._config.machine.worker_size, self._config.workers
            _LOG.warning(
                "%s was left with K=%d and goes on with K=%d", self._folder.path, before, now
            )
        self._timer.load_state_dict(run)

    def _newest_common_step(self) -> int:
        common = set.intersection(*(set(files.steps()) for files in self._files))
        limit = max(common, default=0)
        while True:
            mine = max((step for step in common if step <= limit), default=0)
            newest = self._group.all_gather([float(mine)] * len(self._files))
            if len(set(newest)) == 1:
                return mine
            limit = int(min(newest))
