"""Checkpoints: one file per rank and step, complete or not there at all."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, final

import torch

from thinwire.errors import CheckpointError

__all__ = ["Checkpoints"]


@final
class Checkpoints:
    """The checkpoints of one worker, or of one rank of a worker that is sharded.

    A checkpoint is a `.pt` file and, written after it, a `.json` file with its size and SHA-256:
    only with the second does it count. A process killed at any moment leaves older ones intact.

    Args:
        folder: created when the first checkpoint is written.
        worker: its number, over all ranks of the run.
        keep: how many stay.
    """

    def __init__(self, folder: Path, *, worker: int, keep: int) -> None:
        self._folder, self._worker, self._keep = folder, worker, keep

    def steps(self) -> list[int]:
        """The steps of this worker's complete checkpoints, ascending."""
        return sorted(
            int(seal.name.split(".")[0].removeprefix("step-"))
            for seal in self._folder.glob(f"step-*.worker-{self._worker}.json")
        )

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write `state` as the checkpoint of `step`.

        Raises:
            CheckpointError: the folder cannot be written (full, read-only); older ones stay.
        """
        data, seal = self._files(step)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _replace(data, lambda path: torch.save(state, path))
            facts = {"step": step, "bytes": data.stat().st_size, "sha256": _sha256(data)}
            _replace(seal, lambda path: path.write_text(json.dumps(facts)))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"write checkpoint {data}",
                because=str(error),
                do="free space or fix permissions, then add --resume: older ones are intact",
            ) from error

    def prune(self) -> None:
        """Remove all but the newest `keep`; call it once every worker has written its own."""
        for step in self.steps()[: -self._keep]:
            data, seal = self._files(step)
            seal.unlink()
            data.unlink(missing_ok=True)

    def load(self, step: int) -> dict[str, Any]:
        """The state saved at `step`.

        Raises:
            CheckpointError: the file is missing or not what was written; names it.
        """
        data, seal = self._files(step)
        try:
            facts = json.loads(seal.read_text())
            if _sha256(data) != facts["sha256"]:
                raise _damaged(
                    data,
                    f"it has {data.stat().st_size} bytes of {facts['bytes']}, or "
                    "others than were written",
                )
            return torch.load(data, weights_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise _damaged(data, str(error)) from error

    def _files(self, step: int) -> tuple[Path, Path]:
        stem = f"step-{step:08d}.worker-{self._worker}"
        return self._folder / f"{stem}.pt", self._folder / f"{stem}.json"


def _damaged(data: Path, because: str) -> CheckpointError:
    return CheckpointError(
        f"load checkpoint {data}",
        because=because,
        do=f"remove {data.with_suffix('.json').name} beside it to resume from the one before",
    )


def _replace(path: Path, write: Any) -> None:
    """Let `write` fill a temporary file, then put it in place of `path` in one step."""
    temporary = path.with_name(path.name + ".partial")
    write(temporary)
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
