"""A call that may never return, in a thread of its own that can be left behind."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """Calls `work` at once; torchft and torch wait in code of their own that nothing can end.

    Args:
        work: what it returns is dropped if the call is left behind.
        name: of the thread.

    Attributes:
        done: set once `work` has returned or raised.

    >>> call = BackgroundCall(lambda: 1 + 1, name="example")
    >>> call.done.wait(10), call.error, call.result()
    (True, None, 2)
    """

    def __init__(self, work: Callable[[], T], *, name: str) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._results: list[T] = []
        self._work = work
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def result(self) -> T:
        """What `work` returned.

        Raises:
            BaseException: what `work` raised.
        """
        if self.error is not None:
            raise self.error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # a panic in torchft's Rust code is not an Exception
            self.error = error
        finally:
            self.done.set()
