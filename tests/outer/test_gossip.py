"""Gossip in pairs is NoLoCo: the paper's loop, DiLoCo among all workers, and anchors that meet."""

import dataclasses

import pytest
import torch
from torch import nn

import thinwire as tw
from exchanges import delta_of
from processes import run_ranks
from ranks import gossip_in_process
from reference_loops import reference_noloco
from thinwire import codecs
from thinwire.blocks import DenseVector
from thinwire.exchange import Pairs
from thinwire.exchange.pairs import peers_of
from thinwire.live_weights import LiveWeights
from thinwire.outer import FragmentContext, Gossip, OuterState
from thinwire.storage import OnDevice
from thinwire.testing import OuterContract
from toy import Team, adamw, build_model, largest_difference, loss, same_bits, sgd

HEAVY_BALL = tw.outer.SGD(lr=0.7, momentum=0.5)
# 30 steps of rounding of weights below 1 in fp32, which adamw enlarges where a moment is small.
ROUNDING = 1e-5


def method(**fields) -> tw.Method:
    return tw.presets.diloco(**{"sync_every": 3, "outer": Gossip(), "exchange": Pairs()} | fields)


def anchors(team: Team) -> list[list[torch.Tensor]]:
    return [list(loop.anchor().values()) for loop in team.loops]


def spread(team: Team) -> float:
    flat = torch.stack([torch.cat([p.flatten() for p in anchor]) for anchor in anchors(team)])
    return float((flat - flat.mean(0)).square().mean().sqrt())


class TestGossip(OuterContract):
    def make(self):
        return Gossip(lr=0.9, momentum=0.3)


class TestGossipWithoutMomentum(OuterContract):
    def make(self):
        return Gossip(lr=1.0, momentum=0.0)


def state_of_one_weight(anchor: float, dtype=torch.float32, outer_device: str = "cpu"):
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, anchor)
    live = LiveWeights(model, [])
    storage = OnDevice(torch.device(outer_device))
    context = FragmentContext(live=live, names=("weight",), workers=4, storage=storage)
    return model.weight, Gossip(lr=0.5, momentum=0.5).bind(context, tw.Delay())


def contribution(state: OuterState) -> torch.Tensor:
    with state.measure() as delta:
        return state.contribution(delta).whole()


def test_two_steps_by_hand() -> None:
    """m1 = .5 (1 - .75) = .125; m2 = .5 m1 + .5 (.875 - 1) = 0."""
    weight, state = state_of_one_weight(1.0)
    with torch.no_grad():
        weight.fill_(0.5)
    assert float(state.pseudo_gradient()) == 0.5
    assert float(contribution(state)) == 0.5  # theta, not the difference
    state.apply(DenseVector(torch.tensor([0.75])))
    assert float(weight.detach()) == float(state.flat_anchor()) == 0.875
    state.apply(DenseVector(torch.tensor([1.0])))
    assert float(weight.detach()) == 0.875


def test_the_weight_that_is_sent_lacks_nothing_that_16_bits_rounded_away() -> None:
    weight, state = state_of_one_weight(1.0, torch.bfloat16)
    state.apply(DenseVector(torch.tensor([1.001])))
    anchor = float(state.flat_anchor())
    assert anchor != float(weight.detach())
    assert float(contribution(state)) == anchor
    with torch.no_grad():
        weight -= 0.25
    assert float(contribution(state)) == pytest.approx(anchor - 0.25)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        *(
            (lambda r=rates: Gossip(lr=r[0], momentum=r[1]), "Gossip with lr=.*they drift apart")
            for rates in [(0.0, 0.5), (1.5, 0.5), (0.7, 1.0), (0.7, -0.1), (float("nan"), 0.5)]
        ),
        (lambda: method(overlap=tw.Eager()), r"Gossip with Eager.*Delay"),
        # Weights that are not sent would be zero; other rules are for pseudo-gradients.
        *(
            (lambda c=codec: method(codec=c), "send weights with .*count as zero")
            for codec in (codecs.TopK(), codecs.RandomK(), codecs.PerRole(default=codecs.TopK()))
        ),
        *(
            (lambda a=rule: method(aggregate=a), "combine weights by .*do: leave aggregate")
            for rule in (tw.MeanOverSenders(), tw.MedianNormClip(), tw.ClipNorms())
        ),
    ],
)
def test_what_cannot_work_is_refused(make, word: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=word):
        make()


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.8])
def test_spread_shrinks_on_one_side_of_the_limit_and_grows_on_the_other(momentum: float) -> None:
    """Many workers that do not train at all, in pairs."""
    limit = 2 * (1 - momentum**2)

    def growth(lr: float) -> float:
        workers, rounds = 128, 150
        phi = torch.stack([delta_of(rank)[:200] for rank in range(workers)]).double()
        phi, m, sizes = phi - phi.mean(0), torch.zeros_like(phi), []
        for round in range(1, rounds):
            theta = (phi + phi[peers_of(workers, round=round, seed=0)]) / 2
            m = momentum * m + lr * (phi - theta)
            phi = phi - m
            size = (phi.square().mean() + m.square().mean()).sqrt()
            phi, m = phi / size, m / size
            sizes.append(size.log())
        return float(torch.stack(sizes[20:]).mean())

    assert growth(0.93 * limit) < -0.005
    assert growth(1.07 * limit) > 0.005


def groups_of(workers: int, seed: int = 0):
    def of_round(round: int) -> list[list[int]]:
        peers = peers_of(workers, round=round, seed=seed)
        return [sorted({rank, peer}) for rank, peer in enumerate(peers) if rank <= peer]

    return of_round


@pytest.mark.parametrize(
    ("workers", "build"), [(1, sgd), (2, adamw), (3, adamw), (4, sgd), (5, adamw)]
)
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


@pytest.mark.parametrize(("workers", "build"), [(1, adamw), (2, sgd), (3, adamw), (5, sgd)])
def test_among_all_workers_it_is_diloco_with_heavy_ball_momentum(workers: int, build) -> None:
    gossip = Team(method(exchange=tw.Gather()), build, workers).train(30)
    heavy_ball = Team(method(outer=HEAVY_BALL, exchange=tw.Gather()), build, workers).train(30)
    assert largest_difference(gossip.anchor(), heavy_ball.anchor()) < ROUNDING
    assert len({loop.digest() for loop in gossip.loops}) == 1
    if workers == 1:
        assert same_bits(gossip.anchor(), heavy_ball.anchor())


def test_control_nesterov_and_another_momentum_are_not_that() -> None:
    gossip = Team(method(exchange=tw.Gather()), adamw, 3).train(30).anchor()
    for outer in (dataclasses.replace(HEAVY_BALL, nesterov=True), tw.outer.SGD(lr=0.7)):
        other = Team(method(outer=outer, exchange=tw.Gather()), adamw, 3).train(30).anchor()
        assert largest_difference(gossip, other) > 30 * ROUNDING


@pytest.mark.parametrize("exchange", [tw.Gather(), tw.ReduceScatter()])
def test_shards_give_the_bits_of_a_gather(exchange) -> None:
    teams = [Team(method(exchange=e), adamw, 3).train(12) for e in (exchange, tw.Gather())]
    assert len({loop.digest() for team in teams for loop in team.loops}) == 1


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


def trained(workers: int, rates, **fields) -> list[float]:
    """The spread after every round, with these inner learning rates by step."""
    team, spreads = Team(method(**fields), adamw, workers), []
    for step, rate in enumerate(rates):
        for optimizer in team.optimizers:
            optimizer.param_groups[0]["lr"] = rate
        team.train(1, first=step)
        if (step + 1) % 3 == 0:
            spreads.append(spread(team))
    return spreads


def test_spread_follows_the_inner_rate() -> None:
    constant = trained(4, [0.02] * 90)
    falling = trained(4, [0.02 * (1 - 0.9 * step / 90) for step in range(90)])
    assert falling[-1] < 0.25 * constant[-1]
    assert falling[-1] < 0.25 * max(falling)


def test_control_without_a_pull_the_anchors_drift_apart() -> None:
    """Every worker with itself: the pairs of a lone worker."""

    def one(worker: int) -> torch.Tensor:
        def its_loss(model: nn.Module, step: int, _: int, *, workers: int) -> torch.Tensor:
            return loss(model, step, worker, workers=4)

        team = Team(method(), adamw, 1, loss=its_loss).train(90)
        return torch.cat([p.flatten() for p in team.anchor()])

    flat = torch.stack([one(worker) for worker in range(4)])
    apart = float((flat - flat.mean(0)).square().mean().sqrt())
    assert apart > 3 * trained(4, [0.02] * 90)[-1]


@pytest.mark.parametrize("codec", [codecs.Identity(), codecs.CastBF16(), codecs.Quantise(bits=4)])
def test_bytes_do_not_grow_with_the_workers(codec) -> None:
    counted = set()
    for workers in (2, 4, 8):
        team = Team(method(codec=codec), adamw, workers).train(6)
        counted |= {(loop.stats.sent_bytes, loop.stats.received_bytes) for loop in team.loops}
    ((sent, received),) = counted
    nbytes = codec.bind(team.loops[0]._state.fragments[0].layout).nbytes
    assert sent == received == 2 * (64 + nbytes)


@pytest.mark.parametrize("bits", [8, 4])
def test_feedback_keeps_the_mean_of_all_anchors_near_that_without_a_codec(bits: int) -> None:
    """What rounding takes in one round it gives back in the next: the anchors average over it."""

    def consensus(**fields) -> torch.Tensor:
        team = Team(method(**fields), adamw, 4).train(60)
        flat = [torch.cat([p.flatten() for p in anchor]) for anchor in anchors(team)]
        return torch.stack(flat).mean(0)

    exact, codec = consensus(), codecs.Quantise(bits=bits)
    plain = float((consensus(codec=codec) - exact).norm())
    corrected = float(
        (consensus(codec=codec, feedback=tw.ErrorFeedback(decay=0.95)) - exact).norm()
    )
    assert corrected < plain


def test_a_watcher_sees_pseudo_gradients() -> None:
    team, seen = Team(method(sync_every=1), sgd, 2), []
    team.loops[0].watch(lambda index, delta: seen.append(delta.clone()))
    size = torch.cat([*map(torch.flatten, team.train(2).anchor())]).norm()
    assert all(0 < delta.norm() < 0.1 * size for delta in seen)


def test_a_resumed_run_gives_every_worker_its_own_anchor_back() -> None:
    team = Team(method(), adamw, 3).train(7)
    resumed = Team(method(), adamw, 3).load(team.states())
    assert len({*resumed.digests()}) == 3
    assert resumed.train(5, first=7).digests() == Team(method(), adamw, 3).train(12).digests()


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


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_reach_the_bits_of_one_process(ranks: int) -> None:
    expected = gossip_in_process(ranks)
    assert len({own[0] for own in expected}) == (1 if ranks == 2 else 3)
    for rank, process in enumerate(run_ranks("gossip", ranks)):
        assert process.returncode == 0, process.stderr
        assert process.stdout.split() == expected[rank]
