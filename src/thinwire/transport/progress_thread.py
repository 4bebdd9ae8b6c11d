"""A thread that carries exchanges to their end while training goes on."""

import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.errors import ExchangeError
from thinwire.transport.backend import no_sync
from thinwire.transport.base import Round, RoundTag, RunningExchange

_JOIN_S = 5.0

T = TypeVar("T")


class Future(Round[T]):
    """An exchange that another thread carries.

    Args:
        running: the exchange.
        sync_stream: called with what arrived last, in the thread that goes on to use it.

    >>> def one():
    ...     yield from ()
    ...     return lambda: 1
    >>> future = Future(RunningExchange(one()))
    >>> future.arrived_s() is None
    True
    >>> future.succeed([])
    >>> future.wait()
    1
    """

    def __init__(
        self,
        running: RunningExchange[T],
        sync_stream: Callable[[Sequence[Tensor]], None] = no_sync,
    ) -> None:
        self._running, self._sync_stream = running, sync_stream
        self._done = threading.Event()
        self._last: Sequence[Tensor] = ()
        self._error: BaseException | None = None
        self._arrived_s: float | None = None

    def succeed(self, last: Sequence[Tensor]) -> None:
        """Everything has arrived, `last` at the end."""
        self._last, self._arrived_s = last, time.perf_counter()
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """The exchange was stopped by `error`, which `wait` raises."""
        self._error = error
        self._done.set()

    def arrived_s(self) -> float | None:
        """When everything had arrived, by the progress thread's clock."""
        return self._arrived_s

    def wait(self) -> T:
        """What the exchange returned, or the error that stopped it."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        self._sync_stream(self._last)
        return self._running.finish()


class Task(ABC):
    """An exchange that has to be carried.

    Args:
        tag: for error messages.
        future: gets the outcome.
    """

    def __init__(self, tag: RoundTag, future: Future[Any]) -> None:
        self.tag, self.future = tag, future
        # torch keeps the number of threads per thread, and sums may depend on it.
        self._threads = torch.get_num_threads()

    @abstractmethod
    def carry(self) -> Sequence[Tensor]:
        """Answer every post; returns what arrived last.

        Blocks until it is there or the backend's timeout is over.
        """

    @abstractmethod
    def abort(self) -> None:
        """Make `carry`, running in another thread, raise soon; this process is ending."""

    def run(self) -> None:
        """Carry the exchange with as many threads as the thread that made this task has."""
        try:
            if torch.get_num_threads() != self._threads:
                torch.set_num_threads(self._threads)
            last = self.carry()
        # The thread that waits is the one to be interrupted or told.
        except BaseException as error:
            self.future.fail(error)
        else:
            self.future.succeed(last)

    def give_up(self) -> None:
        """Tell a thread that still waits that the task will not be run."""
        self.future.fail(
            ExchangeError(
                f"exchange {self.tag}",
                because="its transport was closed while it was under way",
                do="wait for every exchange that was started",
            )
        )


class ProgressThread:
    """Runs tasks one after the other in a daemon thread, which starts with the first.

    One order is what makes it safe: all workers start their exchanges in the same order, so the
    exchange that one thread waits for is never behind one that another worker's thread waits for.

    >>> ProgressThread().close()
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self._closing = threading.Event()
        self._ordering = threading.Lock()  # no task is put after the None that ends the thread
        self._current: Task | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_own_process(self) -> bool:
        """Whether this process made it, and was not forked from the one that did."""
        return os.getpid() == self._process

    def submit(self, task: Task) -> None:
        """Run `task` after those submitted before."""
        with self._ordering:
            if self._closing.is_set():
                task.give_up()
            else:
                self._tasks.put(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="thinwire-progress", daemon=True)
            self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a task is being run."""
        return self._current is not None

    def close(self) -> None:
        """End the thread; an exchange that is under way fails.

        A thread that is still inside a backend when the interpreter ends aborts the process, so
        this must have run by then. In a process that was forked from the one that made it, nothing
        happens: what is under way is not the child's.
        """
        if not self.is_own_process:
            return
        with self._ordering:
            self._closing.set()
            self._tasks.put(None)
        thread, current = self._thread, self._current
        # The last reference to a transport may be a task's: then its own thread closes it, and a
        # thread cannot join itself.
        if thread is None or thread is threading.current_thread():
            return
        if current is not None:
            current.abort()
        thread.join(_JOIN_S)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            # In this order either close() sees the task or this thread sees that it is closing.
            self._current = task
            if self._closing.is_set():
                task.give_up()
            else:
                task.run()
            self._current = None
            del task  # while the thread idles it must not keep a process group alive
