import dataclasses

import pytest
import torch

import thinwire as tw
from processes import run_ranks
from thinwire.exchange import Exchange, Gather, ReduceScatter
from thinwire.exchange.same_work import SameWorkCheck
from toy import Team, adamw, loss

REDUCE = ReduceScatter(owner_feedback=tw.ErrorFeedback())
SAME = "all workers did exactly the same work.*DDP or FSDP.*outer.share"


def team(exchange: Exchange | None = None, workers: int = 2, **fields) -> Team:
    method = tw.presets.diloco(sync_every=1, **fields)
    if exchange is not None:
        method = dataclasses.replace(method, exchange=exchange)
    return Team(method, adamw, workers)


def train(team: Team, steps: int = 1, *, data: tuple[int, ...] = (0, 0, 0)) -> None:
    """Every worker on the block of the batch that `data` names."""
    for step in range(steps):
        for model, optimizer, block in zip(team.models, team.optimizers, data, strict=False):
            loss(model, step, block, workers=3).backward()
            optimizer.step()
            optimizer.zero_grad()
        team.exchange()


@pytest.mark.parametrize("exchange", [Gather(), REDUCE], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("codec", [tw.codecs.Identity(), tw.codecs.TopK(k=16)], ids=str)
def test_workers_that_did_the_same_are_refused(exchange, workers, codec) -> None:
    with pytest.raises(tw.ConfigurationError, match=f"in round 1; .*{SAME}"):
        train(team(exchange, workers, codec=codec))


def test_weights_that_were_not_trained_are_no_work() -> None:
    """Pairs send weights, of which equal ones prove nothing: a first rate of 0 would be refused."""
    workers = Team(tw.presets.noloco(sync_every=1), adamw, 2)
    workers.exchange()
    assert workers.loops[0].stats.rounds == 1


@pytest.mark.parametrize("exchange", [Gather(), REDUCE], ids=lambda e: type(e).__name__)
def test_control_one_that_did_something_else_is_enough(exchange) -> None:
    workers = team(exchange, 3)
    train(workers, 2, data=(0, 0, 1))
    assert workers.loops[0].stats.rounds == 2


@pytest.mark.parametrize("exchange", [Gather(), REDUCE], ids=lambda e: type(e).__name__)
def test_workers_that_did_nothing_are_not(exchange) -> None:
    """A learning rate that begins with 0; Top-k of zeros has indices that are not zero."""
    workers = team(exchange, codec=tw.codecs.TopK(k=16))
    workers.exchange()
    assert workers.loops[0].stats.rounds == 1


def test_a_shard_that_none_has_changed_is_not() -> None:
    workers = team(REDUCE, codec=tw.codecs.TopK(k=16))
    with torch.no_grad():
        for worker, model in enumerate(workers.models):
            next(model.parameters()).add_(1 + worker)
    workers.exchange()
    assert workers.loops[0].stats.rounds == 1


def test_only_the_first_round_is_compared() -> None:
    workers = team()
    train(workers, data=(0, 1))
    train(workers, 2)
    assert workers.loops[0].stats.rounds == 3


def test_replicas_that_came_together_may_be_evaluated() -> None:
    workers = Team(tw.presets.noloco(sync_every=1), adamw, 2)
    train(workers, data=(0, 1))
    for loop in workers.loops:
        loop.begin_consensus()
    assert workers.loops[0].digest() == workers.loops[1].digest()
    with workers.loops[0].evaluating():
        pass


def test_a_lone_worker_has_none_to_compare_with() -> None:
    train(team(workers=1))
    assert not SameWorkCheck(is_due=False).is_due


@pytest.mark.parametrize("case", ["averaged_by_ddp", "averaged_in_elastic"])
def test_ddp_around_the_workers_is_named_by_all_ranks(case: str) -> None:
    for process in run_ranks(case, 2):
        assert process.returncode == 1, process.stderr
        assert "ConfigurationError" in process.stdout
        assert "something averages their gradients already" in process.stdout
