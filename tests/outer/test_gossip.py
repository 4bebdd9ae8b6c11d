"""Gossip in pairs is NoLoCo: the paper's loop, DiLoCo among all workers, and anchors that meet."""

import dataclasses

import pytest
import torch

import thinwire as tw
from processes import run_ranks
from ranks import gossip_in_process
from reference_loops import reference_noloco
from thinwire import codecs
from thinwire.blocks import DenseVector
from thinwire.exchange import Pairs
from thinwire.exchange.state import peers_of
from thinwire.outer import Gossip, OuterState
from toy import (
    OwnAnchors,
    Team,
    adamw,
    bound,
    build_model,
    largest_difference,
    loss,
    own_anchor,
    same_bits,
    sgd,
)

ZEROS = codecs.TopK(), codecs.RandomK(), codecs.PerRole(default=codecs.TopK())
HEAVY_BALL = tw.outer.SGD(lr=0.7, momentum=0.5)
# 30 steps of rounding of weights below 1 in fp32, which adamw enlarges where a moment is small.
ROUNDING = 1e-5


def method(**fields) -> tw.Method:
    return tw.presets.diloco(**{"sync_every": 3, "outer": Gossip(), "exchange": Pairs()} | fields)


def anchors(team: Team) -> list[list[torch.Tensor]]:
    return [list(own_anchor(loop).values()) for loop in team.loops]


def spread(team: Team) -> float:
    flat = torch.stack([torch.cat([p.flatten() for p in anchor]) for anchor in anchors(team)])
    return float((flat - flat.mean(0)).square().mean().sqrt())


def test_the_weight_that_is_sent_lacks_nothing_that_16_bits_rounded_away() -> None:
    """Theta, not the difference."""

    def sent(state: OuterState) -> float:
        with state.measure() as delta:
            return float(state.contribution(delta).whole())

    weight, state = bound(Gossip(), torch.ones(1, dtype=torch.bfloat16))
    state.apply(DenseVector(torch.tensor([1.001])))
    anchor = float(state.flat_anchor())
    assert sent(state) == anchor != float(weight.detach())
    with torch.no_grad():
        weight -= 0.25
    assert sent(state) == pytest.approx(anchor - 0.25)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        *(
            (lambda r=rates: Gossip(lr=r[0], momentum=r[1]), "Gossip with lr=.*they drift apart")
            for rates in [(0.0, 0.5), (1.5, 0.5), (0.7, 1.0), (0.7, -0.1), (float("nan"), 0.5)]
        ),
        (lambda: method(overlap=tw.Eager()), r"Gossip with Eager.*Delay"),
        # Weights that are not sent would be zero; other rules are for pseudo-gradients.
        *((lambda c=codec: method(codec=c), "combine what .*keep the zeros") for codec in ZEROS),
        *(
            (lambda a=rule: method(aggregate=a), "combine weights by .*do: leave aggregate")
            for rule in (tw.MeanOverSenders(), tw.MedianNormClip(), tw.ClipNorms())
        ),
    ],
)
def test_what_cannot_work_is_refused(make, word: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=word):
        make()


def groups_of(workers: int, seed: int = 0):
    def of_round(round: int) -> list[list[int]]:
        peers = peers_of(workers, round=round, seed=seed)
        return [sorted({rank, peer}) for rank, peer in enumerate(peers) if rank <= peer]

    return of_round


@pytest.mark.parametrize(("workers", "build"), [(1, sgd), (2, adamw), (5, adamw)])
def test_it_follows_the_papers_two_vectors_where_gamma_is_eta(workers: int, build) -> None:
    """One payload is two payloads; an odd one out steps on its own weights."""

    def reference(gamma: float, seed: int = 0) -> list[list[torch.Tensor]]:
        return reference_noloco(
            build_model,
            build,
            lambda model, step, worker: loss(model, step, worker, workers=workers),
            steps=30,
            sync_every=3,
            outer=(0.7, 0.5, gamma),
            groups=groups_of(workers, seed),
        )

    ours = anchors(Team(method(), build, workers).train(30))
    for mine, theirs in zip(ours, reference(0.7), strict=True):
        assert largest_difference(mine, theirs) < ROUNDING
    others = [reference(0.9), reference(0.7, seed=1)] if workers > 2 else []
    for other in others:
        differences = map(largest_difference, ours, other)
        assert max(differences) > 30 * ROUNDING


@pytest.mark.parametrize(("workers", "build"), [(1, adamw), (2, sgd), (3, adamw)])
def test_among_all_workers_it_is_diloco_with_heavy_ball_momentum(workers: int, build) -> None:
    gossip = Team(method(exchange=tw.Gather()), build, workers).train(30)
    heavy_ball = Team(method(outer=HEAVY_BALL, exchange=tw.Gather()), build, workers).train(30)
    assert largest_difference(gossip.anchor(), heavy_ball.anchor()) < ROUNDING
    assert len({loop.digest() for loop in gossip.loops}) == 1
    if workers == 1:
        assert same_bits(gossip.anchor(), heavy_ball.anchor())
    # The control: Nesterov's, and none.
    for outer in (dataclasses.replace(HEAVY_BALL, nesterov=True), tw.outer.SGD(lr=0.7)):
        other = Team(method(outer=outer, exchange=tw.Gather()), build, workers).train(30)
        assert largest_difference(gossip.anchor(), other.anchor()) > 30 * ROUNDING


@pytest.mark.parametrize("overlap", [tw.Delay(tau=1), tw.Delay(tau=2, mixing=0.5)])
def test_it_overlaps(overlap) -> None:
    """Among all workers, a late mean is that of DiLoCo; anchors in pairs stay together."""
    gossip, heavy_ball = (
        Team(method(outer=outer, exchange=tw.Gather(), overlap=overlap), adamw, 3).train(30)
        for outer in (Gossip(), HEAVY_BALL)
    )
    assert largest_difference(gossip.anchor(), heavy_ball.anchor()) < ROUNDING
    pairs, waited = Team(method(overlap=overlap), adamw, 4), Team(method(), adamw, 4)
    assert spread(pairs.train(30)) < 2 * spread(waited.train(30))


def test_fragments_each_have_their_own_pairs_of_the_round() -> None:
    """All fragments of a round go to one peer, as the whole model does."""
    whole, halves = (
        Team(method(fragments=fragments), adamw, 4).train(9)
        for fragments in (tw.Whole(), tw.Balanced(count=2, offsets=tw.At(steps=(0, 0))))
    )
    assert whole.digests() == halves.digests()


def test_control_without_a_pull_the_anchors_drift_apart() -> None:
    pulled, free = (
        Team(method(outer=outer), adamw, 4).train(90)
        for outer in (Gossip(), OwnAnchors(outer=HEAVY_BALL))
    )
    assert spread(free) > 3 * spread(pulled)


def test_worker_count_may_change() -> None:
    """A newcomer goes on from the anchor of another worker."""
    old, new = Team(method(), adamw, 2).train(6), Team(method(), adamw, 3)
    for rank, loop in enumerate(new.loops):
        loop.load_state_dict(old.loops[rank % 2].state_dict(), with_feedback=rank < 2)
        new.models[rank].load_state_dict(old.models[rank % 2].state_dict())
    digests = [loop.digest() for loop in old.loops]
    assert [loop.digest() for loop in new.loops] == [*digests, digests[0]]
    new.train(6, first=6)
    assert all(torch.isfinite(p).all() for anchor in anchors(new) for p in anchor)


def test_processes_reach_the_bits_of_one_process() -> None:
    expected = gossip_in_process(3)
    assert len({own[0] for own in expected}) == 3
    for rank, process in enumerate(run_ranks("gossip", 3)):
        assert process.returncode == 0, process.stderr
        assert process.stdout.split() == expected[rank]
