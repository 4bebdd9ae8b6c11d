"""An asynchronous run of a toy model, with real arithmetic and a virtual clock."""

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
    WorkerSpeeds,
)
from thinwire.exchange.message import Header, Kind, read_origin
from toy import BuildOptimizer, adamw, build_model, loss


def method(
    *, every: int = 3, lr: float = 0.7, momentum: float = 0.9, c: float = 0.0, **fields
) -> tw.Method:
    outer = tw.outer.DelayedNesterov(lr=lr, momentum=momentum, every=every, c=c)
    return tw.presets.diloco(**{"sync_every": 6, "outer": outer, **fields})


def with_number(message: torch.Tensor, value: float) -> torch.Tensor:
    """`message`, of the codec of plain fp32, with one number replaced and checksums that fit."""
    body = message[64:].clone().view(torch.float32)
    body[3] = value
    header = Header(
        codec=tw.codecs.Identity().id,
        fragment=0,
        kind=Kind.WHOLE,
        shard=0,
        elements=len(body),
        **read_origin(message)._asdict(),
    )
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
        **network: float,
    ) -> None:
        self.count = len(speeds)
        self.server = AsyncServer(
            model(),
            method,
            workers=self.count,
            total_steps=total_steps,
            options=options,
            outer_device=outer_device,
        )
        self.models = [model() for _ in speeds]
        self.optimizers = [build(model) for model in self.models]
        self.workers = [
            AsyncWorker(model, optimizer, method, rank=rank, outer_device=outer_device)
            for rank, (model, optimizer) in enumerate(
                zip(self.models, self.optimizers, strict=True)
            )
        ]
        self.taken = [0] * self.count
        self.given: list[tuple[int, int, int]] = []
        self.simulation = Simulation(
            self.server, self.workers, WorkerSpeeds(steps_per_s=speeds, **network), self.train
        )

    def train(self, rank: int, assignment: Assignment) -> None:
        self.given.append((rank, assignment.steps, assignment.steps_done))
        model, optimizer = self.models[rank], self.optimizers[rank]
        for _ in range(assignment.steps):
            loss(model, self.taken[rank], rank, workers=self.count).backward()
            optimizer.step()
            optimizer.zero_grad()
            self.taken[rank] += 1

    def run(self, advances: int | None = None) -> "AsyncTeam":
        """So many groups of arrivals, or all."""
        while advances is None or advances > 0:
            if not self.simulation.advance():
                break
            advances = None if advances is None else advances - 1
        return self

    def theta(self) -> list[torch.Tensor]:
        """In the order of the model's parameters."""
        anchor = self.server.anchor()
        return [anchor[name].clone() for name, _ in self.server.model.named_parameters()]

    def state_dict(self) -> dict:
        return {
            "server": self.server.state_dict(),
            "simulation": self.simulation.state_dict(),
            "workers": [worker.state_dict() for worker in self.workers],
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "taken": list(self.taken),
        }

    def load_state_dict(self, state: dict) -> "AsyncTeam":
        self.server.load_state_dict(state["server"])
        self.simulation.load_state_dict(state["simulation"])
        for worker, model, optimizer, *saved in zip(
            self.workers,
            self.models,
            self.optimizers,
            state["workers"],
            state["models"],
            state["optimizers"],
            strict=True,
        ):
            worker.load_state_dict(saved[0])
            model.load_state_dict(saved[1])
            optimizer.load_state_dict(saved[2])
        self.taken = list(state["taken"])
        return self
