"""Checkpoints: one file per rank and step, complete or not there at all."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from thinwire.errors import CheckpointError
from thinwire.files import replace_file, replace_text

_NAME: Final = re.compile(r"step-(\d{8,})\.worker-(\d+)\.(json|pt)", re.ASCII)


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
            for step in {step for step, _ in self._found("json")}
            if self._files(step, self._source(step))[1].exists()
        )

    def _source(self, step: int) -> int:
        return self._worker % self._ranks_at(step)

    def _ranks_at(self, step: int) -> int:
        """Ranks of the run that wrote `step`, as its first seal says."""
        first = min((worker for its, worker in self._found("json") if its == step), default=None)
        if first is None:
            return self._ranks
        try:
            return self._read_seal(self._files(step, first)[1])["ranks"]
        except (OSError, ValueError):
            return self._ranks  # `load` says what is wrong with the seal

    def _found(self, ending: str) -> Iterator[tuple[int, int]]:
        """Steps and workers of the files there are; what has another name is not ours."""
        for file in self._folder.glob(f"step-*.worker-*.{ending}"):
            name = _NAME.fullmatch(file.name)
            if name is not None:
                yield int(name[1]), int(name[2])

    def _read_seal(self, seal: Path) -> dict[str, Any]:
        """What a seal says; earlier versions did not note the ranks."""
        facts: Any = json.loads(seal.read_text())
        if not isinstance(facts, dict):
            raise ValueError("its seal holds no object")
        facts = {"ranks": self._ranks, **facts}
        if type(facts["ranks"]) is not int or facts["ranks"] < 1:
            raise ValueError(f"its seal says that there were {facts['ranks']!r} ranks")
        if not isinstance(facts.get("sha256"), str):
            raise ValueError("its seal has no sha256")
        return facts

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
        mine = sorted(step for step, worker in self._found("json") if worker == self._worker)
        old = {step: [self._worker] for step in mine[: -self._keep]}
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
        for step, worker in list(self._found("pt")):
            if step <= newest and worker >= self._ranks:
                old.setdefault(step, []).append(worker)

    def load(self, step: int) -> tuple[dict[str, Any], int]:
        """The state saved at `step` from which this worker goes on, and the ranks there were.

        Raises:
            CheckpointError: the file is missing or not what was written; names it.
        """
        data, seal = self._files(step, self._source(step))
        try:
            facts = self._read_seal(seal)
            if _sha256(data) != facts["sha256"]:
                raise ValueError(
                    f"it has {data.stat().st_size} bytes of {facts.get('bytes')}, or "
                    "others than were written"
                )
            state = torch.load(data, weights_only=True)
        except Exception as error:  # bytes of any kind fail in any way
            raise self.damaged(step, str(error).partition("\n")[0]) from error
        run = state.get("run") if isinstance(state, dict) else None
        if not isinstance(run, dict) or not {"config", "corpus"} <= run.keys():
            raise self.damaged(step, "it does not say of which run it is")
        return state, self._ranks_at(step)

    def damaged(self, step: int, because: str) -> CheckpointError:
        """The error for a checkpoint of this worker that cannot be used.

        Args:
            step: whose.
            because: what is wrong with it.
        """
        data, seal = self._files(step, self._source(step))
        return CheckpointError(
            f"load checkpoint {data}",
            because=because,
            do=f"remove {seal.name} beside it to resume from the one before",
        )

    def _files(self, step: int, worker: int) -> tuple[Path, Path]:
        stem = f"{_stem(step)}.worker-{worker}"
        return self._folder / f"{stem}.pt", self._folder / f"{stem}.json"


def _stem(step: int) -> str:
    return f"step-{step:08d}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
