"""An exchange that a coroutine carries, in a progress thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from torch import Tensor

from thinwire.errors import ExchangeError
from thinwire.transport.base import RoundTag, RunningExchange
from thinwire.transport.progress_thread import Future, Task


class AsyncTask(Task):
    """One exchange.

    Args:
        tag: of the exchange, for error messages.
        running: the exchange.
        work: answers all of its requests; it is cancelled when the thread is closed.
    """

    def __init__(
        self,
        tag: RoundTag,
        running: RunningExchange[Any],
        work: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        super().__init__(tag, Future(running))
        self._carried = work
        self._lock, self._is_aborted = threading.Lock(), False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None

    def carry(self) -> Sequence[Tensor]:
        """Run the coroutine to its end."""
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError as error:
            raise ExchangeError(
                f"exchange {self.tag}",
                because="its transport was closed while it was under way",
                do="wait for every exchange that was started",
            ) from error
        return ()

    async def _main(self) -> None:
        with self._lock:
            self._loop, self._work = asyncio.get_running_loop(), asyncio.current_task()
            if self._is_aborted:
                raise asyncio.CancelledError
        try:
            await self._carried()
        finally:
            with self._lock:
                self._work = None

    def abort(self) -> None:
        """Cancel the coroutine."""
        with self._lock:
            self._is_aborted = True
            if self._loop is not None and self._work is not None:
                self._loop.call_soon_threadsafe(self._work.cancel)
