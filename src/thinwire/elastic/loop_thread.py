"""A daemon thread with an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from thinwire.errors import RunStopped

T = TypeVar("T")

_JOIN_S: Final = 5.0
_TICK_S, _STOPPED_S = 1.0, 2.0
LOOK_S: Final = 0.5
"""Interval at which a waiting worker checks whether it is asked to stop."""


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock stops while the process is suspended: no wait times out by that.

    All loops of a process share one clock, since one reads times that another noted.
    """

    _lock, _seen_s, _stopped_s = threading.Lock(), 0.0, 0.0

    def time(self) -> float:
        """Seconds that this process ran; the loop asks in every iteration, so after every tick."""
        with _Loop._lock:
            now_s, before_s = super().time(), _Loop._seen_s
            _Loop._seen_s = now_s
            if before_s and now_s - before_s > _STOPPED_S:
                _Loop._stopped_s += now_s - before_s
            return now_s - _Loop._stopped_s

    def tick(self) -> None:
        self.call_later(_TICK_S, self.tick)


class LoopThread:
    """Runs coroutines in a daemon thread, beside other threads.

    >>> async def one(): return 1
    >>> thread = LoopThread()
    >>> thread.run(one())
    1
    >>> thread.close()
    """

    def __init__(self) -> None:
        self._loop = _Loop()
        serve = partial(_serve, self._loop)
        thread = threading.Thread(target=serve, name="thinwire-store", daemon=True)
        thread.start()
        # Also runs at interpreter exit, which must not find the thread inside a request.
        self._closing = weakref.finalize(self, _end, self._loop, thread)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result; call this from any other thread."""
        return self.start(work).result()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin `work`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def result(self, work: Coroutine[Any, Any, T], asked: Callable[[], bool]) -> T:
        """Run `work` and return its result, unless this worker is asked to stop first."""
        return result_of(self.start(work), asked)

    def close(self) -> None:
        """Cancel what is under way and end the thread."""
        self._closing()


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result, also in a notebook, whose thread already runs a loop.

    >>> async def one(): return 1
    >>> async def cell(): return run_to_end(one())
    >>> run_to_end(cell())
    1
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    thread = LoopThread()
    try:
        return thread.run(work)
    finally:
        thread.close()


def result_of(running: concurrent.futures.Future[T], asked: Callable[[], bool]) -> T:
    """Wait for the result of `running`; cancel it once this worker is asked to stop.

    Args:
        running: the future to wait for.
        asked: called about twice a second.

    Raises:
        RunStopped: this worker is asked to stop.
    """
    while not concurrent.futures.wait([running], timeout=LOOK_S).done:
        if asked():
            raise stopped(running)
    return running.result()


def stopped(running: concurrent.futures.Future[Any]) -> RunStopped:
    """Cancel `running`; returns the error to raise on a worker that was asked to stop."""
    running.cancel()
    return RunStopped(
        "wait for the others",
        because="this worker was asked to stop",
        do="start it again to take part",
    )


def _serve(loop: _Loop) -> None:
    asyncio.set_event_loop(loop)
    loop.tick()
    loop.run_forever()
    loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _end(loop: _Loop, thread: threading.Thread) -> None:
    if not thread.is_alive():  # as in a forked process
        return
    asyncio.run_coroutine_threadsafe(_cancel_all(), loop).add_done_callback(
        lambda _: loop.call_soon_threadsafe(loop.stop)
    )
    # A coroutine may hold the last reference, and a thread cannot join itself.
    if thread is not threading.current_thread():
        thread.join(_JOIN_S)
