"""Exchanges whose messages are changed in transit."""

from collections.abc import Callable, Generator
from typing import TypeVar

import torch
from torch import Tensor

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
    """A transport that applies `change` to every exchange; a test may replace it in between."""

    def __init__(self, inner: Transport, change: Change) -> None:
        super().__init__(inner)
        self.change = change

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        return self._inner.run(wrapped(posts, self._carry), tag)

    def _carry(self, post: Post) -> Generator[Post, Received, Received]:
        return self.change.arrived(post, (yield self.change.sent(post)))


Tamper = Callable[[list[Tensor]], list[Tensor]]


class Wire(Change):
    """Changes messages that arrive (`shards`: at a shard's owner), or those that are sent."""

    def __init__(self, rank: int, workers: int) -> None:
        self.rank, self.workers = rank, workers
        self.arriving: Tamper = list
        self.shards: Tamper = list
        self.sending: Callable[[Tensor], Tensor] = lambda message: message

    def sent(self, post: Post) -> Post:
        return post.changed(self.sending)

    def arrived(self, post: Post, received: Received) -> Received:
        change = self.shards
        if post.is_to_all(self.workers):
            # A worker's own message reaches itself as others receive it.
            own = self.sending(next(iter(post.to.values())))
            change, received = self.arriving, {self.rank: own, **received}
        nothing = torch.empty(0, dtype=torch.uint8)
        changed = change([received.get(rank, nothing) for rank in range(self.workers)])
        return {sender: changed[sender] for sender in received}


def of_worker_1(change: Callable[[Tensor], Tensor]) -> Tamper:
    return lambda messages: [change(m) if rank == 1 else m for rank, m in enumerate(messages)]
