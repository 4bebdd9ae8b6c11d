"""Outer SGD and AdamW: torch optimizers whose gradient is the mean pseudo-gradient."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.errors import check, check_range
from thinwire.outer.base import OuterOptimizer
from thinwire.outer.flat_anchor import StepRule
from thinwire.outer.overlap import Overlap
from thinwire.outer.state import FragmentContext, OuterState

LARGEST_RATE = torch.finfo(torch.float32).max
"""The largest learning rate: steps are taken in fp32."""


class ElementwiseOptimizer(OuterOptimizer, StepRule, ABC):
    """An optimizer that moves each number of the anchor by itself; subclasses say how.

    `step(position, gradient, state)` is given one part of a fragment after the other, never all of
    it, and returns the position that the anchor moves to; `buffers(like)` are its tensors.

    >>> SGD(lr=0.5).step(torch.tensor([1.0]), torch.tensor([2.0]), {})
    tensor([0.])
    """

    def bind(self, context: FragmentContext, overlap: Overlap) -> OuterState:
        """A state whose anchor is the local weights as they are now."""
        return overlap.join(self, context)


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD(ElementwiseOptimizer):
    """m = mu m + Delta; theta = theta - eta (Delta + mu m) with Nesterov, else theta - eta m.

    Args:
        lr: eta, applied here and nowhere else.
        momentum: mu in [0, 1); 0 keeps no buffer.
        nesterov: look ahead by mu m, as DiLoCo does.

    Raises:
        ConfigurationError: a negative rate, a momentum outside [0, 1), Nesterov without momentum.

    Source: DiLoCo (arXiv 2311.08105), Algorithm 1; `torch.optim.SGD`.

    >>> SGD(lr=0.7, momentum=0.9, nesterov=True)
    SGD(lr=0.7, momentum=0.9, nesterov=True)
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_range("the outer lr", self.lr, most=LARGEST_RATE)
        check_range("the outer momentum", self.momentum, below=1)
        check(
            not self.nesterov or self.momentum > 0,
            "use outer SGD with nesterov=True and momentum=0",
            because="there is no momentum to look ahead with",
            do="pass nesterov=False or momentum > 0",
        )

    def step(
        self, position: Tensor | None, gradient: Tensor, state: Mapping[str, Tensor]
    ) -> Tensor:
        """As `torch.optim.SGD` steps, with the same bits."""
        if self.momentum:
            momentum = state["momentum_buffer"].mul_(self.momentum).add_(gradient)
            if self.nesterov:
                gradient.add_(momentum, alpha=self.momentum)
            else:
                gradient.copy_(momentum)
        # 0 + (-lr) g is the product, rounded once either way.
        return (
            gradient.mul_(-self.lr) if position is None else position.add_(gradient, alpha=-self.lr)
        )

    def buffers(self, like: Tensor) -> dict[str, Tensor]:
        """A momentum buffer of zeros; no buffer without momentum."""
        return {"momentum_buffer": torch.zeros_like(like)} if self.momentum else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW(ElementwiseOptimizer):
    """Adam on the mean pseudo-gradient; no weight decay, which belongs to the inner optimizer.

    Args:
        lr: eta.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.

    Raises:
        ConfigurationError: a negative rate, or betas outside [0, 1).

    Source: the outer-optimizer ablation of DiLoCo (arXiv 2311.08105); `torch.optim.AdamW`.

    >>> AdamW(lr=0.1).betas
    (0.9, 0.95)
    """

    lr: float = 0.3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 0.1

    def __post_init__(self) -> None:
        check_range("the outer lr", self.lr, most=LARGEST_RATE)
        for beta in self.betas:
            check_range("an outer beta", beta, below=1)

    def step(
        self, position: Tensor | None, gradient: Tensor, state: Mapping[str, Tensor]
    ) -> Tensor:
        """By `torch.optim.AdamW`."""
        position = torch.zeros_like(gradient) if position is None else position
        parameter = nn.Parameter(position, requires_grad=False)
        parameter.grad = gradient
        optimizer = torch.optim.AdamW(
            [parameter], lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=0.0
        )
        # The step is counted once for all parts of the anchor.
        optimizer.state[parameter] = {**state, "step": state["step"].clone()}
        optimizer.step()
        return position

    def buffers(self, like: Tensor) -> dict[str, Tensor]:
        """A step count of 0 and two moments of zeros."""
        moments = {name: torch.zeros_like(like) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.tensor(0.0), **moments}
