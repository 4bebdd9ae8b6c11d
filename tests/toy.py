"""A model small enough to check by hand, and K workers that train it in one process."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import thinwire as tw

BuildOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def build_model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def loss(model: nn.Module, step: int, worker: int, *, workers: int = 1, batch: int = 60) -> Tensor:
    """The mean squared error of worker `worker`'s block of the global batch of `step`."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(11, (batch,), generator=generator).chunk(workers)[worker]
    y = torch.randn(batch, 3, generator=generator).chunk(workers)[worker]
    return (model(x) - y).square().mean()


def build_matrices() -> nn.Module:
    """Of matrices alone, whose sides are multiples of 64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wide, back = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)
        return nn.Sequential(nn.Embedding(64, 64), wide, nn.Tanh(), back)


def matrix_loss(model: nn.Module, step: int, worker: int, *, workers: int) -> Tensor:
    """As `loss`, of `build_matrices`."""
    draws = torch.Generator().manual_seed(step)
    x = torch.randint(64, (60,), generator=draws).chunk(workers)[worker]
    y = torch.randn(60, 64, generator=draws).chunk(workers)[worker]
    return (model(x) - y).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return tw.inner.Muon(lr=0.02, weight_decay=0.01).build(model)


@dataclass(frozen=True, kw_only=True)
class OwnAnchors(tw.outer.OuterOptimizer):
    """`outer`, with an anchor of its own for every worker, which nothing pulls together."""

    outer: tw.outer.OuterOptimizer

    @property
    def has_own_anchors(self) -> bool:
        return True

    def bind(self, context, overlap):
        return self.outer.bind(context, overlap)


class Team:
    """K workers that share a thread."""

    def __init__(
        self,
        method: tw.Method,
        build: BuildOptimizer,
        workers: int,
        *,
        model=build_model,
        outer_device: str | None = None,
    ) -> None:
        self.workers = workers
        self.models = [model() for _ in range(workers)]
        self.optimizers = [build(model) for model in self.models]
        self.loops = [
            tw.OuterLoop(model, optimizer, method, transport=transport, outer_device=outer_device)
            for model, optimizer, transport in zip(
                self.models, self.optimizers, tw.transport.in_process(workers), strict=True
            )
        ]

    def train(self, steps: int, *, first: int = 0) -> "Team":
        for step in range(first, first + steps):
            for worker, (model, optimizer) in enumerate(
                zip(self.models, self.optimizers, strict=True)
            ):
                loss(model, step, worker, workers=self.workers).backward()
                optimizer.step()
                optimizer.zero_grad()
            self.exchange()
        return self

    def exchange(self) -> None:
        for loop in self.loops:
            loop.begin()
        for loop in self.loops:
            loop.finish()

    def anchor(self) -> list[Tensor]:
        return list(self.loops[0].anchor().values())


def train_alone(build: BuildOptimizer, steps: int) -> list[Tensor]:
    model = build_model()
    optimizer = build(model)
    for step in range(steps):
        loss(model, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def largest_difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
