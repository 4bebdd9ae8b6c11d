"""A model small enough to check by hand, and K workers that train it in one process."""

import io
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.live_weights import LiveWeights
from thinwire.outer import FragmentContext, OuterState
from thinwire.storage import StatePlacement

BuildOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
_SEEDING = threading.Lock()  # torch has one random generator for all threads


@contextmanager
def seeded(seed: int) -> Generator[None]:
    with _SEEDING, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def build_model(seed: int = 0) -> nn.Module:
    with seeded(seed):
        return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def loss(model: nn.Module, step: int, worker: int, *, workers: int = 1) -> Tensor:
    """The mean squared error of worker `worker`'s block of the global batch of `step`."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(11, (60,), generator=generator).chunk(workers)[worker]
    y = torch.randn(60, 3, generator=generator).chunk(workers)[worker]
    return (model(x) - y).square().mean()


def build_matrices() -> nn.Module:
    """A model of matrices only, with sides that are multiples of 64."""
    with seeded(0):
        wide, back = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)
        return nn.Sequential(nn.Embedding(64, 64), wide, nn.Tanh(), back)


def matrix_loss(model: nn.Module, step: int, worker: int, *, workers: int) -> Tensor:
    """As `loss`, for `build_matrices`."""
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


def descend(loss: Tensor, *optimizers: torch.optim.Optimizer) -> None:
    """Take one inner step."""
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def exchange_all(loops: Sequence[tw.OuterLoop]) -> None:
    """Exchange after an inner step, for workers that share a thread."""
    for loop in loops:
        loop.begin()
    for loop in loops:
        loop.finish()


def flush(loops: Sequence[tw.OuterLoop]) -> None:
    """Flush the last exchange of workers that share a thread."""
    for loop in loops:
        loop.begin(last=True)
    for loop in loops:
        loop.finish()


def own_anchor(loop: tw.OuterLoop) -> dict[str, Tensor]:
    """This worker's outer parameters by name, even if each worker has its own."""
    return loop._state.as_state_dict(loop._state.own())


def feedback_of(loop: tw.OuterLoop) -> list[dict[str, Tensor]]:
    """A copy of each fragment's error feedback, as in a checkpoint."""
    fragments = loop.state_dict()["fragments"]
    return [{k: v.clone() for k, v in each["exchange"].items()} for each in fragments]


def alone(
    method: tw.Method, build: BuildOptimizer = adamw, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, tw.OuterLoop]:
    """A lone worker, or the worker of `transport`."""
    model = build_model()
    optimizer = build(model)
    return model, optimizer, tw.OuterLoop(model, optimizer, method, **options)


@dataclass(frozen=True, kw_only=True)
class OwnAnchors(tw.outer.OuterOptimizer):
    """`outer` with an anchor of its own for every worker; nothing pulls the anchors together."""

    outer: tw.outer.OuterOptimizer

    @property
    def has_own_anchors(self) -> bool:
        return True

    def bind(self, context, overlap):
        return self.outer.bind(context, overlap)


def bound(
    outer: tw.outer.OuterOptimizer, weights: Tensor, workers: int = 4
) -> tuple[nn.Parameter, OuterState]:
    """The only parameter of a model, and its outer state among `workers`."""
    model = nn.Linear(len(weights), 1, bias=False, dtype=weights.dtype)
    with torch.no_grad():
        model.weight.copy_(weights)
    storage, live = StatePlacement(torch.device("cpu")), LiveWeights(model, [])
    context = FragmentContext(live=live, names=("weight",), workers=workers, storage=storage)
    return model.weight, outer.bind(context, tw.Delay())


class Team:
    """K workers that share a thread. `loss` takes a model, a step, a worker and `workers`."""

    def __init__(
        self,
        method: tw.Method,
        build: BuildOptimizer,
        workers: int,
        *,
        model: Callable[[], nn.Module] = build_model,
        loss: Callable[..., Tensor] = loss,
        outer_device: str | None = None,
        transports: Sequence[tw.transport.Transport] | None = None,
    ) -> None:
        self.workers, self.loss = workers, loss
        self.models = [model() for _ in range(workers)]
        self.optimizers = [build(model) for model in self.models]
        transports = transports or tw.transport.in_process(workers)
        self.loops = [
            tw.OuterLoop(model, optimizer, method, transport=transport, outer_device=outer_device)
            for model, optimizer, transport in zip(
                self.models, self.optimizers, transports, strict=True
            )
        ]

    def train(self, steps: int, *, first: int = 0) -> "Team":
        for step in range(first, first + steps):
            for worker in range(self.workers):
                self.descend(worker, step)
            self.exchange()
        return self

    def descend(self, worker: int, step: int) -> None:
        loss = self.loss(self.models[worker], step, worker, workers=self.workers)
        descend(loss, self.optimizers[worker])

    def exchange(self) -> None:
        exchange_all(self.loops)

    def flush(self) -> "Team":
        flush(self.loops)
        return self

    def digests(self) -> list[str]:
        return [loop.digest() for loop in self.loops]

    def anchor(self) -> list[Tensor]:
        return list(own_anchor(self.loops[0]).values())

    def states(self) -> list[dict[str, Any]]:
        """Checkpoints of all workers, saved to a file and loaded again."""
        file = io.BytesIO()
        parts = zip(self.models, self.optimizers, self.loops, strict=True)
        names = ("model", "optimizer", "outer")
        torch.save(
            [dict(zip(names, [p.state_dict() for p in each], strict=True)) for each in parts], file
        )
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, states: Sequence[Mapping[str, Any]]) -> "Team":
        for model, optimizer, loop, state in zip(
            self.models, self.optimizers, self.loops, states, strict=True
        ):
            loop.load_state_dict(state["outer"])
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        return self


def train_alone(build: BuildOptimizer, steps: int) -> list[Tensor]:
    model = build_model()
    optimizer = build(model)
    for step in range(steps):
        descend(loss(model, step, 0), optimizer)
    return [p.detach() for p in model.parameters()]


def largest_difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
