"""Presets collapse onto each other at corners: exact answers, each with a control that differs."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

import thinwire as tw
from reference_loops import reference_ddp, reference_diloco, reference_sparseloco
from toy import Team, adamw, largest_difference, loss, muon, same_bits, sgd, train_alone
from toy import build_model as toy_model

PLAIN = tw.outer.SGD(lr=1.0)
# 60 steps of rounding of weights below 1 in fp32, which no two orders of summation share.
ROUNDING = 2e-6


@pytest.mark.parametrize("build", [adamw, muon, sgd])
def test_one_worker_with_plain_outer_sgd_is_the_inner_optimizer_alone(build) -> None:
    method = tw.presets.diloco(sync_every=7, outer=PLAIN)
    team, alone = Team(method, build, 1).train(70), train_alone(build, 70)
    assert same_bits(team.anchor(), alone)
    assert same_bits([p.detach() for p in team.models[0].parameters()], alone)
    other = dataclasses.replace(method, outer=tw.outer.SGD(lr=0.99))
    assert largest_difference(Team(other, build, 1).train(70).anchor(), alone) > 1e-4


def test_rounds_of_one_step_with_plain_sgd_inside_and_outside_are_data_parallel() -> None:
    ddp = Team(tw.presets.ddp(), sgd, 4).train(60).anchor()
    local, two_steps = (
        Team(tw.presets.diloco(sync_every=h, outer=PLAIN), sgd, 4).train(60).anchor()
        for h in (1, 2)
    )
    assert largest_difference(local, ddp) < ROUNDING
    assert largest_difference(two_steps, ddp) > 100 * ROUNDING


def test_rounds_of_one_step_are_data_parallel_exactly_where_nothing_rounds() -> None:
    """Constant gradients of 1/8 and 1/4 on weights of 0: every number is a small dyadic."""

    def zeros() -> nn.Module:
        return nn.ParameterDict({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})

    def total(model: nn.Module, step: int, worker: int, *, workers: int) -> torch.Tensor:
        return sum(p.sum() for p in model.parameters()) * (worker + 1)

    local, ddp = (
        Team(method, sgd_eighth, 2, model=zeros, loss=total).train(20).anchor()
        for method in (tw.presets.diloco(sync_every=1, outer=PLAIN), tw.presets.ddp())
    )
    assert same_bits(local, ddp)
    assert {float(x) for x in local[1].flatten()} == {-20 * 0.125 * 1.5}


def sgd_eighth(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125)


@pytest.mark.parametrize(("build", "workers"), [(adamw, 1), (muon, 2), (sgd, 3), (adamw, 3)])
def test_ddp_is_the_mean_gradient_in_the_inner_optimizer(build, workers: int) -> None:
    blocks = partial(loss, workers=workers)
    expected = reference_ddp(toy_model, build, blocks, workers=workers, steps=15)
    ddp = Team(tw.presets.ddp(), build, workers).train(15)
    # Muon's bf16 iteration turns a last-bit difference of a gradient into a bf16 rounding.
    tolerance = 5e-3 if build is muon else 2e-5
    assert largest_difference(ddp.anchor(), expected) < tolerance
    assert len({loop.digest() for loop in ddp.loops}) == 1


@pytest.mark.parametrize(("preset", "build"), [("diloco", adamw), ("muloco", muon)])
@pytest.mark.parametrize("workers", [2, 3])
def test_presets_follow_their_reference_loops(preset: str, build, workers: int) -> None:
    nesterov = tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)
    method = tw.presets.by_name(preset)(sync_every=5, outer=nesterov)

    def reference(outer: tuple[float, float]):
        blocks = partial(loss, workers=workers)
        how = {"workers": workers, "steps": 15, "sync_every": 5, "outer": outer}
        return reference_diloco(toy_model, build, blocks, **how)

    ours = Team(method, build, workers).train(15).anchor()
    tolerance = 5e-3 if build is muon else 1e-5
    assert largest_difference(ours, reference((0.7, 0.9))) < tolerance
    assert largest_difference(ours, reference((0.7, 0.8))) > 3 * tolerance


def dense(groups: tw.codecs.Grouping, values: tw.codecs.Values) -> tw.codecs.TopK:
    return tw.codecs.TopK(k=tw.codecs.k_for_density(1), values=values, groups=groups)


def trained(method: tw.Method, build=adamw, workers: int = 3) -> list[torch.Tensor]:
    return Team(dataclasses.replace(method, sync_every=4), build, workers).train(16).anchor()


BLOCKS = tw.codecs.Blocks()


@pytest.mark.parametrize(
    ("preset", "build", "groups", "feedback", "control"),
    [
        ("sparseloco", adamw, BLOCKS, tw.NoFeedback(), dense(BLOCKS, tw.codecs.BF16())),
        (
            *("sparse_muloco", muon, tw.codecs.Chunks(), tw.ErrorFeedback(decay=0.0)),
            dense(BLOCKS, tw.codecs.SignLevels()),
        ),
        (
            *("sparseloco", adamw, tw.codecs.Tensors(), tw.ErrorFeedback(decay=0.0)),
            tw.codecs.TopK(k=64, values=tw.codecs.F32(), groups=BLOCKS),
        ),
        # Where nothing is lost, feedback of any decay has nothing to feed back.
        ("sparseloco", adamw, BLOCKS, tw.ErrorFeedback(decay=1.0), None),
    ],
)
def test_sparse_presets_at_density_1_in_full_precision_are_diloco_without_momentum(
    preset: str, build, groups, feedback, control
) -> None:
    codec = dense(groups, tw.codecs.F32())
    sparse = tw.presets.by_name(preset)(codec=codec, feedback=feedback)
    ours, plain = trained(sparse, build), trained(tw.presets.diloco(outer=PLAIN), build)
    assert same_bits(ours, plain)
    momentum = {"outer": tw.outer.SGD(lr=1.0, momentum=0.9)}
    other = dataclasses.replace(sparse, **({"codec": control} if control else momentum))
    assert not same_bits(trained(other, build), plain)


def two_chunks() -> nn.Module:
    """4,503 elements in tensors of fewer than 4,096 each."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Embedding(11, 60), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 3)
        return nn.Sequential(*layers)


@pytest.mark.parametrize("over_senders", [True, False])
@pytest.mark.parametrize(("workers", "k", "beta"), [(1, 64, 0.0), (2, 512, 0.5), (3, 64, 0.95)])
def test_sparseloco_follows_its_reference_loop(over_senders, workers: int, k, beta) -> None:
    def reference(k: int, beta: float, over_senders: bool = over_senders) -> list[torch.Tensor]:
        return reference_sparseloco(
            two_chunks,
            adamw,
            partial(loss, workers=workers),
            workers=workers,
            steps=12,
            sync_every=3,
            sparsity=(k, beta),
            over_senders=over_senders,
        )

    method = tw.presets.sparseloco(
        sync_every=3,
        aggregate=tw.MeanOverSenders() if over_senders else tw.MeanOverWorkers(),
        codec=tw.codecs.TopK(k=k, values=tw.codecs.F32()),
        feedback=tw.ErrorFeedback(decay=beta),
    )
    team = Team(method, adamw, workers, model=two_chunks).train(12)
    ours = [torch.cat([p.flatten() for p in team.anchor()])]
    tolerance = 1e-5
    assert largest_difference(ours, reference(k, beta)) < tolerance
    assert largest_difference(ours, reference(k + 64, beta)) > 100 * tolerance
    assert largest_difference(ours, reference(k, beta + 0.04)) > 100 * tolerance
    if workers > 1:
        assert largest_difference(ours, reference(k, beta, not over_senders)) > 100 * tolerance
