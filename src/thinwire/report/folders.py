"""Run folders as a report reads them: what is complete and sound, and why the rest is not."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

__all__ = ["Found", "LeftOut", "Run", "find_runs", "read_run"]

_SIGNS: Final = ("config.json", "summary.json", "metrics.jsonl", "checkpoints")
_DEEPEST: Final = 3
_COUNTS: Final = ("workers", "parameters", "steps", "tokens")
_AMOUNTS: Final = (
    "val_loss",
    "sent_bytes_per_worker",
    "received_bytes_per_worker",
    "peak_sent_bytes_per_step",
    "wall_s",
    "wait_s",
)
_RECORDED: Final = ("step", "tokens", "loss", "sent_bytes", "wait_s", "overlapped_s", "wall_s")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A finished run whose files agree with each other.

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


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A folder that is not shown among the others.

    Args:
        folder: where it lies.
        reason: why.
    """

    folder: Path
    reason: str


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What folders hold.

    Args:
        runs: complete and sound.
        left_out: all others.
    """

    runs: tuple[Run, ...]
    left_out: tuple[LeftOut, ...]


@final
class _UnusableError(Exception):
    pass


def find_runs(paths: Sequence[Path]) -> Found:
    """The runs in `paths`, each of which is a run's folder or holds some.

    Args:
        paths: as given; a folder that is met twice counts once.
    """
    runs: list[Run] = []
    left_out: list[LeftOut] = []
    for folder in dict.fromkeys(folder for path in paths for folder in _folders(path)):
        read = read_run(folder)
        (runs if isinstance(read, Run) else left_out).append(read)  # pyright: ignore
    return Found(runs=tuple(runs), left_out=tuple(left_out))


def _folders(path: Path) -> list[Path]:
    try:
        found = list(_below(path, _DEEPEST))
    except OSError:
        found = []
    return found or [path]


def _below(path: Path, depth: int) -> Iterable[Path]:
    if not path.is_dir():
        return
    if any((path / name).exists() for name in _SIGNS):
        yield path
    elif depth:
        for child in sorted(path.iterdir()):
            yield from _below(child, depth - 1)


def read_run(folder: Path) -> Run | LeftOut:
    """The run in `folder`, or why there is none that can be shown.

    Args:
        folder: of one run.
    """
    try:
        return _read(folder)
    except _UnusableError as error:
        return LeftOut(folder=folder, reason=str(error))


def _read(folder: Path) -> Run:
    _check_begun(folder)
    config = _configuration(folder)
    if not (folder / "summary.json").exists():
        raise _UnusableError(_unfinished(folder, config))
    run = Run(
        folder=folder,
        config=config,
        summary=_object(folder / "summary.json"),
        records=tuple(_records(folder)),
        corpus=_corpus(folder),
    )
    _check(run)
    return run


def _check_begun(folder: Path) -> None:
    if not folder.exists():
        raise _UnusableError("there is no such folder")
    if not folder.is_dir():
        raise _UnusableError("it is a file, not the folder of a run")
    if not any((folder / name).exists() for name in _SIGNS):
        raise _UnusableError("no run was begun in it")
    if not (folder / "config.json").exists():
        raise _UnusableError("corrupt: config.json is missing")


def _configuration(folder: Path) -> Mapping[str, Any]:
    config = _object(folder / "config.json")
    if config.get("kind") != "TrainConfig":
        raise _UnusableError("its config.json is not that of a run of thinwire")
    wanted: Mapping[str, type] = {
        **dict.fromkeys(("workers", "steps", "global_batch", "seed"), int),
        **dict.fromkeys(("method", "model", "data", "machine", "schedule"), dict),
    }
    for name, kind in wanted.items():
        if not isinstance(config.get(name), kind):
            raise _UnusableError(f"corrupt: config.json has {name} {_short(config.get(name))}")
    _check_nested(config)
    return config


def _check_nested(config: Mapping[str, Any]) -> None:
    for part, name, kind in (
        ("method", "name", str),
        ("method", "sync_every", int),
        ("data", "sequence_length", int),
    ):
        if not isinstance(config[part].get(name), kind):
            found = _short(config[part].get(name))
            raise _UnusableError(f"corrupt: config.json has {part}.{name} {found}")


def _unfinished(folder: Path, config: Mapping[str, Any]) -> str:
    """How far a run without a summary came, and why it ended if that was noted."""
    last = "none"
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        last = str(max(json.loads(line)["step"] for line in lines[-2:] if line.endswith("}")))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    reason = f"incomplete: it has no summary, {last} of {config['steps']} steps are recorded"
    try:
        noted = _object(folder / "failed.json")
    except _UnusableError:
        return reason
    return f"{reason}; it ended with {noted.get('kind')}: {noted.get('why')}"


def _records(folder: Path) -> Iterable[Mapping[str, Any]]:
    before = 0
    for number, line in enumerate(_text(folder / "metrics.jsonl").splitlines(), start=1):
        where = f"line {number} of metrics.jsonl"
        record = _parsed(line, where)
        for name in _RECORDED:
            if not _is_amount(record.get(name)):
                raise _UnusableError(f"corrupt: {where} has {name} {_short(record.get(name))}")
        if record["step"] <= before:
            raise _UnusableError(f"corrupt: {where} has step {record['step']} after {before}")
        bad = [name for name, value in record.items() if not _is_number(value)]
        if bad:
            raise _UnusableError(f"corrupt: {where} has {bad[0]} {_short(record[bad[0]])}")
        before = record["step"]
        yield record


def _check(run: Run) -> None:
    """Raise unless the three files tell of one and the same run."""
    summary, config = run.summary, run.config
    for name in (*_COUNTS, *_AMOUNTS):
        if not _is_amount(summary.get(name)):
            raise _UnusableError(f"corrupt: summary.json has {name} {_short(summary.get(name))}")
    wanted = {"method": run.method, "steps": config["steps"]}
    if not run.is_elastic:  # whose workers, and so whose tokens, vary
        wanted["workers"] = config["workers"]
        wanted["tokens"] = (
            config["steps"] * config["global_batch"] * config["data"]["sequence_length"]
        )
    for name, value in wanted.items():
        if summary.get(name) != value:
            raise _UnusableError(
                f"corrupt: summary.json has {name} {_short(summary.get(name))}, which "
                f"config.json makes {value}"
            )
    if not run.records:
        raise _UnusableError("corrupt: metrics.jsonl is empty")
    _check_end(run)


def _check_end(run: Run) -> None:
    last = run.records[-1]
    pairs = (("step", "steps"), ("tokens", "tokens"), ("val_loss", "val_loss"))
    for recorded, summed in (*pairs, ("sent_bytes", "sent_bytes_per_worker")):
        if last.get(recorded) != run.summary[summed]:
            raise _UnusableError(
                f"corrupt: the last record has {recorded} {_short(last.get(recorded))}, and "
                f"summary.json {run.summary[summed]}"
            )


def _corpus(folder: Path) -> str | None:
    file = folder / "data.json"
    if not file.exists():
        return None
    noted = _object(file).get("fingerprint")
    if not isinstance(noted, str):
        raise _UnusableError(f"corrupt: data.json has fingerprint {_short(noted)}")
    return noted


def _object(file: Path) -> Mapping[str, Any]:
    return _parsed(_text(file), file.name)


def _parsed(text: str, where: str) -> Mapping[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise _UnusableError(f"corrupt: {where} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise _UnusableError(f"corrupt: {where} holds no object")
    return data


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _UnusableError(f"corrupt: {file.name} cannot be read: {error}") from error


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _is_amount(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _short(value: Any) -> str:
    return "missing" if value is None else repr(value)[:60]
