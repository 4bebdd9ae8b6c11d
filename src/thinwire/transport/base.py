"""A connection between workers: it carries what an exchange posts, and changes nothing.

An exchange is a generator. It yields posts and is sent what the others posted to this worker; what
it returns is called in the thread that waits for the exchange:

    def gather(message, rank, workers):
        received = yield to_all(message, rank, workers)
        return lambda: mean_of({rank: message, **received})

A transport runs it. Whatever is to be added to every exchange (counting, sealing, faults) wraps the
generator, and no transport need know of it.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTag:
    """Which exchange of a run this is.

    Args:
        what: the fragment's name.
        round: its number among the fragment's exchanges, from 1.
        anchor: digest of the outer parameters that the pseudo-gradient was taken from.

    >>> str(RoundTag(what="the whole model", round=3))
    'the whole model in round 3'
    """

    what: str
    round: int
    anchor: bytes = b""

    def __str__(self) -> str:
        return f"{self.what} in round {self.round}"


# -- what an exchange yields -----------------------------------------------------------------------


class Post(NamedTuple):
    """Bytes (uint8 [n]) for other workers, and what is expected of them: the only request there is.

    It is answered by what came from each worker in `take`. A transport may also answer with this
    worker's own payload, where that is not as it was handed over.

    Args:
        to: payload by receiver. One tensor for several receivers is stored or counted once. A lone
            worker's is to itself: it goes nowhere, but a store keeps it for those who come later.
        take: number of bytes by sender.
        allow_missing: the exchange judges each payload, and can go on without one: in place of one
            that is lost, forged or damaged the answer has an empty one. Otherwise that is an error.
    """

    to: Mapping[int, Tensor]
    take: Mapping[int, int]
    allow_missing: bool = False

    def is_to_all(self, workers: int) -> bool:
        """Whether one tensor goes to all others, and as many bytes come from each."""
        if len(self.to) != max(1, workers - 1) or len(self.take) != workers - 1:
            return False
        first, *rest = self.to.values()
        others = {id(payload) for payload in rest} - {id(first)}
        return not others and {first.numel(), *self.take.values()} == {first.numel()}

    def changed(self, change: Callable[[Tensor], Tensor]) -> Post:
        """This post with every payload changed; one tensor for several receivers stays one.

        >>> import torch
        >>> to_all(torch.tensor([3]), 0, 3).changed(torch.neg).is_to_all(3)
        True
        """
        payloads = {id(payload): payload for payload in self.to.values()}
        changed = {key: change(payload) for key, payload in payloads.items()}
        return self._replace(to={rank: changed[id(p)] for rank, p in self.to.items()})


Received: TypeAlias = Mapping[int, Tensor]
"""The answer to a post: payloads by sender."""
Wait: TypeAlias = Callable[[], Received]
"""Blocks until the answer to a post is there, and returns it; to be called once."""
Posts: TypeAlias = Generator[Post, Received, Callable[[], T]]
"""An exchange. Between two posts it may run in a thread of the transport, beside the training; what
it returns is called in the thread that waits."""


def to_all(payload: Tensor, rank: int, workers: int, *, allow_missing: bool = False) -> Post:
    """`payload` for every other worker, and as many bytes from each.

    >>> import torch
    >>> to_all(torch.zeros(5, dtype=torch.uint8), 1, 3).take
    {0: 5, 2: 5}
    """
    others = [other for other in range(workers) if other != rank]
    take = dict.fromkeys(others, payload.numel())
    return Post(dict.fromkeys(others or [rank], payload), take, allow_missing)


def wrapped(
    posts: Posts[T], carry: Callable[[Post], Generator[Post, Received, Received]]
) -> Posts[T]:
    """`posts`, of which each is carried by `carry`: how a transport's wrapper changes an exchange.

    Args:
        posts: the exchange, not started yet.
        carry: yields what is posted in place of a post, and returns the answer to it.
    """
    received: Received | None = None
    while True:
        try:
            # A generator that has not begun takes None alone.
            post = posts.send(received)  # pyright: ignore[reportArgumentType]
        except StopIteration as end:
            return end.value
        received = yield from carry(post)


class SharedAnswer(dict[int, Tensor]):
    """The answer to a post of all workers of one process to all.

    Args:
        received: the answer.
        made: what one of the workers computed for all of them, by name.
        lock: held while one of them computes it.
    """

    def __init__(self, received: Received, made: dict[Any, Any], lock: threading.Lock) -> None:
        super().__init__(received)
        self.made, self.lock = made, lock


def attempt(work: Callable[[], T]) -> Callable[[], T]:
    """Do `work` now; return a function that returns its result or raises its error.

    For an exchange that works in a thread of the transport, which may take an error for a fault of
    the link: the error is raised where the exchange is waited for.

    >>> attempt(lambda: 1 + 1)()
    2
    """
    done = Future[T]()
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
    return done.result


def bytes_tensor(raw: bytes | bytearray) -> Tensor:
    """`raw` as uint8 [n].

    >>> bytes_tensor(b"ab").tolist(), bytes_tensor(b"").numel()
    ([97, 98], 0)
    """
    # A buffer of no bytes is refused by torch.
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0).byte()


# -- running one -----------------------------------------------------------------------------------


class Round(ABC, Generic[T_co]):
    """An exchange under way."""

    @abstractmethod
    def wait(self) -> T_co:
        """What the exchange returned; call it once.

        Raises:
            ExchangeError: a peer died. ExchangeTimeout: a peer stayed silent for too long.
            RoundDiscarded: the round does not count on any worker, and the run goes on.
        """

    @abstractmethod
    def arrived_s(self) -> float | None:
        """When everything had arrived; None before that.

        Seconds of `time.perf_counter()`. Once `wait` has returned it is known.
        """


class RunningExchange(Round[T]):
    """An exchange and the post whose answer it waits for: what a transport's `run` returns.

    Args:
        posts: the exchange; it runs up to its first post at once.

    Attributes:
        post: to be carried; None once the exchange has ended.
        arrive: called by `wait` first; returns once the exchange has ended or has an error.
        error: what stopped the exchange.
        ended_s: when everything had arrived, in seconds of `time.perf_counter()`.

    >>> import torch
    >>> def size(payload):
    ...     received = yield to_all(payload, 0, 2)
    ...     return lambda: len(received[1])
    >>> running = RunningExchange(size(torch.zeros(3, dtype=torch.uint8)))
    >>> running.answer({1: running.post.to[1]})
    >>> running.post is None, running.wait()
    (True, 3)
    """

    def __init__(self, posts: Posts[T]) -> None:
        self._posts = posts
        self._left: list[Callable[[], T]] = []
        self.post: Post | None = None
        self.arrive: Callable[[], object] = bool
        self.error: BaseException | None = None
        self.ended_s: float | None = None
        self.answer(None)

    def answer(self, received: Received | None) -> None:
        """Continue with the answer to `post`, up to the next one; None starts the exchange."""
        try:
            # A generator that has not begun takes None alone.
            self.post = self._posts.send(received)  # pyright: ignore[reportArgumentType]
        except StopIteration as end:
            self.post = None
            self._left.append(end.value)
            self.ended_s = time.perf_counter()

    def wait(self) -> T:
        """What the exchange returned, or raise the error that stopped it."""
        self.arrive()
        if self.error is not None:
            raise self.error
        # Not kept: it refers to the exchange's state, which others may replace meanwhile.
        return self._left.pop()()

    def arrived_s(self) -> float | None:
        """When everything had arrived; None before that."""
        return self.ended_s


class Transport(ABC):
    """Connects one worker to all others.

    Workers run the same exchanges in the same order. A payload must not be changed before `wait`
    returned, and what is received is to be read, not written.
    """

    rank: int
    """This worker's number, from 0."""

    world_size: int
    """The number of workers, K."""

    @abstractmethod
    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange; it goes on while this worker trains, where a transport can do that.

        Args:
            posts: the exchange, not started yet.
            tag: which one, for error messages.
        """

    @abstractmethod
    def announce(self, card: bytes, tag: RoundTag) -> Mapping[int, bytes]:
        """Make `card` (of any length) known to the others, before the first round.

        It is not counted.

        Args:
            card: of this worker.
            tag: what it is, for error messages.

        Returns:
            The cards known so far by rank, this worker's own included.
        """

    added_nbytes: int = 0
    """Bytes by which this makes every payload that travels longer; they are counted, too."""

    @property
    def service_requests(self) -> Mapping[str, int]:
        """How often a service was asked that charges for it, by kind; empty without one."""
        return {}

    def close(self) -> None:
        """Leave the others; this transport is not used again. By default nothing is to be done."""
        return


class WrappedTransport(Transport):
    """A transport that another one carries: what it does not change is that one's.

    Args:
        inner: carries.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner, self.added_nbytes = inner, inner.added_nbytes

    @property
    def rank(self) -> int:
        """The wrapped transport's."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """The wrapped transport's."""
        return self._inner.world_size

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Have the wrapped transport run `posts`; a subclass, another exchange made of them.

        Args:
            posts: the exchange, not started yet.
            tag: which one, for error messages.
        """
        return self._inner.run(posts, tag)

    def announce(self, card: bytes, tag: RoundTag) -> Mapping[int, bytes]:
        """Announce over the wrapped transport."""
        return self._inner.announce(card, tag)

    @property
    def service_requests(self) -> Mapping[str, int]:
        """The wrapped transport's."""
        return self._inner.service_requests

    def close(self) -> None:
        """Close the wrapped transport."""
        self._inner.close()
