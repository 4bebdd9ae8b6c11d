"""How the inner optimizers of stacked workers step: all in one, or each by itself."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from thinwire.optim import LAYOUTS, Muon
from thinwire.outer import GradientAveraging
from thinwire.train.model_stack import ModelStack
from thinwire.train.worker import Worker

__all__ = ["Apart", "Stepping", "Together", "choose_stepping"]


class Stepping(ABC):
    """Takes the inner step of stacked workers, whose gradients are there.

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


@final
class Apart(Stepping):
    """Every worker's optimizer steps, one after the other: any optimizer, with its own hooks."""

    def step(self) -> None:
        """As on threads."""
        self.stack.share_gradients()
        for worker in self.workers:
            worker.optimizer.step()
            worker.optimizer.zero_grad()

    def reload(self) -> None:
        """Nothing: they are the optimizers that step."""


@final
class Together(Stepping):
    """One optimizer of the workers' kind steps the stacked weights.

    An elementwise step does not know where a worker ends; Muon takes a stack as so many matrices.
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
            # No gradient is there, so it does nothing; the scheduler asks whether it was called.
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
    """What to set in the groups of an optimizer of that kind, for the same step in fewer calls."""
    group = optimizer.param_groups[0]
    # On CUDA a fused AdamW counts its steps there, which a worker's own could not go on from.
    fuses = type(optimizer) is torch.optim.AdamW and group["params"][0].device.type == "cpu"
    asked = any(group.get(key) is not None for key in ("fused", "foreach"))
    return {"fused": True} if fuses and not asked else {}


def choose_stepping(stack: ModelStack, workers: Sequence[Worker]) -> Stepping:
    """`Together` where one optimizer computes what the workers' own would, else `Apart`."""
    kind = Together if _is_one(workers[0]) else Apart
    return kind(stack, workers)


def _is_one(worker: Worker) -> bool:
    # It takes the gradients out of every worker's own step.
    if isinstance(worker.config.method.outer, GradientAveraging):
        return False
    groups = worker.optimizer.param_groups
    # The state of a scalar cannot be told from a count of steps.
    if any(parameter.ndim == 0 for group in groups for parameter in group["params"]):
        return False
    if type(worker.optimizer) is Muon:
        return all(LAYOUTS[g["layout"]].stacked for g in groups if g["rule"] == "muon")
    return type(worker.optimizer) in (torch.optim.AdamW, torch.optim.SGD)


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
        else _copy_of(value)
        for key, value in states[0].items()
    }


def _copy_of(value: Any) -> Any:
    """A tensor of its own; anything else as it is."""
    return value.clone() if isinstance(value, Tensor) else value


def _has_workers(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape
