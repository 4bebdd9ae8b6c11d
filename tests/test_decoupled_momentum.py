"""Decoupled momentum as released: its limits, and the two things that are wrong with it."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from reference_loops import reference_decoupled_momentum
from thinwire.blocks import DenseVector, LazyVector, StreamedVector
from thinwire.codecs import DCT, F32, Blocks, BoundCodec, TopK
from thinwire.feedback import Feedback, FeedbackState
from thinwire.storage import StatePlacement
from toy import Team, adamw, build_matrices, largest_difference, matrix_loss, same_bits

ETA, BETA = 0.7, 0.9
ROUNDING = 2e-5


def released(*, k: int = 32, beta: float = BETA, **fields: Any) -> tw.Method:
    given = {
        "sync_every": 3,
        "codec": TopK(k=k, values=F32(), groups=Blocks(), transform=DCT()),
        "feedback": tw.DecoupledMomentum(decay=beta),
        "outer": tw.outer.DecoupledNesterov(lr=ETA),
    }
    return tw.presets.decoupled_momentum(**{**given, **fields})


def train(method: tw.Method, workers: int, steps: int = 12) -> list[list[Tensor]]:
    """The anchor of each worker."""
    team = Team(method, adamw, workers, model=build_matrices, loss=matrix_loss).train(steps)
    return [[p.clone() for p in loop.anchor().values()] for loop in team.loops]


def nesterov(beta: float = BETA) -> tw.Method:
    outer = tw.outer.SGD(lr=ETA, momentum=beta, nesterov=True)
    return tw.presets.diloco(sync_every=3, outer=outer)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("k", "beta"), [(32, 0.9), (512, 0.6)])
def test_it_follows_its_reference_loop(workers: int, k: int, beta: float) -> None:
    def reference(k: int, beta: float) -> list[list[Tensor]]:
        return reference_decoupled_momentum(
            build_matrices,
            adamw,
            lambda model, step, worker: matrix_loss(model, step, worker, workers=workers),
            workers=workers,
            steps=12,
            sync_every=3,
            outer=(k, ETA, beta),
        )

    ours, theirs = train(released(k=k, beta=beta), workers), reference(k, beta)
    controls = [reference(k, beta - 0.1), *([reference(k + 32, beta)] if workers > 1 else [])]
    for worker, anchor in enumerate(ours):
        assert largest_difference(anchor, theirs[worker]) < ROUNDING
        for control in controls:
            assert largest_difference(anchor, control[worker]) > 100 * ROUNDING


@pytest.mark.parametrize("k", [1, 32, 4096])
def test_a_lone_worker_is_diloco_with_nesterov_whatever_it_sends(k: int) -> None:
    (alone,), (diloco,) = train(released(k=k), 1), train(nesterov(), 1)
    assert largest_difference(alone, diloco) < ROUNDING
    assert largest_difference(train(released(k=k), 1)[0], train(nesterov(0.8), 1)[0]) > 1e-2


class Simplified(FeedbackState):
    """A momentum, of which a subclass shares all or nothing."""

    def __init__(self, momentum: Tensor) -> None:
        self.momentum = momentum

    def prefetch(self) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return {"residual": self.momentum}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.momentum = state["residual"].clone()


class AllShared(Simplified):
    """m = beta m + mean Delta; returns mean Delta + beta m: the mean in place of each one's own."""

    def encode_to(self, out: Tensor, delta: LazyVector, codec: BoundCodec, round: int = 0) -> None:
        codec.encode_to(out, BETA * self.momentum + delta.whole(), round)

    def absorb(self, mean: StreamedVector) -> StreamedVector:
        delta, self.momentum = mean.whole() - BETA * self.momentum, mean.whole()
        return DenseVector(delta + BETA * self.momentum)


class NothingShared(Simplified):
    """m = beta m + Delta, which stays with the worker; zeros travel."""

    def encode_to(self, out: Tensor, delta: LazyVector, codec: BoundCodec, round: int = 0) -> None:
        self.momentum.mul_(BETA).add_(delta.whole())
        codec.encode_to(out, torch.zeros_like(self.momentum), round)

    def absorb(self, mean: StreamedVector) -> StreamedVector:
        assert not mean.whole().any()
        return DenseVector(BETA * self.momentum)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing(Feedback):
    """Makes states of `kind`."""

    kind: type[Simplified]
    gives_momentum = True  # type: ignore[assignment]

    def bind(self, numel: int, storage: StatePlacement) -> FeedbackState:
        return self.kind(torch.zeros(numel))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanDelta(tw.outer.OuterOptimizer):
    """theta = theta - eta times what feedback returns, which has the mean Delta in it."""

    takes_momentum = True  # type: ignore[assignment]

    def bind(self, context: Any, overlap: Any) -> Any:
        return tw.outer.SGD(lr=ETA).bind(context, overlap)


def test_with_the_mean_displacement_and_all_sent_it_is_diloco() -> None:
    coupled = released(k=4096, feedback=Sharing(kind=AllShared), outer=MeanDelta())
    ours, diloco = train(coupled, 3), train(nesterov(), 3)
    assert largest_difference(ours[0], ours[2]) == 0
    assert largest_difference(ours[0], diloco[0]) < ROUNDING
    # The released code has each worker's own.
    assert largest_difference(train(released(k=4096), 3)[0], diloco[0]) > 1e-2


WORKERS, ROUNDS, H = 4, 20, 10


def classifier() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))


def batch(seed: int, size: int = 32) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 32, generator=draws)
    teacher = torch.randn(32, 10, generator=torch.Generator().manual_seed(99))
    return x, (x @ teacher + 2 * torch.randn(size, 10, generator=draws)).argmax(1)


@cache
def outcome(method: tw.Method) -> tuple[float, float, float]:
    """Loss of the mean of the anchors, loss of one, and spread: rms over workers over rms."""
    method = dataclasses.replace(method, sync_every=H)

    def inner(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    def entropy(model: nn.Module, step: int, worker: int, *, workers: int) -> Tensor:
        x, y = batch(1 + step * WORKERS + worker)
        return nn.functional.cross_entropy(model(x), y)

    team = Team(method, inner, WORKERS, model=classifier, loss=entropy)
    for step in range(ROUNDS * H):
        for optimizer in team.optimizers:
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 - 0.9 * step / (ROUNDS * H))
        team.train(1, first=step)
    anchors = [torch.cat([p.flatten() for p in loop.anchor().values()]) for loop in team.loops]
    stacked, (x, y) = torch.stack(anchors), batch(0, 4096)
    losses: list[float] = []
    for vector in (stacked.mean(0), stacked[0]):
        model = classifier()
        nn.utils.vector_to_parameters(vector, model.parameters())
        losses.append(float(nn.functional.cross_entropy(model(x), y).detach()))
    spread = (stacked - stacked.mean(0)).square().mean().sqrt() / stacked.square().mean().sqrt()
    return losses[0], losses[1], float(spread)


def coupled_form() -> tw.Method:
    return tw.presets.sparseloco(
        outer=tw.outer.SGD(lr=ETA),
        codec=TopK(k=32, groups=Blocks(), transform=DCT()),
        feedback=tw.ErrorFeedback(decay=BETA),
    )


def test_replicas_are_hardly_closer_than_without_any_exchange() -> None:
    mean, one, spread = outcome(released(aggregate=tw.MeanOverWorkers()))
    mean_alone, one_alone, spread_alone = outcome(released(feedback=Sharing(kind=NothingShared)))
    assert spread > 0.8 * spread_alone > 0.3
    # One replica shows it, their mean hides it.
    assert one - mean > 0.5 * (one_alone - mean_alone) > 0.1
    assert abs(mean - mean_alone) < 0.05
    mean_diloco, one_diloco, spread_diloco = outcome(nesterov())
    assert (mean_diloco, spread_diloco) == (pytest.approx(one_diloco), 0.0)
    assert one > one_diloco + 0.1


def test_with_the_mean_over_senders_it_diverges_as_released() -> None:
    assert outcome(released())[1] > 10
    assert outcome(released(aggregate=tw.MeanOverWorkers()))[1] < 2
    assert outcome(released(beta=0.6))[1] < 2


def test_the_coupled_form_trains_and_keeps_replicas_equal() -> None:
    untrained = float(nn.functional.cross_entropy(classifier()(batch(0)[0]), batch(0)[1]).detach())
    mean, one, spread = outcome(coupled_form())
    assert (mean, spread) == (pytest.approx(one), 0.0)
    assert one < 0.6 * untrained


def test_owners_of_shards_give_the_numbers_of_gathering() -> None:
    whole = TopK(k=4096, values=F32(), groups=Blocks())
    gathered, reduced, control = (
        train(released(codec=whole, exchange=exchange, beta=beta), 3)
        for exchange, beta in (
            (tw.Gather(), BETA),
            (tw.ReduceScatter(owner_feedback=tw.ErrorFeedback()), BETA),
            (tw.Gather(), 0.5),
        )
    )
    for ours, theirs, other in zip(gathered, reduced, control, strict=True):
        assert same_bits(ours, theirs)
        assert not same_bits(ours, other)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        *(
            (lambda f=fields: tw.presets.decoupled_momentum(**f), r"cannot .*; because .*; do: ")
            for fields in (
                {"feedback": tw.ErrorFeedback()},
                {"outer": tw.outer.SGD(lr=0.7)},
                {"outer": tw.outer.ByWorkerCount(table=((1, tw.outer.SGD()),))},
                {"overlap": tw.Delay(tau=1)},
                {"overlap": tw.Eager()},
                {"exchange": tw.ReduceScatter(owner_feedback=tw.DecoupledMomentum())},
            )
        ),
        (lambda: tw.DecoupledMomentum(decay=1.1), r"decay=1\.1"),
        (
            lambda: tw.outer.ByWorkerCount(
                table=((1, tw.outer.SGD()), (2, tw.outer.DecoupledNesterov()))
            ),
            "its own anchor",
        ),
        (
            lambda: tw.presets.decoupled_momentum().outer.check_elastic(),
            "differ from worker to worker",
        ),
        (lambda: tw.presets.demo().outer.check_elastic(), "workers that come and go"),
    ],
)
def test_what_does_not_fit_is_refused(call, word: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=word):
        call()


def test_rows_of_a_table_may_all_have_momentum_of_their_own() -> None:
    table = tw.outer.ByWorkerCount(table=((1, tw.outer.DecoupledNesterov()),))
    assert tw.presets.decoupled_momentum(outer=table).outer.takes_momentum
