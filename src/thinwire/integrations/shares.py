"""A data set in numbered shares, so that no two workers read the same rows."""

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from thinwire.errors import ConfigurationError
from thinwire.outer_loop import OuterLoop
from thinwire.train.data.batches import window_order

T_co = TypeVar("T_co", covariant=True)


class IndexedRows(Protocol[T_co]):
    """What has a length and rows by their index, such as a `torch.utils.data.Dataset`."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, index: int, /) -> T_co:
        """Return row `index`, from 0."""
        ...


class ShareDataset(IterableDataset[T_co]):
    """The rows of the share that a worker holds: one pass is what is left of one round.

    With b rows at an inner step and H steps in a round, share s is samples s b H to (s + 1) b H - 1
    of one global order, which goes through all rows epoch after epoch. No share is given to two
    workers, so no row of an epoch is read twice, however many workers there are and however often
    they are started again. Iterate again for the next round; trainers that go through their data
    set in epochs do so by themselves, and an epoch of theirs is then a round.

    Args:
        rows: the data set, the same on all workers.
        outer: returns the outer loop, when the first pass begins: in a trainer's callback it may
            not exist before.
        rows_per_step: b, those that this worker reads at an inner step: its batch size times the
            batches whose gradients it accumulates.
        seed: of the order, the same on all workers.

    Raises:
        ConfigurationError: there are no rows, or `rows_per_step` is below 1. When it is read: by
            another process than the loop's, or not so many rows at an inner step.

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
        rows: IndexedRows[T_co],
        outer: Callable[[], OuterLoop],
        *,
        rows_per_step: int,
        seed: int = 0,
    ) -> None:
        for name, value in (("rows_per_step", rows_per_step), ("the number of rows", len(rows))):
            if value < 1:
                raise ConfigurationError(
                    "cut the data into shares", because=f"{name} is {value}", do="pass at least 1"
                )
        self._rows, self._outer = rows, outer
        self._rows_per_step, self._seed = rows_per_step, seed
        self._read_share = -1

    def __len__(self) -> int:
        """Rows of a whole share."""
        return self._outer().method.sync_every * self._rows_per_step

    def __iter__(self) -> Iterator[T_co]:
        """The rows that are left of this worker's share."""
        if get_worker_info() is not None:
            raise ConfigurationError(
                "read a share in a process of a DataLoader",
                because="only the process that trains knows which share it holds",
                do="pass num_workers=0 (dataloader_num_workers=0 to TrainingArguments)",
            )
        outer = self._outer()
        # What a trainer fetches ahead is of the same share: a pass ends before the next is dealt.
        share, first = outer.share, outer.inner_step % outer.method.sync_every
        if share == self._read_share:
            raise self._other_rows(f"share {share} was read to its end before its round was over")
        start = share * len(self) + first * self._rows_per_step
        order = window_order(start, (share + 1) * len(self), len(self._rows), self._seed)
        for index in order.tolist():
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
