"""Data of workers that come and go: numbered shares of one global order, each dealt out once.

A worker reads b rows at a step and goes on for a round of H steps: the b H samples of share s are
samples s b H to (s + 1) b H - 1 of the order in `thinwire.train.order`. Whoever holds a share reads
all of it, so what is read depends on which shares were dealt and not on how many workers there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from thinwire.errors import ConfigurationError
from thinwire.train.order import window_order

if TYPE_CHECKING:
    from thinwire.train.batches import Windows

__all__ = ["ShareBatches", "Shares"]


@final
class Shares:
    """The batch of step i within share s: samples (s H + i) b to (s H + i + 1) b - 1.

    Args:
        windows: what the samples are.
        rows: b, windows in a batch.
        sync_every: H, batches in a share.
        seed: of the order, the same on all workers.

    Raises:
        ConfigurationError: b or H is below 1.

    >>> import numpy as np
    >>> from thinwire.train.batches import Windows
    >>> shares = Shares(Windows(np.arange(8), 1), rows=2, sync_every=1, seed=0)
    >>> sorted(shares.batch(0, 0)[:, 0].tolist() + shares.batch(1, 0)[:, 0].tolist())
    [0, 2, 4, 6]
    """

    def __init__(self, windows: Windows, *, rows: int, sync_every: int, seed: int) -> None:
        for name, value in (("rows", rows), ("sync_every", sync_every)):
            if value < 1:
                raise ConfigurationError(
                    "deal out shares of the data",
                    because=f"{name} is {value}",
                    do=f"pass {name} >= 1",
                )
        self._windows, self._seed = windows, seed
        self._rows, self.sync_every = rows, sync_every

    def batch(self, share: int, index: int) -> Tensor:
        """Batch `index` of `share`: int64, [b, sequence_length + 1].

        Raises:
            ConfigurationError: there is no such batch in a share.
        """
        if share < 0 or not 0 <= index < self.sync_every:
            raise ConfigurationError(
                f"read batch {index} of share {share}",
                because=f"shares are counted from 0 and have {self.sync_every} batches",
                do=f"pass an index from 0 to {self.sync_every - 1}",
            )
        start = (share * self.sync_every + index) * self._rows
        order = window_order(start, start + self._rows, len(self._windows), self._seed)
        return self._windows.__getitems__(order.tolist())


@final
class ShareBatches(Iterator[Tensor]):
    """The batches of whoever is dealt shares, for ever; where they stand is known elsewhere.

    Args:
        shares: of the data.
        place: the share held now and the batch of it that is next.
    """

    def __init__(self, shares: Shares, place: Callable[[], tuple[int, int]]) -> None:
        self._shares, self._place = shares, place

    def __next__(self) -> Tensor:
        return self._shares.batch(*self._place())

    def state_dict(self) -> dict[str, Any]:
        """Nothing: shares are dealt anew to a worker that comes back."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is kept here."""
        del state
