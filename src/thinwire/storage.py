"""Memory for outer state between rounds, for messages, and for copies to the host."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from thinwire.errors import check


class Ledger:
    """Bytes of outer state on the device and in the host's memory, now and at the peak.

    >>> ledger = Ledger()
    >>> kept = StatePlacement(torch.device("cpu"), ledger, on_host=True).keep(torch.ones(2))
    >>> kept.fetch(), ledger.device_bytes, ledger.host_bytes
    (tensor([1., 1.]), 8, 8)
    >>> kept.release()
    >>> ledger.device_bytes, ledger.peak_device_bytes
    (0, 8)
    """

    def __init__(self) -> None:
        self.peak_device_bytes = self.peak_host_bytes = 0
        # Weak, so that dropped tensors no longer count, such as those of an exchange that is
        # replaced when the number of workers changes.
        self.kept: WeakSet[StoredTensor] = WeakSet()
        # A transport may encode a reduced shard on another thread.
        self._lock = threading.Lock()

    def count(self, kept: StoredTensor) -> None:
        """Note that `kept` takes memory that it did not take before."""
        with self._lock:
            self.kept.add(kept)
            self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
            self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes of outer state on the device now."""
        return sum(kept.device_bytes for kept in self.kept)

    @property
    def host_bytes(self) -> int:
        """Bytes of outer state in the host's memory now."""
        return sum(kept.host_bytes for kept in self.kept)


class StoredTensor:
    """A tensor that is stored on the worker's device or in the host's memory, and fetched for use.

    `fetch`, change it in place or not, then `store` the value to keep, or `release` it unchanged.
    Copies from the host to a GPU run on another stream, beside the training.

    Args:
        value: the tensor to store.
        storage: where to store it.
    """

    def __init__(self, value: Tensor, storage: StatePlacement) -> None:
        self.storage = storage
        self._fetched: Tensor | None = None
        self._arrived: torch.Event | None = None
        self._value = value
        self.place()

    def place(self) -> None:
        """Move the tensor to where it is stored."""
        value, storage = self._value, self.storage
        self._arrived = None  # a copy to the device before this one
        if storage.on_host:
            # Only from pinned memory can a GPU copy by itself.
            pinned = storage.device.type == "cuda"
            host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=pinned)
            self._value = host.copy_(value)
        else:
            self._value = value.to(storage.device)
        storage.ledger.count(self)

    def prefetch(self) -> None:
        """Start copying the tensor to the device, so that `fetch` need not wait."""
        if self.storage.on_host and self._fetched is None:
            self._copy_to_device()
            self.storage.prefetched.add(self)

    def _copy_to_device(self) -> None:
        stream = self.storage.stream
        if stream is None:
            # Copied on a CPU, too, since the fetched tensor may be changed in place.
            self._fetched = self._value.to(self.storage.device, copy=True)
        else:
            with torch.cuda.stream(stream):
                self._fetched = self._value.to(self.storage.device, non_blocking=True)
                self._arrived = stream.record_event()
        self.storage.ledger.count(self)

    def fetch(self) -> Tensor:
        """The tensor on the worker's device."""
        if not self.storage.on_host:
            return self._value
        if self._fetched is None:
            self._copy_to_device()
        self.storage.prefetched.discard(self)
        assert self._fetched is not None
        if self._arrived is not None:
            training = torch.cuda.current_stream(self.storage.device)
            training.wait_event(self._arrived)
            # Its memory must not be reused before the training stream is done with it.
            self._fetched.record_stream(training)
        return self._fetched

    def store(self, value: Tensor) -> None:
        """Keep `value`; the fetched tensor must not be used afterwards."""
        if self.storage.on_host:
            # Blocks until it has arrived: the next step may overwrite `value`.
            self._value.copy_(value)
            self.release()
        else:
            self._value = value

    def release(self) -> None:
        """Free the fetched tensor, which was not changed."""
        self._fetched = None
        self.storage.prefetched.discard(self)

    def stored(self) -> Tensor:
        """The tensor where it is stored, to be read only; valid until the next `store`."""
        return self._value

    def unshared(self) -> Tensor:
        """The tensor where it is stored, to be changed; others that share its memory keep theirs.

        >>> kept = StatePlacement(torch.device("cpu")).keep(torch.ones(2))
        >>> snapshot = kept.stored().detach()
        >>> kept.unshared().add_(1), snapshot
        (tensor([2., 2.]), tensor([1., 1.]))
        """
        if _use_count(self._value) > _unshared():
            pinned = self.storage.on_host and self.storage.device.type == "cuda"
            self._value = torch.empty_like(self._value, pin_memory=pinned).copy_(self._value)
        return self._value

    def load(self, value: Tensor) -> None:
        """Keep a copy of `value`, in place: a snapshot's memory is not needed twice."""
        if self._arrived is not None:  # else a GPU may still copy from there
            self._arrived.synchronize()
        self.store(self.unshared().copy_(value))

    @property
    def device_bytes(self) -> int:
        """Bytes that it takes on the worker's device now."""
        is_there = not self.storage.on_host or self._fetched is not None
        return self._value.nbytes if is_there else 0

    @property
    def host_bytes(self) -> int:
        """Bytes that it takes in the host's memory now."""
        return self._value.nbytes if self.storage.on_host else 0


class StatePlacement:
    """Makes the stored tensors of a worker.

    A worker on a CPU gets real copies, too, if they are in the host's memory: it counts the bytes
    that a GPU would hold.

    Args:
        device: the worker's device.
        ledger: counts the bytes; by default a new ledger.
        on_host: whether tensors are in the host's memory, and on the device only while in use.

    Attributes:
        buffers: memory for messages.
        prefetched: tensors that were prefetched and not fetched yet.

    >>> host = StatePlacement(torch.device("cpu"), on_host=True)
    >>> kept = host.keep(torch.ones(2))
    >>> kept.store(kept.fetch().mul_(3))
    >>> kept.stored(), host.ledger.device_bytes, host.ledger.host_bytes
    (tensor([3., 3.]), 0, 8)
    """

    def __init__(
        self, device: torch.device, ledger: Ledger | None = None, *, on_host: bool = False
    ) -> None:
        self.device, self.on_host = device, on_host
        self.ledger = Ledger() if ledger is None else ledger
        self.buffers = BufferPool()
        self.prefetched: set[StoredTensor] = set()

    @cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of copies to the device; None without a GPU."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def keep(self, value: Tensor) -> StoredTensor:
        """Keep `value`, which the caller must not use afterwards."""
        return StoredTensor(value, self)

    def zeros(self, numel: int) -> StoredTensor:
        """Keep `numel` zeros of fp32."""
        return self.keep(
            torch.zeros(numel, dtype=torch.float32, device="cpu" if self.on_host else self.device)
        )

    def put_away(self) -> None:
        """Release everything that was prefetched and not fetched."""
        for kept in tuple(self.prefetched):
            kept.release()

    def move(self, device: torch.device) -> None:
        """Follow the worker to `device`."""
        self.put_away()
        self.device = device
        self.__dict__.pop("stream", None)
        for kept in tuple(self.ledger.kept):
            if kept.storage is self:
                kept.place()


def choose_storage(
    rest: torch.device | str | None, device: torch.device, ledger: Ledger | None = None
) -> StatePlacement:
    """The storage on device `rest`; None means the worker's `device`.

    Raises:
        ConfigurationError: `rest` is neither the host nor the worker's device.
    """
    wanted = device if rest is None else torch.device(rest)
    if rest is not None and wanted.type == "cpu":
        return StatePlacement(device, ledger, on_host=True)
    # "cuda" without an index means the worker's own device.
    check(
        wanted.type == device.type and wanted.index in (None, device.index),
        f"keep outer state on {str(rest)!r}",
        because=f"the worker's device is {str(device)!r}",
        do="pass 'cpu' for the host's memory, or None for the worker's device",
    )
    return StatePlacement(device, ledger)


_LOOKED_AT = 32  # most buffers to examine, of a pool that may have thousands
_SMALL_NBYTES = 4096  # up to this, take fresh memory


class BufferPool:
    """Memory that is reused once no tensor shares it.

    On a CPU, fresh memory of a fragment's size costs more than all arithmetic of a round: the
    system clears it page by page. GPU memory comes from torch's own pool.

    >>> pool = BufferPool()
    >>> first = pool.take(10_000, torch.device("cpu"))
    >>> part = first[10:20]
    >>> address = first.data_ptr()
    >>> del first
    >>> pool.take(10_000, torch.device("cpu")).data_ptr() == address  # `part` is still there
    False
    >>> del part
    >>> pool.take(9_000, torch.device("cpu")).data_ptr() == address
    True
    """

    def __init__(self) -> None:
        self._buffers = deque[Tensor]()
        # A transport's thread may take memory, too.
        self._lock = threading.Lock()

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory with undefined contents, uint8 [nbytes]."""
        if device.type != "cpu" or nbytes <= _SMALL_NBYTES:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        with self._lock:
            # Not all of them: with a thousand workers, a round has thousands of buffers.
            for _ in range(min(_LOOKED_AT, len(self._buffers))):
                buffer = self._buffers.popleft()
                is_shared = _use_count(buffer) > _unshared()
                # Drop free buffers that are too small, to keep no more than was in use at once.
                if is_shared or buffer.numel() >= nbytes:
                    self._buffers.append(buffer)
                if not is_shared and buffer.numel() >= nbytes:
                    return buffer[:nbytes]
            self._buffers.append(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
            return self._buffers[-1][:nbytes]

    def clear(self) -> None:
        """Empty the pool, which frees memory that no tensor shares."""
        with self._lock:
            self._buffers.clear()


def _use_count(buffer: Tensor) -> int:
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)  # pyright: ignore


@cache
def _unshared() -> int:
    """The use count of memory that belongs to one tensor."""
    return _use_count(torch.empty(1, device="cpu"))


class HostCopy:
    """A copy of a tensor to the host.

    From a CUDA device it goes to pinned memory on a side stream, so neither the current stream nor
    the calling thread waits; `read` does, perhaps in another thread. From other devices the copy is
    made at once.

    Args:
        tensor: the tensor, copied after work issued earlier on its device.

    >>> HostCopy(torch.ones(2)).read()
    tensor([1., 1.])
    """

    def __init__(self, tensor: Tensor) -> None:
        self._wait: Callable[[], None] | None = None
        self._host = torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
        )
        if not tensor.is_cuda:
            self._host.copy_(tensor)
            return
        stream = _copying_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
            self._wait = stream.record_event().synchronize
        # Its memory must not be reused before the copy has ended.
        tensor.record_stream(stream)

    def read(self) -> Tensor:
        """The tensor, in the host's memory."""
        if self._wait is not None:
            self._wait()
        return self._host


@cache
def _copying_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
