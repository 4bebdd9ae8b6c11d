"""The files of a run folder, typed and checked for consistency; and the identity of a run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

from thinwire.errors import CheckpointError
from thinwire.handshake import flatten_description
from thinwire.method import migrate_names

_STATES: Final = ("live_weights", "inner_state", "anchor", "outer_state", "feedback")

# Prefix of the fields with the contents of a model's file.
MODEL_CONFIGURATION: Final = "model.configuration."

# A resumed run may change these fields, but none that decides what it computes.
_NOT_COMPUTED: Final = (
    "machine.device",
    "machine.outer_device",
    "machine.timeout_s",
    "periods.keep_checkpoints",
    "periods.checkpoint_steps",
    "periods.statistics_steps",
)

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]

# -- the files -------------------------------------------------------------------------------------


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """config.json.

    Args:
        method: the method's text.
        sync_every: H.
        workers: K.
        worker_size: ranks per worker.
        threads: CPU threads per rank; 0 if no number was fixed.
        steps: inner steps of every worker.
        global_batch: sequences per inner step over all workers.
        sequence_length: tokens per sequence.
        seed: seed of initial weights and order of the data.
        model_size: name or file of the model.
        corpus: name or path of the text.
        tokenizer: name of the tokenizer.
        described: the whole file, nested, with current names of slots.
    """

    method: str
    sync_every: int
    workers: int
    worker_size: int = 1
    threads: int = 0
    steps: int
    global_batch: int
    sequence_length: int
    seed: int
    model_size: str
    corpus: str
    tokenizer: str
    described: dict[str, Any]

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all workers together read in one inner step."""
        return self.global_batch * self.sequence_length


# The parts of config.json that every run has, and the fields of `RunConfig` that are there.
_PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    "method": {"method": "name", "sync_every": "sync_every"},
    "model": {"model_size": "size"},
    "data": {name: name for name in ("corpus", "tokenizer", "sequence_length")},
    "machine": {name: name for name in ("worker_size", "threads")},
    "schedule": {},
}


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """summary.json.

    Args:
        method: as in config.json.
        workers: K.
        parameters: number of parameters of the model.
        steps: inner steps of every worker.
        tokens: tokens read by all workers together.
        val_loss: validation loss of the final outer parameters, in nats per token.
        sent_bytes_per_worker: counted at the transport, a payload once, however many receive it.
        received_bytes_per_worker: counted at the transport.
        peak_sent_bytes_per_step: most that a worker sent after one inner step.
        added_nbytes: bytes that sealing added to each message; None if they were not sealed.
        wall_s: duration of the whole run.
        workers_here: workers that shared the process; None in runs of older versions.
        is_elastic: whether workers could join and leave.
        contributions: number of rejected or clipped contributions, by member and kind.
        versions: versions of Python, torch and others.
        described: the whole file.
    """

    method: str
    workers: Annotated[int, msgspec.Meta(ge=1)]
    parameters: Count
    steps: Count
    tokens: Count
    val_loss: Amount
    sent_bytes_per_worker: Count
    received_bytes_per_worker: Count
    peak_sent_bytes_per_step: Count
    added_nbytes: int | None = msgspec.field(default=None, name="added_bytes_per_message")
    wall_s: Amount
    workers_here: int | None = None
    is_elastic: bool
    contributions: dict[str, dict[str, Count]] = {}
    versions: dict[str, Any] = {}
    described: dict[str, Any]


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A line of metrics.jsonl; counters and seconds are those since the run began.

    Args:
        step: inner steps.
        tokens: tokens read by all workers together.
        loss: training loss, averaged over the workers.
        sent_bytes: bytes that a worker sent, each payload counted once.
        received_bytes: bytes that a worker received.
        wait_s: time that a worker waited for exchanges.
        overlapped_s: time of exchanges while the worker trained.
        wall_s: duration of the run so far.
        val_loss: validation loss of the outer parameters; None if they were not evaluated.
        rounds: exchanges that were applied; None in runs of earlier versions.
        training_s: time in inner and outer steps; None in runs of earlier versions.
        inner_s: the part of it in inner steps; None in runs of earlier versions.
        state_bytes: bytes of each state of a worker, by name; empty if not measured.
    """

    step: Count
    tokens: Count
    loss: Amount
    sent_bytes: Count
    received_bytes: Count
    wait_s: Amount
    overlapped_s: Amount
    wall_s: Amount
    val_loss: float | None = None
    rounds: Amount | None = None
    training_s: Amount | None = None
    inner_s: Amount | None = None
    state_bytes: dict[str, int] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """A finished run whose files agree with each other.

    Args:
        folder: the run's folder.
        config: config.json.
        summary: summary.json.
        records: metrics.jsonl, in the order of their steps; at least one.
        corpus: fingerprint of the tokens; None in runs of older versions.
    """

    folder: Path
    config: RunConfig
    summary: RunSummary
    records: tuple[RunRecord, ...]
    corpus: str | None


# -- reading ---------------------------------------------------------------------------------------


def read_config(folder: Path) -> RunConfig:
    """The configuration of the run in `folder`.

    Raises:
        CheckpointError: it is missing, damaged, or not a run's.
    """
    file = folder / "config.json"
    if not file.exists():
        raise _corrupt(file, "config.json is missing")
    described = migrate_names(read_object(file))
    if described.get("kind") != "TrainConfig":
        raise _corrupt(file, "its config.json is not that of a run of thinwire")
    fields = {"described": described, **described}
    for part, places in _PARTS.items():
        if not isinstance(described.get(part), dict):
            raise _corrupt(file, f"config.json has {part} {_short(described.get(part))}")
        fields |= {name: described[part].get(place) for name, place in places.items()}
    return _typed(fields, RunConfig, file, file.name)


def read_summary(folder: Path) -> RunSummary:
    """The summary of the run in `folder`.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    file = folder / "summary.json"
    found = read_object(file)
    its = {**found, "described": found, "is_elastic": "events" in found}
    return _typed(its, RunSummary, file, file.name)


def read_finished(folder: Path) -> FinishedRun:
    """The run in `folder`, which has a summary.

    Raises:
        CheckpointError: a file is missing or damaged, or two files do not belong to the same
            run.
    """
    config, noted, metrics = read_config(folder), folder / "data.json", folder / "metrics.jsonl"
    summary, records = read_summary(folder), tuple(_records(metrics))
    data = read_object(noted) if noted.exists() else None
    corpus = None if data is None else data.get("fingerprint")
    if data is not None and not isinstance(corpus, str):
        raise _corrupt(noted, f"{noted.name} has fingerprint {_short(corpus)}")
    if not records:
        raise _corrupt(metrics, "metrics.jsonl is empty")
    last = records[-1]
    for name, its, other in (
        ("step", last.step, summary.steps),
        ("tokens", last.tokens, summary.tokens),
        ("val_loss", last.val_loss, summary.val_loss),
        ("sent_bytes", last.sent_bytes, summary.sent_bytes_per_worker),
    ):
        if its != other:
            because = f"the last record has {name} {_short(its)}, and summary.json {other}"
            raise _corrupt(metrics, because)
    for state in _STATES if last.state_bytes else ():
        size = last.state_bytes.get(state)
        if size is None or size < 0 or (state == "live_weights" and size == 0):
            raise _corrupt(metrics, f"the last record has {state}_bytes {_short(size)}")
    return FinishedRun(
        folder=folder, config=config, summary=summary, records=records, corpus=corpus
    )


def _records(file: Path) -> Iterator[RunRecord]:
    before = 0
    for number, line in enumerate(_content(file).splitlines(), start=1):
        where = f"line {number} of {file.name}"
        values = _parsed(line, dict[str, int | float], file, where)
        sizes = {s: values[f"{s}_bytes"] for s in _STATES if f"{s}_bytes" in values}
        record = _typed({**values, "state_bytes": sizes}, RunRecord, file, where)
        if record.step <= before:
            raise _corrupt(file, f"{where} has step {record.step} after {before}")
        before = record.step
        yield record


class _Step(msgspec.Struct):
    step: int


def step_of(line: bytes) -> int | None:
    """The step of a line of metrics.jsonl; None if the line is damaged.

    >>> step_of(b'{"step": 3, "loss": 1.0}'), step_of(b'{"step": 3, "lo')
    (3, None)
    """
    try:
        return msgspec.json.decode(line, type=_Step).step
    except (ValueError, RecursionError):
        return None


def read_object(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        CheckpointError: it cannot be read, or holds no object.
    """
    return _parsed(_content(file), dict[str, Any], file, file.name)


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _corrupt(file, f"{file.name} cannot be read: {error}") from error


def _parsed(text: bytes, kind: type[T], file: Path, where: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError) as error:
        hint = " (NaN and Infinity are no JSON)" if b"NaN" in text or b"Infinity" in text else ""
        raise _corrupt(file, f"{where} cannot be read: {error}{hint}") from error


def _typed(fields: Mapping[str, Any], kind: type[T], file: Path, where: str) -> T:
    """`fields` as `kind`; a null field counts as missing."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _corrupt(file, f"{where} cannot be used: {error}") from error


def _corrupt(file: Path, because: str) -> CheckpointError:
    do = "restore the file, or run again in another folder"
    return CheckpointError(f"read {file}", because=because, do=do)


def _short(value: Any) -> str:
    return "missing" if value is None else repr(value)[:60]


# -- identity of a run -----------------------------------------------------------------------------


def identity_fields(description: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a described configuration that decide what a run computes, flat.

    Two folders with equal identity fields hold the same run.

    Args:
        description: nested as in config.json, or flat as in a checkpoint.

    >>> identity_fields({"seed": 3, "machine": {"device": "cpu", "threads": 2}})
    {'seed': '3', 'machine.threads': '2'}
    """
    flat = flatten_description(migrate_names(description))
    return {
        name: value
        for name, value in flat.items()
        # Earlier versions could also simulate workers in another way, with other rounding.
        if name not in _NOT_COMPUTED and (name, value) != ("machine.simulation", "threads")
    }


def identities(
    begun: Mapping[str, Any], asked_for: Mapping[str, Any], ignored: tuple[str, ...] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """The identity fields of an earlier run and of a requested one, made comparable.

    Earlier versions recorded the name of the model's file and not its contents; both results then
    leave out the contents.

    Args:
        begun: description of the earlier run, as in `identity_fields`.
        asked_for: description of the requested run, as in `identity_fields`.
        ignored: prefixes of the names of fields that may differ.

    >>> identities({"model": {"size": "a"}}, {"model": {"size": "a", "configuration": {"b": 1}}})
    ({'model.size': 'a'}, {'model.size': 'a'})
    """
    theirs, mine = identity_fields(begun), identity_fields(asked_for)
    if not any(name.startswith(MODEL_CONFIGURATION) for name in theirs):
        ignored = (*ignored, MODEL_CONFIGURATION)
    left = ({n: v for n, v in its.items() if not n.startswith(ignored)} for its in (theirs, mine))
    return next(left), next(left)
