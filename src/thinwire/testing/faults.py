"""Faults on purpose: exchanges whose messages are changed on their way."""

from abc import ABC
from typing import Any, TypeVar

from thinwire.transport import (
    Request,
    Requests,
    Round,
    RoundTag,
    Transport,
    WrappedTransport,
)

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


class Changing(WrappedTransport):
    """A transport with `change` at every exchange.

    Args:
        inner: what carries.
        change: may be replaced between exchanges.

    >>> from thinwire.transport import in_process
    >>> Changing(in_process(2)[1], Change()).rank
    1
    """

    def __init__(self, inner: Transport, change: Change) -> None:
        super().__init__(inner)
        self.change = change

    def run(self, requests: Requests[T], tag: RoundTag) -> Round[T]:
        """Run it changed."""
        return self._inner.run(tampered(requests, self.change), tag)
