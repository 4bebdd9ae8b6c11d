"""A thread that sees exchanges through to their end while training goes on."""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from thinwire.errors import ExchangeError
from thinwire.transport.backend import nothing
from thinwire.transport.base import Label, Pending

__all__ = ["Future", "ProgressThread", "Task"]

_JOIN_S = 5.0


@final
class Future(Pending):
    """The result of an errand, once it is there: payloads or an error.

    Args:
        hand_over: called with the payloads in the thread that waits for them.

    >>> delivery = Future()
    >>> delivery.arrived_s() is None
    True
    >>> delivery.succeed([])
    >>> delivery.wait()
    []
    """

    def __init__(self, hand_over: Callable[[list[Tensor]], None] = nothing) -> None:
        self._hand_over = hand_over
        self._done = threading.Event()
        self._payloads: list[Tensor] = []
        self._error: BaseException | None = None
        self._arrived_s: float | None = None

    def succeed(self, payloads: list[Tensor]) -> None:
        """Everything is there."""
        self._payloads, self._arrived_s = payloads, time.perf_counter()
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """Nothing will come any more."""
        self._error = error
        self._done.set()

    def arrived_s(self) -> float | None:
        """When everything had arrived, by the courier's clock."""
        return self._arrived_s

    def wait(self) -> list[Tensor]:
        """The payloads, or the error that met the courier."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        self._hand_over(self._payloads)
        return self._payloads


class Task(ABC):
    """An exchange under way that has to be seen through.

    Args:
        label: for error messages.
        delivery: gets what comes of it.
    """

    def __init__(self, label: Label, delivery: Future) -> None:
        self.label, self.delivery = label, delivery
        # torch keeps the number of threads per thread, and sums may depend on it.
        self._threads = torch.get_num_threads()

    @abstractmethod
    def see_through(self) -> list[Tensor]:
        """Every worker's payload; blocks until it is there or the backend's timeout is over."""

    @abstractmethod
    def abort(self) -> None:
        """Make `see_through`, running in another thread, raise soon; this process is ending."""

    @final
    def run(self) -> None:
        """`see_through`, as it would run in the thread that made this errand."""
        try:
            if torch.get_num_threads() != self._threads:
                torch.set_num_threads(self._threads)
            payloads = self.see_through()
        # The thread that waits is the one to be interrupted or told.
        except BaseException as error:
            self.delivery.fail(error)
        else:
            self.delivery.succeed(payloads)

    @final
    def give_up(self) -> None:
        """Tell whoever may still wait that nobody is there to see it through."""
        self.delivery.fail(
            ExchangeError(
                f"exchange {self.label}",
                because="its transport was closed while it was under way",
                do="wait for every exchange that was started",
            )
        )


@final
class ProgressThread:
    """Runs errands one after the other in a daemon thread, which starts with the first.

    One order is what makes it safe: all workers start their exchanges in the same order, so the
    exchange that one courier waits for is never behind one that another courier waits for.

    >>> ProgressThread().close()
    """

    def __init__(self) -> None:
        self._errands: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._ordering = threading.Lock()  # no errand is put after the None that ends the thread
        self._current: Task | None = None
        self._thread: threading.Thread | None = None

    def send(self, errand: Task) -> Pending:
        """Run `errand` after those sent before; returns what comes of it."""
        with self._ordering:
            if self._closing.is_set():
                errand.give_up()
            else:
                self._errands.put(errand)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="thinwire-courier", daemon=True)
            self._thread.start()
        return errand.delivery

    @property
    def busy(self) -> bool:
        """Whether an errand is being run."""
        return self._current is not None

    def close(self) -> None:
        """End the thread; what is under way then fails.

        A thread that is still inside a backend when the interpreter ends aborts the process, so
        this must have run by then.
        """
        with self._ordering:
            self._closing.set()
            self._errands.put(None)
        thread, current = self._thread, self._current
        if thread is None or thread is threading.current_thread():
            return
        if current is not None:
            current.abort()
        thread.join(_JOIN_S)

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            # In this order either close() sees the errand or this thread sees that it is closing.
            self._current = errand
            if self._closing.is_set():
                errand.give_up()
            else:
                errand.run()
            self._current = None
            del errand  # while the thread idles it must not keep a process group alive
