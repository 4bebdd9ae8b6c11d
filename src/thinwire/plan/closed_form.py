"""Closed forms: what the simulation must come to in the cases that have an equation."""

from thinwire.errors import ConfigurationError
from thinwire.plan.engine import StepWise
from thinwire.plan.freight import last_due
from thinwire.plan.patience import Everyone
from thinwire.plan.scenario import Scenario

__all__ = ["least_round_s", "wall_s"]


def wall_s(scenario: Scenario, *, steps: int) -> float:
    """Seconds of a run of one message, step by step, whose workers keep their speed.

        wall = S s + n (encode + decode) + (n - 1) max(0, D - tau s) + max(0, D - r s) + rest
        D    = latency + bytes / rate, and the coding between the halves of a reduction

    S steps of s seconds by the slowest worker; n times in them the message is due, r = min(tau, S -
    the last of these steps); rest = encode + D + decode if steps come after the last, else 0.
    Without overlap (tau = 0) that is S s + n (encode + D + decode), n counted with the rest.

    Args:
        scenario: what is worked out.
        steps: S, inner steps.

    Raises:
        ConfigurationError: there is no equation for it: several messages, layers by themselves,
            workers that vary, come, go or meet in pairs at different speeds, or a tau of H or more.

    >>> from thinwire.fragments import Whole
    >>> from thinwire.plan.compute import Compute
    >>> from thinwire.plan.ideal import ideal_freight
    >>> from thinwire.plan.link import Link
    >>> freight = ideal_freight(Whole(), parameters=8, layers=2, bits=16, sync_every=3)
    >>> wall_s(Scenario(freight=freight, compute=Compute(step_s=1), link=Link.of(64)), steps=6)
    10.0
    """
    step_s, freight = _slowest_step_s(scenario), scenario.freight
    message, every, workers = freight.messages[0], freight.sync_every, freight.workers
    crossing_s = scenario.crossing(0, share=1, workers=workers).total_s
    coding_s = scenario.encode_s(0, share=1)
    coding_s += scenario.decode_s(0, share=1, workers=workers)
    last = last_due(message, steps, sync_every=every)
    first = message.first + (message.offset - message.first) % every
    wall = steps * step_s
    if last:
        waits_s = (last - first) // every * max(0.0, crossing_s - freight.tau * step_s)
        waits_s += max(0.0, crossing_s - min(freight.tau, steps - last) * step_s)
        wall += waits_s + ((last - first) // every + 1) * coding_s
    return wall + (coding_s + crossing_s if last < steps else 0.0)


def _slowest_step_s(scenario: Scenario) -> float:
    freight = scenario.freight
    factors = scenario.pace.constant(freight.workers)
    known = (
        factors is not None
        and len(freight.messages) == 1
        and freight.tau < freight.sync_every
        and isinstance(scenario.engine, StepWise)
        and scenario.presence.is_constant
        and isinstance(scenario.patience, Everyone)
        and (freight.messages[0].exchange != "pairs" or bool((factors == factors[0]).all()))
    )
    if factors is None or not known:
        raise ConfigurationError(
            "work out the time of this run in one equation",
            because="it has several messages, layers by themselves, an overlap of a whole round, "
            "or workers that vary",
            do="use thinwire.plan.simulate",
        )
    return scenario.compute.step_s * float(factors.max())


def least_round_s(scenario: Scenario) -> float:
    """A bound for every engine and overlap: max(compute and coding, what the link is held for).

        round >= max(H s + sum_p (encode_p + decode_p), sum_p held_p)

    It is reached where everything overlaps.

    Args:
        scenario: s is the time of a step by the fastest worker, if its speed is known.

    >>> from thinwire.fragments import Whole
    >>> from thinwire.plan.compute import Compute
    >>> from thinwire.plan.ideal import ideal_freight
    >>> from thinwire.plan.link import Link
    >>> freight = ideal_freight(Whole(), parameters=8, layers=2, bits=16, sync_every=3)
    >>> least_round_s(Scenario(freight=freight, compute=Compute(step_s=1), link=Link.of(64)))
    3.0
    """
    freight = scenario.freight
    factors = scenario.pace.constant(freight.workers)
    fastest = 1.0 if factors is None else float(factors.min())
    busy_s, held_s = freight.sync_every * scenario.compute.step_s * fastest, 0.0
    for piece in (piece for pieces in scenario.pieces() for piece in pieces):
        index, share, workers = piece.message, piece.share, freight.workers
        busy_s += scenario.encode_s(index, share=share)
        busy_s += scenario.decode_s(index, share=share, workers=workers)
        held_s += scenario.crossing(index, share=share, workers=workers).held_s
    return max(busy_s, held_s)
