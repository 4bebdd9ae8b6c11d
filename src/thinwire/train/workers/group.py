"""The workers of this process, kept in step: all K of a run, one of them, or a rank of one."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from thinwire.elastic.transport import Elastic
from thinwire.errors import CheckpointError
from thinwire.train.workers.ranks import under_torchrun
from thinwire.train.workers.worker import Worker
from thinwire.transport.base import RoundTag

T = TypeVar("T")


def cores() -> list[int]:
    """The processor cores that this process may use, which may be fewer than the machine's.

    >>> len(cores()) >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class WorkerGroup:
    """The workers of a run that live in this process.

    Args:
        workers: the workers, in rank order.
        ranks: number of ranks, over all workers, that share this run's folder.
        gather: all-gathers numbers over these ranks, equally many from each; by default all ranks
            are in this process.
        pool: threads of simulated workers.

    Attributes:
        all_gather: takes this process's numbers, and returns all processes', in rank order. All
            workers have equally many ranks, so a mean over ranks is a mean over workers.
        events: joins, losses and rounds of an elastic run; None in a fixed run.
        is_apart: whether other workers, with folders of their own, start and stop with this one.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        ranks: int,
        gather: Callable[[Sequence[float]], list[float]] = list,
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        self.workers, self.checkpoint_ranks, self.all_gather = list(workers), ranks, gather
        self._pool, self._outer, self._config = pool, workers[0].outer, workers[0].config
        transport = self._outer.transport
        self._store = store = transport if isinstance(transport, Elastic) else None
        self.events = store.events if store is not None and self._outer.is_elastic else None
        self.is_apart = store is None and ranks < transport.world_size

    def gather_from_all(self, numbers: Sequence[float]) -> list[float]:
        """`all_gather`, and over workers with folders of their own that start with this one."""
        found = self.all_gather(numbers)
        if not self.is_apart:
            return found
        tag = RoundTag(what="checkpoints", round=0)
        cards = self._outer.transport.announce(msgspec.json.encode(found), tag)
        return [number for each in cards.values() for number in msgspec.json.decode(each)]

    # -- progress ----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Inner step of the schedule."""
        return self.workers[0].step

    @property
    def tokens(self) -> int:
        """Tokens read so far: by all workers of a fixed run, or by this one of an elastic run."""
        total = self._config.tokens_per_step
        if self.events is None:
            return self.step * total
        return self.workers[0].steps_taken * total // self._config.workers

    def record_fields(self) -> dict[str, int]:
        """Further fields of records: the number of workers of an elastic run."""
        return {} if self.events is None else {"workers": self._outer.workers}

    def leave_when(self, asked: Callable[[], bool]) -> None:
        """End waits in the store with `RunStopped` once `asked` returns true."""
        if self._store is not None:
            self._store.leave_when(asked)

    # -- training ----------------------------------------------------------------------------------

    def join_run(self) -> int:
        """Join the other workers, and catch up with them; returns `step`."""
        for worker in self.workers:
            worker.outer.join()
        self.follow()
        return self.step

    def inner_step(self) -> list[float]:
        """One inner step of each local worker; returns their losses."""
        return self.each(lambda worker: worker.inner_step())

    def outer_step(self) -> None:
        """Exchange what is due, and set the schedule to the step of the outer loop."""
        try:
            self.each(lambda worker: worker.outer.begin())
            self.each(lambda worker: worker.outer.finish())
        finally:
            self.follow()  # even after a failed round: its steps were taken, and will be saved

    def flush(self) -> bool:
        """Exchange what is left after the last inner step; False if there is more to train."""
        if self.events is None:
            # All workers of a process send before any of them waits.
            self.each(lambda worker: worker.outer.begin(last=True))
            self.each(lambda worker: worker.outer.finish())
        is_over = all(self.each(lambda worker: worker.outer.flush()))
        self.follow()
        return is_over

    def each(self, work: Callable[[Worker], T]) -> list[T]:
        """Run `work` for each local worker, in rank order, with that worker's random stream."""
        if self._pool is not None:
            return list(self._pool.map(work, self.workers))
        results: list[T] = []
        for worker in self.workers:
            with worker.stream.active():
                results.append(work(worker))
        return results

    def barrier(self) -> None:
        """Return once every rank of the run has called this."""
        self.all_gather([0.0] * len(self.workers))

    def follow(self) -> None:
        """Set the schedule to the step of the outer loop, which another worker may have moved."""
        for worker in self.workers:
            worker.reschedule(worker.outer.inner_step)

    def file_failed(self, error: CheckpointError) -> None:
        """Note that a file could not be written, or raise `error` in a fixed run."""
        if self.events is None:
            raise error
        self.events.note("unsaved", round=self._outer.stats.rounds, why=str(error))

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Release threads and connections after a run that went well."""
        self.abandon()
        if under_torchrun():
            dist.destroy_process_group()
        for worker in self.workers:
            worker.ranks.close()

    def abandon(self) -> None:
        """Release what needs no other ranks, which may be gone."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        for worker in self.workers:
            worker.outer.close()
            worker.outer.transport.close()


def simulated(workers: Sequence[Worker], sample: torch.Tensor) -> WorkerGroup:
    """All K workers of a run, on threads of this process.

    Each thread computes with as many CPU threads as a rank of torchrun would, so both give the same
    bits. If the model draws random numbers, its workers take turns: torch has one CPU generator per
    process, and each worker has its own stream.

    Args:
        workers: all K workers, in rank order.
        sample: int64 [batch, time], to try the model on.
    """
    first = workers[0]
    # An accelerator's generator does not tell, and workers on it take turns anyway.
    if first.device.type != "cpu" or _draws_random_numbers(first.model, sample):
        return WorkerGroup(workers, ranks=len(workers))
    pool = ThreadPoolExecutor(
        min(len(workers), len(cores())),
        initializer=torch.set_num_threads,
        initargs=(first.config.machine.threads,),
    )
    return WorkerGroup(workers, ranks=len(workers), pool=pool)


def _draws_random_numbers(model: nn.Module, tokens: torch.Tensor) -> bool:
    """Whether a forward pass in training mode draws from the CPU's generator, as dropout does."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        model(input_ids=tokens)
        return not torch.equal(before, torch.get_rng_state())
