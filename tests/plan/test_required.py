"""Utilisation in the long run, and the rate that a utilisation needs."""

import math
from dataclasses import replace

import pytest

from plan_scenarios import one_message, plain, same, streaming
from thinwire.errors import ConfigurationError
from thinwire.fragments import At, Sequential
from thinwire.plan.compute import Coding
from thinwire.plan.required import least_round_s, required_bandwidth, steady_utilisation
from thinwire.plan.simulate import simulate


def test_a_link_that_falls_behind_slowly_is_found_out() -> None:
    fragments = Sequential(layers=1, offsets=At(steps=tuple(range(10))))
    sent = streaming(fragments, parameters=1000, layers=10, every=10, tau=5)
    scenario = plain(sent, 8 * 200 / 0.1001)
    assert simulate(scenario, steps=100).wait_s[:100] == (0,) * 100
    assert same(steady_utilisation(scenario), 1 / 1.001)


@pytest.mark.parametrize("rate", [1e5, 1.1e6, 1e9])
def test_the_bound_is_reached_where_everything_overlaps(rate) -> None:
    # A whole round for each answer: compute and link each go on without the other.
    scenario = plain(streaming(every=10, tau=10), rate)
    round_s = simulate(scenario, steps=600).round_s
    assert same((round_s[-1] - round_s[-11]) / 10, least_round_s(scenario))


@pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
def test_the_required_rate_is_that_of_the_equation(target) -> None:
    scenario = replace(one_message(workers=2), coding=Coding())
    allowed_s = 7 * 0.13 * (1 / target - 1) - 0.017
    if allowed_s <= 0:
        assert required_bandwidth(target, scenario) == math.inf
        return
    found = required_bandwidth(target, scenario)
    assert math.isclose(found, 8 * 12_347 / allowed_s, rel_tol=1e-6)


def test_latency_and_coding_can_be_too_much_for_any_rate() -> None:
    scenario = one_message()
    assert required_bandwidth(0.999, scenario) == math.inf
    assert required_bandwidth(0.9, replace(scenario, traffic=one_message(workers=1).traffic)) == 0


def test_the_required_rate_reaches_the_target_and_a_smaller_one_does_not() -> None:
    scenario = plain(streaming())
    rate = required_bandwidth(0.9, scenario)
    assert steady_utilisation(scenario.at_rate(rate)) >= 0.9
    assert steady_utilisation(scenario.at_rate(rate / (1 + 1e-6))) < 0.9


@pytest.mark.parametrize("target", [0, 1, math.nan])
def test_a_target_that_is_no_share_is_refused(target: float) -> None:
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        required_bandwidth(target, one_message())
