"""Decoupled momentum as released: its reference loop and its limits.

What is wrong with it, the claims that are measured say: docs/claims-small.md.
"""

from functools import partial
from typing import Any

import pytest
from torch import Tensor

import thinwire as tw
from reference_loops import reference_decoupled_momentum
from thinwire.codecs import DCT, F32, Blocks, TopK
from toy import Team, adamw, build_matrices, largest_difference, matrix_loss, own_anchor, same_bits

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
    return [[p.clone() for p in own_anchor(loop).values()] for loop in team.loops]


def nesterov(beta: float = BETA) -> tw.Method:
    outer = tw.outer.SGD(lr=ETA, momentum=beta, nesterov=True)
    return tw.presets.diloco(sync_every=3, outer=outer)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("k", "beta"), [(32, 0.9), (512, 0.6)])
def test_it_follows_its_reference_loop(workers: int, k: int, beta: float) -> None:
    def reference(k: int, beta: float) -> list[list[Tensor]]:
        blocks = partial(matrix_loss, workers=workers)
        how = {"workers": workers, "steps": 12, "sync_every": 3, "outer": (k, ETA, beta)}
        return reference_decoupled_momentum(build_matrices, adamw, blocks, **how)

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
        (lambda: tw.DecoupledMomentum(decay=1.1), r"to 1\.1; because it must lie in \[0, 1\]"),
        (lambda: tw.presets.decoupled_momentum().check_elastic(), "its own outer parameters"),
        (lambda: tw.presets.demo().check_elastic(), "where workers come and go"),
    ],
)
def test_what_does_not_fit_is_refused(call, word: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=word):
        call()
