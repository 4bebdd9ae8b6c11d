"""Faults on purpose: exchanges whose messages are changed on their way."""

from typing import TypeVar

from thinwire.transport import (
    Post,
    Posts,
    Received,
    Round,
    RoundTag,
    Transport,
    WrappedTransport,
)

T = TypeVar("T")


class Change:
    """What happens to an exchange on its way; by default nothing. Subclass it."""

    def sent(self, post: Post) -> Post:
        """What travels instead of `post`."""
        return post

    def arrived(self, post: Post, received: Received) -> Received:
        """What the exchange gets instead of `received`."""
        del post
        return received


class Changing(WrappedTransport):
    """A transport with `change` at every exchange.

    Args:
        inner: what carries.
        change: may be replaced between exchanges.

    >>> import torch
    >>> from thinwire.testing.transports import gathered
    >>> from thinwire.transport import RoundTag, in_process
    >>> class Negative(Change):
    ...     def sent(self, post):
    ...         return post.changed(torch.neg)
    >>> transports = [Changing(transport, Negative()) for transport in in_process(2)]
    >>> tag = RoundTag(what="x", round=1)
    >>> rounds = [t.run(gathered(torch.tensor([3]), t.rank, 2), tag) for t in transports]
    >>> rounds[0].wait()
    [tensor([3]), tensor([-3])]
    """

    def __init__(self, inner: Transport, change: Change) -> None:
        super().__init__(inner)
        self.change = change

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Run it changed."""
        return self._inner.run(self._changed(posts), tag)

    def _changed(self, posts: Posts[T]) -> Posts[T]:
        received: Received | None = None
        while True:
            try:
                # A generator that has not begun takes None alone.
                post = posts.send(received)  # pyright: ignore[reportArgumentType]
            except StopIteration as end:
                return end.value
            received = self.change.arrived(post, (yield self.change.sent(post)))
