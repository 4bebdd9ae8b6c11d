"""Agreement among the ranks of one elastic worker, so that all of them do the same."""

import asyncio
import concurrent.futures
import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from thinwire.errors import ExchangeError, RoundDiscarded, ThinwireError
from thinwire.exchange.state import RoundResult
from thinwire.rejection import RejectReason, discarded
from thinwire.transport.base import Round
from thinwire.transport.distributed import group_of, reason_of

T = TypeVar("T")

# A rank that ends is noticed at once. One that hangs stops its trainer's collectives, too, which
# have a timeout of their own; here the others may wait as long as the first rank does for workers.
_TIMEOUT = datetime.timedelta(days=20)


class WorkerRanks:
    """The S ranks of one worker; all of them make the same calls in the same order.

    Args:
        group: process group, or one-dimensional mesh, of the worker's ranks; None is a worker of
            one rank, which needs no torch.distributed.

    Attributes:
        index: this rank's index, from 0.
        size: S.
        is_first: whether this rank speaks for the worker.

    >>> ranks = WorkerRanks()
    >>> ranks.gather("a"), ranks.agreed(lambda: "b")
    (['a'], 'b')
    """

    def __init__(self, group: Any = None) -> None:
        self.index, self.size, self.is_first = 0, 1, True
        self._group: Any = None
        self._lock = threading.Lock()  # a cancelled wait leaves its gather under way
        if group is None:
            return
        members = dist.get_process_group_ranks(group_of(group))
        # A separate group: these collectives must not mix with the trainer's.
        self._group = dist.new_group(
            members, backend="gloo", timeout=_TIMEOUT, use_local_synchronization=True
        )
        self.index, self.size = dist.get_rank(self._group), len(members)
        self.is_first = self.index == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order.

        Args:
            value: a small, picklable object.

        Raises:
            ExchangeError: another rank of this worker is gone.
        """
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        try:
            with self._lock:
                dist.all_gather_object(found, value, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise ExchangeError(
                f"go on as a worker of {self.size} ranks",
                because=f"another rank of it is gone: {reason_of(error)}",
                do="read what that rank said, and start this worker again with the same identity",
            ) from error
        return found

    def agreed(self, work: Callable[[], T]) -> T:
        """Result of `work` on this rank; raises the error of any rank."""
        results: list[T] = []
        raised: ThinwireError | None = None
        try:
            results.append(work())
        except ThinwireError as error:
            raised = error
        _raise_any(self.gather(raised))
        return results[0]

    async def gather_async(self, value: T) -> list[T]:
        """`gather`, on an event loop."""
        if self.size == 1:
            return [value]
        loop, future = asyncio.get_running_loop(), concurrent.futures.Future[list[T]]()

        def work() -> None:
            try:
                future.set_result(self.gather(value))
            except BaseException as error:  # it belongs to the thread that waits
                future.set_exception(error)

        # A daemon: a process that ends must not wait for the other ranks.
        threading.Thread(target=work, name="thinwire-ranks", daemon=True).start()
        return await asyncio.wrap_future(future, loop=loop)


async def on_all_ranks(ranks: WorkerRanks, target: object, command: str, *args: Any) -> list[Any]:
    """Call a method on every rank of a worker, from its first rank while the others `follow`.

    Args:
        ranks: the worker's ranks.
        target: this rank's object, whose coroutine method is called.
        command: the method's name.
        args: picklable arguments.

    Returns:
        Results of all ranks, in rank order.

    Raises:
        ThinwireError: the method raised it on any rank.
    """
    await ranks.gather_async((command, args))
    return await _outcomes(ranks, target, command, args)


async def follow(ranks: WorkerRanks, target: object) -> Any:
    """Call on this rank what the first rank calls, until it calls `end_following`.

    Returns:
        The outcome passed to `end_following`; raises it if it is an error.
    """
    while True:
        gathered: list[Any] = await ranks.gather_async(None)
        match gathered[0]:
            case str() as command, args:
                await _outcomes(ranks, target, command, args)
            case BaseException() as error:
                raise error
            case outcome:
                return outcome


async def end_following(ranks: WorkerRanks, outcome: object) -> None:
    """Have the other ranks return `outcome` from `follow`, or raise it; for the first rank."""
    await ranks.gather_async(outcome)


async def _outcomes(
    ranks: WorkerRanks, target: object, command: str, args: Sequence[Any]
) -> list[Any]:
    try:
        mine = await getattr(target, command)(*args)
    except ThinwireError as error:
        mine = error
    found = await ranks.gather_async(mine)
    _raise_any(found)
    return found


def _raise_any(outcomes: Sequence[object]) -> None:
    """Raise the first error, if any; one that ends the worker before one that ends the round."""
    errors = [each for each in outcomes if isinstance(each, ThinwireError)]
    for error in sorted(errors, key=lambda each: isinstance(each, RoundDiscarded)):
        raise error


class AgreedRound(Round[T]):
    """An exchange of one rank that counts only if those of all ranks of its worker do.

    A message can be lost for one rank alone. If its worker still counted on the other ranks, the
    copies of a parameter would differ. So if ranks miss different workers, the round is discarded.
    All workers read the same messages, and decide alike.

    Args:
        inner: this rank's exchange.
        ranks: the worker's ranks; all of them wait for their exchanges in the same order.
    """

    def __init__(self, inner: Round[T], ranks: WorkerRanks) -> None:
        self._inner, self._ranks = inner, ranks

    def wait(self) -> T:
        """Result of the exchange; raises the error of any rank."""
        result = self._ranks.agreed(self._inner.wait)
        left_out = result.left_out if isinstance(result, RoundResult) else {}
        # Some ranks alone may refuse values: each judges its shard, and all judge copies alike.
        absent = {rank for rank, why in left_out.items() if why.reason <= RejectReason.DRIFTED}
        every = self._ranks.gather(absent)
        if some := set.union(*every) - set.intersection(*every):
            workers = ", ".join(map(str, sorted(some)))
            because = f"only some ranks of this worker have the messages of worker {workers}"
            raise discarded("a round", because)
        return result
