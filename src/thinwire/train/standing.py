"""What is a worker's own among the others: its number, its random numbers, its data."""

from abc import ABC, abstractmethod
from typing import TypeAlias, final

from thinwire.outer_loop import OuterLoop
from thinwire.train.batches import WorkerBatches
from thinwire.train.config import TrainConfig
from thinwire.train.data import LoadedData
from thinwire.train.shares import ShareBatches

__all__ = ["Batches", "Numbered", "Standing"]

Batches: TypeAlias = WorkerBatches | ShareBatches


class Standing(ABC):
    """Where a worker stands among those it trains with.

    Args:
        number: from 0; the worker of number 0 writes what exists once.
        evaluators: workers that share the validation windows between them.
    """

    def __init__(self, *, number: int, evaluators: int) -> None:
        self.number, self.evaluators = number, evaluators

    @abstractmethod
    def stream(self, rank: int) -> int:
        """Which stream of random numbers a rank of this worker draws from.

        Args:
            rank: over all ranks of the run.
        """

    @abstractmethod
    def batches(self, config: TrainConfig, data: LoadedData, outer: OuterLoop) -> Batches:
        """What this worker reads: int64, [global_batch / K, sequence_length + 1] each, for ever."""


@final
class Numbered(Standing):
    """Worker k of K, which are there from the beginning to the end.

    Args:
        number: k.
        workers: K.
    """

    def __init__(self, number: int, workers: int) -> None:
        super().__init__(number=number, evaluators=workers)

    def stream(self, rank: int) -> int:
        """The rank's own."""
        return rank

    def batches(self, config: TrainConfig, data: LoadedData, outer: OuterLoop) -> Batches:
        """Block k of every global batch."""
        del outer
        return data.batches(
            worker=self.number,
            workers=config.workers,
            global_batch=config.global_batch,
            seed=config.seed,
        )
