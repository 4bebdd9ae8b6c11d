"""A thread that runs exchanges to their end during training."""

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from thinwire.errors import ExchangeError
from thinwire.transport.base import RoundTag, RunningExchange

_JOIN_S = 5.0


def closed(tag: RoundTag) -> ExchangeError:
    """The error of an exchange whose transport was closed."""
    return ExchangeError(
        f"exchange {tag}",
        because="its transport was closed",
        do="wait for every exchange before closing; then build another transport on all workers",
    )


class ProgressThread:
    """Runs exchanges one after the other in a daemon thread, which starts with the first.

    All workers start their exchanges in one order, so no two threads wait for each other.

    >>> def one():
    ...     yield from ()
    ...     return lambda: 1
    >>> thread, running = ProgressThread(), RunningExchange(one())
    >>> thread.submit(running, RoundTag(what="x", round=1), carry=bool, abort=bool)
    >>> running.wait()
    1
    >>> thread.close()
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self._is_closing = False
        self._abort: Callable[[], object] = bool
        self._thread: threading.Thread | None = None

    @property
    def is_own_process(self) -> bool:
        """False in a process that was forked from the one that made this."""
        return os.getpid() == self._process

    def submit(
        self,
        running: RunningExchange[Any],
        tag: RoundTag,
        *,
        carry: Callable[[], object],
        abort: Callable[[], object],
    ) -> None:
        """Run an exchange after those submitted before; once closed, let it fail.

        Args:
            running: the exchange; its `wait` returns once it has ended.
            tag: of the exchange, for error messages.
            carry: answers every post; blocks until that is done or the backend times out.
            abort: makes `carry`, in another thread, raise soon.
        """
        ended = threading.Event()
        running.arrive = ended.wait
        # torch has a number of threads for each thread, and sums may depend on it.
        threads = torch.get_num_threads()

        def task() -> None:
            # In this order: either close() has `abort`, or this thread sees `_is_closing`.
            self._abort = abort
            try:
                if self._is_closing:
                    raise closed(tag)
                if torch.get_num_threads() != threads:
                    torch.set_num_threads(threads)
                carry()
            except BaseException as error:  # it belongs to the thread that waits
                running.error = error
            self._abort = bool
            ended.set()

        self._tasks.put(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="thinwire-progress", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread; an exchange in flight fails.

        A thread that is inside a backend when the interpreter exits aborts the process, so call
        this before. It does nothing in a forked child, which has no exchanges.
        """
        if not self.is_own_process:
            return
        self._is_closing = True
        self._tasks.put(None)
        # The last reference to a transport may be in a task, and a thread cannot join itself.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._abort()
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # an idle thread must not keep a process group alive
