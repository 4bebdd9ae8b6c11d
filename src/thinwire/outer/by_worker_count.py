"""Outer settings that depend on the number of workers, as the papers' tables do."""

from dataclasses import dataclass

from thinwire.errors import check
from thinwire.outer.base import OuterOptimizer
from thinwire.outer.overlap import Overlap
from thinwire.outer.state import FragmentContext, OuterState


@dataclass(frozen=True, kw_only=True, slots=True)
class ByWorkerCount(OuterOptimizer):
    """Chooses the row with the largest K that is not above the number of workers.

    Args:
        table: (K, optimizer) rows with K ascending from 1.

    Raises:
        ConfigurationError: the rows do not start at 1 or do not ascend; or workers have their own
            anchors in some rows and share them in others.

    >>> from thinwire.outer import SGD
    >>> table = ByWorkerCount(table=((1, SGD(lr=0.7)), (8, SGD(lr=0.9))))
    >>> table.at(4).lr, table.at(16).lr
    (0.7, 0.9)
    """

    table: tuple[tuple[int, OuterOptimizer], ...]

    def __post_init__(self) -> None:
        counts = [workers for workers, _ in self.table]
        check(
            counts[:1] == [1] and counts == sorted(set(counts)),
            f"use outer settings for {counts} workers",
            because="each number of workers must have exactly one row",
            do="start the table at 1 worker and list the numbers in ascending order",
        )
        check(
            len({(o.has_own_anchors, o.takes_momentum) for _, o in self.table}) == 1,
            "use these outer settings by number of workers",
            because="with some of them every worker has its own anchor or momentum, and with "
            "others all workers share one",
            do="take one kind of outer optimizer for all rows",
        )

    def at(self, workers: int) -> OuterOptimizer:
        """The optimizer for `workers` workers."""
        return [optimizer for least, optimizer in self.table if least <= workers][-1]

    @property
    def has_own_anchors(self) -> bool:
        """That of every row."""
        return self.table[0][1].has_own_anchors

    @property
    def averages_weights(self) -> bool:
        """True if any row does."""
        return any(optimizer.averages_weights for _, optimizer in self.table)

    @property
    def takes_momentum(self) -> bool:
        """That of every row."""
        return self.table[0][1].takes_momentum

    @property
    def elastic_refusal(self) -> str | None:
        """That of the first row that has one."""
        return next((o.elastic_refusal for _, o in self.table if o.elastic_refusal), None)

    def check(self, *, sync_every: int, overlap: Overlap) -> None:
        """Check every row of the table."""
        for _, optimizer in self.table:
            optimizer.check(sync_every=sync_every, overlap=overlap)

    def check_rounds(self) -> None:
        """Every row must be one for rounds."""
        for _, optimizer in self.table:
            optimizer.check_rounds()

    def bind(self, context: FragmentContext, overlap: Overlap) -> OuterState:
        """An outer state of the row for the workers of `context`."""
        return self.at(context.workers).bind(context, overlap)
