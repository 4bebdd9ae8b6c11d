"""Storage of outer state between rounds: on the worker's device, or in the host's memory."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from functools import cached_property
from weakref import WeakSet

import torch
from torch import Tensor

from thinwire.buffers import BufferPool
from thinwire.errors import check


class StoredTensor:
    """A tensor that is stored on the worker's device, or elsewhere, and fetched for use.

    `fetch`, change it in place or not, then `store` the value to keep, or `release` it unchanged.

    Args:
        value: as it is stored.
        ledger: counts its bytes.
    """

    def __init__(self, value: Tensor, ledger: Ledger) -> None:
        self._value, self._ledger = value, ledger
        ledger.count(self)

    def prefetch(self) -> None:
        """Begin to bring it, so that `fetch` need not wait."""

    def fetch(self) -> Tensor:
        """The tensor on the worker's device."""
        return self._value

    def store(self, value: Tensor) -> None:
        """Keep `value`; the fetched tensor must not be used afterwards."""
        self._value = value

    def release(self) -> None:
        """Free the fetched tensor, which was not changed."""

    def stored(self) -> Tensor:
        """The tensor where it is stored, to be read only; valid until the next `store`."""
        return self._value

    def discard(self) -> None:
        """Keep it no longer; nothing else may be called afterwards."""
        self.release()
        self._ledger.forget(self)

    @property
    def device_bytes(self) -> int:
        """Bytes that it takes on the worker's device now."""
        return self._value.nbytes

    host_bytes: int = 0
    """Bytes that it takes in the host's memory now."""


class Ledger:
    """Bytes of outer state on the device and in the host's memory, now and at most.

    >>> ledger = Ledger()
    >>> kept = OnHost(torch.device("cpu"), ledger).keep(torch.ones(2))
    >>> kept.fetch(), ledger.device_bytes, ledger.host_bytes
    (tensor([1., 1.]), 8, 8)
    >>> kept.release()
    >>> ledger.device_bytes, ledger.peak_device_bytes
    (0, 8)
    """

    def __init__(self) -> None:
        self.peak_device_bytes = self.peak_host_bytes = 0
        # Weak, because a whole exchange is dropped, without a call here, when the number of workers
        # changes.
        self._kept: WeakSet[StoredTensor] = WeakSet()
        # A transport may encode a reduced shard on another thread.
        self._lock = threading.Lock()

    def count(self, kept: StoredTensor) -> None:
        """Note that `kept` takes memory that it did not take before."""
        with self._lock:
            self._kept.add(kept)
            self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
            self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    def forget(self, kept: StoredTensor) -> None:
        """Count `kept` no longer."""
        with self._lock:
            self._kept.discard(kept)

    @property
    def device_bytes(self) -> int:
        """Bytes of outer state on the device now."""
        return sum(kept.device_bytes for kept in self._kept)

    @property
    def host_bytes(self) -> int:
        """Bytes of outer state in the host's memory now."""
        return sum(kept.host_bytes for kept in self._kept)


class StatePlacement(ABC):
    """Makes the stored tensors of a worker.

    Args:
        device: the worker's.
        ledger: counts the bytes; by default a new one.

    Attributes:
        buffers: for messages.
        home: the device on which tensors are stored.
    """

    def __init__(self, device: torch.device, ledger: Ledger | None = None) -> None:
        self.device, self.home = device, device
        self.ledger = Ledger() if ledger is None else ledger
        self.buffers = BufferPool()

    @abstractmethod
    def keep(self, value: Tensor) -> StoredTensor:
        """Keep `value`, which the caller must not use afterwards; moves it to `home`."""

    def zeros(self, numel: int) -> StoredTensor:
        """Keep `numel` zeros of fp32."""
        return self.keep(torch.zeros(numel, device=self.home))

    def put_away(self) -> None:
        """Release what was prefetched and not fetched; by default nothing is prefetched."""
        return


class OnDevice(StatePlacement):
    """State stays on the worker's device.

    >>> OnDevice(torch.device("cpu")).keep(torch.ones(2)).fetch()
    tensor([1., 1.])
    """

    def keep(self, value: Tensor) -> StoredTensor:
        """Keep `value` on the device."""
        return StoredTensor(value.to(self.device), self.ledger)


class _OnHostTensor(StoredTensor):
    """Copies to the device run on another stream, beside the training."""

    def __init__(self, value: Tensor, storage: OnHost) -> None:
        self._storage = storage
        self._fetched: Tensor | None = None
        self._arrived: torch.Event | None = None
        # Pinned memory is what a GPU can copy from by itself.
        pinned = storage.device.type == "cuda"
        host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=pinned)
        super().__init__(host.copy_(value), storage.ledger)

    def prefetch(self) -> None:
        if self._fetched is None:
            self._copy_to_device()
            self._storage.prefetched.add(self)

    def _copy_to_device(self) -> None:
        stream = self._storage.stream
        if stream is None:
            # A copy on a CPU, too: what is fetched may be changed in place.
            self._fetched = self._value.to(self._storage.device, copy=True)
        else:
            with torch.cuda.stream(stream):
                self._fetched = self._value.to(self._storage.device, non_blocking=True)
                self._arrived = stream.record_event()
        self._ledger.count(self)

    def fetch(self) -> Tensor:
        if self._fetched is None:
            self._copy_to_device()
        self._storage.prefetched.discard(self)
        assert self._fetched is not None
        if self._arrived is not None:
            training = torch.cuda.current_stream(self._storage.device)
            training.wait_event(self._arrived)
            # Its memory must not be given away before the training stream is done with it.
            self._fetched.record_stream(training)
            self._arrived = None
        return self._fetched

    def store(self, value: Tensor) -> None:
        # Blocks until it has arrived: the next step may overwrite `value`.
        self._value.copy_(value)
        self.release()

    def release(self) -> None:
        self._fetched = self._arrived = None
        self._storage.prefetched.discard(self)

    @property
    def device_bytes(self) -> int:
        return 0 if self._fetched is None else self._value.nbytes

    @property
    def host_bytes(self) -> int:
        return self._value.nbytes


class OnHost(StatePlacement):
    """State is stored in the host's memory, and on the device only while it is used.

    A worker on a CPU gets real copies, too: it counts the bytes that a GPU would hold.

    >>> host = OnHost(torch.device("cpu"))
    >>> kept = host.keep(torch.ones(2))
    >>> kept.store(kept.fetch().mul_(3))
    >>> kept.stored(), host.ledger.device_bytes, host.ledger.host_bytes
    (tensor([3., 3.]), 0, 8)
    """

    def __init__(self, device: torch.device, ledger: Ledger | None = None) -> None:
        super().__init__(device, ledger)
        self.home = torch.device("cpu")
        self.prefetched: set[StoredTensor] = set()

    @cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of copies to the device; None without a GPU."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def keep(self, value: Tensor) -> StoredTensor:
        """Move `value` into the host's memory, pinned where the device is a GPU."""
        return _OnHostTensor(value, self)

    def put_away(self) -> None:
        """Release everything prefetched."""
        for kept in tuple(self.prefetched):
            kept.release()


def choose_storage(
    rest: torch.device | str | None, device: torch.device, ledger: Ledger | None = None
) -> StatePlacement:
    """The storage on device `rest`; None means the worker's `device`.

    Raises:
        ConfigurationError: `rest` is neither the host nor the worker's device.
    """
    wanted = device if rest is None else torch.device(rest)
    if rest is not None and wanted.type == "cpu":
        return OnHost(device, ledger)
    # "cuda" without an index means the worker's own device.
    check(
        wanted.type == device.type and wanted.index in (None, device.index),
        f"keep outer state on {str(rest)!r}",
        because=f"the worker's device is {str(device)!r}",
        do="pass 'cpu' for the host's memory, or None for the worker's device",
    )
    return OnDevice(device, ledger)
