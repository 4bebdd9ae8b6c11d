"""Snapshots as safetensors files: tensors, and facts as JSON in the file's metadata.

Eight bytes say how long the header is, the header is JSON, the rest are the tensors' elements:
https://github.com/huggingface/safetensors, "Format".

Files are written part by part from the tensors' own memory, so that a worker with 10 GB of state
sends its first byte at once. `safetensors.torch.save_file` would write all of it to a disk first:
10 s for 2 GB where it was tried. They are read from bytes. Nothing is unpickled.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from thinwire.errors import ConfigurationError, ExchangeError, MismatchError
from thinwire.membership import Snapshot

_FORMAT, _SNAPSHOT = "format", "thinwire snapshot 1"
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
_LONGEST_HEADER = 16 << 20
_MOST_DIMENSIONS, _MOST_ELEMENTS = 16, 1 << 56


def snapshot_parts(snapshot: Snapshot) -> list[memoryview]:
    """A snapshot as the parts of a file; those after the first share the tensors' memory.

    >>> parts = snapshot_parts(Snapshot(facts={"version": 3}, tensors={"w": torch.ones(2)}))
    >>> unpack(b"".join(parts)).tensors["w"]
    tensor([1., 1.])

    Raises:
        ConfigurationError: a tensor's dtype does not fit the format, or there are too many.
    """
    texts = {_FORMAT: _SNAPSHOT, _FACTS: json.dumps(dict(snapshot.facts))}
    header: dict[str, Any] = {_METADATA: texts}
    parts: list[memoryview] = []
    end = 0
    # Wide elements first: then each tensor is aligned to its own.
    for name, tensor in sorted(
        snapshot.tensors.items(), key=lambda t: (-t[1].element_size(), t[0])
    ):
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


def unpack(source: bytes | bytearray | memoryview) -> Snapshot:
    """The snapshot in a file that `snapshot_parts` made, perhaps on another machine.

    Args:
        source: is copied.

    Raises:
        ExchangeError: the file is damaged.
        MismatchError: it is not a snapshot, or that of another thinwire version.
    """
    try:
        tensors, metadata = _loaded(bytes(source))
    except ExchangeError:
        raise
    except Exception as error:  # the library's own, and what torch says to impossible shapes
        raise _damaged(f"safetensors cannot read it: {str(error).partition(chr(10))[0]}") from error
    for name, tensor in tensors.items():
        _check_tensor(name[:100], tensor)
    found = metadata.get(_FORMAT)
    if found != _SNAPSHOT:
        raise MismatchError(
            "use what another worker sent",
            because=f"it says that it is {str(found)[:100]!r}, not {_SNAPSHOT!r}",
            do="run the same thinwire version on all workers",
        )
    try:
        facts = json.loads(metadata[_FACTS])
    except (KeyError, ValueError, RecursionError) as error:
        raise _damaged(f"its facts are not JSON: {str(error)[:100]}") from error
    if not isinstance(facts, dict) or not _is_version(facts.get("version")):
        raise _damaged("its facts have no version")
    return Snapshot(facts=facts, tensors=tensors)


def _loaded(raw: bytes) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Tensors and metadata of a file."""
    # JSON that is parsed takes some twenty times its length: refuse a long header before.
    length = int.from_bytes(raw[:_LENGTH_NBYTES], "little")
    if len(raw) < _LENGTH_NBYTES or length > min(_LONGEST_HEADER, len(raw) - _LENGTH_NBYTES):
        raise _damaged(f"its header is said to have {length} bytes and all of it has {len(raw)}")
    if length % _LENGTH_NBYTES:
        raise _damaged(f"its header has {length} bytes, which leaves the elements unaligned")
    # Before the header is parsed here: the library refuses one that is no header.
    tensors = load(raw)
    header = raw[_LENGTH_NBYTES : _LENGTH_NBYTES + length]
    return tensors, json.loads(header).get(_METADATA, {})


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
