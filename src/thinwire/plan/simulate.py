"""The simulation: inner steps, what is sent in them, and what they wait for, event by event.

See `thinwire.plan.run` for what happens in a step.
"""

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigurationError
from thinwire.plan.clocks import Crowd, Lone
from thinwire.plan.outcome import Outcome
from thinwire.plan.pace import DrawPace
from thinwire.plan.patience import Everyone
from thinwire.plan.run import Run
from thinwire.plan.scenario import Scenario

__all__ = ["is_regular", "simulate"]


def simulate(scenario: Scenario, *, steps: int, seed: int = 0) -> Outcome:
    """A run of `steps` inner steps, at the end of which all that was trained is exchanged.

    Args:
        scenario: what is simulated.
        steps: inner steps; 0 is a run without any.
        seed: of paces, presence and pairs.

    Raises:
        ConfigurationError: fewer than 0 steps.

    >>> from thinwire.fragments import Whole
    >>> from thinwire.plan.compute import Compute
    >>> from thinwire.plan.ideal import ideal_freight
    >>> from thinwire.plan.link import Link
    >>> freight = ideal_freight(Whole(), parameters=8, layers=2, bits=16, sync_every=3)
    >>> outcome = simulate(
    ...     Scenario(freight=freight, compute=Compute(step_s=1), link=Link.of(64)), steps=6
    ... )
    >>> outcome.wall_s, outcome.utilisation, outcome.limit
    (10.0, 0.6, 'bandwidth')
    """
    if steps < 0:
        raise ConfigurationError(
            f"simulate {steps} inner steps", because="a run has none or more", do="pass steps >= 0"
        )
    if is_regular(scenario):
        run = _alike(scenario)
        _train_alike(run, steps)
    else:
        run = _apart(scenario, steps, seed)
    return run.end(steps)


def is_regular(scenario: Scenario) -> bool:
    """Whether all workers are alike in every step, so that nothing depends on a seed."""
    freight = scenario.freight
    factors = scenario.pace.constant(freight.workers)
    alike = factors is not None and bool((factors == factors[0]).all())
    pairs = any(message.exchange == "pairs" for message in freight.messages)
    # Of an odd number somebody has no partner, and does not wait.
    return (
        alike
        and not (pairs and freight.workers % 2 and freight.workers > 1)
        and scenario.presence.is_constant
        and isinstance(scenario.patience, Everyone)
    )


def _alike(scenario: Scenario) -> Run:
    workers = scenario.freight.workers
    factors = scenario.pace.constant(workers)
    assert factors is not None
    return Run(scenario, Lone(scenario.compute.step_s * float(factors[0]), workers))


def _train_alike(run: Run, steps: int) -> None:
    """Step by step where something happens, and all at once where nothing does."""
    step = 1
    while step <= steps:
        event = min(run.next_event(step), steps + 1)
        if event > step:
            run.rest(event - step)
        if event <= steps:
            run.step(event)
        step = event + 1


def _apart(scenario: Scenario, steps: int, seed: int) -> Run:
    """A run with a clock for each worker, round by round."""
    workers, every = scenario.freight.workers, scenario.freight.sync_every
    pace, presence, pairs = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    crowd = Crowd(workers, scenario.patience, pairs)
    run = Run(scenario, crowd)
    draw = scenario.pace.bind(pace, workers)
    present = scenario.presence.draw(presence, -(-steps // every), workers)
    for begin in range(0, steps, every):
        if present is not None:
            run.use_first_answers(begin + 1)
            _convene(run, crowd, present, begin // every)
        _train_round(run, crowd, draw, range(begin + 1, min(begin + every, steps) + 1))
    return run


def _convene(run: Run, crowd: Crowd, present: NDArray[np.bool_], round: int) -> None:
    if round and (present[round] == present[round - 1]).all():
        return
    there = np.flatnonzero(present[round])
    presence = run.scenario.presence
    crowd.convene(there, notice_s=presence.notice_s, heal_s=presence.heal_s)
    run.workers = len(there)


def _train_round(run: Run, crowd: Crowd, draw: DrawPace, steps: range) -> None:
    for step, step_s in zip(steps, run.scenario.compute.step_s * draw(len(steps)), strict=True):
        crowd.begin_step(step_s)
        run.step(step)
