"""A connection between workers: it carries what an exchange asks for, and changes nothing.

An exchange is a generator. It yields what has to travel next and gets back what the others sent:

    def gather(message):
        messages = yield AllGather(message)     # every worker's, in rank order
        yield ToCaller()                        # what follows runs in the thread that waits
        return mean_of(messages)

A transport runs it. Whatever is to be added to every exchange (counting, faults) wraps the
generator, and no transport need know of it.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeAlias, TypeVar

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


# -- what an exchange may ask for ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AllGather:
    """Send `payload` (uint8 [n], the same n on all workers) to every worker.

    The answer is every worker's payload in rank order, this worker's own included.

    Args:
        payload: of this worker.
        may_lack: the exchange judges each payload, and can go on without one: in place of one that
            was found to be forged or changed on its way the answer has an empty one. Otherwise that
            is an error.
    """

    payload: Tensor
    may_lack: bool = field(default=False, kw_only=True)

    def sent_nbytes(self, rank: int, workers: int, *, added_nbytes: int = 0) -> int:
        """The payload counts once, however often a transport sends it."""
        del rank
        return _nbytes(self.payload) + added_nbytes if workers > 1 else 0

    def received_nbytes(self, answer: Sequence[Tensor], rank: int, *, added_nbytes: int = 0) -> int:
        """The payloads of the others."""
        return sum(_nbytes(p) + added_nbytes for worker, p in enumerate(answer) if worker != rank)


class SharedAnswer(list[Tensor]):
    """The answer to an all-gather of workers in one process, who all get this very list.

    What all of them would make of it alike, one of them makes for all.

    >>> answer = SharedAnswer()
    >>> [answer.once("sum", lambda: len(made)) for made in ([], [1])]
    [0, 0]
    """

    def __init__(self, payloads: Iterable[Tensor] = ()) -> None:
        super().__init__(payloads)
        self._made: dict[object, Any] = {}
        self._lock = threading.Lock()

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What `make` returned for the first worker that asked for `key`."""
        with self._lock:
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Send `payloads[j]` (uint8, the j-th of one size on all workers) to worker j, for every j.

    The answer is what every worker sent to this one, in rank order. Another request must follow.

    Args:
        payloads: by receiver.
        may_lack: as for `AllGather`.
    """

    payloads: Sequence[Tensor]
    may_lack: bool = field(default=False, kw_only=True)

    def sent_nbytes(self, rank: int, workers: int, *, added_nbytes: int = 0) -> int:
        """The payloads for the others."""
        del workers
        others = (p for worker, p in enumerate(self.payloads) if worker != rank)
        return sum(_nbytes(p) + added_nbytes for p in others)

    def received_nbytes(self, answer: Sequence[Tensor], rank: int, *, added_nbytes: int = 0) -> int:
        """The payloads of the others."""
        return sum(_nbytes(p) + added_nbytes for worker, p in enumerate(answer) if worker != rank)


@dataclass(frozen=True, slots=True)
class Swap:
    """Send `payload` (uint8 [n], the same n on both) to worker `peer`, which swaps with this one.

    The answer is the peer's payload. A worker whose peer is itself gets its own back.
    """

    payload: Tensor
    peer: int

    def sent_nbytes(self, rank: int, workers: int, *, added_nbytes: int = 0) -> int:
        """The payload, unless it stays here."""
        del workers
        return 0 if self.peer == rank else _nbytes(self.payload) + added_nbytes

    def received_nbytes(self, answer: Tensor, rank: int, *, added_nbytes: int = 0) -> int:
        """The peer's payload."""
        return 0 if self.peer == rank else _nbytes(answer) + added_nbytes


@dataclass(frozen=True, slots=True)
class Announce:
    """Make `payload` (bytes of any length) known to the others, before the first round.

    The answer is the payloads known so far by rank, this worker's own included. It is not counted.
    """

    payload: bytes


@dataclass(frozen=True, slots=True)
class ToCaller:
    """Nothing travels; what follows runs in the thread that calls `Round.wait`.

    Before it, code may run in a thread of the transport, beside the training.
    """


Request: TypeAlias = AllGather | AllToAll | Swap | Announce | ToCaller
Requests: TypeAlias = Generator[Request, Any, T]
"""An exchange: yields requests, is sent their answers, and returns what came of it."""


R = TypeVar("R", bound=Request)


def with_payloads(request: R, change: Callable[[Tensor], Tensor]) -> R:
    """`request` with every payload changed, one after the other; one that carries none as it is.

    >>> import torch
    >>> with_payloads(Swap(torch.tensor([3]), peer=1), torch.neg)
    Swap(payload=tensor([-3]), peer=1)
    """
    match request:
        case AllGather(payload) | Swap(payload):
            return replace(request, payload=change(payload))
        case AllToAll(payloads):
            return replace(request, payloads=[change(payload) for payload in payloads])
        case _:
            return request


def on_host(request: Request | None) -> Request | None:
    """`request` with its payloads in the host's memory, one run of bytes each.

    >>> on_host(None) is None
    True
    """
    if request is None:
        return None
    return with_payloads(request, lambda payload: payload.cpu().contiguous())


def attempt(work: Callable[[], T]) -> Callable[[], T]:
    """Do `work` now, and return what returns its result, or raises its error.

    For an exchange that works in a thread of the transport, which may take an error for a fault of
    the link: called after `ToCaller`, the error is raised where the exchange is waited for.

    >>> attempt(lambda: 1 + 1)()
    2
    """
    try:
        result = work()
    except Exception as error:
        failure = error

        def fail() -> T:
            raise failure

        return fail
    return lambda: result


# -- running one -----------------------------------------------------------------------------------


class RunningExchange(Generic[T]):
    """An exchange and the request whose answer it waits for.

    Args:
        requests: the exchange; it runs up to its first request at once.

    >>> def sizes(payload):
    ...     payloads = yield AllGather(payload)
    ...     return [len(p) for p in payloads]
    >>> import torch
    >>> running = RunningExchange(sizes(torch.zeros(3, dtype=torch.uint8)))
    >>> running.answer([running.request.payload] * 2)
    >>> running.request is None, running.finish()
    (True, [3, 3])
    """

    def __init__(self, requests: Requests[T]) -> None:
        self._requests = requests
        # In a list, because None may be the result.
        self._result: list[T] = []
        self.request: Request | None = None
        self.answer(None)

    @property
    def travels(self) -> bool:
        """Whether something has to be carried before the exchange can go on."""
        return self.request is not None and not isinstance(self.request, ToCaller)

    def answer(self, answer: Any) -> None:
        """Go on with the answer to `request`, up to the next one."""
        try:
            self.request = self._requests.send(answer)
        except StopIteration as end:
            self.request = None
            self._result.append(end.value)

    def finish(self) -> T:
        """Run what is left in this thread; nothing may have to be carried any more."""
        while isinstance(self.request, ToCaller):
            self.answer(None)
        (result,) = self._result
        return result


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


class Transport(ABC):
    """Connects one worker to all others.

    Workers run the same exchanges in the same order. A payload must not be changed before `wait`
    returned, and what is received is to be read, not written.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """This worker's number, from 0."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of workers, K."""

    @abstractmethod
    def run(self, requests: Requests[T], tag: RoundTag) -> Round[T]:
        """Start an exchange; it goes on while this worker trains, where a transport can do that.

        Args:
            requests: the exchange, not started yet.
            tag: which one, for error messages.
        """

    added_nbytes: int = 0
    """Bytes by which this makes every payload that travels longer; they are counted, too."""

    gives_all_the_same: bool = False
    """Whether a payload reaches either all workers alike or none of them.

    What is wrong with one is then seen by all, and they need not tell each other.
    """

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
        self._inner = inner

    @property
    def rank(self) -> int:
        """The wrapped transport's."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """The wrapped transport's."""
        return self._inner.world_size

    @abstractmethod
    def run(self, requests: Requests[T], tag: RoundTag) -> Round[T]:
        """Have the wrapped transport run `requests`, or another exchange made of them.

        Args:
            requests: the exchange, not started yet.
            tag: which one, for error messages.
        """

    @property
    def added_nbytes(self) -> int:
        """The wrapped transport's."""
        return self._inner.added_nbytes

    @property
    def gives_all_the_same(self) -> bool:
        """Whether the wrapped transport does."""
        return self._inner.gives_all_the_same

    @property
    def service_requests(self) -> Mapping[str, int]:
        """The wrapped transport's."""
        return self._inner.service_requests

    def close(self) -> None:
        """Close the wrapped transport."""
        self._inner.close()


class FinishedRound(Round[T]):
    """An exchange that nothing has to be carried for any more, or that failed.

    Args:
        running: the exchange; None if it failed.
        error: why.
    """

    def __init__(
        self, running: RunningExchange[T] | None, error: BaseException | None = None
    ) -> None:
        self._running, self._error, self._arrived_s = running, error, time.perf_counter()

    def wait(self) -> T:
        """Return what the exchange returned, or raise the error that stopped it."""
        if self._error is not None:
            raise self._error
        assert self._running is not None
        return self._running.finish()

    def arrived_s(self) -> float | None:
        """When the exchange ended, in seconds of `time.perf_counter()`."""
        return self._arrived_s


def run_alone(requests: Requests[T]) -> Round[T]:
    """The exchange of a worker with itself.

    >>> import torch
    >>> def first(payload):
    ...     payloads = yield AllGather(payload)
    ...     return payloads[0]
    >>> run_alone(first(torch.ones(1))).wait()
    tensor([1.])
    """
    try:
        running = RunningExchange(requests)
        while running.travels:
            running.answer(_own(running.request))
    except Exception as error:  # it belongs to the caller of wait()
        return FinishedRound(None, error)
    return FinishedRound(running)


def _own(request: Request | None) -> Any:
    match request:
        case AllGather(payload):
            return [payload]
        case AllToAll(payloads):
            return list(payloads)
        case Swap(payload, _):
            return payload
        case Announce(payload):
            return {0: payload}
        case _:
            raise AssertionError(request)


def _nbytes(payload: Tensor) -> int:
    return payload.numel() * payload.element_size()
