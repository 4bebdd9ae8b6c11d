"""An asynchronous run of a toy model, with real arithmetic and a virtual clock."""

import itertools
from collections.abc import Callable

import torch
from torch import nn

import thinwire as tw
from exchanges import sealed
from thinwire.asynchronous import (
    Assignment,
    AsyncOptions,
    AsyncServer,
    AsyncWorker,
    Simulation,
)
from thinwire.exchange.message import read_origin
from toy import BuildOptimizer, adamw, build_model, descend, loss


def method(
    *, every: int = 3, lr: float = 0.7, momentum: float = 0.9, c: float = 0.0, **fields
) -> tw.Method:
    outer = tw.outer.DelayedNesterov(lr=lr, momentum=momentum, every=every, c=c)
    return tw.presets.diloco(**{"sync_every": 6, "outer": outer, **fields})


def with_number(message: torch.Tensor, value: float) -> torch.Tensor:
    """`message`, in plain fp32, with one number replaced and matching checksums."""
    body = message[64:].clone().view(torch.float32)
    body[3] = value
    header = read_origin(message)._replace(codec=tw.codecs.Identity().id)
    return sealed(body.view(torch.uint8), header)


class AsyncTeam:
    """K workers and their server in this thread."""

    def __init__(
        self,
        method: tw.Method,
        speeds: tuple[float, ...],
        *,
        total_steps: int | None = 90,
        build: BuildOptimizer = adamw,
        model: Callable[[], nn.Module] = build_model,
        options: AsyncOptions | None = None,
        outer_device: str | None = None,
    ) -> None:
        self.count = len(speeds)
        known = {"total_steps": total_steps, "options": options, "outer_device": outer_device}
        self.server = AsyncServer(model(), method, workers=self.count, **known)
        self.models = [model() for _ in speeds]
        self.optimizers = [build(model) for model in self.models]
        self.workers = [
            AsyncWorker(*part, method, rank=rank, outer_device=outer_device)
            for rank, part in enumerate(zip(self.models, self.optimizers, strict=True))
        ]
        self.taken = [0] * self.count
        self.given: list[tuple[int, int, int]] = []
        self.simulation = Simulation(self.server, self.workers, speeds, self.train)

    def train(self, rank: int, assignment: Assignment) -> None:
        self.given.append((rank, assignment.steps, assignment.steps_done))
        model, optimizer = self.models[rank], self.optimizers[rank]
        for _ in range(assignment.steps):
            descend(loss(model, self.taken[rank], rank, workers=self.count), optimizer)
            self.taken[rank] += 1

    def run(self, advances: int | None = None) -> "AsyncTeam":
        """Run that many groups of arrivals, or all."""
        for _ in itertools.count() if advances is None else range(advances):
            if not self.simulation.advance():
                break
        return self

    def theta(self) -> list[torch.Tensor]:
        """The server's parameters, in the order of the model's."""
        anchor = self.server.anchor()
        return [anchor[name].clone() for name, _ in self.server.model.named_parameters()]

    def _parts(self) -> dict[str, list]:
        """Everything with a state, by name."""
        alone = {"server": [self.server], "simulation": [self.simulation]}
        each = {"workers": self.workers, "models": self.models, "optimizers": self.optimizers}
        return alone | each

    def state_dict(self) -> dict:
        states = {name: [p.state_dict() for p in parts] for name, parts in self._parts().items()}
        return {**states, "taken": list(self.taken)}

    def load_state_dict(self, state: dict) -> "AsyncTeam":
        for name, parts in self._parts().items():
            for part, saved in zip(parts, state[name], strict=True):
                part.load_state_dict(saved)
        self.taken = list(state["taken"])
        return self
