"""How busy a link keeps the workers in the long run, and which rate a given utilisation needs."""

import math
from collections.abc import Callable, Sequence
from typing import Final

from thinwire.errors import ConfigurationError
from thinwire.plan.scenario import Scenario
from thinwire.plan.simulate import simulate

_MOST_ROUNDS: Final = 64
_PRECISION: Final = 1e-9
_SLOWEST_BITS_PER_S, _FASTEST_BITS_PER_S = 1e-3, 1e21


def steady_utilisation(scenario: Scenario) -> float:
    """Share of the time in which workers compute, in the long run: without its beginning and end.

    >>> from thinwire import presets
    >>> from thinwire.plan.compute import Compute
    >>> from thinwire.plan.link import Link
    >>> from thinwire.plan.shape import Shape
    >>> from thinwire.plan.traffic import traffic
    >>> sent = traffic(presets.diloco(sync_every=3), Shape.of_size(1000, 2), workers=2)
    >>> link = Link.of(8 * sent.sent_per_round)
    >>> steady_utilisation(Scenario(traffic=sent, compute=Compute(step_s=1), link=link))
    0.75
    """
    every = scenario.traffic.sync_every
    round_s = steady_round_s(
        lambda rounds: simulate(scenario, steps=rounds * every).round_s,
        least_s=least_round_s(scenario),
    )
    return min(1.0, every * scenario.compute.step_s / round_s)  # but for rounding


def steady_round_s(ends_s: Callable[[int], Sequence[float]], *, least_s: float) -> float:
    """How long a round takes in the long run.

    Rounds are simulated until two in a row take the same time, and as long as the link is busy in
    each: a link that is a little too slow falls behind for many equal rounds before workers wait.

    Args:
        ends_s: the times at which the rounds of a run of so many end.
        least_s: no round is shorter in the long run.
    """
    rounds, round_s = 4, (0.0,)
    while rounds <= _MOST_ROUNDS:
        round_s = ends_s(rounds)
        before_s, last_s = round_s[-2] - round_s[-3], round_s[-1] - round_s[-2]
        if math.isclose(before_s, last_s, rel_tol=1e-12) and last_s > least_s * (1 - 1e-9):
            return last_s
        rounds *= 2
    # Rounds that differ may repeat after several.
    half = len(round_s) // 2
    return max(least_s, (round_s[-1] - round_s[half - 1]) / (len(round_s) - half))


def least_round_s(scenario: Scenario) -> float:
    """A bound for every overlap, reached where everything overlaps.

    round >= max(H s + sum_p (encode_p + decode_p), sum_p held_p)
    """
    traffic = scenario.traffic
    busy_s, held_s = traffic.sync_every * scenario.compute.step_s, 0.0
    for index in range(len(traffic.messages)):
        busy_s += scenario.encode_s(index)
        busy_s += scenario.decode_s(index)
        held_s += scenario.transfer_time(index).held_s
    return max(busy_s, held_s)


def required_bandwidth(target: float, scenario: Scenario) -> float:
    """The least rate, up and down, at which workers compute for a share `target` of the time.

    Args:
        target: compute utilisation, in (0, 1).
        scenario: what is simulated; the rates of its link do not matter.

    Returns:
        Bits per second, exact to 1e-9 of it; 0 if any rate will do, infinity if no rate will,
        because latency or coding takes more than the rest of the time.

    Raises:
        ConfigurationError: a target outside of (0, 1).

    >>> from thinwire import presets
    >>> from thinwire.plan.compute import Compute
    >>> from thinwire.plan.link import Link
    >>> from thinwire.plan.shape import Shape
    >>> from thinwire.plan.traffic import traffic
    >>> sent = traffic(presets.diloco(sync_every=3), Shape.of_size(1000, 2), workers=2)
    >>> scenario = Scenario(traffic=sent, compute=Compute(step_s=1), link=Link.of(1))
    >>> round(required_bandwidth(0.75, scenario)) == 8 * sent.sent_per_round
    True
    """
    if not 0 < target < 1:
        raise ConfigurationError(
            f"find the bandwidth for a utilisation of {target:g}",
            because="it is a share of the time, and an exchange takes some",
            do="pass a target between 0 and 1",
        )
    return least_rate(lambda rate: steady_utilisation(scenario.at_rate(rate)) >= target)


def least_rate(reaches: Callable[[float], bool]) -> float:
    """The least of all rates that reach something, in bit/s; 0: any does, infinity: no rate does.

    Args:
        reaches: false up to some rate, and true from there on.
    """
    low, high = _SLOWEST_BITS_PER_S, _FASTEST_BITS_PER_S
    if not reaches(math.inf):
        return math.inf
    if reaches(low):
        return 0.0
    if not reaches(high):
        return math.inf
    while high / low > 1 + _PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high
