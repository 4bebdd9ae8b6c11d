"""What the ranks of one elastic worker tell each other, so that all of them do the same."""

import contextlib
import datetime
import json
import threading
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch.distributed as dist

from thinwire.errors import ExchangeError, RoundDiscarded, ThinwireError
from thinwire.transport.base import Round
from thinwire.transport.distributed import group_of, reason_of
from thinwire.transport.gloo_group import listening_store

T = TypeVar("T")

# A rank that ends is noticed at once. One that hangs stops its trainer's collectives, too, which
# have a timeout of their own; here others may wait for a shard that takes long to be healed.
_TIMEOUT = datetime.timedelta(hours=1)
_LOOK_S, _JOIN_S = 0.1, 1.0
_REQUEST = datetime.timedelta(seconds=30)


class WorkerRanks:
    """The S ranks of one worker; all of them make the same calls in the same order.

    Args:
        group: process group, or one-dimensional mesh, of the worker's ranks; None is a worker of
            one rank, which needs no torch.distributed.

    Attributes:
        index: of this rank, from 0.
        size: S.
        is_first: whether this rank speaks for the worker.

    >>> ranks = WorkerRanks()
    >>> ranks.gather("a"), ranks.broadcast("b")
    (['a'], 'b')
    """

    def __init__(self, group: Any = None) -> None:
        self.index, self.size, self.is_first = 0, 1, True
        self._group: Any = None
        if group is None:
            return
        members = dist.get_process_group_ranks(group_of(group))
        # Of its own: what is said here must not stand between the trainer's collectives.
        self._group = dist.new_group(
            members, backend="gloo", timeout=_TIMEOUT, use_local_synchronization=True
        )
        self.index, self.size = dist.get_rank(self._group), len(members)
        self.is_first = self.index == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order.

        Args:
            value: small, and such that it can be pickled.

        Raises:
            ExchangeError: another rank of this worker is gone.
        """
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, value, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise ExchangeError(
                f"go on as a worker of {self.size} ranks",
                because=f"another rank of it is gone: {reason_of(error)}",
                do="read what that rank said, and start this worker again with the same identity",
            ) from error
        return found

    def broadcast(self, value: T | None = None) -> T:
        """The first rank's value, on every rank.

        Args:
            value: of the first rank; the others have none.
        """
        first: Any = self.gather(value)[0]
        return first


class AgreedRound(Round[T]):
    """An exchange of one rank that counts only if those of all ranks of its worker do.

    Args:
        inner: this rank's exchange.
        ranks: of the worker; all of them wait for their exchanges in the same order.
    """

    def __init__(self, inner: Round[T], ranks: WorkerRanks) -> None:
        self._inner, self._ranks = inner, ranks

    def wait(self) -> T:
        """What the exchange returned; raises what stopped that of any rank."""
        result: list[T] = []
        error: ThinwireError | None = None
        try:
            result.append(self._inner.wait())
        except ThinwireError as raised:
            error = raised
        found = [each for each in self._ranks.gather(error) if each is not None]
        # What ends the worker comes before what only discards the round.
        found.sort(key=lambda each: isinstance(each, RoundDiscarded))
        if found:
            raise found[0] from error
        return result[0]

    def arrived_s(self) -> float | None:
        """When everything had arrived at this rank."""
        return self._inner.arrived_s()


class LostWorkers:
    """Calls `on_lost` on every rank with the workers that the first rank was told are gone.

    Only the first rank hears from the registry, and the others would wait for a worker that was
    stopped or cut off until the timeout of their exchange with it. All ranks construct this.

    Args:
        ranks: of this worker.
        host: address of this machine, as the worker's other ranks reach it.
        on_lost: told their names; called from any thread.

    Raises:
        OSError: the first rank's machine does not have the address.

    >>> LostWorkers(WorkerRanks(), "127.0.0.1", on_lost=print).tell(["b:1"])
    ['b:1']
    """

    def __init__(
        self, ranks: WorkerRanks, host: str, on_lost: Callable[[Collection[str]], None]
    ) -> None:
        self._on_lost, self._told = on_lost, 0
        self._closed = threading.Event()
        self._store: Any = None
        self._thread: threading.Thread | None = None
        if ranks.size == 1:
            return
        if ranks.is_first:
            self._store = listening_store(host, 0, timeout_s=_REQUEST.total_seconds())
        found = ranks.broadcast((host, self._store.port) if ranks.is_first else None)
        if not ranks.is_first:
            stores: Any = dist
            self._store = stores.TCPStore(
                *found, is_master=False, wait_for_workers=False, timeout=_REQUEST
            )
            self._thread = threading.Thread(target=self._listen, daemon=True)
            self._thread.start()

    def tell(self, names: Collection[str]) -> None:
        """Note that workers are gone; the first rank's."""
        if self._store is not None:
            self._store.set(f"lost/{self._told}", json.dumps(sorted(names)))
            self._told += 1
        self._on_lost(names)

    def close(self) -> None:
        """Listen no more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        self._store = None

    def _listen(self) -> None:
        store, heard = self._store, 0
        # The first rank may be gone, and this one with it in a moment.
        with contextlib.suppress(RuntimeError, ValueError):
            while not self._closed.wait(_LOOK_S):
                while store.check([key := f"lost/{heard}"]):
                    heard += 1
                    self._on_lost(json.loads(store.get(key)))
