"""A data set in numbered shares, each read by one worker only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from thinwire.errors import ConfigurationError, check, check_whole
from thinwire.outer_loop import OuterLoop
from thinwire.train.data.batches import window_order

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem

T_co = TypeVar("T_co", covariant=True)


class ShareDataset(IterableDataset[T_co]):
    """The rows of a worker's data share; each pass reads the rest of one round.

    With b rows per inner step and H steps in a round, share s is samples s b H to (s + 1) b H - 1
    of one global order, which repeats all rows, shuffled, epoch by epoch. No two workers get the
    same share, so no row of an epoch is read twice, whatever the number of workers and restarts.
    Iterate again for the next round: an epoch of a trainer is then a round.

    Args:
        rows: the data set, such as a `torch.utils.data.Dataset` with a length; the same on all
            workers.
        outer: returns the outer loop; called only when the data set is used, since a trainer's
            callback may build the loop after the data set.
        rows_per_step: b, rows that this worker reads per inner step: its batch size times the
            number of accumulated batches.
        seed: seed of the order, the same on all workers.

    Raises:
        ConfigurationError: there are no rows, or `rows_per_step` is below 1. When read: in another
            process than the loop's, or with another number of rows per inner step.

    >>> import torch
    >>> from thinwire import presets
    >>> model = torch.nn.Linear(2, 1)
    >>> loop = OuterLoop(model, [], presets.diloco(sync_every=2))
    >>> shares = ShareDataset(range(100, 112), lambda: loop, rows_per_step=3)
    >>> len(shares), len(set(shares))
    (6, 6)
    """

    def __init__(
        self,
        rows: SupportsLenAndGetItem[T_co],
        outer: Callable[[], OuterLoop],
        *,
        rows_per_step: int,
        seed: int = 0,
    ) -> None:
        check_whole("rows_per_step", rows_per_step)
        check_whole("the number of rows", len(rows))
        self._rows, self._outer = rows, outer
        self._rows_per_step, self._seed = rows_per_step, seed
        self._read_share = -1

    def __len__(self) -> int:
        """Rows of a whole share."""
        return self._outer().method.sync_every * self._rows_per_step

    def __iter__(self) -> Iterator[T_co]:
        """Yield the remaining rows of this worker's share."""
        check(
            get_worker_info() is None,
            "read a share in a worker process of a DataLoader",
            because="only the training process knows its share",
            do="pass num_workers=0 (dataloader_num_workers=0 to TrainingArguments)",
        )
        outer = self._outer()
        # A trainer prefetches rows of the same share: a pass ends before the next is assigned.
        share, first = outer.share, outer.inner_step % outer.method.sync_every
        if share == self._read_share:
            raise self._other_rows(f"share {share} was read to its end before its round was over")
        step = outer.inner_step
        start = share * len(self) + first * self._rows_per_step
        order = window_order(start, (share + 1) * len(self), len(self._rows), self._seed)
        for index in order.tolist():
            if outer.inner_step < step:
                return  # the loop went back after its last step, to another share
            step = outer.inner_step
            if outer.share != share:
                raise self._other_rows(f"share {share} was not read to its end in its round")
            yield self._rows[index]
        self._read_share = share

    def _other_rows(self, because: str) -> ConfigurationError:
        return ConfigurationError(
            f"read {self._rows_per_step} rows at an inner step",
            because=because,
            do="pass rows_per_step=the DataLoader's batch size times the batches that are "
            "accumulated for an optimizer step",
        )
