"""The workers of this process, run in step: all of them (simulated), or one (under torchrun).

Under torchrun a worker may have several ranks. Its object is then on each of them.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from thinwire.elastic.events import EventLog
from thinwire.errors import CheckpointError
from thinwire.train.workers.ranks import gather_values
from thinwire.train.workers.worker import Worker

T = TypeVar("T")


def cores() -> list[int]:
    """The processor cores that this process may use.

    A job of a comparison, or a container, has only a part of the machine's.

    >>> len(cores()) >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class WorkerGroup:
    """The workers of a run that live in this process; as it is, one that exchanges rounds alone.

    Args:
        workers: in rank order.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = list(workers)
        self.steps_taken = 0
        machine = workers[0].config.machine
        # Ranks that write checkpoints into the run's folder: all of the run.
        self.checkpoint_ranks = workers[0].config.workers * machine.worker_size

    # -- where the run stands ----------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this process holds rank 0, which writes what exists once."""
        return self.workers[0].rank == 0

    @property
    def step(self) -> int:
        """Inner steps by the schedule."""
        return self.workers[0].scheduler.last_epoch

    @property
    def tokens(self) -> int:
        """Tokens read so far, by all workers together."""
        return self.step * self.workers[0].config.tokens_per_step

    events: EventLog | None = None
    """Joins, losses and rounds of an elastic run; None where the workers are fixed."""

    stops_alone: bool = True
    """Whether this process may stop between any two steps, without the other ranks."""

    def leave_when(self, asked: Callable[[], bool]) -> None:
        """Let waits for the others end with `RunStopped` once `asked` says so, where they can."""
        del asked

    def record_fields(self) -> dict[str, int]:
        """What a record says besides: the number of workers, where it varies."""
        return {}

    # -- training ----------------------------------------------------------------------------------

    def join_run(self) -> int:
        """Take part in the run, healed from the others if behind; returns `step`.

        Called before every inner step. Fixed workers have joined by being constructed.
        """
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

    def finish_last_round(self) -> None:
        """Repeat the last round until it counts, where a round may fail."""
        return

    def begin_consensus(self) -> None:
        """Begin to gather what the workers need to evaluate, on all of them before any waits."""
        self.each(lambda worker: worker.outer.begin_consensus())

    def each(self, work: Callable[[Worker], T]) -> list[T]:
        """`work` of every local worker, in rank order, each with its own random stream."""
        return [with_own_random_stream(work)(worker) for worker in self.workers]

    def all_gather(self, values: Sequence[float]) -> list[float]:
        """This process's numbers in, those of all processes of the run out, in rank order.

        Simulated workers are a rank each. All workers have equally many ranks, so that a mean over
        all ranks is a mean over workers.

        Args:
            values: as many in every process.
        """
        return list(values)

    def barrier(self) -> None:
        """Return once every rank of the run has called this."""
        self.all_gather([0.0] * len(self.workers))

    # -- checkpoints -------------------------------------------------------------------------------

    can_checkpoint: bool = True
    """Whether a checkpoint may be written now, between two steps."""

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
                do="thinwire join its address, or pass another --out",
            )
        config = worker.config
        sources = workers * config.machine.worker_size if workers != config.workers else None
        worker.load_state_dict(state["worker"], sources=sources)

    def file_failed(self, error: CheckpointError) -> None:
        """A file of the run could not be written: raise `error`, which stops the run."""
        raise error

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Release threads and connections after a run that went well."""
        self.abandon()
        for worker in self.workers:
            worker.close()

    def abandon(self) -> None:
        """Release what can be released without the other workers, which may be gone."""


class SimulatedWorkers(WorkerGroup):
    """All K workers of a run, side by side on threads of this process.

    Each thread computes with as many CPU threads as a rank of torchrun would, so both give the same
    bits. A model that draws random numbers makes its workers take turns: torch has one CPU
    generator per process, and each worker must see its own stream.

    Args:
        workers: all, in rank order.
        threads: CPU threads of a worker.
        sample: int64 [batch, time]; the model is tried out on it.
    """

    def __init__(self, workers: Sequence[Worker], *, threads: int, sample: torch.Tensor) -> None:
        super().__init__(workers)
        first = workers[0]
        # An accelerator's generator cannot be asked, and its workers take turns anyway.
        self._draws = first.device.type != "cpu" or _draws_random_numbers(first.model, sample)
        self._pool = ThreadPoolExecutor(
            1 if self._draws else min(len(workers), len(cores())),
            initializer=torch.set_num_threads,
            initargs=(threads,),
        )

    def each(self, work: Callable[[Worker], T]) -> list[T]:
        """In threads, or in turns with each worker's own random stream."""
        return list(
            self._pool.map(with_own_random_stream(work) if self._draws else work, self.workers)
        )

    def abandon(self) -> None:
        """End the threads: no other process is involved."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _draws_random_numbers(model: nn.Module, tokens: torch.Tensor) -> bool:
    """Whether a forward pass in training mode draws from the CPU's generator, as dropout does."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        model(input_ids=tokens)
        return not torch.equal(before, torch.get_rng_state())


class TorchrunWorker(WorkerGroup):
    """One worker here, or a rank of it; the others are in the default process group."""

    stops_alone = False

    def all_gather(self, values: Sequence[float]) -> list[float]:
        """Gather over the ranks."""
        return gather_values(values, self.workers[0].device)

    def close(self) -> None:
        """Leave the process group, which `abandon` does not: it waits for peers."""
        for worker in self.workers:  # the transport has a group of its own, with threads
            worker.outer.transport.close()
        dist.destroy_process_group()
        super().close()


def with_own_random_stream(work: Callable[[Worker], T]) -> Callable[[Worker], T]:
    """`work` with the worker's random stream."""

    def wrapped(worker: Worker) -> T:
        with worker.stream.active():
            return work(worker)

    return wrapped
