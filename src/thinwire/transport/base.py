"""The contract of transports, which carry the payloads of exchanges between workers.

An exchange is a generator. It yields posts and receives what the other workers posted to this one.
It returns a function, which runs in the thread that waits for the exchange:

    def gather(message, rank, workers):
        received = yield to_all(message, rank, workers)
        return lambda: mean_of({rank: message, **received})

A transport runs it. Counting, sealing and faults wrap the generator, unknown to transports.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTag:
    """The name of an exchange, the same on all workers.

    Args:
        what: name of the fragment.
        round: number of the exchange among the fragment's, from 1.
        anchor: digest of the outer parameters from which the pseudo-gradient was computed.

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
    """A request to send payloads (uint8 [n]) and to receive others; there is no other request.

    The answer has the payload of each worker in `take`. It may also have this worker's own payload,
    if the other workers received something else.

    Args:
        to: payload by receiver. One tensor for several receivers is stored or counted once. The
            payload of a lone worker is for itself: a store keeps it for later workers. All payloads
            for one receiver have the same size, whoever sends them.
        take: number of bytes by sender.
        allow_missing: the answer has an empty payload in place of one that is lost, forged or
            damaged. Otherwise that is an error.
        stand_in: computes a lost worker's payload from its rank and what it received for the
            previous post. A transport that keeps what was posted gives that payload to all workers,
            in place of an empty one.
    """

    to: Mapping[int, Tensor]
    take: Mapping[int, int]
    allow_missing: bool = False
    stand_in: Callable[[int, Mapping[int, Tensor]], Tensor] | None = None

    def is_to_all(self, workers: int) -> bool:
        """True if one tensor goes to all others, and each of them sends as many bytes."""
        if len(self.to) != max(1, workers - 1) or len(self.take) != workers - 1:
            return False
        first, *rest = self.to.values()
        others = {id(payload) for payload in rest} - {id(first)}
        return not others and {first.numel(), *self.take.values()} == {first.numel()}

    def changed(self, change: Callable[[Tensor], Tensor]) -> Post:
        """Apply `change` to every payload; a tensor shared by receivers stays shared.

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
"""Blocks until the answer to a post has arrived, and returns it; called once."""
Posts: TypeAlias = Generator[Post, Received, Callable[[], T]]
"""An exchange. Between posts it may run in a thread of the transport, during training. The function
that it returns runs in the thread that waits."""


def to_all(payload: Tensor, rank: int, workers: int, *, allow_missing: bool = False) -> Post:
    """Post `payload` to every other worker, and take the same number of bytes from each.

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
    """The exchange `posts`, with each of its posts replaced by those of `carry`.

    Args:
        posts: the exchange, not started.
        carry: yields posts in place of one post, and returns the answer to that one.
    """
    received: Received | None = None
    while True:
        try:
            # A generator that has not begun accepts only None.
            post = posts.send(received)  # pyright: ignore[reportArgumentType]
        except StopIteration as end:
            return end.value
        received = yield from carry(post)


class SharedAnswer(dict[int, Tensor]):
    """The answer to a post that every worker of one process made to all others.

    Args:
        received: the answer.
        made: results that one of the workers computed for all of them, by key.
        lock: held while one of them computes it.
    """

    def __init__(self, received: Received, made: dict[Any, Any], lock: threading.Lock) -> None:
        super().__init__(received)
        self.made, self.lock = made, lock


def attempt(work: Callable[[], T]) -> Callable[[], T]:
    """Do `work` now; return a function that returns its result or raises its error.

    A transport's thread would take the error for a fault of the link, so it is raised in the thread
    that waits for the exchange.

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
    """Copy `raw` into a tensor, uint8 [n].

    >>> bytes_tensor(b"ab").tolist(), bytes_tensor(b"").numel()
    ([97, 98], 0)
    """
    # torch refuses an empty buffer.
    return (
        torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        if raw
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


# -- running one -----------------------------------------------------------------------------------


class Round(ABC, Generic[T_co]):
    """An exchange under way."""

    @abstractmethod
    def wait(self) -> T_co:
        """Wait for the exchange and return its result; call it once.

        Raises:
            ExchangeError: a peer died. ExchangeTimeout: a peer stayed silent for too long.
            RoundDiscarded: the round counts on no worker; the run continues.
        """


class RunningExchange(Round[T]):
    """An exchange and the post whose answer it waits for; `Transport.run` returns it.

    Args:
        posts: the exchange; it runs to its first post at once.

    Attributes:
        post: the next post to carry; None once the exchange has ended.
        arrive: called first by `wait`; returns once the exchange has ended or has an error.
        error: the error that stopped the exchange.

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
        self.answer(None)

    def answer(self, received: Received | None) -> None:
        """Resume with the answer to `post`, up to the next post; None starts the exchange."""
        try:
            # A generator that has not begun accepts only None.
            self.post = self._posts.send(received)  # pyright: ignore[reportArgumentType]
        except StopIteration as end:
            self.post = None
            self._left.append(end.value)

    def wait(self) -> T:
        """Return the result of the exchange, or raise the error that stopped it."""
        self.arrive()
        if self.error is not None:
            raise self.error
        # Not kept: it refers to the exchange's state, which may be replaced meanwhile.
        return self._left.pop()()


class Transport(ABC):
    """A connection of one worker to all others.

    Workers run the same exchanges in the same order. Do not change a payload before `wait` has
    returned, and never change a received payload.
    """

    rank: int
    """This worker's number, from 0."""

    world_size: int
    """The number of workers, K."""

    @abstractmethod
    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange; it advances during training if the transport can do that.

        Args:
            posts: the exchange, not started.
            tag: its name, for error messages.
        """

    @abstractmethod
    def announce(self, card: bytes, tag: RoundTag) -> Mapping[int, bytes]:
        """Make a description of this worker known to the others, before the first round.

        Its bytes are not counted.

        Args:
            card: the description, of any length.
            tag: its name, for error messages.

        Returns:
            The cards known so far by rank, this worker's included.
        """

    added_nbytes: int = 0
    """Bytes that the transport adds to every payload sent; they are counted."""

    service_requests: Mapping[str, int] = MappingProxyType({})
    """Requests to a service that charges for them, by kind; empty without one."""

    def close(self) -> None:
        """Leave the others for good. Does nothing by default."""


class WrappedTransport(Transport):
    """A transport that wraps another one, and behaves like it unless a subclass overrides.

    Args:
        inner: the wrapped transport.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner, self.added_nbytes = inner, inner.added_nbytes

    @property
    def inner(self) -> Transport:
        """The wrapped transport."""
        return self._inner

    @property
    def rank(self) -> int:
        """The wrapped transport's."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """The wrapped transport's."""
        return self._inner.world_size

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Run `posts` over the wrapped transport; a subclass runs a changed exchange.

        Args:
            posts: the exchange, not started.
            tag: its name, for error messages.
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
