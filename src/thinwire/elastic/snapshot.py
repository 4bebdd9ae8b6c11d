"""Snapshots and records as safetensors files: tensors, and facts as JSON in the file's metadata.

Eight bytes say how long the header is, the header is JSON, the rest are the tensors' elements:
https://github.com/huggingface/safetensors, "Format".

Files are written part by part from the tensors' own memory, so that a worker with 10 GB of state
sends its first byte at once. `safetensors.torch.save_file` would write all of it to a disk first:
10 s for 2 GB where it was tried, which a receiver takes for silence. They are read by `safe_open`
from a file in memory, which is mapped and not copied, where the system has such files (Linux), else
from bytes. Nothing is unpickled.
"""

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from thinwire.errors import ConfigurationError, ExchangeError, MismatchError
from thinwire.membership import RoundRecord, Snapshot

_FORMAT, _SNAPSHOT, _RECORDS = "format", "thinwire snapshot 1", "thinwire records 1"
_FACTS, _METADATA = "facts", "__metadata__"
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_LENGTH_NBYTES = 8
# JSON takes some twenty times its length once it is parsed, and the library would take 100 MB.
_LONGEST_HEADER = 16 << 20
_MOST_DIMENSIONS, _MOST_ELEMENTS = 16, 1 << 56

_Source: TypeAlias = BinaryIO | bytes | bytearray | memoryview


def memory_file() -> BinaryIO:
    """An empty file in memory, gone with its last user, that `unpack` reads without a copy."""
    return os.fdopen(os.memfd_create("thinwire"), "w+b")


def snapshot_parts(snapshot: Snapshot) -> list[memoryview]:
    """A snapshot as the parts of a file; those after the first share the tensors' memory.

    >>> parts = snapshot_parts(Snapshot(facts={"version": 3}, tensors={"w": torch.ones(2)}))
    >>> unpack(b"".join(parts)).tensors["w"]
    tensor([1., 1.])

    Raises:
        ConfigurationError: a tensor's dtype does not fit the format, or there are too many.
    """
    return _file_parts(snapshot.tensors, _SNAPSHOT, dict(snapshot.facts))


def unpack(source: _Source) -> Snapshot:
    """The snapshot in a file that `snapshot_parts` made, perhaps on another machine.

    Args:
        source: a `memory_file`, which the tensors then share, or bytes, which are copied.

    Raises:
        ExchangeError: the file is damaged.
        MismatchError: it is not a snapshot, or that of another thinwire version.
    """
    tensors, facts = _read(source, _SNAPSHOT)
    if not isinstance(facts, dict) or not _is_version(facts.get("version")):
        raise _damaged("its facts have no version")
    return Snapshot(facts=facts, tensors=tensors)


def record_parts(records: Sequence[RoundRecord]) -> list[memoryview]:
    """Records as the parts of a file; those after the first share the messages' memory.

    >>> record = RoundRecord(version=1, facts={}, messages=[])
    >>> unpack_records(b"".join(record_parts([record])))[0].version
    1
    """
    messages = {
        f"{number}.{index}": message
        for number, record in enumerate(records)
        for index, message in enumerate(record.messages)
    }
    facts = [
        {"version": record.version, "messages": len(record.messages), "facts": dict(record.facts)}
        for record in records
    ]
    return _file_parts(messages, _RECORDS, facts)


def unpack_records(source: _Source) -> list[RoundRecord]:
    """The records in a file that `record_parts` made, perhaps on another machine.

    Args:
        source: a `memory_file`, which the messages then share, or bytes, which are copied.

    Raises:
        ExchangeError: the file is damaged.
        MismatchError: it does not hold records, or those of another thinwire version.
    """
    tensors, listed = _read(source, _RECORDS)
    if not isinstance(listed, list):
        raise _damaged("its facts are not a list")
    records: list[RoundRecord] = []
    for number, described in enumerate(listed):
        match described:
            case {"version": version, "messages": int(count), "facts": dict(facts)} if _is_version(
                version
            ) and 0 <= count <= len(tensors):
                names = [f"{number}.{index}" for index in range(count)]
            case _:
                raise _damaged(f"record {number} is {str(described)[:100]}")
        if not all(name in tensors for name in names):
            raise _damaged(f"a message of record {number} is missing")
        messages = [tensors.pop(name) for name in names]
        if not all(map(_is_message, messages)):
            raise _damaged(f"a message of record {number} is not a vector of uint8")
        records.append(RoundRecord(version=version, facts=facts, messages=messages))
    if tensors:
        raise _damaged(f"{len(tensors)} tensors belong to no record")
    return records


def _file_parts(tensors: Mapping[str, Tensor], kind: str, facts: Any) -> list[memoryview]:
    header: dict[str, Any] = {_METADATA: {_FORMAT: kind, _FACTS: json.dumps(facts)}}
    parts: list[memoryview] = []
    end = 0
    # Wide elements first: then each tensor is aligned to its own.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise _unpackable(f"{name!r} is {tensor.dtype}")
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        parts.append(flat.view(torch.uint8).numpy().data)
        start, end = end, end + len(parts[-1])
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % _LENGTH_NBYTES)
    if len(raw) > _LONGEST_HEADER:
        raise _unpackable(f"names, shapes and facts take {len(raw)} bytes of {_LONGEST_HEADER}")
    return [memoryview(len(raw).to_bytes(_LENGTH_NBYTES, "little") + raw), *parts]


def _read(source: _Source, kind: str) -> tuple[dict[str, Tensor], Any]:
    """Tensors and facts of a file of `kind`."""
    try:
        tensors, metadata = _opened(source)
    except ExchangeError:
        raise
    except Exception as error:  # the library's own, and what torch says to impossible shapes
        raise _damaged(f"safetensors cannot read it: {str(error).partition(chr(10))[0]}") from error
    for name, tensor in tensors.items():
        _check_tensor(name[:100], tensor)
    found = metadata.get(_FORMAT)
    if found != kind:
        raise MismatchError(
            "use what another worker sent",
            because=f"it says that it is {str(found)[:100]!r}, not {kind!r}",
            do="run the same thinwire version on all workers",
        )
    try:
        return tensors, json.loads(metadata[_FACTS])
    except (KeyError, ValueError, RecursionError) as error:
        raise _damaged(f"its facts are not JSON: {str(error)[:100]}") from error


def _opened(source: _Source) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Tensors and metadata of a file."""
    if isinstance(source, bytes | bytearray | memoryview):
        if not hasattr(os, "memfd_create"):
            return _loaded(bytes(source))
        with memory_file() as file:
            file.write(source)
            return _opened(file)
    source.flush()
    _check_header_length(source)
    with safe_open(f"/proc/self/fd/{source.fileno()}", framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return tensors, opened.metadata() or {}


def _loaded(raw: bytes) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """The same where there are no files in memory."""
    _check_header_length(io.BytesIO(raw))
    # Before the header is parsed here: the library refuses one that is no header.
    tensors = load(raw)
    end = _LENGTH_NBYTES + int.from_bytes(raw[:_LENGTH_NBYTES], "little")
    return tensors, json.loads(raw[_LENGTH_NBYTES:end]).get(_METADATA, {})


def _check_header_length(file: BinaryIO) -> None:
    """Refuse a header that would take too much memory, before it is parsed."""
    nbytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(_LENGTH_NBYTES), "little")
    if nbytes < _LENGTH_NBYTES or length > min(_LONGEST_HEADER, nbytes - _LENGTH_NBYTES):
        raise _damaged(f"its header is said to have {length} bytes and all of it has {nbytes}")
    if length % _LENGTH_NBYTES:
        raise _damaged(f"its header has {length} bytes, which leaves the elements unaligned")


def _check_tensor(name: str, tensor: Tensor) -> None:
    """Refuse what safetensors reads and torch computes nonsense with, or crashes on."""
    if tensor.dtype not in _NAMES:
        raise _damaged(f"{name!r} is {tensor.dtype}")
    # Not plainly their product: an empty tensor's other sizes must be reasonable, too.
    span = math.prod(max(size, 1) for size in tensor.shape)
    if tensor.dim() > _MOST_DIMENSIONS or span > _MOST_ELEMENTS:
        raise _damaged(f"the shape of {name!r} is {str(list(tensor.shape))[:100]}")
    if tensor.numel() and tensor.data_ptr() % tensor.element_size():
        raise _damaged(f"{name!r} is not aligned")
    if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
        raise _damaged(f"{name!r} holds other bytes than 0 and 1")


def _is_version(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_message(tensor: Tensor) -> bool:
    return tensor.dtype == torch.uint8 and tensor.dim() == 1


def _unpackable(because: str) -> ConfigurationError:
    return ConfigurationError(
        "pack a worker's state",
        because=because,
        do="train fewer parameters, of one of the usual dtypes",
    )


def _damaged(because: str) -> ExchangeError:
    return ExchangeError(
        "use what another worker sent",
        because=because,
        do="try again with another worker, and check that all run the same thinwire version; "
        "none of it was used",
    )
