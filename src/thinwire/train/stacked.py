"""Simulated workers as one set of matrices: what K workers compute, in fewer and larger steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from thinwire.train.cores import cores
from thinwire.train.crew import Crew
from thinwire.train.model_stack import ModelStack
from thinwire.train.stepping import choose_stepping
from thinwire.train.witness import Witness, witness_of
from thinwire.train.worker import Worker

__all__ = ["Stacked"]

T = TypeVar("T")


@final
class Stacked(Crew):
    """All K workers in this process, stacked: as many stacks as there are cores, on threads.

    A worker's weights, gradients and optimizer state are views into those of its stack, so that
    outer loop, evaluation and checkpoints find what they find elsewhere. It computes what
    `Simulated` computes up to rounding: in fp32 the gradient of every parameter by less than 1e-5
    of its norm. Steps that divide by a small moment enlarge that, as every change of rounding.

    Args:
        workers: all, in rank order.
        threads: CPU threads of a stack.
        sample: int64 [n, time + 1]; what every stack is tried out on.

    Raises:
        ConfigurationError: the model cannot be stacked; says why.
    """

    def __init__(self, workers: Sequence[Worker], *, threads: int, sample: Tensor) -> None:
        super().__init__(workers)
        count = len(self.workers)
        on_cpu = self.workers[0].device.type == "cpu"
        stacks = min(count, len(cores())) if on_cpu else 1
        # No larger than they must be: the last to finish is waited for.
        bounds = [index * count // stacks for index in range(stacks + 1)]
        self._stacks = [_Stack(self.workers[a:b], sample) for a, b in pairwise(bounds)]
        self._pool = ThreadPoolExecutor(
            stacks, initializer=torch.set_num_threads, initargs=(threads,)
        )

    def witness(self, *, every: int) -> Witness | None:
        """All workers are here."""
        return witness_of(self.workers, every=every)

    def inner_step(self) -> list[float]:
        """One inner step of every worker; returns their losses."""
        self.steps_taken += 1
        return [loss for part in self._pool.map(_Stack.inner_step, self._stacks) for loss in part]

    def each(self, work: Callable[[Worker], T]) -> list[T]:
        """In threads: nothing here draws random numbers."""
        return list(self._pool.map(work, self.workers))

    def everywhere(self, values: Sequence[float]) -> list[float]:
        """All workers are here."""
        return list(values)

    def capture(self, worker: Worker) -> dict[str, Any]:
        """The worker's own: a view would take the whole stack into the file."""
        return _without_stack(super().capture(worker), {})

    def resume(self, worker: Worker, state: dict[str, Any], *, workers: int) -> None:
        """Go on from what `capture` returned, here or in a crew of threads."""
        super().resume(worker, state, workers=workers)
        for stack in self._stacks:
            stack.stepping.reload()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def abandon(self) -> None:
        """End the threads: no other process is involved."""
        self.close()


@final
class _Stack:
    def __init__(self, workers: Sequence[Worker], sample: Tensor) -> None:
        self._workers = list(workers)
        self._models = ModelStack([worker.model for worker in workers], sample)
        self.stepping = choose_stepping(self._models, workers)

    def inner_step(self) -> list[float]:
        losses = self._backward(torch.stack([worker.read() for worker in self._workers]))
        if not all(map(math.isfinite, losses)):
            self._models.share_gradients()  # one of them is about to be named
        for worker, loss in zip(self._workers, losses, strict=True):
            worker.check_loss(loss)
        self.stepping.step()
        self._models.drop_gradients()
        return losses

    def _backward(self, windows: Tensor) -> list[float]:
        first = self._workers[0]
        parts = windows.chunk(first.config.accumulate, dim=1)
        totals = [0.0] * len(self._workers)
        for part in parts:
            with first.autocast():
                losses = self._models.losses(part) / first.config.accumulate
            # A worker's weights are in no other worker's loss.
            losses.sum().backward()
            totals = [total + loss for total, loss in zip(totals, losses.tolist(), strict=True)]
        return totals


def _without_stack(state: Any, seen: dict[object, Tensor]) -> Any:
    """`state` with views of larger tensors copied; tied ones stay tied by way of `seen`."""
    if isinstance(state, Mapping):
        return {key: _without_stack(value, seen) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_without_stack(value, seen) for value in state)
    if isinstance(state, Tensor) and state.untyped_storage().nbytes() > state.nbytes:
        return seen.setdefault((state.data_ptr(), state.shape, state.stride()), state.clone())
    return state
