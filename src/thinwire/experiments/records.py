"""The records of a run's folder: read, and found whole and of one mind, or refused."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard, final

from thinwire.errors import CheckpointError

__all__ = [
    "FAILURE",
    "Finished",
    "has_records",
    "how_far",
    "read_configuration",
    "read_failure",
    "read_finished",
]

FAILURE: Final = "failed.json"
"""Says why a run ended; one that goes on has none."""

_SIGNS: Final = ("config.json", "summary.json", "metrics.jsonl", "checkpoints")
_STATES: Final = ("live_weights", "inner_state", "anchor", "outer_state", "feedback")
_CONFIGURED: Final[Mapping[str, type]] = {
    **dict.fromkeys(("workers", "steps", "global_batch", "seed"), int),
    **dict.fromkeys(("method", "model", "data", "machine", "schedule"), dict),
    "method.name": str,
    "method.sync_every": int,
    "data.sequence_length": int,
}
_SUMMED: Final = (
    "workers",
    "parameters",
    "steps",
    "tokens",
    "val_loss",
    "sent_bytes_per_worker",
    "received_bytes_per_worker",
    "peak_sent_bytes_per_step",
    "wall_s",
    "wait_s",
)
_RECORDED: Final = ("step", "tokens", "loss", "sent_bytes", "wait_s", "overlapped_s", "wall_s")
# Fields of the last record, and those of the summary that say the same.
_ENDS: Final = {
    "step": "steps",
    "tokens": "tokens",
    "val_loss": "val_loss",
    "sent_bytes": "sent_bytes_per_worker",
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A finished run whose records agree with each other.

    Args:
        folder: where it lies.
        config: config.json.
        summary: summary.json.
        records: metrics.jsonl, a record a line, in the order of their steps.
        corpus: fingerprint of the tokens; None of a run that did not note it.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    records: tuple[Mapping[str, Any], ...]
    corpus: str | None

    @property
    def method(self) -> str:
        """As it was asked for."""
        return str(self.config["method"]["name"])

    @property
    def seed(self) -> int:
        """Of initial weights and order of the data."""
        return int(self.config["seed"])

    @property
    def is_elastic(self) -> bool:
        """Whether workers could come and go."""
        return "events" in self.summary

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Of each state that a worker held; empty of a run that did not note it."""
        last = self.records[-1]
        return {s: int(last[f"{s}_bytes"]) for s in _STATES if f"{s}_bytes" in last}


def has_records(folder: Path) -> bool:
    """Whether something of a run lies in `folder`."""
    return any((folder / name).exists() for name in _SIGNS)


def read_configuration(folder: Path) -> dict[str, Any]:
    """The configuration of the run in `folder`.

    Raises:
        CheckpointError: it is missing, damaged or that of something else.
    """
    if not (folder / "config.json").exists():
        raise _corrupt("config.json is missing")
    config = _object(folder / "config.json")
    if config.get("kind") != "TrainConfig":
        raise _corrupt("its config.json is not that of a run of thinwire")
    for field, kind in _CONFIGURED.items():
        part, _, name = field.rpartition(".")
        value = (config[part] if part else config).get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _corrupt(f"config.json has {field} {_short(value)}")
    return config


def read_finished(folder: Path) -> Finished:
    """The run in `folder`, which has a summary.

    Raises:
        CheckpointError: a file is missing or damaged, or they do not tell of one and the same run.
    """
    run = Finished(
        folder=folder,
        config=read_configuration(folder),
        summary=_object(folder / "summary.json"),
        records=tuple(_records(folder / "metrics.jsonl")),
        corpus=_corpus(folder / "data.json"),
    )
    _check_summary(run)
    _check_end(run)
    return run


def read_failure(folder: Path) -> tuple[str, str] | None:
    """Kind and reason of what ended the run in `folder`; None if that was not noted."""
    try:
        noted = _object(folder / FAILURE)
    except CheckpointError:
        return None
    return str(noted.get("kind")), str(noted.get("why"))


def how_far(folder: Path, config: Mapping[str, Any]) -> str:
    """How many steps are recorded of a run that may have been killed while it wrote."""
    last = "none"
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        last = str(max(json.loads(line)["step"] for line in lines[-2:] if line.endswith("}")))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return f"{last} of {config['steps']} steps recorded"


# -- what is checked -------------------------------------------------------------------------------


def _records(file: Path) -> Iterable[Mapping[str, Any]]:
    before = 0
    for number, line in enumerate(_text(file).splitlines(), start=1):
        where = f"line {number} of {file.name}"
        record = _parsed(line, where)
        _check_amounts(record, _RECORDED, where)
        if record["step"] <= before:
            raise _corrupt(f"{where} has step {record['step']} after {before}")
        for name, value in record.items():
            if not _is_number(value):
                raise _corrupt(f"{where} has {name} {_short(value)}")
        before = record["step"]
        yield record


def _check_summary(run: Finished) -> None:
    summary, config = run.summary, run.config
    _check_amounts(summary, _SUMMED, "summary.json")
    if not isinstance(summary.get("versions", {}), dict):
        raise _corrupt(f"summary.json has versions {_short(summary['versions'])}")
    wanted = {"method": run.method, "steps": config["steps"]}
    if not run.is_elastic:  # whose workers, and so whose tokens, vary
        batch_tokens = config["global_batch"] * config["data"]["sequence_length"]
        wanted |= {"workers": config["workers"], "tokens": config["steps"] * batch_tokens}
    for name, value in wanted.items():
        if summary.get(name) != value:
            its = _short(summary.get(name))
            raise _corrupt(f"summary.json has {name} {its}, which config.json makes {value}")


def _check_end(run: Finished) -> None:
    if not run.records:
        raise _corrupt("metrics.jsonl is empty")
    last = run.records[-1]
    for recorded, summed in _ENDS.items():
        if last.get(recorded) != run.summary[summed]:
            its, other = _short(last.get(recorded)), run.summary[summed]
            raise _corrupt(f"the last record has {recorded} {its}, and summary.json {other}")
    sizes = [f"{state}_bytes" for state in _STATES]
    if any(name in last for name in sizes):
        _check_amounts(last, sizes, "the last record")
    if last.get("live_weights_bytes") == 0:
        raise _corrupt("the last record has live_weights_bytes 0")


def _corpus(file: Path) -> str | None:
    if not file.exists():
        return None
    noted = _object(file).get("fingerprint")
    if not isinstance(noted, str):
        raise _corrupt(f"{file.name} has fingerprint {_short(noted)}")
    return noted


def _check_amounts(record: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    for name in names:
        value = record.get(name)
        if not _is_number(value) or value < 0:
            raise _corrupt(f"{where} has {name} {_short(value)}")


def _object(file: Path) -> dict[str, Any]:
    return _parsed(_text(file), file.name)


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise _corrupt(f"{where} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise _corrupt(f"{where} holds no object")
    return data


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _corrupt(f"{file.name} cannot be read: {error}") from error


def _corrupt(because: str) -> CheckpointError:
    return CheckpointError(
        "use what a run recorded",
        because=because,
        do="restore the file, or run again in another folder",
    )


def _is_number(value: Any) -> TypeGuard[float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _short(value: Any) -> str:
    return "missing" if value is None else repr(value)[:60]
