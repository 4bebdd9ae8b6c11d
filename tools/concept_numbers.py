"""The numbers in the pictures of docs/concepts, all from small runs of thinwire itself.

tools/concept_pictures.py draws them.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.plan.compute import Compute
from thinwire.plan.link import Link
from thinwire.plan.shape import Shape
from thinwire.plan.simulate import Scenario, simulate
from thinwire.plan.traffic import traffic

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from elastic_twin import ElasticHub

__all__ = [
    "Attendance",
    "FeedbackCurves",
    "OuterStep",
    "TimeLine",
    "elastic_rounds",
    "feedback_curves",
    "outer_step",
    "overlap_lines",
]

Point = tuple[float, float]

CURVATURE = torch.tensor([[1.0, 0.55], [0.55, 0.6]])
OPTIMA = ((1.0, 2.4), (4.2, -1.6), (2.0, 0.9))


class OuterStep(NamedTuple):
    """One round of three workers in a plane: the path of each, and that of the anchor."""

    start: Point
    paths: list[list[Point]]
    mean: Point
    end: Point


def outer_step(*, inner_steps: int = 8) -> OuterStep:
    """One DiLoCo round of a model of two numbers; every worker's loss has its own optimum."""
    method = tw.presets.diloco(sync_every=inner_steps)
    models = [_Plane() for _ in OPTIMA]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.11) for model in models]
    loops = [
        tw.OuterLoop(model, optimizer, method, transport=transport)
        for model, optimizer, transport in zip(
            models, optimizers, tw.transport.in_process(len(models)), strict=True
        )
    ]
    start = models[0].point()
    paths = [[start] for _ in models]
    for step in range(inner_steps):
        for model, optimizer, optimum, path in zip(models, optimizers, OPTIMA, paths, strict=True):
            model(torch.tensor(optimum)).backward()
            optimizer.step()
            optimizer.zero_grad()
            path.append(model.point())
        if step < inner_steps - 1:
            _exchange(loops)
    _exchange(loops)
    ends = [path[-1] for path in paths]
    mean = (sum(x for x, _ in ends) / len(ends), sum(y for _, y in ends) / len(ends))
    return OuterStep(start, paths, mean, models[0].point())


class _Plane(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.tensor([0.0, -1.2]))

    def forward(self, optimum: Tensor) -> Tensor:
        away = self.at - optimum
        return away @ CURVATURE @ away / 2

    def point(self) -> Point:
        x, y = self.at.tolist()
        return x, y


def _exchange(loops: list[tw.OuterLoop]) -> None:
    for loop in loops:
        loop.begin()
    for loop in loops:
        loop.finish()


class TimeLine(NamedTuple):
    """A simulated run: the times of its steps, and those at which each fragment had the link."""

    steps: list[tuple[float, float]]
    transfers: list[tuple[int, float, float]]
    wall_s: float
    utilisation: float


STEPS, H, STEP_S = 14, 6, 1.0


def overlap_lines() -> dict[str, TimeLine]:
    """DiLoCo and three fragments with tau = 2, over the same link, by the planner's simulation."""
    shape = Shape.of_size(1_000_000, 6)
    whole = tw.presets.diloco(sync_every=H)
    parts = tw.presets.streaming_diloco(
        sync_every=H,
        fragments=tw.Strided(layers=2),
        overlap=tw.Delay(tau=2, mixing=0.5),
        codec=tw.codecs.Identity(),
    )
    nbytes = traffic(whole, shape, workers=2).sent_nbytes()
    link = Link.of(8 * nbytes / 4.2)  # the whole model takes 4.2 s
    return {
        name: _time_line(method, shape, link)
        for name, method in (("whole", whole), ("parts", parts))
    }


def _time_line(method: tw.Method, shape: Shape, link: Link) -> TimeLine:
    sent = traffic(method, shape, workers=2)
    scenario = Scenario(traffic=sent, compute=Compute(step_s=STEP_S), link=link)
    result = simulate(scenario, steps=STEPS)
    steps, now = [], 0.0
    for wait in result.wait_s[:-1]:
        now += wait
        steps.append((now, now + STEP_S))
        now += STEP_S
    order = [
        number
        for step in range(1, STEPS + 1)
        for number, message in enumerate(sent.messages)
        if step >= message.first and (step - message.offset) % H == 0
    ]
    order += [n for n, m in enumerate(sent.messages) if m.last_due(STEPS, sync_every=H) < STEPS]
    times = zip(result.begun_s, result.freed_s, strict=True)
    transfers = [(number, *time) for number, time in zip(order, times, strict=True)]
    return TimeLine(steps, transfers, result.wall_s, result.utilisation)


class FeedbackCurves(NamedTuple):
    """One number of 4096 under Top-64: sums over rounds, and the residual."""

    wanted: list[float]
    with_feedback: list[float]
    without: list[float]
    residual: list[float]


FEEDBACK_ROUNDS, STEADY = 60, 0.6


def feedback_curves() -> FeedbackCurves:
    """A number that moves by 0.6 in every round, among others that move by noise of size 1."""
    codec = tw.codecs.TopK(k=64, values=tw.codecs.F32())
    draws = torch.Generator().manual_seed(0)
    curves = FeedbackCurves([0.0], [0.0], [0.0], [0.0])
    left = torch.zeros(4096)
    for _ in range(FEEDBACK_ROUNDS):
        delta = torch.randn(4096, generator=draws)
        delta[0] = STEADY
        alone = codec.decode(codec.encode(delta), 4096)
        wanted = left + delta
        sent = codec.decode(codec.encode(wanted), 4096)
        left = wanted - sent
        curves.wanted.append(curves.wanted[-1] + STEADY)
        curves.with_feedback.append(curves.with_feedback[-1] + float(sent[0]))
        curves.without.append(curves.without[-1] + float(alone[0]))
        curves.residual.append(float(left[0]))
    return curves


class Attendance(NamedTuple):
    """A round of an elastic run: its members, those it loses, and each worker's version."""

    members: tuple[str, ...]
    lost: tuple[str, ...]
    versions: dict[str, int]
    healed: dict[str, str]
    digests: dict[str, str]


def elastic_rounds() -> list[Attendance]:
    """Seven rounds: c is lost in the third and is back in the seventh; d is new in the fifth."""
    hub = ElasticHub()
    workers = {name: _Elastic(hub, name) for name in "abc"}
    _meet(hub, workers, "abc")
    for name in "abc":
        workers[name].loop.join()
    rounds = [_round(hub, workers, "abc") for _ in range(2)]
    arrives = hub.tamper
    hub.uninformed.add("c")
    hub.tamper = lambda sender, _, payload: payload[: 0 if sender == "abc".index("c") else None]
    rounds.append(_round(hub, workers, "abc"))
    hub.uninformed.clear()
    hub.tamper = arrives
    for coming, members in (("", "ab"), ("d", "abd"), ("", "abd"), ("c", "abdc")):
        if coming == "d":
            workers["d"] = _Elastic(hub, "d")
        _meet(hub, workers, members)
        hub.heal_by = "snapshot" if coming == "d" else "records"
        rounds.append(_round(hub, workers, members, coming=coming))
    return rounds


class _Elastic:
    def __init__(self, hub: ElasticHub, name: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.node = hub.connect(name)
        method = tw.presets.diloco(sync_every=1)
        self.loop = tw.OuterLoop(self.model, self.optimizer, method, transport=self.node)
        self.draws = torch.Generator().manual_seed(ord(name))

    def version(self) -> int:
        return self.node.state.progress().version

    def train(self) -> None:
        x = torch.randn(8, 3, generator=self.draws)
        (self.model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _meet(hub: ElasticHub, workers: dict[str, _Elastic], members: str) -> None:
    hub.set_members(*(workers[name].node for name in members))


def _round(
    hub: ElasticHub, workers: dict[str, _Elastic], members: str, *, coming: str = ""
) -> Attendance:
    """One round, after `coming` has been brought up to date."""
    before = max(worker.version() for name, worker in workers.items() if name != coming)
    for name in members:
        if name != coming or workers[name].node.state is not None:
            workers[name].train()
            workers[name].loop.begin()
        else:
            workers[name].loop.join()
    for name in members:
        workers[name].loop.finish()
    versions = {name: worker.version() for name, worker in workers.items()}
    return Attendance(
        members=tuple(members),
        lost=tuple(name for name in members if versions[name] != before + 1),
        versions=versions,
        healed={coming: hub.heal_by} if coming else {},
        digests={name: worker.loop.digest() for name, worker in workers.items()},
    )
