"""Fault injection: exchanges whose messages are changed in transit."""

from collections.abc import Generator
from typing import TypeVar

from thinwire.transport import Post, Posts, RoundTag, Transport, WrappedTransport
from thinwire.transport.base import Received, Round, wrapped

T = TypeVar("T")


class Change:
    """Changes of an exchange in transit; none by default. Subclass it."""

    def sent(self, post: Post) -> Post:
        """The post that is sent in place of `post`."""
        return post

    def arrived(self, post: Post, received: Received) -> Received:
        """The messages that the exchange receives in place of `received`."""
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
        return self._inner.run(wrapped(posts, self._carry), tag)

    def _carry(self, post: Post) -> Generator[Post, Received, Received]:
        return self.change.arrived(post, (yield self.change.sent(post)))
