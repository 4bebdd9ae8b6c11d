"""Checkpoints of a run, one file per rank and step, and the lock of a run's folder."""

import errno
import hashlib
import json
import logging
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import torch
from filelock import FileLock, Timeout

from thinwire.errors import CheckpointError, ConfigurationError, RunStopped
from thinwire.files import replace_file, replace_text

_LOG = logging.getLogger(__name__)
_NAME: Final = re.compile(r"step-(\d{8,})\.worker-(\d+)\.(json|pt)", re.ASCII)
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Create `folder` and lock out all other processes; remove the lock at the end.

    Raises:
        ConfigurationError: another process has the lock, or the folder cannot be written.
    """
    # The lock file may just have been removed, which shows only after locking it: try once more.
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


def stopped(out: Path, step: int, *, is_saved: bool) -> RunStopped:
    """The error of the run in `out`, which ends after `step` because it was asked to stop."""
    checkpoint = "a checkpoint" if is_saved else "no checkpoint, which could not be written"
    return RunStopped(
        f"finish the run in {out}",
        because=f"it was asked to stop, and did so after inner step {step} with {checkpoint}",
        do=f"the same command with --resume --out {out}",
    )


class _Seal(msgspec.Struct):
    """The `.json` file beside a checkpoint; earlier versions did not write `ranks`."""

    sha256: str
    ranks: Annotated[int, msgspec.Meta(ge=1)] | msgspec.UnsetType = msgspec.UNSET


_SEALS: Final = msgspec.json.Decoder(_Seal)


class Checkpoints:
    """The checkpoints of one worker, or of one rank of a sharded worker.

    A checkpoint is a `.pt` file and a `.json` file with its SHA-256, which is written last
    and completes it. A process that is killed leaves older checkpoints intact.

    Args:
        folder: created when the first checkpoint is written.
        worker: this rank's number among all ranks of the run.
        ranks: number of ranks of the run now.
        keep: number of checkpoints to keep.
    """

    def __init__(self, folder: Path, *, worker: int, ranks: int, keep: int) -> None:
        self._folder, self._worker, self._ranks, self._keep = folder, worker, ranks, keep

    def steps(self) -> list[int]:
        """Steps of complete checkpoints from which this worker can resume, ascending.

        For a run that had R ranks, these are the checkpoints of rank `worker` modulo R.
        """
        found = set(self._found("json"))
        return sorted(s for s in {step for step, _ in found} if (s, self._source(s)) in found)

    def _source(self, step: int) -> int:
        return self._worker % self._ranks_at(step)

    def _ranks_at(self, step: int) -> int:
        """Number of ranks of the run that wrote `step`, by its first seal."""
        # The seal may be missing or damaged; `load` then raises the error.
        with suppress(OSError, ValueError):
            first = min(worker for its, worker in self._found("json") if its == step)
            return _SEALS.decode(self._files(step, first)[1].read_bytes()).ranks or self._ranks
        return self._ranks

    def _found(self, ending: str) -> Iterator[tuple[int, int]]:
        """Steps and workers of the files in the folder; files of other names are ignored."""
        for file in self._folder.glob(f"step-*.worker-*.{ending}"):
            name = _NAME.fullmatch(file.name)
            if name is not None:
                yield int(name[1]), int(name[2])

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write `state` as the checkpoint of `step`.

        Raises:
            CheckpointError: the folder cannot be written (full, read-only); older files stay.
        """
        data, seal = self._files(step, self._worker)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(data, lambda path: torch.save(state, path))
            replace_text(seal, json.dumps({"sha256": _sha256(data), "ranks": self._ranks}))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"write checkpoint {data}",
                because=str(error),
                do="free space or fix permissions, then add --resume: older ones are intact",
            ) from error

    def prune(self) -> None:
        """Remove all but the newest `keep`; call it once every worker has written its own."""
        mine = sorted(step for step, worker in self._found("json") if worker == self._worker)
        for step, worker in list(self._found("pt")):
            # Worker 0 also removes files of ranks that the run no longer has.
            is_mine = worker == self._worker or (self._worker == 0 and worker >= self._ranks)
            if is_mine and step < mine[-self._keep :][0]:
                data, seal = self._files(step, worker)
                seal.unlink(missing_ok=True)
                data.unlink(missing_ok=True)

    def load(self, step: int) -> tuple[dict[str, Any], int]:
        """The state saved at `step` from which this worker resumes, and that run's rank count.

        Copy tensors that you keep: they map the file, which takes disk space as long as one lives.

        Raises:
            CheckpointError: the file, which the error names, is missing or not what was written.
        """
        data, seal = self._files(step, self._source(step))
        try:
            facts = _SEALS.decode(seal.read_bytes())
            if _sha256(data) != facts.sha256:
                raise ValueError(f"its {data.stat().st_size} bytes are not those that were written")
            # Mapped, so that copied tensors are not in memory twice.
            state = torch.load(data, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # damaged bytes raise anything
            raise self.damaged(step, str(error).partition("\n")[0]) from error
        return state, self._ranks_at(step)

    def damaged(self, step: int, because: str) -> CheckpointError:
        """The error for a checkpoint of this worker that cannot be used.

        Args:
            step: the checkpoint's step.
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
