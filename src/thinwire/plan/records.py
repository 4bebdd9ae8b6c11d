"""What a finished run left in its folder, as far as a plan wants to know it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, final

from thinwire.errors import ConfigurationError

__all__ = ["Records", "Span", "cannot_plan", "read_records"]

_ELSE: Final = "pass the folder of a finished run of `thinwire train`"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """What happened between two records of worker 0.

    Args:
        steps: inner steps.
        exchanges: that were applied, each fragment's counted.
        training_s: in inner and outer steps.
        inner_s: of them in inner steps.
        wait_s: of them standing still for exchanges.
    """

    steps: float
    exchanges: float
    training_s: float
    inner_s: float
    wait_s: float

    @property
    def coding_s(self) -> float:
        """All that is neither an inner step nor waiting: encoding, decoding, the outer step."""
        return max(0.0, self.training_s - self.inner_s - self.wait_s)


# Names in metrics.jsonl, in the order of the fields of a span.
_COUNTERS: Final = ("step", "rounds", "training_s", "inner_s", "wait_s")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """The files of a run.

    Args:
        folder: where they lie.
        config: config.json.
        summary: summary.json.
        metrics: metrics.jsonl, a record a line.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]

    def counted(self, name: str) -> int:
        """A number of summary.json.

        Raises:
            ConfigurationError: it is missing or no number.
        """
        return int(_number(self.folder, self.summary, name, "summary.json"))

    def configured(self, *path: str) -> Any:
        """A field of config.json.

        Raises:
            ConfigurationError: it is missing.
        """
        found: Any = self.config
        for name in path:
            if not isinstance(found, Mapping) or name not in found:
                raise cannot_plan(self.folder, f"config.json has no {'.'.join(path)}", _ELSE)
            found = found[name]
        return found

    def last(self, name: str) -> float:
        """A number of the last record.

        Raises:
            ConfigurationError: there is no record, or no such number in it.
        """
        record = self.metrics[-1] if self.metrics else {}
        return _number(self.folder, record, name, "metrics.jsonl")

    def spans(self) -> list[Span]:
        """Between all records but the first, before which everything is slow that is done once.

        Raises:
            ConfigurationError: there are fewer than two, or without the seconds of inner steps.
        """
        counters = [
            [_number(self.folder, record, name, "metrics.jsonl") for name in _COUNTERS]
            for record in self.metrics
        ]
        differences = (
            [now - then for then, now in zip(before, after, strict=True)]
            for before, after in pairwise(counters)
        )
        spans = [
            Span(steps=d[0], exchanges=d[1], training_s=d[2], inner_s=d[3], wait_s=d[4])
            for d in differences
            if d[0] > 0 and min(d) >= 0
        ]
        if not spans:
            raise cannot_plan(
                self.folder,
                f"metrics.jsonl has {len(self.metrics)} records, and the time of a step is taken "
                "from those after the first",
                "train with a smaller --log-steps, or give the step time",
            )
        return spans


def read_records(folder: Path) -> Records:
    """The records in `folder`.

    Raises:
        ConfigurationError: it is not the folder of a run, the run is not finished, or a file is
            damaged.
    """
    if not (folder / "config.json").is_file() or not (folder / "metrics.jsonl").is_file():
        raise cannot_plan(folder, "it has no config.json and metrics.jsonl of a run", _ELSE)
    config = _object(folder, "config.json")
    if config.get("kind") != "TrainConfig":
        raise cannot_plan(folder, "its config.json is not that of a run", _ELSE)
    if not (folder / "summary.json").is_file():
        raise cannot_plan(
            folder, "it has no summary.json: the run is not finished", "finish it with --resume"
        )
    lines = _text(folder, "metrics.jsonl").splitlines()
    return Records(
        folder=folder,
        config=config,
        summary=_object(folder, "summary.json"),
        metrics=[_parsed(folder, "metrics.jsonl", line) for line in lines],
    )


def cannot_plan(folder: Path, because: str, do: str) -> ConfigurationError:
    """That nothing can be planned from `folder`."""
    return ConfigurationError(f"plan from the run in {folder}", because=because, do=do)


def _number(folder: Path, record: Mapping[str, Any], name: str, file: str) -> float:
    value = record.get(name)
    if isinstance(value, int | float) and math.isfinite(value) and value >= 0:
        return value
    because = f"{file} has {name}={value!r}"
    if name not in record:
        because = f"{file} has no {name}, as those of older versions"
    raise cannot_plan(folder, because, "train again for a few rounds")


def _object(folder: Path, name: str) -> Mapping[str, Any]:
    return _parsed(folder, name, _text(folder, name))


def _text(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text()
    except (OSError, ValueError) as error:
        raise cannot_plan(folder, f"{name} cannot be read: {error}", "restore the file") from error


def _parsed(folder: Path, name: str, text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise cannot_plan(folder, f"{name} is damaged: {error}", "restore the file") from error
    if not isinstance(found, Mapping):
        raise cannot_plan(folder, f"{name} is damaged: no record", "restore the file")
    return found
