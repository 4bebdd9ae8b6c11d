"""The workers this process runs: all of them (simulated), or its own one (under torchrun).

Under torchrun a worker may have several ranks. Its object is then on each of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist

from thinwire.elastic.events import EventLog
from thinwire.errors import CheckpointError
from thinwire.train.cores import cores
from thinwire.train.random_stream import draws_random_numbers
from thinwire.train.witness import Witness, witness_of
from thinwire.train.worker import Worker
from thinwire.transport import naming_failures

__all__ = ["Crew", "Ranked", "Simulated", "in_own_stream"]

T = TypeVar("T")


class Crew(ABC):
    """Runs workers in step.

    Args:
        workers: those that live in this process, in rank order.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = list(workers)
        self.steps_taken = 0

    @property
    def leads(self) -> bool:
        """Whether this process holds rank 0, which writes what exists once."""
        return self.workers[0].rank == 0

    @property
    def step(self) -> int:
        """Inner steps by the schedule."""
        return self.workers[0].scheduler.last_epoch

    @property
    def rounds(self) -> int:
        """Outer steps taken."""
        return self.workers[0].outer.stats.rounds

    @property
    def events(self) -> EventLog | None:
        """What happened to the membership, where workers come and go."""
        return None

    @property
    def rests(self) -> bool:
        """Whether a checkpoint may be written now, between two steps."""
        return True

    @property
    def tokens(self) -> int:
        """Those that were read so far."""
        return self.step * self.workers[0].config.tokens_per_step

    def present(self) -> dict[str, int]:
        """The number of workers as a field of a record, where it varies."""
        return {}

    def witness(self, *, every: int) -> Witness | None:
        """Who looks at what all workers send, where they are here; None: nobody does."""
        del every
        return None

    def settle(self) -> None:
        """See to it that what was exchanged last counts, where a round may not."""
        return

    def arrive(self) -> int:
        """`step`, once the workers here stand where the others are, before an inner step."""
        return self.step

    def inner_step(self) -> list[float]:
        """One inner step of every local worker; returns their losses."""
        self.steps_taken += 1
        return self.each(lambda worker: worker.inner_step())

    def outer_step(self) -> None:
        """Exchange what is due, after the inner step and before the schedule moves on."""
        self.each(lambda worker: worker.outer.begin())
        self.each(lambda worker: worker.outer.finish())
        for worker in self.workers:
            worker.scheduler.step()

    def flush(self) -> None:
        """Exchange what is left after the last inner step."""
        self.each(lambda worker: worker.outer.begin_last())
        self.each(lambda worker: worker.outer.finish())

    @abstractmethod
    def each(self, work: Callable[[Worker], T]) -> list[T]:
        """`work` of every local worker, in rank order."""

    @abstractmethod
    def everywhere(self, values: Sequence[float]) -> list[float]:
        """One number per local worker in, one per rank of the run out, in rank order.

        Simulated workers are a rank each. All workers have equally many ranks, so that a mean over
        all ranks is a mean over workers.
        """

    def capture(self, worker: Worker) -> dict[str, Any]:
        """What a checkpoint of a local worker holds."""
        return {"worker": worker.state_dict()}

    def resume(self, worker: Worker, state: dict[str, Any], *, workers: int) -> None:
        """Go on from what `capture` returned.

        Args:
            worker: a local one.
            state: its own, or that of its predecessor in a run with another number of workers.
            workers: K of that run.

        Raises:
            CheckpointError: it is of another kind of run.
        """
        if "worker" not in state:
            raise CheckpointError(
                "go on from this checkpoint",
                because="it is of a worker of an elastic run",
                do="add --elastic HOST:PORT, or pass another --out",
            )
        config = worker.config
        if workers == config.workers:
            worker.load_state_dict(state["worker"])
        else:
            worker.succeed(state["worker"], sources=workers * config.machine.worker_size)

    @abstractmethod
    def close(self) -> None:
        """Release threads and connections after a run that went well."""

    @abstractmethod
    def abandon(self) -> None:
        """Release what can be released without the other workers, who may be gone."""


@final
class Simulated(Crew):
    """All K workers in this process, side by side on threads.

    Each thread computes with as many CPU threads as a rank of torchrun would, so both give the same
    bits. A model that draws random numbers makes its workers take turns: torch has one CPU
    generator per process, and each worker must see its own stream.
    """

    def __init__(self, workers: Sequence[Worker], *, threads: int, sample: torch.Tensor) -> None:
        super().__init__(workers)
        first = self.workers[0]
        # An accelerator's generator cannot be asked, and its workers take turns anyway.
        self._draws = first.device.type != "cpu" or draws_random_numbers(first.model, sample)
        self._pool = ThreadPoolExecutor(
            self._concurrency(), initializer=torch.set_num_threads, initargs=(threads,)
        )

    def witness(self, *, every: int) -> Witness | None:
        """All workers are here."""
        return witness_of(self.workers, every=every)

    def _concurrency(self) -> int:
        if self._draws:
            return 1
        return min(len(self.workers), len(cores()))

    def each(self, work: Callable[[Worker], T]) -> list[T]:
        """In threads, or in turns with each worker's own random stream."""
        return list(self._pool.map(in_own_stream(work) if self._draws else work, self.workers))

    def everywhere(self, values: Sequence[float]) -> list[float]:
        """All workers are here."""
        return list(values)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def abandon(self) -> None:
        """End the threads: no other process is involved."""
        self.close()


@final
class Ranked(Crew):
    """One worker here, or a rank of it; the others are in the default process group."""

    def each(self, work: Callable[[Worker], T]) -> list[T]:
        """In this thread, with the worker's random stream."""
        return [in_own_stream(work)(worker) for worker in self.workers]

    def everywhere(self, values: Sequence[float]) -> list[float]:
        """Gather over the ranks."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.workers[0].device)
        slots = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        with naming_failures("measurements of the workers"):
            dist.all_gather(slots, mine)
        return [float(slot) for slot in torch.cat(slots)]

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()
        for worker in self.workers:
            worker.close()

    def abandon(self) -> None:
        """Nothing: destroying a group waits for peers, and this process is about to end."""


def in_own_stream(work: Callable[[Worker], T]) -> Callable[[Worker], T]:
    """`work` with the worker's random stream."""

    def wrapped(worker: Worker) -> T:
        with worker.stream.active():
            return work(worker)

    return wrapped
