"""Exchanges whose messages are changed in transit."""

from collections.abc import Generator
from typing import TypeVar

from thinwire.transport import Post, Posts, RoundTag, Transport, WrappedTransport
from thinwire.transport.base import Received, Round, wrapped

T = TypeVar("T")


class Change:
    """Changes of an exchange in transit; none by default."""

    def sent(self, post: Post) -> Post:
        return post

    def arrived(self, post: Post, received: Received) -> Received:
        del post
        return received


class Changing(WrappedTransport):
    """A transport with `change` at every exchange; it may be replaced between two."""

    def __init__(self, inner: Transport, change: Change) -> None:
        super().__init__(inner)
        self.change = change

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        return self._inner.run(wrapped(posts, self._carry), tag)

    def _carry(self, post: Post) -> Generator[Post, Received, Received]:
        return self.change.arrived(post, (yield self.change.sent(post)))
