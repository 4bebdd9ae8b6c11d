"""What carries the posts of one exchange between the ranks of a process group."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

from torch import Tensor

from thinwire.transport.base import Post, Received


def no_sync(payloads: Sequence[Tensor]) -> None:
    """Nothing is to be done: the payloads were complete when they were handed over."""
    del payloads


Wait: TypeAlias = Callable[[], Received]
"""Blocks until the answer to a post is there, and returns it; to be called once."""


class Backend(ABC):
    """Carries one exchange, and must not outlive it: it holds on to the process group."""

    @abstractmethod
    def start(self, post: Post, step: int) -> Wait:
        """Start carrying `post`; returns what waits for the answer.

        Args:
            post: what to carry.
            step: the post's number within the exchange. Number 0 is started by the thread that
                trains, all later ones by the progress thread, while the other starts further
                exchanges, earlier or later on other ranks.
        """

    @abstractmethod
    def abort(self) -> None:
        """Make a wait that blocks in another thread raise soon."""

    def computing(self) -> AbstractContextManager[object]:
        """What the progress thread computes between two posts runs inside this."""
        return nullcontext()

    def sync_stream(self) -> Callable[[Sequence[Tensor]], None]:
        """What to call with the last answer in the thread that goes on to use it.

        It may outlive the exchange.
        """
        return no_sync
