"""Each preset as the loop one would write on a whiteboard: slow, obvious, and nobody's product.

Workers are a list, tensors are handled one by one, nothing is encoded. Tests compare the outer loop
with these.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["BuildModel", "BuildOptimizer", "Loss", "reference_ddp", "reference_diloco"]

BuildModel: TypeAlias = Callable[[], nn.Module]
BuildOptimizer: TypeAlias = Callable[[nn.Module], torch.optim.Optimizer]
Loss: TypeAlias = Callable[[nn.Module, int, int], Tensor]


def reference_ddp(
    build_model: BuildModel,
    build_optimizer: BuildOptimizer,
    loss: Loss,
    *,
    workers: int,
    steps: int,
) -> list[Tensor]:
    """Data parallelism: one model, the mean of the workers' gradients.

    Args:
        build_model: makes the same model every time.
        build_optimizer: makes its optimizer.
        loss: of (model, step, worker).
        workers: K.
        steps: inner steps.

    Returns:
        The parameters at the end.
    """
    model = build_model()
    optimizer = build_optimizer(model)
    for step in range(steps):
        for worker in range(workers):
            (loss(model, step, worker) / workers).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def reference_diloco(
    build_model: BuildModel,
    build_optimizer: BuildOptimizer,
    loss: Loss,
    *,
    workers: int,
    steps: int,
    sync_every: int,
    outer: tuple[float, float],
) -> list[Tensor]:
    """DiLoCo with Nesterov momentum, and MuLoCo: the optimizer is the only difference.

    Source: DiLoCo (arXiv 2311.08105), Algorithm 1.

    Args:
        build_model: makes the same model every time.
        build_optimizer: makes a worker's optimizer.
        loss: of (model, step, worker).
        workers: K.
        steps: inner steps; only whole rounds count.
        sync_every: H.
        outer: (eta, mu).

    Returns:
        The outer parameters theta at the end.
    """
    eta, mu = outer
    replicas = [build_model() for _ in range(workers)]
    optimizers = [build_optimizer(replica) for replica in replicas]
    theta = [p.detach().clone() for p in replicas[0].parameters()]
    momentum = [torch.zeros_like(p) for p in theta]
    for step in range(steps):
        for worker, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            loss(replica, step, worker).backward()
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % sync_every == 0:
            for i, mean in enumerate(_mean_displacement(theta, replicas)):
                momentum[i] = mu * momentum[i] + mean
                theta[i] = theta[i] - eta * (mean + mu * momentum[i])
            _restart(theta, replicas)
    return theta


def _mean_displacement(theta: Sequence[Tensor], replicas: Sequence[nn.Module]) -> list[Tensor]:
    deltas = [
        [t - p.detach() for t, p in zip(theta, replica.parameters(), strict=True)]
        for replica in replicas
    ]
    return [torch.stack(same).mean(0) for same in zip(*deltas, strict=True)]


@torch.no_grad()
def _restart(theta: Sequence[Tensor], replicas: Sequence[nn.Module]) -> None:
    for replica in replicas:
        for parameter, value in zip(replica.parameters(), theta, strict=True):
            parameter.copy_(value)
