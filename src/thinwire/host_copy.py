"""Copies of tensors in the host's memory that no thread waits for before they are read."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def lies_on_gpu(tensor: Tensor) -> bool:
    """Whether copying `tensor` to the host can go on beside what the GPU computes.

    >>> lies_on_gpu(torch.ones(2))
    False
    """
    return tensor.is_cuda


class HostCopy:
    """A tensor on its way to the host, which is waited for only when it is read.

    From a CUDA device it goes to pinned memory, on a stream of its own: neither the stream that
    computes nor the thread that asks waits for it. `read` may be called in another thread.

    Args:
        tensor: as it is when what was asked of its device so far is done.

    >>> HostCopy(torch.ones(2)).read()
    tensor([1., 1.])
    """

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: Any = None
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if not tensor.is_cuda:
            self._host.copy_(tensor, non_blocking=True)
            return
        stream = _copying_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = stream.record_event()
        # Its memory must not be given to others before the copy has left.
        tensor.record_stream(stream)

    def read(self) -> Tensor:
        """The tensor, in the host's memory."""
        if self._arrived is not None:
            self._arrived.synchronize()
        elif torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return self._host


@cache
def _copying_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
