"""The mean of anchors that differ from worker to worker: exact, equal on all, counted apart."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import thinwire as tw
from thinwire.outer import Gossip
from toy import Team, adamw, build_model, own_anchor, same_bits


def method(**fields) -> tw.Method:
    return tw.presets.diloco(
        **{"sync_every": 2, "outer": Gossip(), "exchange": tw.Pairs()} | fields
    )


def consensus(team: Team) -> list[list[Tensor]]:
    for loop in team.loops:
        loop.evaluating()
    return [list(loop.consensus().values()) for loop in team.loops]


def mean_of(team: Team) -> list[Tensor]:
    anchors = [list(own_anchor(loop).values()) for loop in team.loops]
    return [sum(x * (1.0 / team.workers) for x in same) for same in zip(*anchors, strict=True)]


def weights(team: Team, worker: int = 0) -> list[Tensor]:
    return [p.detach().clone() for p in team.models[worker].parameters()]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 7])
def test_it_is_the_mean_of_all_anchors_in_rank_order(workers: int) -> None:
    fragments = tw.Balanced(count=2) if workers in (2, 4, 7) else tw.Whole()
    team = Team(method(fragments=fragments), adamw, workers).train(8)
    mean = mean_of(team)
    for found in consensus(team):
        assert same_bits(found, mean)
    if workers > 2:
        assert not same_bits(mean, team.anchor())


def test_a_shared_anchor_is_the_consensus_and_nothing_is_sent() -> None:
    team = Team(tw.presets.diloco(sync_every=2), adamw, 3).train(4)
    stats = team.loops[0].stats
    for loop, found in zip(team.loops, consensus(team), strict=True):
        assert same_bits(found, list(own_anchor(loop).values()))
    with team.loops[0].evaluating():  # the others need not
        assert same_bits(weights(team), team.anchor())
    assert team.loops[0].stats == stats
    assert stats.consensus_sent_bytes == stats.consensus_received_bytes == 0


def test_it_is_gathered_once_after_every_outer_step_and_counted_apart() -> None:
    team = Team(method(), adamw, 3).train(4)
    nbytes, before = 64 + 4 * sum(w.numel() for w in weights(team)), team.loops[0].stats
    assert before.consensus_sent_bytes == 0
    first = consensus(team)[0]
    assert same_bits(consensus(team)[0], first)
    team.train(1, first=4)  # in the middle of a round
    assert same_bits(consensus(team)[0], first)
    counted = team.loops[0].stats
    own = {"consensus_sent_bytes": nbytes, "consensus_received_bytes": 2 * nbytes}
    assert counted == replace(before, **own)
    team.train(1, first=5)
    assert not same_bits(consensus(team)[0], first)
    assert team.loops[0].stats.consensus_sent_bytes == 2 * nbytes


def test_evaluating_holds_it_and_puts_the_live_weights_back() -> None:
    team = Team(method(), adamw, 3).train(5)
    expected, live = consensus(team)[0], weights(team)
    for worker, loop in enumerate(team.loops):
        with loop.evaluating():
            assert same_bits(weights(team, worker), expected)
    assert same_bits(weights(team), live)
    assert not same_bits(live, expected)
    # What is resumed, and digested, is the worker's own.
    assert len({*team.digests()}) == 3


def test_it_is_gathered_beside_rounds_under_way() -> None:
    described = method(sync_every=3, overlap=tw.Delay(tau=2))
    team = Team(described, adamw, 3).train(10)
    assert any(f.pending for loop in team.loops for f in loop._state.fragments)
    mean = mean_of(team)
    assert same_bits(consensus(team)[0], mean)
    alone = Team(described, adamw, 3).train(14)
    assert team.train(4, first=10).digests() == alone.digests()


def test_a_worker_that_does_not_ask_is_named() -> None:
    named = r"the outer parameters of fragment 0.*worker 1, 2 of 3"
    with pytest.raises(tw.ExchangeTimeout, match=named):
        Team(method(), adamw, 3).train(2).loops[0].consensus()


def test_loading_a_state_forgets_what_was_gathered_and_counts_on() -> None:
    team = Team(method(), adamw, 3).train(4)
    expected = consensus(team)[0]
    other = Team(method(), adamw, 3).train(8)
    assert not same_bits(consensus(other)[0], expected)
    other.load(team.states())
    before = other.loops[0].stats.consensus_sent_bytes
    assert before == team.loops[0].stats.consensus_sent_bytes > 0
    assert same_bits(consensus(other)[0], expected)
    assert other.loops[0].stats.consensus_sent_bytes == 2 * before
    fresh = Team(method(), adamw, 3).load(team.states())
    assert fresh.loops[0].stats.consensus_sent_bytes == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_anchor_that_is_not_finite_is_no_part_of_a_mean(bad: float) -> None:
    team = Team(method(), adamw, 3).train(2)
    next(iter(own_anchor(team.loops[1]).values()))[0, 0] = bad
    with pytest.raises(tw.NonFiniteError):
        team.loops[1].evaluating()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_other_types(dtype) -> None:
    team = Team(method(), adamw, 2, model=lambda: build_model().to(dtype)).train(2)
    for found in consensus(team):
        assert all(tensor.dtype == torch.float32 for tensor in found)
        with team.loops[0].evaluating():
            assert same_bits([t.to(dtype) for t in found], weights(team))
