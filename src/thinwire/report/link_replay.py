"""Data with which a page replays a run over a link that its reader chooses.

The planner's time of an exchange is linear in rate and latency of a link:

    transfer_s = 8 moved / rate        latency_s = hops latency        lag_s = last latency

and `moved`, `hops` and `last` come from the planner.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from thinwire.errors import ConfigurationError
from thinwire.method import Method
from thinwire.plan.calibration import planned_traffic
from thinwire.plan.compute import Compute
from thinwire.plan.link import TOPOLOGIES, Link, Topology
from thinwire.plan.models import resolve
from thinwire.plan.shape import Shape
from thinwire.plan.simulate import Scenario
from thinwire.plan.traffic import Traffic
from thinwire.runs.schema import FinishedRun


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkReplay:
    """The exchanges of a run.

    Args:
        traffic: its messages.
        steps: inner steps.
    """

    traffic: Traffic
    steps: int

    def describe(self) -> dict[str, Any]:
        """The arguments of `simulate` in link.js, as JSON-able data."""
        return {
            "steps": self.steps,
            "every": self.traffic.sync_every,
            "tau": self.traffic.tau,
            "messages": [
                {
                    "offset": message.offset,
                    "first": message.first,
                    "crossing": {
                        name: crossing_of(self.traffic, index, topology)
                        for name, topology in TOPOLOGIES.items()
                    },
                }
                for index, message in enumerate(self.traffic.messages)
            ],
        }


def crossing_of(traffic: Traffic, index: int, topology: Topology) -> list[float]:
    """`moved`, `hops` and `last` of the exchange of a message.

    Args:
        traffic: of the run.
        index: of the message.
        topology: of the link.
    """
    scenario = Scenario(
        traffic=traffic,
        compute=Compute(step_s=1),
        link=Link.of(8.0, latency_s=1.0),
        topology=topology,
    )
    taken = scenario.transfer_time(index)
    return [taken.transfer_s, taken.latency_s, taken.lag_s]


# It takes a second.
_resolved: Final = cache(resolve)


def shape_of(run: FinishedRun) -> Shape:
    """The shape of the model that `run` saved, or of its size if that determines it.

    Raises:
        ConfigurationError: neither the name of its size nor a saved model gives the shape.
    """
    saved = run.folder / "model"
    byte_level = run.config.tokenizer == "bytes"
    has_saved = (saved / "config.json").is_file()
    return _resolved(str(saved) if has_saved and not byte_level else run.config.model_size)


def replay_data(run: FinishedRun) -> LinkReplay:
    """The exchanges of `run`, if their bytes equal those that it counted.

    Raises:
        ConfigurationError: the planner cannot plan for it.
    """
    if run.summary.is_elastic:
        what = f"replay the run in {run.folder} over another link"
        because = "its workers came and went"
        raise ConfigurationError(what, because=because, do="plan for its method with thinwire plan")
    method = Method.from_dict(run.config.described["method"])
    return LinkReplay(traffic=planned_traffic(run, method, shape_of(run)), steps=run.summary.steps)
