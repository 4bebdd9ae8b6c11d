"""Delayed Nesterov: an outer step for every arrival, and momentum for every N of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError, check_range, check_whole
from thinwire.outer.overlap import Overlap
from thinwire.outer.torch_optimizers import LARGEST_RATE, ElementwiseOptimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayedNesterov(ElementwiseOptimizer):
    """Nesterov momentum where pseudo-gradients arrive one by one: it moves once in N arrivals.

        S = S + g
        every N-th arrival:  m = beta m + S/N;  theta = theta - eps ((1 - c N + c) beta m + g/N)
                             S = 0
        every other:         theta = theta - eps (c beta m + g/N)

    N arrivals at one theta are, with c = 0, one step of `SGD(lr=eps, momentum=beta,
    nesterov=True)` on their mean. An arrival counts 1/N, so N belongs to the workers that take
    turns: N = K is natural.

    Args:
        lr: eps, of a whole mean; an arrival moves theta by eps/N.
        momentum: beta in [0, 1); with 0 an arrival is a step of SGD with eps/N.
        every: N.
        c: share of the momentum that each arrival takes in advance, in [0, 1/N].

    Raises:
        ConfigurationError: a negative rate, a momentum outside [0, 1), N below 1, or c outside
            [0, 1/N].

    Source: Asynchronous Local-SGD (arXiv 2401.09135), delayed Nesterov. Differs:
    with c > 0 its footnote calls N arrivals at one theta equal to a Nesterov step, which they are
    not: the N - 1 steps between take the old m.

    >>> DelayedNesterov(lr=0.7, momentum=0.9, every=4).c
    0.0
    """

    lr: float = 0.7
    momentum: float = 0.9
    every: int = 4
    c: float = 0.0

    def __post_init__(self) -> None:
        check_range("the outer lr", self.lr, most=LARGEST_RATE)
        check_range("the outer momentum", self.momentum, below=1)
        check_whole("every, the arrivals per step of the momentum,", self.every)
        # N arrivals take the whole momentum at most.
        check_range(f"c with every={self.every}", self.c, most=1 / self.every)

    def check(self, *, sync_every: int, overlap: Overlap) -> None:
        """Refuse an overlap that steps one fragment's vectors unequally often."""
        del sync_every
        if overlap.at_once > 1:
            raise ConfigurationError(
                f"use delayed Nesterov with {type(overlap).__name__}",
                because="it steps a worker's own vector more often than the shared one, so every "
                "N-th arrival would be another one in each",
                do="leave overlap out",
            )

    def check_rounds(self) -> None:
        """Refuse rounds that all workers take together, except where N is 1.

        Raises:
            ConfigurationError: N > 1.
        """
        if self.every > 1:
            raise ConfigurationError(
                f"take outer steps in rounds with delayed Nesterov over {self.every} arrivals",
                because="a round has one mean of all workers, which would count as one arrival "
                f"and move by 1/{self.every} of the learning rate",
                do="train with thinwire.asynchronous; for rounds, pass outer.SGD(nesterov=True)",
            )

    def step(
        self, position: Tensor | None, gradient: Tensor, state: Mapping[str, Tensor]
    ) -> Tensor:
        """By one arrival."""
        direction = delayed_nesterov(
            gradient,
            state["momentum_buffer"],
            state["arrived_sum"],
            int(state["step"]),
            beta=self.momentum,
            every=self.every,
            c=self.c,
        )
        position = torch.zeros_like(gradient) if position is None else position
        return position.sub_(direction, alpha=self.lr)

    def buffers(self, like: Tensor) -> dict[str, Tensor]:
        """m and S of zeros, and a count of 0 arrivals."""
        vectors = {name: torch.zeros_like(like) for name in ("momentum_buffer", "arrived_sum")}
        return {"step": torch.tensor(0), **vectors}


def delayed_nesterov(
    g: Tensor, m: Tensor, s: Tensor, t: int, *, beta: float, every: int, c: float
) -> Tensor:
    """The direction of arrival t: theta = theta - eps * direction. m and s change in place.

    Args:
        g: the pseudo-gradient that arrived, [numel].
        m: momentum, [numel].
        s: sum of the pseudo-gradients since m moved, [numel].
        t: arrivals before this one.
        beta: decay of m.
        every: N.
        c: share of the momentum taken by an arrival at which m does not move.

    >>> m, s = torch.zeros(1), torch.zeros(1)
    >>> [float(delayed_nesterov(torch.ones(1), m, s, t, beta=0.5, every=2, c=0)) for t in (0, 1)]
    [0.5, 1.0]
    """
    s.add_(g)
    weight = c
    if (t + 1) % every == 0:
        m.mul_(beta).add_(s, alpha=1 / every)
        s.zero_()
        weight = 1 - c * every + c
    direction = g / every
    return direction.add_(m, alpha=weight * beta) if weight else direction
