"""What moves payloads between the ranks of a process group, one exchange at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

__all__ = ["Backend", "Work", "nothing"]


def nothing(payloads: list[Tensor]) -> None:
    """There is nothing to be done."""
    del payloads


class Work(ABC):
    """One half of an exchange, on its way."""

    @abstractmethod
    def land(self) -> list[Tensor]:
        """Every worker's payload; blocks until it is there. The courier calls it, once."""


class Backend(ABC):
    """Carries one exchange, and must not outlive it: it holds on to the process group."""

    @abstractmethod
    def gather(self, payload: Tensor) -> Work:
        """Start sending `payload` to all."""

    @abstractmethod
    def scatter(self, payloads: Sequence[Tensor]) -> Work:
        """Start sending `payloads[j]` to worker j."""

    @abstractmethod
    def gather_results(self, result: Tensor) -> Work:
        """Start sending `result` to all, in the courier's thread, after `scatter` has landed.

        Meanwhile the main thread starts other exchanges, earlier or later on other ranks.
        """

    @abstractmethod
    def abort(self) -> None:
        """Make `Work.land`, blocked in another thread, raise soon."""

    def reducing(self) -> AbstractContextManager[object]:
        """What the courier computes between the halves runs inside this."""
        return nullcontext()

    def sync_stream(self) -> Callable[[list[Tensor]], None]:
        """What to call with the payloads in the thread that goes on to use them.

        It may outlive the exchange.
        """
        return nothing
