"""A thread with an event loop, for code that is not asynchronous."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_JOIN_S = 5.0


class LoopThread:
    """Runs coroutines in a daemon thread of its own.

    >>> async def one(): return 1
    >>> thread = LoopThread()
    >>> thread.run(one())
    1
    >>> thread.close()
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(
            target=_serve, args=(self._loop,), name="thinwire-store", daemon=True
        )
        thread.start()
        # Also at the end of the interpreter, which must not find the thread inside a request.
        self._closing = weakref.finalize(self, _end, self._loop, thread)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns, once it has; from any other thread."""
        return self.start(work).result()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin `work`, which goes on beside what this thread does."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what is under way and end the thread."""
        self._closing()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if not thread.is_alive():  # as in a process that was forked
        return
    asyncio.run_coroutine_threadsafe(_cancel_all(), loop).add_done_callback(
        lambda _: loop.call_soon_threadsafe(loop.stop)
    )
    thread.join(_JOIN_S)
    if not thread.is_alive():
        loop.close()
