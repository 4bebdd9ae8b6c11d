"""What a folder holds of the run that belongs there: judged by the folder's own records."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, final

from thinwire.agreement import first_difference
from thinwire.errors import CheckpointError
from thinwire.experiments.comparable import common_fields
from thinwire.train.config import TrainConfig
from thinwire.train.run_folder import RunFolder, what_counts, without, write_json

__all__ = ["Standing", "State", "forget_failure", "look", "note_failure", "strangers"]

_FAILURE = "failed.json"
_STATES = ("live_weights", "inner_state", "anchor", "outer_state", "feedback")


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
        summary: of a finished run, with its memory as `memory_bytes`.
        origin: what of a finished run only the run itself knew: its corpus and its parameters.
    """

    state: State
    why: str = ""
    summary: Mapping[str, Any] | None = None
    origin: tuple[str | None, int] | None = None


@final
class _CorruptError(Exception):
    pass


def look(folder: Path, config: TrainConfig) -> Standing:
    """How the run of `config` in `folder` stands; nothing is changed.

    Args:
        folder: where it is or would be.
        config: of the run that is asked for.
    """
    try:
        return _look(folder, config)
    except _CorruptError as error:
        return Standing(state=State.CORRUPT, why=str(error))


def _look(folder: Path, config: TrainConfig) -> Standing:
    if not RunFolder(folder).has_run():
        left = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        if "summary.json" in left or "metrics.jsonl" in left:
            raise _CorruptError("it has records and no config.json")
        return Standing(state=State.ABSENT)
    theirs = _object(folder / "config.json")
    field = _difference(theirs, config)
    if field is not None:
        return Standing(state=State.MISMATCH, why=field)
    if (folder / "summary.json").exists():
        return _finished(folder, config)
    failure = failure_of(folder)
    if failure is not None and failure[0] == "NonFiniteError":
        return Standing(state=State.DIVERGED, why=failure[1])
    return Standing(state=State.UNFINISHED, why=_how_far(folder, config))


def _difference(theirs: dict[str, Any], config: TrainConfig) -> str | None:
    """In which field the run there is not the one asked for."""
    # Its own part of the cores is no reason to run again, unless somebody asked for another.
    ignored: Collection[str] = () if config.machine.threads else ("machine.threads",)
    there = without(what_counts(theirs), ignored)
    here = without(what_counts(json.loads(json.dumps(config.describe()))), ignored)
    field = first_difference(there, here)
    if field is None:
        return None
    return f"{field} is {there.get(field, 'none')} there and {here.get(field, 'none')} here"


def _finished(folder: Path, config: TrainConfig) -> Standing:
    summary = _object(folder / "summary.json")
    if "events" in summary:
        why = "it is of one worker of an elastic run"
        return Standing(state=State.MISMATCH, why=why)
    wanted = {
        "workers": config.workers,
        "steps": config.steps,
        "tokens": config.steps * config.tokens_per_step,
    }
    for name, value in wanted.items():
        if summary.get(name) != value:
            raise _CorruptError(
                f"summary.json has {name} {summary.get(name)}, which config.json makes {value}"
            )
    numbers = ("val_loss", "sent_bytes_per_worker", "received_bytes_per_worker")
    for name in (*numbers, "peak_sent_bytes_per_step", "wall_s", "parameters"):
        if not _is_number(summary.get(name)):
            raise _CorruptError(f"summary.json has {name} {summary.get(name)}")
    return Standing(
        state=State.FINISHED,
        summary=summary | {"memory_bytes": _memory(folder)},
        origin=(_corpus(folder), summary["parameters"]),
    )


def _memory(folder: Path) -> dict[str, int]:
    """Bytes of each state that a worker of the run in `folder` held."""
    try:
        record = RunFolder(folder).last_evaluation()
        return {state: int(record[f"{state}_bytes"]) for state in _STATES}
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        raise _CorruptError(f"metrics.jsonl has no readable last evaluation: {error}") from error


def _corpus(folder: Path) -> str | None:
    """The fingerprint of the corpus; None of a run from before it was noted."""
    file = folder / "data.json"
    return str(_object(file).get("fingerprint")) if file.exists() else None


def _how_far(folder: Path, config: TrainConfig) -> str:
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return f"{json.loads(lines[-1])['step']} of {config.steps} steps noted"
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return f"none of {config.steps} steps noted"


def _object(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise _CorruptError(f"{file.name} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise _CorruptError(f"{file.name} holds a {type(data).__name__}")
    return data


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# -- failures --------------------------------------------------------------------------------------


def note_failure(folder: Path, kind: str, why: str) -> None:
    """Leave in a run's folder why it ended; a folder without a run gets nothing."""
    if RunFolder(folder).has_run():
        write_json(folder / _FAILURE, {"kind": kind, "why": why})


def forget_failure(folder: Path) -> None:
    """The run is tried again."""
    (folder / _FAILURE).unlink(missing_ok=True)


def failure_of(folder: Path) -> tuple[str, str] | None:
    """Kind and reason of what ended the run in `folder`."""
    try:
        noted = _object(folder / _FAILURE)
    except _CorruptError:
        return None
    return str(noted.get("kind")), str(noted.get("why"))


# -- other folders ---------------------------------------------------------------------------------


def strangers(out: Path, known: Collection[str], config: TrainConfig) -> dict[str, Standing]:
    """Runs in `out` that do not belong to a comparison, and in what they differ from it.

    Args:
        out: the comparison's folder.
        known: names of the folders that belong to it.
        config: any of its runs'.
    """
    found: dict[str, Standing] = {}
    for folder in sorted(out.iterdir()) if out.is_dir() else []:
        holds = ("config.json", "summary.json", "metrics.jsonl", "checkpoints")
        if folder.name not in known and any((folder / name).exists() for name in holds):
            found[folder.name] = Standing(state=State.STRANGER, why=_stranger(folder, config))
    return found


def _stranger(folder: Path, config: TrainConfig) -> str:
    try:
        theirs = common_fields(_object(folder / "config.json"))
    except _CorruptError as error:
        return str(error)
    mine = common_fields(json.loads(json.dumps(config.describe())))
    field = first_difference(theirs, mine)
    if field is None:
        return "the same model and tokens, but no run that was asked for"
    return f"{field} is {theirs.get(field, 'none')} there and {mine.get(field, 'none')} here"
