"""A pool of memory for messages."""

from __future__ import annotations

import threading
from functools import cache

import torch
from torch import Tensor


class BufferPool:
    """Memory that is reused once no tensor shares it.

    On a CPU fresh memory of a fragment's size costs more than all arithmetic of a round: the system
    clears it page by page. Memory of a GPU comes from torch's own pool.

    >>> pool = BufferPool()
    >>> first = pool.take(100, torch.device("cpu"))
    >>> part = first[10:20]
    >>> address = first.data_ptr()
    >>> del first
    >>> pool.take(100, torch.device("cpu")).data_ptr() == address  # `part` is still there
    False
    >>> del part
    >>> pool.take(90, torch.device("cpu")).data_ptr() == address
    True
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        # A transport's thread may make a message.
        self._lock = threading.Lock()

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory with undefined contents, uint8 [nbytes]."""
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        with self._lock:
            for buffer in self._buffers:
                if len(buffer) >= nbytes and not _is_shared(buffer):
                    return buffer[:nbytes]
            # Free buffers that are too small go: no more is kept than was in use at once.
            self._buffers = [buffer for buffer in self._buffers if _is_shared(buffer)]
            self._buffers.append(torch.empty(nbytes, dtype=torch.uint8))
            return self._buffers[-1][:nbytes]


def _use_count(buffer: Tensor) -> int:
    storage = buffer.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)  # pyright: ignore


@cache
def _unshared() -> int:
    """The use count of memory that belongs to one tensor."""
    return _use_count(torch.empty(1))


def _is_shared(buffer: Tensor) -> bool:
    return _use_count(buffer) > _unshared()
