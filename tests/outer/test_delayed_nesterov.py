"""Delayed Nesterov: N arrivals at one theta are a Nesterov step, and what is not.

The paper's loop is in asynchronous/test_simulation.py.
"""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.blocks import DenseVector
from thinwire.outer import DelayedNesterov
from toy import bound


def gradients(count: int, numel: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


def after(outer: tw.outer.OuterOptimizer, arrivals: list[Tensor]) -> Tensor:
    state = bound(outer, torch.linspace(-1, 1, len(arrivals[0])))[1]
    for g in arrivals:
        state.apply(DenseVector(g.clone()))
    return state.flat_anchor().clone()


def means(arrivals: list[Tensor], every: int) -> list[Tensor]:
    return list(torch.stack(arrivals).unflatten(0, (-1, every)).mean(1))


def largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


NESTEROV = tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize(
    ("every", "c"), [(1, 0.0), (1, 0.3), (1, 1.0), (2, 0.0), (4, 0.0), (5, 0.0)]
)
def test_n_arrivals_are_one_nesterov_step_on_their_mean(every: int, c: float) -> None:
    """One at a time also with momentum in advance, for which there is no time."""
    arrivals = gradients(6 * every)
    found = after(DelayedNesterov(lr=0.7, momentum=0.9, every=every, c=c), arrivals)
    assert largest(found, after(NESTEROV, means(arrivals, every))) < 4e-6


def test_control_momentum_in_advance_or_at_every_arrival_is_another_step() -> None:
    arrivals = gradients(24)
    for c in (0.05, 0.25):
        found = after(DelayedNesterov(lr=0.7, momentum=0.9, every=4, c=c), arrivals)
        assert largest(found, after(NESTEROV, means(arrivals, 4))) > 0.05
    often = tw.outer.SGD(lr=0.7 / 4, momentum=0.9, nesterov=True)
    found = after(DelayedNesterov(lr=0.7, momentum=0.9, every=4), arrivals)
    assert largest(found, after(often, arrivals)) > 0.05


def test_without_momentum_an_arrival_is_sgd_with_a_share_of_the_rate() -> None:
    arrivals = gradients(7)
    found = after(DelayedNesterov(lr=0.8, momentum=0.0, every=4), arrivals)
    assert largest(found, after(tw.outer.SGD(lr=0.2), arrivals)) < 1e-6


def method(outer: tw.outer.OuterOptimizer) -> tw.Method:
    return tw.presets.diloco(outer=outer, sync_every=1)


def test_rounds_refuse_it_unless_it_is_nesterov_and_eager_updates_anyhow() -> None:
    table = tw.outer.ByWorkerCount(table=((1, DelayedNesterov()),))
    for outer in (DelayedNesterov(), table):
        with pytest.raises(tw.ConfigurationError, match="in rounds with delayed Nesterov over 4"):
            tw.OuterLoop(nn.Linear(2, 1), [], method(outer))
    tw.OuterLoop(nn.Linear(2, 1), [], method(DelayedNesterov(every=1))).step()
    with pytest.raises(tw.ConfigurationError, match="delayed Nesterov with Eager"):
        dataclasses.replace(method(DelayedNesterov()), overlap=tw.Eager())
