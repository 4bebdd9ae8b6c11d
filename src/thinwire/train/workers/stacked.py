"""Simulated workers as one set of matrices: what K workers compute, in fewer and larger steps."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from thinwire.optim import LAYOUTS, Muon, SignSGD
from thinwire.outer import GradientAveraging
from thinwire.train.workers.group import SimulatedWorkers, cores
from thinwire.train.workers.model_stack import ModelStack
from thinwire.train.workers.worker import Worker


class StackedWorkers(SimulatedWorkers):
    """All K workers in this process, stacked: as many stacks as there are cores, on threads.

    A worker's weights, gradients and optimizer state are views into those of its stack, so that
    outer loop, evaluation and checkpoints find what they find elsewhere. It computes what
    `ThreadedWorkers` computes up to rounding: in fp32 the gradient of every parameter by less than
    1e-5 of its norm. Steps that divide by a small moment enlarge that, as every change of rounding.

    Args:
        workers: all, in rank order.
        threads: CPU threads of a stack.
        sample: int64 [n, time + 1]; what every stack is tried out on.

    Raises:
        ConfigurationError: the model cannot be stacked; says why.
    """

    def __init__(self, workers: Sequence[Worker], *, threads: int, sample: Tensor) -> None:
        count = len(workers)
        stacks = min(count, len(cores())) if workers[0].device.type == "cpu" else 1
        super().__init__(workers, concurrency=stacks, threads=threads)
        # Sizes differ by one at most: the last stack to finish is waited for.
        bounds = [index * count // stacks for index in range(stacks + 1)]
        self._stacks = [_Stack(self.workers[a:b], sample) for a, b in pairwise(bounds)]

    def inner_step(self) -> list[float]:
        """One inner step of every worker; returns their losses."""
        self.steps_taken += 1
        return [loss for part in self._pool.map(_Stack.inner_step, self._stacks) for loss in part]

    def capture(self, worker: Worker) -> dict[str, Any]:
        """The worker's own: a view would take the whole stack into the file."""
        return _without_stack(super().capture(worker), {})

    def resume(self, worker: Worker, state: dict[str, Any], *, workers: int) -> None:
        """Go on from what `capture` returned, here or in `ThreadedWorkers`."""
        super().resume(worker, state, workers=workers)
        for stack in self._stacks:
            stack.stepper.reload()


class _Stack:
    def __init__(self, workers: Sequence[Worker], sample: Tensor) -> None:
        self._workers = list(workers)
        self._models = ModelStack([worker.model for worker in workers], sample)
        self.stepper = choose_stepper(self._models, workers)

    def inner_step(self) -> list[float]:
        losses = self._backward(torch.stack([worker.read() for worker in self._workers]))
        if not all(map(math.isfinite, losses)):
            self._models.share_gradients()  # the error names the parameter of a bad gradient
        for worker, loss in zip(self._workers, losses, strict=True):
            worker.check_loss(loss)
        self.stepper.step()
        self._models.drop_gradients()
        return losses

    def _backward(self, windows: Tensor) -> list[float]:
        first = self._workers[0]
        parts = windows.chunk(first.config.accumulate, dim=1)
        totals = torch.zeros(len(self._workers), dtype=torch.float64, device=windows.device)
        for part in parts:
            with first.autocast():
                losses = self._models.losses(part) / first.config.accumulate
            # A worker's weights are in no other worker's loss.
            losses.sum().backward()
            totals += losses.detach()
        return totals.tolist()  # once a step: it waits for the device


def _without_stack(state: Any, seen: dict[object, Tensor]) -> Any:
    """`state` with views of larger tensors copied; tied ones stay tied by way of `seen`."""
    if isinstance(state, Mapping):
        return {key: _without_stack(value, seen) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_without_stack(value, seen) for value in state)
    if isinstance(state, Tensor) and state.untyped_storage().nbytes() > state.nbytes:
        return seen.setdefault((state.data_ptr(), state.shape, state.stride()), state.clone())
    return state


class InnerStepper(ABC):
    """Takes the inner step of stacked workers, once their gradients are computed.

    Args:
        stack: of the workers' models.
        workers: in the stack's order.
    """

    def __init__(self, stack: ModelStack, workers: Sequence[Worker]) -> None:
        self.stack, self.workers = stack, list(workers)

    @abstractmethod
    def step(self) -> None:
        """One step of every worker."""

    @abstractmethod
    def reload(self) -> None:
        """The workers' optimizers were loaded from a checkpoint."""


class PerWorkerStep(InnerStepper):
    """Every worker's own optimizer steps, one after the other: any optimizer, with its hooks."""

    def __init__(self, stack: ModelStack, workers: Sequence[Worker]) -> None:
        super().__init__(stack, workers)
        self.reload()

    def step(self) -> None:
        """Step every worker's own optimizer, as workers on threads do."""
        self.stack.share_gradients()
        for worker in self.workers:
            worker.optimizer.step()
            worker.optimizer.zero_grad()

    def reload(self) -> None:
        """What was loaded are the optimizers that step, perhaps by the settings of slower ones."""
        for worker in self.workers:
            changed = _faster(worker.optimizer)
            for group in worker.optimizer.param_groups:
                group.update(changed)


class StackedStep(InnerStepper):
    """One optimizer, of the same class as the workers' own, steps the stacked weights.

    An elementwise step does not care where a worker ends; Muon takes a stack as so many matrices.
    The state of each worker's optimizer is views into that of the stack.
    """

    def __init__(self, stack: ModelStack, workers: Sequence[Worker]) -> None:
        super().__init__(stack, workers)
        self._clip_norm = workers[0].config.clip_norm
        own = workers[0].optimizer
        names = {id(stack.own[name][0]): name for name in stack.parameters}
        self._changed = _faster(own)
        groups = [
            {**group, "params": [stack.parameters[names[id(p)]] for p in group["params"]]}
            | self._changed
            for group in own.param_groups
        ]
        kind: Any = type(own)
        self._optimizer: torch.optim.Optimizer = kind(groups)
        self._shared, self._loaded = 0, True
        for worker in workers:
            # Without gradients this does nothing, but the scheduler warns if it was never called.
            worker.optimizer.step()

    def step(self) -> None:
        """Clip each worker's gradient by its own norm, and step."""
        if self._loaded:
            self._gather_states()
        for group, own in zip(
            self._optimizer.param_groups, self.workers[0].optimizer.param_groups, strict=True
        ):
            kept = {"params", *self._changed}
            group.update({key: value for key, value in own.items() if key not in kept})
        if self._clip_norm:
            _clip([p.grad for p in self.stack.parameters.values()], self._clip_norm)
        self._optimizer.step()
        if len(self._optimizer.state) != self._shared:
            self._share_states()

    def reload(self) -> None:
        """Stack what was loaded before the next step."""
        self._loaded = True

    def _gather_states(self) -> None:
        self._optimizer.state.clear()
        for name, stacked in self.stack.parameters.items():
            pairs = zip(self.workers, self.stack.own[name], strict=True)
            states = [w.optimizer.state[p] for w, p in pairs if p in w.optimizer.state]
            if states:
                self._optimizer.state[stacked] = _join(states, stacked.shape[1:])
        self._loaded = False
        self._share_states()

    def _share_states(self) -> None:
        for name, stacked in self.stack.parameters.items():
            state: Mapping[str, Any] = self._optimizer.state.get(stacked, {})
            for index, own in enumerate(self.stack.own[name] if state else ()):
                self.workers[index].optimizer.state[own] = {
                    key: value[index] if _has_workers(value, stacked.shape) else value
                    for key, value in state.items()
                }
        self._shared = len(self._optimizer.state)


def _faster(optimizer: torch.optim.Optimizer) -> dict[str, bool]:
    """Settings of its parameter groups that give the same step in fewer calls."""
    group = optimizer.param_groups[0]
    # On CUDA a fused AdamW counts its steps there, which a worker's own could not go on from.
    fuses = type(optimizer) is torch.optim.AdamW and group["params"][0].device.type == "cpu"
    asked = any(group.get(key) is not None for key in ("fused", "foreach"))
    return {"fused": True} if fuses and not asked else {}


def choose_stepper(stack: ModelStack, workers: Sequence[Worker]) -> InnerStepper:
    """`StackedStep` if one optimizer computes what the workers' own would, else `PerWorkerStep`."""
    kind = StackedStep if _steps_as_one(workers[0]) else PerWorkerStep
    return kind(stack, workers)


def _steps_as_one(worker: Worker) -> bool:
    # GradientAveraging takes the gradients out of every worker's own step.
    if isinstance(worker.config.method.outer, GradientAveraging):
        return False
    groups = worker.optimizer.param_groups
    # The state of a scalar cannot be told from a count of steps.
    if any(parameter.ndim == 0 for group in groups for parameter in group["params"]):
        return False
    if type(worker.optimizer) is Muon:
        return all(LAYOUTS[g["layout"]].stacked for g in groups if g["rule"] == "muon")
    return type(worker.optimizer) in (torch.optim.AdamW, torch.optim.SGD, SignSGD)


@torch.no_grad()
def _clip(gradients: Sequence[Tensor | None], most: float) -> None:
    """g[k] = g[k] min(1, most / (|g[k]| + 1e-6)), with the norm over all parameters of worker k.

    Source: `torch.nn.utils.clip_grad_norm_`, of each worker.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    norms = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in present])
    factors = (most / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for gradient in present:
        gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))


def _join(states: Sequence[Mapping[str, Any]], shape: torch.Size) -> dict[str, Any]:
    """The workers' states of one parameter as that of the stack; all have taken equal steps."""
    return {
        key: torch.stack([state[key] for state in states])
        if isinstance(value, Tensor) and value.shape == shape
        else copy.deepcopy(value)  # of its own: every optimizer counts its steps in place
        for key, value in states[0].items()
    }


def _has_workers(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape
