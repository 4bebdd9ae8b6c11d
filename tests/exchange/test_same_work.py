import warnings

import pytest
import torch

import thinwire as tw
from processes import run_ranks
from thinwire.exchange import Exchange, Gather, ReduceScatter
from toy import Team, adamw, loss

REDUCE = ReduceScatter(owner_feedback=tw.ErrorFeedback())
EXCHANGES = pytest.mark.parametrize("exchange", [Gather(), REDUCE], ids=lambda e: type(e).__name__)
TOP_K = tw.codecs.TopK(k=16)


def team(exchange: Exchange, workers: int = 2, **fields) -> Team:
    return Team(tw.presets.diloco(sync_every=1, exchange=exchange, **fields), adamw, workers)


def train(team: Team, steps: int = 1, *, data: tuple[int, ...] = (0, 0, 0)) -> Team:
    """Every worker on the block of the batch that `data` names."""
    for step in range(steps):
        for model, optimizer, block in zip(team.models, team.optimizers, data, strict=False):
            loss(model, step, block, workers=3).backward()
            optimizer.step()
            optimizer.zero_grad()
        team.exchange()
    return team


@EXCHANGES
@pytest.mark.parametrize(("workers", "codec"), [(2, tw.codecs.Identity()), (3, TOP_K)], ids=str)
def test_workers_on_the_same_data_are_told_so_once_and_go_on(exchange, workers, codec) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        loops = train(team(exchange, workers, codec=codec), 3).loops
    (warning,) = found
    assert warning.category is tw.SameWorkWarning
    for words in ("the same in the first round", "the same data", "DDP or FSDP", "its own share"):
        assert words in str(warning.message)
    assert {loop.stats.rounds for loop in loops} == {3}


# Warnings are errors, so none of the following warns.


@EXCHANGES
def test_control_one_that_did_something_else_is_enough(exchange) -> None:
    assert train(team(exchange, 3), 2, data=(0, 0, 1)).loops[0].stats.rounds == 2


def test_no_work_is_not_the_same_work() -> None:
    """A learning rate that begins with 0; Top-k of zeros has indices that are not zero. Pairs send
    weights, of which equal ones prove nothing; and of one shard that none has changed."""
    still = [team(exchange, codec=TOP_K) for exchange in (Gather(), REDUCE, REDUCE)]
    with torch.no_grad():
        for worker, model in enumerate(still[2].models):
            next(model.parameters()).add_(1 + worker)
    for workers in (*still, Team(tw.presets.noloco(sync_every=1), adamw, 2)):
        workers.exchange()
        assert workers.loops[0].stats.rounds == 1


def test_only_the_first_round_is_compared() -> None:
    assert train(train(team(Gather()), data=(0, 1)), 2).loops[0].stats.rounds == 3


def test_replicas_that_came_together_may_be_evaluated() -> None:
    workers = train(Team(tw.presets.noloco(sync_every=1), adamw, 2), data=(0, 1))
    for loop in workers.loops:
        loop.evaluating()
    assert workers.loops[0].digest() == workers.loops[1].digest()
    with workers.loops[0].evaluating():
        pass


def test_ddp_around_the_workers_is_named_by_all_ranks() -> None:
    for process in run_ranks("averaged_by_ddp", 2):
        assert process.returncode == 0, process.stderr
        assert process.stderr.count("SameWorkWarning: all workers sent exactly the same") == 1
        assert "something averages their gradients already" in process.stderr
