"""Tensors and texts in the safetensors format, read and written where they lie in memory.

Eight bytes say how long the header is, the header is JSON, the rest are the tensors' elements:
https://github.com/huggingface/safetensors, "Format". The package of that name copies every tensor
once more each way and drops the texts of a file that is in memory.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError, ExchangeError

__all__ = ["Buffer", "read_tensors", "write_tensors"]

Buffer: TypeAlias = bytes | bytearray | memoryview

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_TEXTS = "__metadata__"
_LENGTH_NBYTES = 8
# JSON takes some twenty times its length once it is parsed.
_LONGEST_HEADER = 16 << 20
_MOST_DIMENSIONS, _MOST_ELEMENTS = 16, 1 << 56


def write_tensors(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> list[memoryview]:
    """The parts of a file, in their order; those after the first share the tensors' memory.

    Args:
        tensors: any shapes and devices; what is not contiguous or not on the CPU is copied.
        texts: the file's metadata.

    Raises:
        ConfigurationError: a dtype, a name or the number of tensors does not fit the format.

    >>> parts = write_tensors({"w": torch.zeros(2)}, {"why": "example"})
    >>> [len(part) % 8 for part in parts]
    [0, 0]
    """
    header: dict[str, Any] = {_TEXTS: dict(texts)}
    parts: list[memoryview] = []
    end = 0
    # Wide elements first: then each tensor is aligned to its own.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        if tensor.dtype not in _NAMES or name == _TEXTS:
            raise _unwritable(f"{name!r} is {tensor.dtype}", "convert or rename it")
        parts.append(_bytes_of(tensor))
        start, end = end, end + len(parts[-1])
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % _LENGTH_NBYTES)
    if len(raw) > _LONGEST_HEADER:
        because = f"names, shapes and texts take {len(raw)} bytes of {_LONGEST_HEADER}"
        raise _unwritable(because, "pack fewer at a time")
    return [memoryview(len(raw).to_bytes(_LENGTH_NBYTES, "little") + raw), *parts]


def read_tensors(data: Buffer) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and texts of a file; the tensors share its memory if that can be written to.

    Args:
        data: the file.

    Raises:
        ExchangeError: it is damaged; nothing larger than the header was allocated by then.
    """
    header, body = _split(data)
    texts = header.pop(_TEXTS, {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise _damaged("its metadata are not texts")
    entries = [_TensorEntry(name, described) for name, described in header.items()]
    _check_cover(entries, len(body))
    if body.readonly and len(body):
        body = memoryview(bytearray(body))
    return {entry.name: entry.tensor(body) for entry in entries}, texts


@final
class _TensorEntry:
    """What the header says of one tensor."""

    def __init__(self, name: str, described: Any) -> None:
        self.name = name
        try:
            self._dtype = _DTYPES[described["dtype"]]
            self._shape: list[int] = _naturals(described["shape"])
            self.start, self.end = _naturals(described["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(f"it describes {name[:100]!r} as {str(described)[:100]}") from error
        # Not plainly their product: an empty tensor's other sizes must be reasonable, too.
        span = math.prod(max(size, 1) for size in self._shape)
        if len(self._shape) > _MOST_DIMENSIONS or span > _MOST_ELEMENTS:
            raise _damaged(f"the shape of {name[:100]!r} is {str(self._shape)[:100]}")
        if self.end - self.start != math.prod(self._shape) * self._dtype.itemsize:
            told = f"{self.end - self.start} bytes for {self._shape} of {described['dtype']}"
            raise _damaged(f"{name[:100]!r} has {told}")

    def tensor(self, body: memoryview) -> Tensor:
        if self.start == self.end:
            return torch.empty(self._shape, dtype=self._dtype)
        if self.start % self._dtype.itemsize:
            raise _damaged(f"{self.name[:100]!r} is not aligned")
        raw = torch.frombuffer(body[self.start : self.end], dtype=torch.uint8)
        if self._dtype == torch.bool and bool((raw > 1).any()):
            raise _damaged(f"{self.name[:100]!r} holds other bytes than 0 and 1")
        return raw.view(self._dtype).reshape(self._shape)


def _split(data: Buffer) -> tuple[dict[str, Any], memoryview]:
    view = memoryview(data).cast("B")
    length = int.from_bytes(view[:_LENGTH_NBYTES], "little")
    start = _LENGTH_NBYTES + length
    if len(view) < _LENGTH_NBYTES or start > len(view) or length > _LONGEST_HEADER:
        raise _damaged(f"its header is said to have {length} bytes and all of it has {len(view)}")
    if length % _LENGTH_NBYTES:
        raise _damaged(f"its header has {length} bytes, which leaves the elements unaligned")
    try:
        header = json.loads(str(view[_LENGTH_NBYTES:start], "utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(f"its header is not JSON: {str(error)[:100]}") from error
    if not isinstance(header, dict):
        raise _damaged("its header is not a table")
    return header, view[start:]


def _check_cover(entries: list[_TensorEntry], nbytes: int) -> None:
    """Each byte belongs to one tensor: none overlap, none is left over or beyond the end."""
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        if entry.start != end:
            raise _damaged(f"{entry.name[:100]!r} starts at byte {entry.start}, not {end}")
        end = entry.end
    if end != nbytes:
        raise _damaged(f"its tensors take {end} bytes and {nbytes} are there")


def _naturals(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(n) is int and n >= 0 for n in values):
        raise ValueError("not a list of numbers from 0")
    return values


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _damaged(because: str) -> ExchangeError:
    return ExchangeError(
        "read tensors from what was sent",
        because=because,
        do="ask another worker, and check that all run the same thinwire version; nothing of it "
        "was used",
    )


def _unwritable(because: str, do: str) -> ConfigurationError:
    return ConfigurationError("pack tensors", because=because, do=do)
