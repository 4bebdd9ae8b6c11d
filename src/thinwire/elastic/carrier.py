"""How bytes move between the workers of a round: apart from who they are."""

import contextlib
import datetime
from abc import ABC, abstractmethod
from typing import Any, final

from thinwire.elastic import torchft
from thinwire.transport.address import address_text
from thinwire.transport.backend import Backend
from thinwire.transport.gloo_group import gloo_group, listening_store
from thinwire.transport.gloo_messages import GlooMessages

__all__ = ["Carrier", "GlooCarrier", "GroupLink"]

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
            at: `address` of the first of them.
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
    """Links over gloo, in torchft's process group, which can be made anew for other workers.

    Args:
        host: this machine's address, as the others reach it.

    Raises:
        ConfigurationError: torchft is not installed.
    """

    def __init__(self, host: str) -> None:
        self._group = _reconfigurable_group(host)
        self._store = listening_store(host, 0, timeout_s=_STORE_TIMEOUT_S)
        self._address = address_text(host, self._store.port)

    @property
    def address(self) -> str:
        """HOST:PORT of this worker's store."""
        return self._address

    def connect(
        self, at: str, *, key: str, name: str, rank: int, workers: int, timeout_s: float
    ) -> GroupLink:
        """A new group of gloo; the one before is ended."""
        self._group.set_timeout(datetime.timedelta(seconds=timeout_s))
        self._group.configure(f"{at}/thinwire/{key}", name, rank, workers)
        return _GlooLink(self._group.parent)

    def close(self) -> None:
        """End the group and the store."""
        with contextlib.suppress(RuntimeError, ValueError):
            self._group.abort(errored=False)
        self._store = None


def _reconfigurable_group(host: str) -> Any:
    """torchft's process group over gloo, which listens on this machine's address `host`."""
    reconfigurable: Any = torchft.load("process_group").ProcessGroupGloo

    @final
    class Listening(reconfigurable):
        """Differs from torchft's in the address it listens on: not what the host's name means."""

        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            timeout_s = self._timeout.total_seconds()
            return gloo_group(store, rank, world_size, host=host, timeout_s=timeout_s)

    return Listening(timeout=datetime.timedelta(seconds=60))
