"""What the ranks of one elastic worker tell each other, so that all of them do the same."""

import datetime
from typing import Any, TypeVar

import torch.distributed as dist

from thinwire.errors import ExchangeError, RoundDiscarded, ThinwireError
from thinwire.transport.base import Round
from thinwire.transport.distributed import group_of, reason_of

T = TypeVar("T")

# A rank that ends is noticed at once. One that hangs stops its trainer's collectives, too, which
# have a timeout of their own; here others may wait for a shard that takes long to be healed.
_TIMEOUT = datetime.timedelta(hours=1)


class WorkerRanks:
    """The S ranks of one worker; all of them make the same calls in the same order.

    Args:
        group: process group, or one-dimensional mesh, of the worker's ranks; None is a worker of
            one rank, which needs no torch.distributed.

    Attributes:
        index: of this rank, from 0; the first one speaks for the worker.
        size: S.

    >>> ranks = WorkerRanks()
    >>> ranks.gather("a"), ranks.broadcast("b")
    (['a'], 'b')
    """

    def __init__(self, group: Any = None) -> None:
        self.index, self.size = 0, 1
        self._group: Any = None
        if group is None:
            return
        members = dist.get_process_group_ranks(group_of(group))
        # Of its own: what is said here must not stand between the trainer's collectives.
        self._group = dist.new_group(
            members, backend="gloo", timeout=_TIMEOUT, use_local_synchronization=True
        )
        self.index, self.size = dist.get_rank(self._group), len(members)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the worker."""
        return self.index == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order.

        Args:
            value: small, and such that it can be pickled.

        Raises:
            ExchangeError: another rank of this worker is gone.
        """
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, value, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise ExchangeError(
                f"go on as a worker of {self.size} ranks",
                because=f"another rank of it is gone: {reason_of(error)}",
                do="read what that rank said, and start this worker again with the same identity",
            ) from error
        return found

    def broadcast(self, value: T | None = None) -> T:
        """The first rank's value, on every rank.

        Args:
            value: of the first rank; the others have none.
        """
        first: Any = self.gather(value)[0]
        return first


class AgreedRound(Round[T]):
    """An exchange of one rank that counts only if those of all ranks of its worker do.

    Args:
        inner: this rank's exchange.
        ranks: of the worker; all of them wait for their exchanges in the same order.
    """

    def __init__(self, inner: Round[T], ranks: WorkerRanks) -> None:
        self._inner, self._ranks = inner, ranks

    def wait(self) -> T:
        """What the exchange returned; raises what stopped that of any rank."""
        result: list[T] = []
        error: ThinwireError | None = None
        try:
            result.append(self._inner.wait())
        except ThinwireError as raised:
            error = raised
        found = [each for each in self._ranks.gather(error) if each is not None]
        # What ends the worker comes before what only discards the round.
        found.sort(key=lambda each: isinstance(each, RoundDiscarded))
        if found:
            raise found[0] from error
        return result[0]

    def arrived_s(self) -> float | None:
        """When everything had arrived at this rank."""
        return self._inner.arrived_s()
