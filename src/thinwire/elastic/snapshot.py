"""Snapshots and records as bytes: tensors in the safetensors format, facts as JSON beside them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thinwire.elastic.shared_state import RoundRecord, Snapshot
from thinwire.elastic.tensor_file import Buffer, read_tensors, write_tensors
from thinwire.errors import ConfigurationError, ExchangeError, MismatchError

__all__ = ["pack", "pack_records", "record_parts", "snapshot_parts", "unpack", "unpack_records"]

_FORMAT, _SNAPSHOT, _RECORDS = "format", "thinwire snapshot 1", "thinwire records 1"
_FACTS = "facts"


def snapshot_parts(snapshot: Snapshot) -> list[memoryview]:
    """`pack(snapshot)` in parts that share the tensors' memory.

    Raises:
        ConfigurationError: its facts are not JSON-able or have no version, or a dtype has no name.
    """
    if not _is_version(snapshot.facts.get("version")):
        raise _unpackable(f"its version is {snapshot.facts.get('version')!r}")
    return write_tensors(snapshot.tensors, _texts(_SNAPSHOT, dict(snapshot.facts)))


def pack(snapshot: Snapshot) -> bytes:
    """A snapshot as bytes.

    >>> packed = pack(Snapshot(facts={"version": 3}, tensors={"w": torch.ones(2)}))
    >>> unpack(packed).tensors["w"]
    tensor([1., 1.])

    Raises:
        ConfigurationError: its facts are not JSON-able or have no version, or a dtype has no name.
    """
    return b"".join(snapshot_parts(snapshot))


def unpack(data: Buffer) -> Snapshot:
    """What `pack` was given, perhaps elsewhere.

    Args:
        data: from `pack`; if it can be written to, the tensors share its memory.

    Raises:
        ExchangeError: it is damaged.
        MismatchError: it is no snapshot, or that of another thinwire version.
    """
    tensors, texts = read_tensors(data)
    facts = _facts(_SNAPSHOT, texts)
    if not isinstance(facts, dict) or not _is_version(facts.get("version")):
        raise _damaged("its facts have no version")
    return Snapshot(facts=facts, tensors=tensors)


def record_parts(records: Sequence[RoundRecord]) -> list[memoryview]:
    """`pack_records(records)` in parts that share the messages' memory.

    Raises:
        ConfigurationError: facts are not JSON-able, or a message is no vector of uint8.
    """
    messages = {
        f"{number}.{index}": message
        for number, record in enumerate(records)
        for index, message in enumerate(record.messages)
    }
    for message in messages.values():
        if message.dtype != torch.uint8 or message.dim() != 1:
            raise _unpackable(f"a message is {message.dtype} {list(message.shape)}")
    facts = [
        {"version": record.version, "messages": len(record.messages), "facts": dict(record.facts)}
        for record in records
    ]
    return write_tensors(messages, _texts(_RECORDS, facts))


def pack_records(records: Sequence[RoundRecord]) -> bytes:
    """Records as bytes.

    >>> unpack_records(pack_records([RoundRecord(version=1, facts={}, messages=[])]))[0].version
    1

    Raises:
        ConfigurationError: facts are not JSON-able, or a message is no vector of uint8.
    """
    return b"".join(record_parts(records))


def unpack_records(data: Buffer) -> list[RoundRecord]:
    """What `pack_records` was given, perhaps elsewhere.

    Args:
        data: from `pack_records`; if it can be written to, the messages share its memory.

    Raises:
        ExchangeError: it is damaged.
        MismatchError: these are no records, or those of another thinwire version.
    """
    tensors, texts = read_tensors(data)
    listed = _facts(_RECORDS, texts)
    if not isinstance(listed, list):
        raise _damaged("its facts are not a list")
    records: list[RoundRecord] = []
    for number, told in enumerate(listed):
        match told:
            case {"version": version, "messages": int(count), "facts": dict(facts)} if _is_version(
                version
            ) and 0 <= count <= len(tensors):
                names = [f"{number}.{index}" for index in range(count)]
            case _:
                raise _damaged(f"record {number} is {str(told)[:100]}")
        if not all(name in tensors for name in names):
            raise _damaged(f"a message of record {number} is missing")
        messages = [tensors.pop(name) for name in names]
        if any(message.dtype != torch.uint8 or message.dim() != 1 for message in messages):
            raise _damaged(f"a message of record {number} is no vector of uint8")
        records.append(RoundRecord(version=version, facts=facts, messages=messages))
    if tensors:
        raise _damaged(f"{len(tensors)} tensors belong to no record")
    return records


def _texts(kind: str, facts: Any) -> dict[str, str]:
    try:
        return {_FORMAT: kind, _FACTS: json.dumps(facts)}
    except (TypeError, ValueError) as error:
        raise _unpackable(f"its facts are not JSON-able: {error}") from error


def _facts(kind: str, texts: Mapping[str, str]) -> Any:
    found = texts.get(_FORMAT)
    if found != kind:
        raise MismatchError(
            "use what another worker sent",
            because=f"it says that it is {str(found)[:100]!r}, not {kind!r}",
            do="run the same thinwire version on all workers",
        )
    try:
        return json.loads(texts[_FACTS])
    except (KeyError, ValueError, RecursionError) as error:
        raise _damaged(f"its facts are not JSON: {str(error)[:100]}") from error


def _is_version(value: Any) -> bool:
    return type(value) is int and value >= 0


def _unpackable(because: str) -> ConfigurationError:
    return ConfigurationError(
        "pack a worker's state",
        because=because,
        do="report it: facts are JSON-able with a version from 0, messages vectors of uint8",
    )


def _damaged(because: str) -> ExchangeError:
    return ExchangeError(
        "use what another worker sent",
        because=because,
        do="ask another worker; nothing of it was used",
    )
