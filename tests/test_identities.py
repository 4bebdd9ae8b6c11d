"""Presets collapse onto each other at corners: exact answers, each with a control that differs."""

import dataclasses

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.testing import reference_ddp, reference_diloco
from toy import Team, adamw, largest_difference, loss, muon, same_bits, sgd, train_alone
from toy import build_model as toy_model

PLAIN = tw.outer.SGD(lr=1.0)
# 60 steps of rounding of weights below 1 in fp32, which no two orders of summation share.
ROUNDING = 2e-6


@pytest.mark.parametrize("build", [adamw, muon, sgd])
def test_one_worker_with_plain_outer_sgd_is_the_inner_optimizer_alone(build) -> None:
    method = tw.presets.diloco(sync_every=7, outer=PLAIN)
    team = Team(method, build, 1).train(70)
    assert same_bits(team.anchor(), train_alone(build, 70))
    assert same_bits([p.detach() for p in team.models[0].parameters()], team.anchor())


def test_control_another_learning_rate_is_not_the_inner_optimizer_alone() -> None:
    method = tw.presets.diloco(sync_every=7, outer=tw.outer.SGD(lr=0.99))
    assert largest_difference(Team(method, adamw, 1).train(70).anchor(), train_alone(adamw, 70)) > (
        1e-4
    )


def test_rounds_of_one_step_with_plain_sgd_inside_and_outside_are_data_parallel() -> None:
    local = Team(tw.presets.diloco(sync_every=1, outer=PLAIN), sgd, 4).train(60).anchor()
    ddp = Team(tw.presets.ddp(), sgd, 4).train(60).anchor()
    assert largest_difference(local, ddp) < ROUNDING


def test_rounds_of_one_step_are_data_parallel_exactly_where_nothing_rounds() -> None:
    """Constant gradients of 1/8 and 1/4 on weights of 0: every number is a small dyadic."""

    def zeros() -> nn.Module:
        model = nn.Linear(3, 2)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    def train(method: tw.Method) -> Team:
        team = Team(method, sgd_eighth, 2, model=zeros)
        for _ in range(20):
            for worker, (model, optimizer) in enumerate(
                zip(team.models, team.optimizers, strict=True)
            ):
                (sum(p.sum() for p in model.parameters()) * (worker + 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
            team.exchange()
        return team

    local = train(tw.presets.diloco(sync_every=1, outer=PLAIN)).anchor()
    assert same_bits(local, train(tw.presets.ddp()).anchor())
    assert float(local[0][0, 0]) == -20 * 0.125 * 1.5


def sgd_eighth(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125)


def test_control_rounds_of_two_steps_are_not_data_parallel() -> None:
    local = Team(tw.presets.diloco(sync_every=2, outer=PLAIN), sgd, 4).train(60).anchor()
    ddp = Team(tw.presets.ddp(), sgd, 4).train(60).anchor()
    assert largest_difference(local, ddp) > 100 * ROUNDING


@pytest.mark.parametrize("build", [adamw, muon, sgd])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_ddp_is_the_mean_gradient_in_the_inner_optimizer(build, workers: int) -> None:
    expected = reference_ddp(
        toy_model,
        build,
        lambda model, step, worker: loss(model, step, worker, workers=workers),
        workers=workers,
        steps=15,
    )
    ddp = Team(tw.presets.ddp(), build, workers).train(15)
    # Muon's bf16 iteration turns a last-bit difference of a gradient into a bf16 rounding.
    tolerance = 5e-3 if build is muon else 2e-5
    assert largest_difference(ddp.anchor(), expected) < tolerance
    assert len({loop.digest() for loop in ddp.loops}) == 1


@pytest.mark.parametrize(("preset", "build"), [("diloco", adamw), ("muloco", muon)])
@pytest.mark.parametrize("workers", [2, 3])
def test_presets_follow_their_reference_loops(preset: str, build, workers: int) -> None:
    outer = (0.7, 0.9)
    method = tw.presets.by_name(preset)(
        sync_every=5, outer=tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)
    )

    def reference(outer: tuple[float, float]):
        return reference_diloco(
            toy_model,
            build,
            lambda model, step, worker: loss(model, step, worker, workers=workers),
            workers=workers,
            steps=15,
            sync_every=5,
            outer=outer,
        )

    ours = Team(method, build, workers).train(15).anchor()
    tolerance = 5e-3 if build is muon else 1e-5
    assert largest_difference(ours, reference(outer)) < tolerance
    assert largest_difference(ours, reference((0.7, 0.8))) > 3 * tolerance


def test_k_workers_with_the_same_data_are_one_worker() -> None:
    """The mean of equal displacements is that displacement: K=2 copies track K=1."""
    method = tw.presets.diloco(sync_every=3)
    method = dataclasses.replace(method, outer=tw.outer.SGD(lr=0.5))

    def same_data(workers: int) -> list[torch.Tensor]:
        team = Team(method, sgd, workers)
        for step in range(12):
            for model, optimizer in zip(team.models, team.optimizers, strict=True):
                loss(model, step, 0).backward()
                optimizer.step()
                optimizer.zero_grad()
            team.exchange()
        return team.anchor()

    assert largest_difference(same_data(1), same_data(2)) < ROUNDING
