"""Data from which a page replays a run over a link that its reader chooses.

The planner's time for an exchange is linear in 1 / rate and in the latency of a link:

    transfer_s = 8 moved / rate        latency_s = hops latency        lag_s = last latency

and `moved`, `hops` and `last` come from the planner.
"""

from functools import cache
from typing import Any, Final

from thinwire.errors import ConfigurationError
from thinwire.method import Method
from thinwire.plan.calibration import planned_traffic
from thinwire.plan.compute import Compute
from thinwire.plan.link import TOPOLOGIES, Link, Topology
from thinwire.plan.models import resolve
from thinwire.plan.simulate import Scenario
from thinwire.plan.traffic import Traffic
from thinwire.runs.schema import FinishedRun


def replay_of(traffic: Traffic, steps: int) -> dict[str, Any]:
    """The arguments of `simulate` in link.js, as JSON-able data.

    Args:
        traffic: messages of a run.
        steps: inner steps.
    """
    return {
        "steps": steps,
        "every": traffic.sync_every,
        "tau": traffic.tau,
        "messages": [
            {
                "offset": message.offset,
                "first": message.first,
                "crossing": {
                    name: crossing_of(traffic, index, topology)
                    for name, topology in TOPOLOGIES.items()
                },
            }
            for index, message in enumerate(traffic.messages)
        ],
    }


def crossing_of(traffic: Traffic, index: int, topology: Topology) -> list[float]:
    """`moved`, `hops` and `last` of the exchange of a message.

    Args:
        traffic: messages of the run.
        index: index of the message.
        topology: paths of the messages.
    """
    link, compute = Link.of(8.0, latency_s=1.0), Compute(step_s=1)
    scenario = Scenario(traffic=traffic, compute=compute, link=link, topology=topology)
    taken = scenario.transfer_time(index)
    return [taken.transfer_s, taken.latency_s, taken.lag_s]


# Cached, because resolving takes a second.
_resolved: Final = cache(resolve)


def replay_data(run: FinishedRun) -> dict[str, Any]:
    """The exchanges of `run`, if their bytes match the count of the run.

    Raises:
        ConfigurationError: the bytes do not match, or the planner cannot plan for the run.
    """
    if run.summary.is_elastic:
        what = f"replay the run in {run.folder} over another link"
        because = "its workers came and went"
        raise ConfigurationError(what, because=because, do="plan for its method with thinwire plan")
    method, saved = Method.from_dict(run.config.described["method"]), run.folder / "model"
    # Only a byte-level model's shape follows from its size.
    is_saved = run.config.tokenizer != "bytes" and (saved / "config.json").is_file()
    shape = _resolved(str(saved) if is_saved else run.config.model_size)
    return replay_of(planned_traffic(run, method, shape), run.summary.steps)
