"""Gradient descent by signs alone, as one torch optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from thinwire.live_weights import local_shard
from thinwire.optim.checks import check_hyperparameters


class SignSGD(torch.optim.Optimizer):
    """W = (1 - lr weight_decay) W - lr sign(G), with sign(0) = 0; it keeps no state.

    Args:
        params: parameters or groups of them, as for any torch optimizer.
        lr: how far every weight moves in a step.
        weight_decay: decoupled; the decay of a step is lr * weight_decay.

    Raises:
        ConfigurationError: a value is out of range.

    Source: signSGD (arXiv 1802.04434); the order of decay and step is that of DeMo's released code
    (arXiv 2411.19870).

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    >>> weight.grad = torch.tensor([5.0, 0.0, -0.1])
    >>> SignSGD([weight], lr=0.25).step()
    >>> weight.tolist()
    [0.75, 1.0, 1.25]
    """

    def __init__(self, params: ParamsT, *, lr: float = 4e-4, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose values must be in range."""
        check_hyperparameters({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step every parameter that has a gradient; returns what `closure` does."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            lr, decay = float(group["lr"]), group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    weight = local_shard(parameter)
                    weight.mul_(1 - lr * decay).sub_(local_shard(parameter.grad).sign(), alpha=lr)
        return loss
