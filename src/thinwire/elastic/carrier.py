"""How bytes move between the workers of a round: apart from who they are."""

import datetime
from abc import ABC, abstractmethod
from typing import Any, final

import torch.distributed as dist

from thinwire.transport.address import address_text, split_address
from thinwire.transport.backend import Backend
from thinwire.transport.gloo_group import gloo_group, listening_store
from thinwire.transport.gloo_messages import GlooMessages

__all__ = ["Carrier", "GlooCarrier", "GroupLink"]

# gloo waits so many times its timeout for a worker that was to connect and does not; less than a
# second of timeout is not enough for a busy machine.
_GLOO_WAITS, _SHORTEST_GLOO_S = 5, 1.0
_STORE_TIMEOUT_S = 300.0


class GroupLink(ABC):
    """A connection between the workers of one round, for as long as none of them is lost."""

    @property
    @abstractmethod
    def workers(self) -> int:
        """How many there are."""

    @abstractmethod
    def backend(self, number: int, *, timeout_s: float) -> Backend:
        """What carries exchange `number`, of which each request may take `timeout_s`."""

    @abstractmethod
    def abort(self) -> None:
        """Make everything that is under way fail soon, here and on the other workers."""


class Carrier(ABC):
    """Makes links; one of a worker's ranks has one.

    Its methods may raise RuntimeError or ValueError: a worker could not be reached.
    """

    @property
    @abstractmethod
    def address(self) -> str:
        """HOST:PORT at which workers that are to be linked find each other through this one."""

    @abstractmethod
    def connect(
        self, at: str, *, key: str, name: str, rank: int, workers: int, timeout_s: float
    ) -> GroupLink:
        """A link of `workers` workers, all of which call this.

        Args:
            at: `address` of one of them, the same for all.
            key: of this link: no other has it.
            name: of this worker.
            rank: of this worker.
            workers: K.
            timeout_s: for all of them to be there.
        """

    @abstractmethod
    def close(self) -> None:
        """End all links."""


@final
class _GlooLink(GroupLink):
    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def workers(self) -> int:
        return self._group.size()

    def backend(self, number: int, *, timeout_s: float) -> Backend:
        return GlooMessages(self._group, 0, number, timeout_s=timeout_s)

    def abort(self) -> None:
        GlooMessages(self._group, 0, 0).abort()


@final
class GlooCarrier(Carrier):
    """Links over gloo; workers that are to be linked meet at the key-value store of one of them.

    Args:
        host: this machine's address, as the others reach it; nothing listens on another one.

    Raises:
        OSError: this machine does not have the address.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._store = listening_store(host, 0, timeout_s=_STORE_TIMEOUT_S)
        self._address = address_text(host, self._store.port)

    @property
    def address(self) -> str:
        """HOST:PORT of this worker's store."""
        return self._address

    def connect(
        self, at: str, *, key: str, name: str, rank: int, workers: int, timeout_s: float
    ) -> GroupLink:
        """A new group of gloo."""
        del name
        timeout = datetime.timedelta(seconds=timeout_s)
        host, port = split_address(at)
        stores: Any = dist
        there = stores.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timeout
        )
        store = stores.PrefixStore(f"thinwire/{key}", there)
        # gloo has less time than this, and it is for connecting alone.
        store.set(f"here/{rank}", "")
        try:
            store.wait([f"here/{other}" for other in range(workers)], timeout)
        except RuntimeError as error:
            because = f"not all {workers} workers came to the store at {at} in {timeout_s:g} s"
            raise RuntimeError(because) from error
        gloo_timeout_s = max(timeout_s / _GLOO_WAITS, _SHORTEST_GLOO_S)
        group = gloo_group(store, rank, workers, host=self._host, timeout_s=gloo_timeout_s)
        return _GlooLink(group)

    def close(self) -> None:
        """End the store."""
        self._store = None
