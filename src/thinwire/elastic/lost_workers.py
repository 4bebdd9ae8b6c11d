"""How all ranks of a worker hear at once that another worker is gone."""

import contextlib
import datetime
import json
import threading
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist

from thinwire.elastic.worker_ranks import WorkerRanks
from thinwire.transport.gloo_group import listening_store

_LOOK_S = 0.1
_JOIN_S = 1.0
_REQUEST = datetime.timedelta(seconds=30)


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
            self._thread = threading.Thread(
                target=self._listen, name="thinwire-lost-workers", daemon=True
            )
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
