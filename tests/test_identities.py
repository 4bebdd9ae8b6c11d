"""Presets collapse onto each other at corners: exact answers, each with a control that differs."""

import dataclasses

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.exchange.same_work import SameWorkCheck
from thinwire.testing.reference import reference_ddp, reference_diloco, reference_sparseloco
from toy import Team, adamw, descend, largest_difference, loss, muon, same_bits, sgd, train_alone
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
                descend((sum(p.sum() for p in model.parameters()) * (worker + 1)), optimizer)
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


def test_k_workers_with_the_same_data_are_one_worker(monkeypatch) -> None:
    """The mean of equal displacements is that displacement: K=2 copies track K=1."""
    # Outside of such a test it is a mistake.
    monkeypatch.setattr(SameWorkCheck, "compare", lambda *_, **__: None)
    method = tw.presets.diloco(sync_every=3)
    method = dataclasses.replace(method, outer=tw.outer.SGD(lr=0.5))

    def same_data(workers: int) -> list[torch.Tensor]:
        team = Team(method, sgd, workers)
        for step in range(12):
            for model, optimizer in zip(team.models, team.optimizers, strict=True):
                descend(loss(model, step, 0), optimizer)
            team.exchange()
        return team.anchor()

    assert largest_difference(same_data(1), same_data(2)) < ROUNDING


def dense(groups: tw.codecs.Grouping, values: tw.codecs.Values) -> tw.codecs.TopK:
    return tw.codecs.TopK(k=tw.codecs.k_for_density(1), values=values, groups=groups)


NOTHING_LOST = dense(tw.codecs.Blocks(), tw.codecs.F32())


def trained(method: tw.Method, build=adamw, workers: int = 3) -> list[torch.Tensor]:
    return Team(dataclasses.replace(method, sync_every=4), build, workers).train(16).anchor()


@pytest.mark.parametrize(("preset", "build"), [("sparseloco", adamw), ("sparse_muloco", muon)])
@pytest.mark.parametrize("groups", [tw.codecs.Blocks(), tw.codecs.Chunks(), tw.codecs.Tensors()])
@pytest.mark.parametrize("feedback", [tw.NoFeedback(), tw.ErrorFeedback(decay=0.0)])
def test_sparse_presets_at_density_1_in_full_precision_are_diloco_without_momentum(
    preset: str, build, groups, feedback
) -> None:
    codec = dense(groups, tw.codecs.F32())
    sparse = tw.presets.by_name(preset)(codec=codec, feedback=feedback)
    assert same_bits(trained(sparse, build), trained(tw.presets.diloco(outer=PLAIN), build))


def test_where_nothing_is_lost_feedback_of_any_decay_has_nothing_to_feed_back() -> None:
    sparse = tw.presets.sparseloco(codec=NOTHING_LOST, feedback=tw.ErrorFeedback(decay=1.0))
    assert same_bits(trained(sparse), trained(tw.presets.diloco(outer=PLAIN)))


@pytest.mark.parametrize(
    "codec",
    [
        dense(tw.codecs.Blocks(), tw.codecs.BF16()),
        dense(tw.codecs.Blocks(), tw.codecs.SignLevels()),
        tw.codecs.TopK(k=64, values=tw.codecs.F32(), groups=tw.codecs.Blocks()),
    ],
    ids=["bf16", "two bits", "density 1/64"],
)
def test_control_fewer_bits_or_numbers_are_not_diloco(codec) -> None:
    sparse = tw.presets.sparseloco(codec=codec, feedback=tw.NoFeedback())
    assert not same_bits(trained(sparse), trained(tw.presets.diloco(outer=PLAIN)))


def test_control_sparse_presets_at_density_1_are_not_diloco_with_momentum() -> None:
    sparse = tw.presets.sparseloco(codec=NOTHING_LOST, feedback=tw.NoFeedback())
    momentum = tw.outer.SGD(lr=1.0, momentum=0.9)
    assert not same_bits(trained(sparse), trained(tw.presets.diloco(outer=momentum)))


@pytest.mark.parametrize("feedback", [tw.NoFeedback(), tw.ErrorFeedback()])
def test_top_k_of_everything_in_bf16_is_a_cast(feedback) -> None:
    sparse, cast, control = (
        tw.presets.diloco(codec=codec, feedback=feedback)
        for codec in (
            dense(tw.codecs.Chunks(), tw.codecs.BF16()),
            tw.codecs.CastBF16(),
            tw.codecs.CastFP16(),
        )
    )
    assert same_bits(trained(sparse), trained(cast))
    assert not same_bits(trained(control), trained(cast))


def test_muloco_in_32_bits_is_muloco_without_a_codec() -> None:
    plain = trained(tw.presets.muloco(), muon)
    assert same_bits(trained(tw.presets.muloco(bits=32), muon), plain)
    assert not same_bits(trained(tw.presets.muloco(bits=16), muon), plain)


def two_chunks() -> nn.Module:
    """4,503 elements in tensors of fewer than 4,096 each."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Embedding(11, 60), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 3)
        return nn.Sequential(*layers)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("aggregate", [tw.MeanOverSenders(), tw.MeanOverWorkers()])
@pytest.mark.parametrize(("k", "beta"), [(64, 0.95), (512, 0.5), (64, 0.0)])
def test_sparseloco_follows_its_reference_loop(workers: int, aggregate, k, beta) -> None:
    over_senders = aggregate == tw.MeanOverSenders()

    def reference(k: int, beta: float, over_senders: bool = over_senders) -> list[torch.Tensor]:
        return reference_sparseloco(
            two_chunks,
            adamw,
            lambda model, step, worker: loss(model, step, worker, workers=workers),
            workers=workers,
            steps=12,
            sync_every=3,
            sparsity=(k, beta),
            over_senders=over_senders,
        )

    method = tw.presets.sparseloco(
        sync_every=3,
        aggregate=aggregate,
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
