"""Loss against wall-clock: how long the runs would take over links, by the planner's model.

Runs are simulated in one process and have no wire, but their bytes are known exactly. All methods
are assumed to take equally long for a step, and gradients travel in fp32, as in the runs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from claim_settings import FAMILIES, Setting
from thinwire.plan.compute import Compute
from thinwire.plan.link import Link
from thinwire.plan.models import resolve
from thinwire.plan.simulate import Scenario, simulate
from thinwire.plan.traffic import traffic
from thinwire.train.config import TrainConfig

LATENCY_S = 0.02
Curve = Sequence[tuple[int, float]]


def clock(
    setting: Setting, configs: Mapping[str, TrainConfig], curves: Mapping[str, Curve]
) -> dict[str, Any] | None:
    """Seconds of every family over every link: for the whole run, and to DiLoCo's final loss.

    None as long as DiLoCo has not run.

    Args:
        setting: has the links.
        configs: configurations of the arms.
        curves: validation loss by steps for each arm, as the mean of its seeds.
    """
    if "diloco" not in curves:
        return None
    target = curves["diloco"][-1][1]
    links = {
        name: Link.of(rate, latency_s=LATENCY_S) for name, rate in setting.links_bits_per_s.items()
    }
    return {
        "step_s": setting.step_s,
        "latency_s": LATENCY_S,
        "target_val_loss": target,
        "links": {
            name: {
                arm: _over(link, setting, configs[arm], curves[arm], target)
                for arm in FAMILIES
                if arm in curves
            }
            for name, link in links.items()
        },
    }


def _over(
    link: Link, setting: Setting, config: TrainConfig, curve: Curve, target: float
) -> dict[str, float | None]:
    sent = traffic(config.method, resolve(config.model.size), workers=config.workers)
    scenario = Scenario(traffic=sent, compute=Compute(step_s=setting.step_s), link=link)
    steps = first_below(curve, target)
    return {
        "whole_run_s": simulate(scenario, steps=config.steps).wall_s,
        "to_target_s": None if steps is None else simulate(scenario, steps=steps).wall_s,
    }


def first_below(curve: Curve, target: float) -> int | None:
    """The step at which a line through the evaluations first reaches `target`; None if never.

    >>> first_below([(10, 3.0), (20, 2.0)], 2.5), first_below([(10, 3.0)], 2.5)
    (15, None)
    """
    before = None
    for step, loss in curve:
        if loss <= target:
            if before is None or before[1] == loss:
                return step
            share = (before[1] - target) / (before[1] - loss)
            return round(before[0] + share * (step - before[0]))
        before = step, loss
    return None
