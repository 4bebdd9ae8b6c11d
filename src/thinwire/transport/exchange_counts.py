"""Which worker is behind: every worker notes in the group's store what it has begun."""

import datetime
import time
from collections.abc import Callable
from functools import partial
from typing import Any

_READ_S = 2.0


class ExchangeCounts:
    """How many exchanges each worker of a group has begun.

    Noting is a write without an answer over a connection of its own, so no step waits for it.

    Args:
        store: where to note it, over a connection that nothing else waits on; None without one.
        prefix: two transports on one group have different ones.
        rank: this worker.
        world_size: the number of workers.
    """

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int) -> None:
        self._store = store
        self._prefix, self._rank, self._world_size = prefix, rank, world_size
        self.begun = 0

    def begin(self) -> None:
        """Note that this worker has begun an exchange."""
        self.begun += 1
        self._use(lambda store: store.set(f"{self._prefix}/{self._rank}", str(self.begun)))

    def behind(self) -> str:
        """Which workers have begun fewer exchanges than this one, or nothing if none is known.

        >>> ExchangeCounts(None, "", 0, 3).behind()
        ''
        """
        until_s = time.perf_counter() + _READ_S
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        notes = {rank: self._use(partial(self._read, rank, until_s)) for rank in others}
        return " and ".join(
            f"worker {rank} has begun {begun} exchanges, this worker {self.begun}"
            for rank, begun in notes.items()
            if begun is not None and begun < self.begun
        )

    def _read(self, rank: int, until_s: float, store: Any) -> int:
        left_s = max(0.001, until_s - time.perf_counter())
        store.set_timeout(datetime.timedelta(seconds=left_s))
        return int(store.get(f"{self._prefix}/{rank}"))

    def _use(self, work: Callable[[Any], Any]) -> Any:
        """What `work` returns; None without a store: a step must not fail for want of a note."""
        try:
            return None if self._store is None else work(self._store)
        except (RuntimeError, ValueError, OSError):
            self._store = None
