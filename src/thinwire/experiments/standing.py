"""How the run in a folder stands, by the folder's own records."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, final

from thinwire.errors import CheckpointError
from thinwire.experiments.comparable import apart, common_fields, common_ground
from thinwire.experiments.records import (
    FAILURE,
    Finished,
    has_records,
    how_far,
    read_configuration,
    read_failure,
    read_finished,
)
from thinwire.handshake import first_difference
from thinwire.train.config import TrainConfig
from thinwire.train.run_folder import RunFolder, what_counts, without, write_json

__all__ = ["Standing", "State", "forget_failure", "judge", "look", "note_failure", "strangers"]


@final
class State(StrEnum):
    """How far a run has come."""

    FINISHED = "finished"
    ABSENT = "not begun"
    UNFINISHED = "unfinished"
    DIVERGED = "diverged"
    FAILED = "failed"
    CORRUPT = "corrupt"
    MISMATCH = "another run"
    STRANGER = "not of this comparison"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A run's state.

    Args:
        state: how far it has come.
        why: what is wrong, for people; empty where nothing is.
        summary: of a finished run, with its memory as `memory_bytes`, empty if not noted.
        origin: of a finished run, what it must have in common with others to be compared.
    """

    state: State
    why: str = ""
    summary: Mapping[str, Any] | None = None
    origin: Mapping[str, str] | None = None


def judge(folder: Path) -> Finished | Standing:
    """The run in `folder`, or why there is none with a result; nothing is changed.

    Args:
        folder: of one run.
    """
    try:
        return _judge(folder)
    except CheckpointError as error:
        return Standing(state=State.CORRUPT, why=error.because)


def _judge(folder: Path) -> Finished | Standing:
    if not folder.exists():
        return Standing(state=State.ABSENT, why="there is no such folder")
    if not folder.is_dir():
        return Standing(state=State.CORRUPT, why="it is a file, not the folder of a run")
    if not has_records(folder):
        return Standing(state=State.ABSENT, why="no run was begun in it")
    if (folder / "summary.json").exists():
        return read_finished(folder)
    reached = how_far(folder, read_configuration(folder))
    failure = read_failure(folder)
    if failure is None:
        return Standing(state=State.UNFINISHED, why=f"it has no summary, {reached}")
    kind, why = failure
    if kind == "NonFiniteError":
        return Standing(state=State.DIVERGED, why=f"{why} ({reached})")
    return Standing(state=State.FAILED, why=f"{kind}: {why} ({reached})")


def look(folder: Path, config: TrainConfig) -> Standing:
    """How the run of `config` in `folder` stands; nothing is changed.

    Args:
        folder: where it is or would be.
        config: of the run that is asked for.
    """
    different = _difference(folder, config)
    if different is not None:  # whatever ails it, it is somebody else's
        return Standing(state=State.MISMATCH, why=different)
    run = judge(folder)
    if isinstance(run, Standing):
        return run
    if run.is_elastic:
        return Standing(state=State.MISMATCH, why="it is of one worker of an elastic run")
    return Standing(
        state=State.FINISHED,
        summary={**run.summary, "memory_bytes": run.memory_bytes},
        origin=common_ground(run),
    )


def _difference(folder: Path, config: TrainConfig) -> str | None:
    """In which field the run there, if one can be told, is not the one asked for."""
    try:
        theirs = read_configuration(folder)
    except CheckpointError:
        return None
    # Its own part of the cores is no reason to run again, unless somebody asked for another.
    ignored: Collection[str] = () if config.machine.threads else ("machine.threads",)
    there = without(what_counts(theirs), ignored)
    here = without(what_counts(json.loads(json.dumps(config.describe()))), ignored)
    field = first_difference(there, here)
    if field is None:
        return None
    return f"{field} is {there.get(field, 'none')} there and {here.get(field, 'none')} here"


# -- failures --------------------------------------------------------------------------------------


def note_failure(folder: Path, kind: str, why: str) -> None:
    """Leave in a run's folder why it ended; a folder without a run gets nothing."""
    if RunFolder(folder).has_run():
        write_json(folder / FAILURE, {"kind": kind, "why": why})


def forget_failure(folder: Path) -> None:
    """The run is tried again."""
    (folder / FAILURE).unlink(missing_ok=True)


# -- other folders ---------------------------------------------------------------------------------


def strangers(out: Path, known: Collection[str], config: TrainConfig) -> dict[str, Standing]:
    """Runs in `out` that do not belong to a comparison, and in what they differ from it.

    Args:
        out: the comparison's folder.
        known: names of the folders that belong to it.
        config: any of its runs'.
    """
    others = sorted(out.iterdir()) if out.is_dir() else []
    return {
        folder.name: Standing(state=State.STRANGER, why=_stranger(folder, config))
        for folder in others
        if folder.name not in known and has_records(folder)
    }


def _stranger(folder: Path, config: TrainConfig) -> str:
    try:
        theirs = common_fields(read_configuration(folder))
    except CheckpointError as error:
        return error.because
    mine = common_fields(json.loads(json.dumps(config.describe())))
    if theirs == mine:
        return "the same model and tokens, but no run that was asked for"
    return apart(theirs, mine)
