"""Snapshots as safetensors files: tensors, and facts as JSON in the file's metadata.

Eight bytes with the length of the header, the header as JSON, then the tensors' elements:
https://github.com/huggingface/safetensors, "Format".

Files are written part by part from the tensors' own memory, so that a worker with 10 GB of state
sends its first byte at once, and read in place, so that a newcomer holds them once. The library
safetensors would write all of it to a disk first (10 s for 2 GB where it was tried), and copy each
tensor that it reads. Nothing is unpickled.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ExchangeError, MismatchError, check
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
_KINDS = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH_NBYTES = 8


def snapshot_parts(snapshot: Snapshot) -> list[memoryview]:
    """A snapshot as the parts of a file; those after the first share the tensors' memory.

    >>> parts = snapshot_parts(Snapshot(facts={"version": 3}, tensors={"w": torch.ones(2)}))
    >>> unpack(bytearray(b"".join(parts))).tensors["w"]
    tensor([1., 1.])

    Raises:
        ConfigurationError: a tensor's dtype does not fit the format.
    """
    texts = {_FORMAT: _SNAPSHOT, _FACTS: json.dumps(dict(snapshot.facts))}
    header: dict[str, Any] = {_METADATA: texts}
    parts: list[memoryview] = []
    end = 0
    # Wide elements first: then each tensor is aligned to its element size.
    for name, tensor in sorted(
        snapshot.tensors.items(), key=lambda t: (-t[1].element_size(), t[0])
    ):
        check(
            tensor.dtype in _NAMES,
            "pack a worker's state",
            because=f"{name!r} is {tensor.dtype}",
            do="train parameters of one of the usual dtypes",
        )
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
    return [memoryview(len(raw).to_bytes(_LENGTH_NBYTES, "little") + raw), *parts]


def unpack(source: bytearray) -> Snapshot:
    """The snapshot in a file that `snapshot_parts` made, perhaps on another machine.

    Args:
        source: the file; tensors share its memory, so that there is no second copy of it.

    Raises:
        ExchangeError: the file is damaged.
        MismatchError: it comes from another thinwire version.
    """
    raw = memoryview(source)
    try:
        start = _LENGTH_NBYTES + int.from_bytes(raw[:_LENGTH_NBYTES], "little")
        header = json.loads(bytes(raw[_LENGTH_NBYTES:start]))
        texts = header.pop(_METADATA)
        facts = json.loads(texts[_FACTS])
        tensors = {name: _tensor(raw[start:], **entry) for name, entry in header.items()}
        if sum(tensor.nbytes for tensor in tensors.values()) != len(raw) - start:
            raise ValueError("its tensors do not fill it")
    except Exception as error:  # torch raises several kinds for impossible shapes
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
        raise ExchangeError(
            "use what another worker sent",
            because=f"it is not a safetensors file with JSON in it: {why}",
            do="try again with another worker, and check that all run the same thinwire version; "
            "none of it was used",
        ) from error
    check(
        texts.get(_FORMAT) == _SNAPSHOT,
        "use what another worker sent",
        because=f"it says that it is {str(texts.get(_FORMAT))[:100]!r}, not {_SNAPSHOT!r}",
        do="run the same thinwire version on all workers",
        kind=MismatchError,
    )
    return Snapshot(facts=facts, tensors=tensors)


def _tensor(
    data: memoryview, *, dtype: str, shape: Sequence[int], data_offsets: Sequence[int]
) -> Tensor:
    start, end = data_offsets
    if start == end:  # `frombuffer` refuses an empty buffer
        return torch.empty(shape, dtype=_KINDS[dtype], device="cpu")
    return torch.frombuffer(data[start:end], dtype=_KINDS[dtype]).view(tuple(shape))
