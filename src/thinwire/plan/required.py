"""What a link must carry for a given compute utilisation."""

import math
from collections.abc import Callable, Sequence

from thinwire.errors import ConfigurationError
from thinwire.plan.closed_form import least_round_s
from thinwire.plan.scenario import Scenario
from thinwire.plan.simulate import is_regular, simulate

__all__ = ["grid_reading", "required_bandwidth", "steady_utilisation"]

_MOST_ROUNDS = 64
_PRECISION = 1e-9
_SLOWEST_BITS_PER_S, _FASTEST_BITS_PER_S = 1e-3, 1e21


def steady_utilisation(scenario: Scenario, *, seed: int = 0) -> float:
    """Share of the time in which workers compute, in the long run: not in its beginning or end.

    For workers that are alike, rounds are simulated until two in a row take the same time, and as
    long as the link is busy in each. Else it is that of a run of 64 rounds.

    Args:
        scenario: what is simulated.
        seed: of paces, presence and pairs.
    """
    every = scenario.freight.sync_every
    if not is_regular(scenario):
        return simulate(scenario, steps=_MOST_ROUNDS * every, seed=seed).utilisation
    return min(1.0, _computed_s(scenario) / _period_s(scenario))  # but for rounding


def _computed_s(scenario: Scenario) -> float:
    factors = scenario.pace.constant(scenario.freight.workers)
    assert factors is not None
    return scenario.freight.sync_every * scenario.compute.step_s * float(factors[0])


def _period_s(scenario: Scenario) -> float:
    """Of a round in the long run."""
    every, rounds, round_s = scenario.freight.sync_every, 4, (0.0,)
    # A link that is a little too slow falls behind for many equal rounds before anybody waits.
    least_s = least_round_s(scenario)
    while rounds <= _MOST_ROUNDS:
        round_s = simulate(scenario, steps=rounds * every).round_s
        before_s, last_s = round_s[-2] - round_s[-3], round_s[-1] - round_s[-2]
        if math.isclose(before_s, last_s, rel_tol=1e-12) and last_s > least_s * (1 - 1e-9):
            return last_s
        rounds *= 2
    # Rounds that differ may repeat after several.
    half = len(round_s) // 2
    return max(least_s, (round_s[-1] - round_s[half - 1]) / (len(round_s) - half))


def required_bandwidth(target: float, scenario: Scenario, *, seed: int = 0) -> float:
    """The least rate, up and down, at which workers compute for a share `target` of the time.

    Args:
        target: compute utilisation, in (0, 1).
        scenario: what is simulated; the rates of its link do not matter.
        seed: of paces, presence and pairs.

    Returns:
        Bits per second, exact to 1e-9 of it; 0 if any rate will do, infinity if none will, because
        latency, coding or slow workers take more than the rest.

    Raises:
        ConfigurationError: a target that is no share.

    >>> from thinwire.fragments import Whole
    >>> from thinwire.plan.compute import Compute
    >>> from thinwire.plan.ideal import ideal_freight
    >>> from thinwire.plan.link import Link
    >>> freight = ideal_freight(Whole(), parameters=8, layers=2, bits=16, sync_every=3)
    >>> scenario = Scenario(freight=freight, compute=Compute(step_s=1), link=Link.of(1))
    >>> round(required_bandwidth(0.6, scenario), 6)
    64.0
    """
    if not 0 < target < 1:
        raise ConfigurationError(
            f"find the bandwidth for a utilisation of {target:g}",
            because="it is a share of the time, and an exchange takes some",
            do="pass a target between 0 and 1",
        )

    def reaches(bits_per_s: float) -> bool:
        return steady_utilisation(scenario.at_rate(bits_per_s), seed=seed) >= target

    if not reaches(math.inf):
        return math.inf
    return _least(reaches)


def _least(reaches: Callable[[float], bool]) -> float:
    low, high = _SLOWEST_BITS_PER_S, _FASTEST_BITS_PER_S
    if reaches(low):
        return 0.0
    if not reaches(high):
        return math.inf
    while high / low > 1 + _PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def grid_reading(required: float, grid: Sequence[float]) -> float:
    """How a paper prints `required`: the grid point just below the first one that reaches it.

    Args:
        required: what `required_bandwidth` found.
        grid: rising.

    Returns:
        The first point where `required` does not come after it, infinity where it is beyond all.

    Source: worked out from Streaming DiLoCo (arXiv 2501.18512), Table 4.

    >>> grid_reading(3.5, (1, 2, 4, 8)), grid_reading(4, (1, 2, 4, 8)), grid_reading(9, (1, 2))
    (2, 2, inf)
    """
    for below, point in zip((grid[0], *grid), grid, strict=False):
        if point >= required:
            return below
    return math.inf
