"""Where outer state rests between rounds: on the worker's device, or in the host's memory."""

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError

__all__ = ["Ledger", "OnDevice", "OnHost", "StatePlacement", "StoredTensor", "choose_storage"]


@final
@dataclass(kw_only=True, slots=True)  # state: counters
class Ledger:
    """Bytes of outer state on the device and in the host's memory, now and at most.

    >>> ledger = Ledger()
    >>> ledger.add(device_bytes=8)
    >>> ledger.add(device_bytes=-8, host_bytes=8)
    >>> ledger.device_bytes, ledger.peak_device_bytes, ledger.peak_host_bytes
    (0, 8, 8)
    """

    device_bytes: int = 0
    host_bytes: int = 0
    peak_device_bytes: int = 0
    peak_host_bytes: int = 0
    # A transport may encode a reduced shard on a thread of its own.
    # What is dropped is uncounted wherever that happens, perhaps in here.
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def add(self, *, device_bytes: int = 0, host_bytes: int = 0) -> None:
        """Count what came (or, below zero, went)."""
        with self._lock:
            self.device_bytes += device_bytes
            self.host_bytes += host_bytes
            self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
            self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)


class StoredTensor(ABC):
    """A tensor that rests somewhere and is fetched for use.

    `fetch`, change it in place or not, then `store` what shall be kept, or `release` it unchanged.
    """

    @abstractmethod
    def prefetch(self) -> None:
        """Begin to bring it, so that `fetch` need not wait."""

    @abstractmethod
    def fetch(self) -> Tensor:
        """The tensor on the worker's device."""

    @abstractmethod
    def store(self, value: Tensor) -> None:
        """Keep `value`; the fetched tensor must not be used afterwards."""

    @abstractmethod
    def release(self) -> None:
        """Let go of the fetched tensor, which was not changed."""

    @abstractmethod
    def resting(self) -> Tensor:
        """The tensor where it rests, to be read only; valid until the next `store`."""

    @abstractmethod
    def discard(self) -> None:
        """Keep it no longer; nothing else may be called afterwards."""


class StatePlacement(ABC):
    """A place for outer state.

    Args:
        device: the worker's.
        ledger: counts what is kept.
    """

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self.device, self.ledger = device, ledger

    @abstractmethod
    def keep(self, value: Tensor) -> StoredTensor:
        """Keep `value`, which nobody else holds, wherever it is now."""

    @abstractmethod
    def zeros(self, numel: int) -> StoredTensor:
        """Keep `numel` zeros of fp32."""

    def put_away(self) -> None:
        """Let go of what was prefetched and not fetched: by default nothing."""
        return


@final
class _OnDeviceTensor(StoredTensor):
    _counted_bytes = 0

    def __init__(self, value: Tensor, ledger: Ledger) -> None:
        self._value, self._ledger = value, ledger
        self._count(value.nbytes)

    def __del__(self) -> None:
        self._count(0)

    def _count(self, nbytes: int) -> None:
        if nbytes != self._counted_bytes:
            self._ledger.add(device_bytes=nbytes - self._counted_bytes)
            self._counted_bytes = nbytes

    def prefetch(self) -> None:
        pass

    def fetch(self) -> Tensor:
        return self._value

    def store(self, value: Tensor) -> None:
        self._count(value.nbytes)
        self._value = value

    def release(self) -> None:
        pass

    def resting(self) -> Tensor:
        return self._value

    def discard(self) -> None:
        self._count(0)


@final
class OnDevice(StatePlacement):
    """State stays on the worker's device.

    >>> OnDevice(torch.device("cpu"), Ledger()).keep(torch.ones(2)).fetch()
    tensor([1., 1.])
    """

    def keep(self, value: Tensor) -> StoredTensor:
        """Keep `value` on the device."""
        return _OnDeviceTensor(value.to(self.device), self.ledger)

    def zeros(self, numel: int) -> StoredTensor:
        """Made on the device."""
        return self.keep(torch.zeros(numel, device=self.device))


@final
class _OnHostTensor(StoredTensor):
    """Copies to the device run on a stream of their own, beside the training."""

    _counted_bytes = 0

    def __init__(self, value: Tensor, device: torch.device, storage: "OnHost") -> None:
        self._device, self._storage = device, storage
        # Pinned memory is what a GPU can copy from by itself.
        self._host = torch.empty(
            value.shape, dtype=value.dtype, device="cpu", pin_memory=device.type == "cuda"
        )
        self._here: Tensor | None = None
        self._arrived: torch.Event | None = None
        self._count(self._host.nbytes)
        self._host.copy_(value)

    def __del__(self) -> None:
        if self._counted_bytes:
            self.discard()

    def _count(self, nbytes: int) -> None:
        self._storage.ledger.add(host_bytes=nbytes - self._counted_bytes)
        self._counted_bytes = nbytes

    def prefetch(self) -> None:
        if self._here is None:
            self._bring()
            self._storage.prefetched.add(self)

    def _bring(self) -> None:
        self._storage.ledger.add(device_bytes=self._host.nbytes)
        stream = self._storage.stream
        if stream is None:
            self._here = self._host.to(self._device, copy=True)
            return
        with torch.cuda.stream(stream):
            self._here = self._host.to(self._device, non_blocking=True)
            self._arrived = stream.record_event()

    def fetch(self) -> Tensor:
        if self._here is None:
            self._bring()
        self._storage.prefetched.discard(self)
        assert self._here is not None
        if self._arrived is not None:
            training = torch.cuda.current_stream(self._device)
            training.wait_event(self._arrived)
            # Its memory must not be given away before the training stream is done with it.
            self._here.record_stream(training)
            self._arrived = None
        return self._here

    def store(self, value: Tensor) -> None:
        self._host.copy_(value)
        self.release()

    def release(self) -> None:
        if self._here is not None:
            self._storage.ledger.add(device_bytes=-self._host.nbytes)
        self._here = self._arrived = None
        self._storage.prefetched.discard(self)

    def resting(self) -> Tensor:
        return self._host

    def discard(self) -> None:
        self.release()
        self._count(0)


@final
class OnHost(StatePlacement):
    """State rests in the host's memory and visits the device only while it is used.

    A worker on a CPU gets real copies, too: what it counts is what a GPU would hold.

    >>> ledger = Ledger()
    >>> kept = OnHost(torch.device("cpu"), ledger).keep(torch.ones(2))
    >>> kept.store(kept.fetch().mul_(3))
    >>> kept.resting(), ledger.device_bytes, ledger.host_bytes
    (tensor([3., 3.]), 0, 8)
    """

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        super().__init__(device, ledger)
        self._stream: torch.cuda.Stream | None = None
        self.prefetched: set[StoredTensor] = set()

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """For copies to the device; None without a GPU."""
        if self._stream is None and self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def keep(self, value: Tensor) -> StoredTensor:
        """Move `value` into the host's memory, pinned where the device is a GPU."""
        return _OnHostTensor(value, self.device, self)

    def zeros(self, numel: int) -> StoredTensor:
        """Made in the host's memory."""
        return self.keep(torch.zeros(numel))

    def put_away(self) -> None:
        """Release it all."""
        for kept in tuple(self.prefetched):
            kept.release()


def choose_storage(
    rest: torch.device | str | None, device: torch.device, ledger: Ledger
) -> StatePlacement:
    """The storage for state that rests on `rest`; None means the worker's `device`.

    Raises:
        ConfigurationError: `rest` is neither the host nor the worker's device.
    """
    if rest is None:
        return OnDevice(device, ledger)
    if torch.device(rest).type == "cpu":
        return OnHost(device, ledger)
    wanted = torch.device(rest)
    # "cuda" is the worker's device, whichever of them that is.
    if wanted.type == device.type and wanted.index in (None, device.index):
        return OnDevice(device, ledger)
    raise ConfigurationError(
        f"keep outer state on {str(rest)!r}",
        because=f"the worker's device is {str(device)!r}",
        do="pass 'cpu' for the host's memory, or None for the worker's device",
    )
