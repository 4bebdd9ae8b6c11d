"""Asynchronous copies of tensors in the host's memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def lies_on_gpu(tensor: Tensor) -> bool:
    """True if `tensor` can be copied to the host while the GPU computes.

    >>> lies_on_gpu(torch.ones(2))
    False
    """
    return tensor.is_cuda


class HostCopy:
    """A copy of a tensor to the host; only `read` waits for it.

    From a CUDA device it goes to pinned memory on a side stream, so neither the current stream nor
    the calling thread waits. `read` may be called in another thread.

    Args:
        tensor: copied after the work that was issued on its device before.

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
        # Its memory must not be reused before the copy has ended.
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
