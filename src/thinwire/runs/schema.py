"""The files of a run folder as dataclasses: read, and found whole and consistent, or refused."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeGuard, cast

from thinwire.errors import CheckpointError
from thinwire.method import with_present_names

_DEEPEST: Final = 50
_STATES: Final = ("live_weights", "inner_state", "anchor", "outer_state", "feedback")

# -- what the files hold ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """config.json.

    Args:
        method: as it was asked for.
        sync_every: H.
        workers: K.
        worker_size: ranks of a worker.
        threads: of the CPU, per rank; 0 if no number was fixed.
        steps: inner steps of every worker.
        global_batch: sequences per inner step over all workers.
        sequence_length: tokens of a sequence.
        seed: of initial weights and order of the data.
        model_size: name or file of the model.
        corpus: name or path of the text.
        tokenizer: of the text.
        described: all of the file, nested, with today's names of slots.
    """

    method: str
    sync_every: int
    workers: int
    worker_size: int
    threads: int
    steps: int
    global_batch: int
    sequence_length: int
    seed: int
    model_size: str
    corpus: str
    tokenizer: str
    described: Mapping[str, Any]

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all workers together read in one inner step."""
        return self.global_batch * self.sequence_length


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """summary.json.

    Args:
        method: as in config.json.
        workers: K.
        parameters: of the model.
        steps: inner steps of every worker.
        tokens: read by all workers together.
        val_loss: of the outer parameters at the end, in nats per token.
        sent_bytes_per_worker: counted at the transport.
        received_bytes_per_worker: counted at the transport.
        peak_sent_bytes_per_step: most that a worker sent after one inner step.
        added_nbytes: that sealing added to each message; None where they were not sealed.
        wall_s: of the whole run.
        wait_s: that a worker stood still for exchanges.
        workers_here: workers that shared the process; None in a run that did not note it.
        is_elastic: whether workers could join and leave.
        contributions: how often a member's was rejected or clipped, by member and kind.
        versions: of Python, torch and others.
        described: all of the file.
    """

    method: str
    workers: int
    parameters: int
    steps: int
    tokens: int
    val_loss: float
    sent_bytes_per_worker: int
    received_bytes_per_worker: int
    peak_sent_bytes_per_step: int
    added_nbytes: int | None
    wall_s: float
    wait_s: float
    workers_here: int | None
    is_elastic: bool
    contributions: Mapping[str, Mapping[str, int]]
    versions: Mapping[str, Any]
    described: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A line of metrics.jsonl; counters and seconds are those since the run began.

    Args:
        step: inner steps.
        tokens: read by all workers together.
        loss: of training, mean of the workers since the record before.
        sent_bytes: by a worker.
        wait_s: that a worker stood still for exchanges.
        overlapped_s: in which exchanges travelled while it trained.
        wall_s: of the run so far.
        val_loss: of the outer parameters; None where they were not evaluated.
        rounds: exchanges that were applied; None in runs of earlier versions.
        training_s: in inner and outer steps; None in runs of earlier versions.
        inner_s: of them in inner steps; None in runs of earlier versions.
        state_bytes: what each state of a worker takes, by its name; empty where not measured.
        statistics: of pseudo-gradients and feedback: name to fragment to value.
    """

    step: int
    tokens: int
    loss: float
    sent_bytes: int
    wait_s: float
    overlapped_s: float
    wall_s: float
    val_loss: float | None = None
    rounds: float | None = None
    training_s: float | None = None
    inner_s: float | None = None
    state_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    statistics: Mapping[str, Mapping[int, float]] = field(
        default_factory=dict[str, Mapping[int, float]]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """A finished run whose files agree with each other.

    Args:
        folder: where it lies.
        config: config.json.
        summary: summary.json.
        records: metrics.jsonl, in the order of their steps; at least one.
        corpus: fingerprint of the tokens; None in a run that did not note it.
    """

    folder: Path
    config: RunConfig
    summary: RunSummary
    records: tuple[RunRecord, ...]
    corpus: str | None

    @property
    def seed(self) -> int:
        """Seed of the initial weights and of the order of the data."""
        return self.config.seed

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Bytes of each state that a worker held at the end; empty if the run did not note them."""
        return self.records[-1].state_bytes


# -- reading ---------------------------------------------------------------------------------------

_REQUIRED: Final = object()


class _JsonFields:
    """The fields of a JSON object, checked as they are taken.

    Args:
        data: the object.
        where: its place, as messages name it.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def get(self, path: str) -> Any:
        """A field, that of a part as `method.name`; None if it is missing."""
        value: Any = self.data
        for name in path.split("."):
            value = value.get(name)
        return value

    def of_type(self, path: str, kind: type, *, default: Any = _REQUIRED) -> Any:
        """A field of that type; `default` stands in for one that is missing."""
        value = self.get(path)
        if value is None and default is not _REQUIRED:
            return default
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _corrupt(f"{self.where} has {path} {_short(value)}")
        return value

    def amount(self, name: str) -> float:
        """A finite number >= 0."""
        value = self.data.get(name)
        if not _is_number(value) or value < 0:
            raise _corrupt(f"{self.where} has {name} {_short(value)}")
        return value

    def optional_amount(self, name: str) -> float | None:
        """A finite number >= 0; None if it is missing."""
        return self.amount(name) if name in self.data else None

    def counts(self) -> dict[str, int]:
        """All fields, each a finite number >= 0."""
        return {name: int(self.amount(name)) for name in self.data}

    def amounts(self, kind: type) -> dict[str, Any]:
        """What the fields of the dataclass `kind` that are plain numbers hold."""
        return {
            each.name: int(amount) if each.type is int else amount
            for each in fields(kind)
            if each.type in (int, float)
            for amount in [self.amount(each.name)]
        }


def read_config(folder: Path) -> RunConfig:
    """The configuration of the run in `folder`.

    Raises:
        CheckpointError: it is missing, damaged or that of something else.
    """
    file = folder / "config.json"
    if not file.exists():
        raise _corrupt("config.json is missing")
    found = _JsonFields(with_present_names(read_object(file)), file.name)
    if found.get("kind") != "TrainConfig":
        raise _corrupt("its config.json is not that of a run of thinwire")
    for part in ("method", "model", "data", "machine", "schedule"):
        found.of_type(part, dict)
    return RunConfig(
        method=found.of_type("method.name", str),
        sync_every=found.of_type("method.sync_every", int),
        workers=found.of_type("workers", int),
        worker_size=found.of_type("machine.worker_size", int, default=1),
        threads=found.of_type("machine.threads", int, default=0),
        steps=found.of_type("steps", int),
        global_batch=found.of_type("global_batch", int),
        sequence_length=found.of_type("data.sequence_length", int),
        seed=found.of_type("seed", int),
        model_size=str(found.get("model.size")),
        corpus=str(found.get("data.corpus")),
        tokenizer=str(found.get("data.tokenizer")),
        described=found.data,
    )


def read_finished(folder: Path) -> FinishedRun:
    """The run in `folder`, which has a summary.

    Raises:
        CheckpointError: a file is missing or damaged, or two of them are not of one and the same
            run.
    """
    config = read_config(folder)
    run = FinishedRun(
        folder=folder,
        config=config,
        summary=_summary(folder, config),
        records=tuple(_records(folder / "metrics.jsonl")),
        corpus=_fingerprint(folder / "data.json"),
    )
    _check_end(run)
    return run


def read_object(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    return _parsed(_text(file), file.name)


def read_summary(folder: Path) -> RunSummary:
    """The summary of the run in `folder`.

    Raises:
        CheckpointError: it is missing, damaged or not that of the run that config.json describes.
    """
    return _summary(folder, read_config(folder))


def _summary(folder: Path, config: RunConfig) -> RunSummary:
    found = _JsonFields(read_object(folder / "summary.json"), "summary.json")
    is_elastic = "events" in found.data
    summary = RunSummary(
        **found.amounts(RunSummary),
        method=str(found.get("method")),
        added_nbytes=found.of_type("added_bytes_per_message", int, default=None),
        workers_here=found.of_type("workers_here", int, default=None),
        is_elastic=is_elastic,
        contributions=_contributions(found),
        versions=found.of_type("versions", dict, default=dict[str, Any]()),
        described=found.data,
    )
    wanted: dict[str, Any] = {"method": config.method, "steps": config.steps}
    if not is_elastic:  # whose number of workers, and so of tokens, varies
        wanted |= {"workers": config.workers, "tokens": config.steps * config.tokens_per_step}
    for name, value in wanted.items():
        its = found.get(name)
        if its != value:
            raise _corrupt(
                f"{found.where} has {name} {_short(its)}, which config.json makes {value}"
            )
    return summary


def _contributions(found: _JsonFields) -> dict[str, dict[str, int]]:
    members = found.of_type("contributions", dict, default=dict[str, Any]())
    counts: dict[str, dict[str, int]] = {}
    for member, told in members.items():
        where = f"contributions of {found.where}"
        if not isinstance(told, dict):
            raise _corrupt(f"{where} has {member} {_short(told)}")
        counts[member] = _JsonFields(cast(dict[str, Any], told), where).counts()
    return counts


def _records(file: Path) -> Iterator[RunRecord]:
    before = 0
    for number, line in enumerate(_text(file).splitlines(), start=1):
        where = f"line {number} of {file.name}"
        found = _JsonFields(_parsed(line, where), where)
        record = _record(found)
        if record.step <= before:
            raise _corrupt(f"{where} has step {record.step} after {before}")
        before = record.step
        yield record


def _record(found: _JsonFields) -> RunRecord:
    statistics: dict[str, dict[int, float]] = {}
    for name, value in found.data.items():
        if not _is_number(value):
            raise _corrupt(f"{found.where} has {name} {_short(value)}")
        # A statistic of one fragment, such as cosine/3.
        statistic, slash, fragment = name.partition("/")
        if slash and fragment.isdecimal():
            statistics.setdefault(statistic, {})[int(fragment)] = value
    sizes = {state: found.get(f"{state}_bytes") for state in _STATES}
    return RunRecord(
        **found.amounts(RunRecord),
        val_loss=found.get("val_loss"),
        rounds=found.optional_amount("rounds"),
        training_s=found.optional_amount("training_s"),
        inner_s=found.optional_amount("inner_s"),
        state_bytes={state: int(size) for state, size in sizes.items() if size is not None},
        statistics=statistics,
    )


def _check_end(run: FinishedRun) -> None:
    if not run.records:
        raise _corrupt("metrics.jsonl is empty")
    last, summary = run.records[-1], run.summary
    for name, its, other in (
        ("step", last.step, summary.steps),
        ("tokens", last.tokens, summary.tokens),
        ("val_loss", last.val_loss, summary.val_loss),
        ("sent_bytes", last.sent_bytes, summary.sent_bytes_per_worker),
    ):
        if its != other:
            raise _corrupt(f"the last record has {name} {_short(its)}, and summary.json {other}")
    for state in _STATES if last.state_bytes else ():
        size = last.state_bytes.get(state)
        if size is None or size < 0 or (state == "live_weights" and size == 0):
            raise _corrupt(f"the last record has {state}_bytes {_short(size)}")


def _fingerprint(file: Path) -> str | None:
    if not file.exists():
        return None
    return _JsonFields(read_object(file), file.name).of_type("fingerprint", str)


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
        if "\\u" in text:  # half of a surrogate pair can be neither shown nor written
            json.dumps(data, ensure_ascii=False).encode()
        _check_depth(data)
    except (ValueError, RecursionError) as error:
        raise _corrupt(f"{where} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise _corrupt(f"{where} holds no object")
    return data


def _check_depth(data: Any, depth: int = 0) -> None:
    if depth > _DEEPEST:
        raise ValueError(f"its objects are more than {_DEEPEST} deep")
    for value in (
        data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    ):
        _check_depth(value, depth + 1)


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
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _short(value: Any) -> str:
    return "missing" if value is None else repr(value)[:60]
