"""Status of the run in a folder, from its files; nothing is changed."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from thinwire.errors import CheckpointError
from thinwire.handshake import first_difference
from thinwire.runs.folder import RunFolder, write_json
from thinwire.runs.schema import (
    FinishedRun,
    identities,
    read_config,
    read_finished,
    read_object,
    step_of,
)

_FAILURE: Final = "failed.json"
_FILES: Final = ("config.json", "summary.json", "metrics.jsonl", "checkpoints")


class RunState(StrEnum):
    """Progress of a run, or why it has no result."""

    FINISHED = "finished"
    ABSENT = "not begun"
    UNFINISHED = "unfinished"
    DIVERGED = "diverged"
    FAILED = "failed"
    CORRUPT = "corrupt"
    MISMATCH = "another run"
    UNRELATED = "not of this comparison"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """A run's state, and the run itself if it is finished.

    Args:
        state: the run's state.
        why: the reason, in words; empty if the run is finished.
        run: None unless the state is finished.
    """

    state: RunState
    why: str = ""
    run: FinishedRun | None = None

    def __str__(self) -> str:
        return f"{self.state}: {self.why}"


def read_run(folder: Path) -> RunStatus:
    """The run in `folder`, or the reason why it has no result.

    Args:
        folder: folder of one run.
    """
    try:
        return _read(folder)
    except CheckpointError as error:
        return RunStatus(state=RunState.CORRUPT, why=error.because)


def _read(folder: Path) -> RunStatus:
    if not folder.exists():
        return RunStatus(state=RunState.ABSENT, why="there is no such folder")
    if not folder.is_dir():
        return RunStatus(state=RunState.CORRUPT, why="it is a file, not the folder of a run")
    if not has_files_of_run(folder):
        return RunStatus(state=RunState.ABSENT, why="no run was begun in it")
    if (folder / "summary.json").exists():
        return RunStatus(state=RunState.FINISHED, run=read_finished(folder))
    reached = f"{_last_step(folder)} of {read_config(folder).steps} steps recorded"
    try:
        failure = read_object(folder / _FAILURE)
    except CheckpointError:
        return RunStatus(state=RunState.UNFINISHED, why=f"it has no summary, {reached}")
    kind, why = str(failure.get("kind")), str(failure.get("why"))
    if kind == "NonFiniteError":
        return RunStatus(state=RunState.DIVERGED, why=f"{why} ({reached})")
    return RunStatus(state=RunState.FAILED, why=f"{kind}: {why} ({reached})")


def has_files_of_run(folder: Path) -> bool:
    """True if `folder` has a file of a run, even a damaged one."""
    return any((folder / name).exists() for name in _FILES)


def _last_step(folder: Path) -> str:
    """The last recorded step, even of a run that was killed while it wrote."""
    try:
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    except OSError:
        return "none"
    return str(max((s for line in lines[-2:] if (s := step_of(line)) is not None), default="none"))


def status_of(folder: Path, described: Mapping[str, Any]) -> RunStatus:
    """Status of the run with a given configuration.

    Args:
        folder: folder of the run, which may not exist.
        described: configuration of the run.
    """
    try:
        theirs = read_config(folder)
    except CheckpointError:
        theirs = None
    if theirs is not None:
        # Another share of the cores is no reason to run again, unless a number was asked for.
        ignored = () if described["machine"]["threads"] else ("machine.threads",)
        there, here = identities(theirs.described, described, ignored)
        field = first_difference(there, here)
        if field is not None:  # another configuration: its state does not matter
            values = f"{there.get(field, 'missing')} there and {here.get(field, 'missing')} here"
            return RunStatus(state=RunState.MISMATCH, why=f"{field} is {values}")
    status = read_run(folder)
    if status.run is not None and status.run.summary.is_elastic:
        return RunStatus(state=RunState.MISMATCH, why="it is of one worker of an elastic run")
    return status


# -- failures --------------------------------------------------------------------------------------


def note_failure(folder: Path, kind: str, why: str) -> None:
    """Record in a run's folder why the run ended; a folder without a run gets nothing."""
    if RunFolder(folder).has_run():
        write_json(folder / _FAILURE, {"kind": kind, "why": why})


def forget_failure(folder: Path) -> None:
    """Remove the record of `note_failure`, before the run is tried again."""
    (folder / _FAILURE).unlink(missing_ok=True)
