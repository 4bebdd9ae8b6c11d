"""Checkpoints: one file per rank and step, complete or not there at all."""

import hashlib
import json
from pathlib import Path
from typing import Any, final

import torch

from thinwire.errors import CheckpointError
from thinwire.files import replace_file, replace_text

__all__ = ["Checkpoints"]


@final
class Checkpoints:
    """The checkpoints of one worker, or of one rank of a worker that is sharded.

    A checkpoint is a `.pt` file and, written after it, a `.json` file with its size and SHA-256:
    only with the second does it count. A process killed at any moment leaves older ones intact.

    Args:
        folder: created when the first checkpoint is written.
        worker: its number, over all ranks of the run.
        ranks: that the run has now.
        keep: how many stay.
    """

    def __init__(self, folder: Path, *, worker: int, ranks: int, keep: int) -> None:
        self._folder, self._worker, self._ranks, self._keep = folder, worker, ranks, keep

    def steps(self) -> list[int]:
        """The steps of complete checkpoints from which this worker can go on, ascending.

        Where a run had R ranks, those of its worker modulo R.
        """
        return sorted(
            step
            for step in {_step(seal) for seal in self._folder.glob("step-*.worker-*.json")}
            if self._files(step, self._source(step))[1].exists()
        )

    def _source(self, step: int) -> int:
        return self._worker % self._ranks_at(step)

    def _ranks_at(self, step: int) -> int:
        """Ranks of the run that wrote `step`, as its first seal says."""
        seals = self._folder.glob(f"{_stem(step)}.worker-*.json")
        first = min(seals, key=_number, default=None)
        try:
            return self._ranks if first is None else int(json.loads(first.read_text())["ranks"])
        except (OSError, ValueError, KeyError, TypeError):
            return self._ranks  # `load` says what is wrong with the seal

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
            facts["ranks"] = self._ranks
            replace_text(seal, json.dumps(facts))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"write checkpoint {data}",
                because=str(error),
                do="free space or fix permissions, then add --resume: older ones are intact",
            ) from error

    def prune(self) -> None:
        """Remove all but the newest `keep`; call it once every worker has written its own."""
        seals = self._folder.glob(f"step-*.worker-{self._worker}.json")
        old = {step: [self._worker] for step in sorted(map(_step, seals))[: -self._keep]}
        if old and self._worker == 0:
            self._add_abandoned(old)
        for step, workers in old.items():
            for worker in workers:
                data, seal = self._files(step, worker)
                seal.unlink(missing_ok=True)
                data.unlink(missing_ok=True)

    def _add_abandoned(self, old: dict[int, list[int]]) -> None:
        """Add files of ranks that the run had before, with more workers."""
        newest = max(old)
        for data in self._folder.glob("step-*.worker-*.pt"):
            if _step(data) <= newest and _number(data) >= self._ranks:
                old.setdefault(_step(data), []).append(_number(data))

    def load(self, step: int) -> tuple[dict[str, Any], int]:
        """The state saved at `step` from which this worker goes on, and the ranks there were.

        Raises:
            CheckpointError: the file is missing or not what was written; names it.
        """
        data, seal = self._files(step, self._source(step))
        try:
            facts = json.loads(seal.read_text())
            if _sha256(data) != facts["sha256"]:
                raise _damaged(
                    data,
                    f"it has {data.stat().st_size} bytes of {facts['bytes']}, or "
                    "others than were written",
                )
            return torch.load(data, weights_only=True), self._ranks_at(step)
        except (OSError, ValueError, KeyError) as error:
            raise _damaged(data, str(error)) from error

    def _files(self, step: int, worker: int) -> tuple[Path, Path]:
        stem = f"{_stem(step)}.worker-{worker}"
        return self._folder / f"{stem}.pt", self._folder / f"{stem}.json"


def _stem(step: int) -> str:
    return f"step-{step:08d}"


def _step(file: Path) -> int:
    return int(file.name.split(".")[0].removeprefix("step-"))


def _number(file: Path) -> int:
    return int(file.name.split(".")[1].removeprefix("worker-"))


def _damaged(data: Path, because: str) -> CheckpointError:
    return CheckpointError(
        f"load checkpoint {data}",
        because=because,
        do=f"remove {data.with_suffix('.json').name} beside it to resume from the one before",
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
