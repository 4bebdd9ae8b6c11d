"""Faults on purpose: exchanges whose messages are changed on their way."""

from abc import ABC
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, final

from torch import Tensor

from thinwire.transport import (
    AllGather,
    AllToAll,
    Request,
    Requests,
    Round,
    RoundTag,
    Swap,
    Transport,
)

__all__ = ["Change", "Changing", "tampered", "with_payloads"]

T = TypeVar("T")


class Change(ABC):  # noqa: B024, which wants an abstract method: both have a default
    """What happens to an exchange on its way; by default nothing. Subclass it."""

    def sent(self, request: Request) -> Request:
        """What travels instead of `request`."""
        return request

    def arrived(self, request: Request, answer: Any) -> Any:
        """What the exchange gets instead of `answer`."""
        del request
        return answer


def tampered(requests: Requests[T], change: Change) -> Requests[T]:
    """`requests`, with `change` at what it sends and gets.

    >>> import torch
    >>> from thinwire.testing.transports import gathered
    >>> from thinwire.transport import RoundTag, in_process
    >>> class Negative(Change):
    ...     def arrived(self, request, answer):
    ...         return answer if answer is None else [-payload for payload in answer]
    >>> requests = tampered(gathered(torch.tensor([3])), Negative())
    >>> in_process(1)[0].run(requests, RoundTag(what="x", round=1)).wait()
    [tensor([-3])]
    """
    answer: Any = None
    while True:
        try:
            request = requests.send(answer)
        except StopIteration as end:
            return end.value
        answer = change.arrived(request, (yield change.sent(request)))


def with_payloads(request: Request, change: Callable[[Tensor], Tensor]) -> Request:
    """`request` with every payload changed.

    >>> import torch
    >>> with_payloads(AllGather(torch.tensor([3])), torch.neg)
    AllGather(payload=tensor([-3]))
    """
    match request:
        case AllGather(payload):
            return AllGather(change(payload))
        case AllToAll(payloads):
            return AllToAll([change(payload) for payload in payloads])
        case Swap(payload):
            return replace(request, payload=change(payload))
        case _:
            return request


@final
class Changing(Transport):
    """A transport with `change` at every exchange.

    Args:
        inner: what carries.
        change: may be replaced between exchanges.

    >>> from thinwire.transport import in_process
    >>> Changing(in_process(2)[1], Change()).rank
    1
    """

    def __init__(self, inner: Transport, change: Change) -> None:
        self._inner, self.change = inner, change

    @property
    def rank(self) -> int:
        """The wrapped transport's rank."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """The wrapped transport's world size."""
        return self._inner.world_size

    def run(self, requests: Requests[T], tag: RoundTag) -> Round[T]:
        """Run it changed."""
        return self._inner.run(tampered(requests, self.change), tag)

    def close(self) -> None:
        """Close the wrapped transport."""
        self._inner.close()
