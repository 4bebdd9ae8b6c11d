"""What the page needs to play a run over a link that its reader chooses, by the planner's model.

What an exchange takes is linear in the two numbers of a link:

    transfer_s = 8 moved / rate        latency_s = hops latency        lag_s = last latency

and the planner itself says what `moved`, `hops` and `last` are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from thinwire.errors import ConfigurationError
from thinwire.experiments.records import Finished
from thinwire.plan.compute import Compute
from thinwire.plan.described import method_of
from thinwire.plan.link import Link
from thinwire.plan.resolve import resolve
from thinwire.plan.scenario import Scenario
from thinwire.plan.shape import Shape
from thinwire.plan.topology import Mesh, Ring, Star, Topology, Tree
from thinwire.plan.traffic import Traffic, traffic

__all__ = ["TOPOLOGIES", "Shapes", "Voyage", "voyage_of"]

TOPOLOGIES: Final[Mapping[str, Topology]] = {
    "ring": Ring(),
    "tree": Tree(),
    "star": Star(),
    "mesh": Mesh(),
}
"""Among which the reader chooses; the first is what `tw.transport.Distributed` does over gloo."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Voyage:
    """A run's exchanges.

    Args:
        freight: what is sent when.
        steps: inner steps.
    """

    freight: Traffic
    steps: int

    def describe(self) -> dict[str, Any]:
        """What `simulate` of link.js takes: plain data."""
        messages = [
            {
                "offset": message.offset,
                "first": message.first,
                "crossing": {
                    name: crossing_of(self.freight, index, topology)
                    for name, topology in TOPOLOGIES.items()
                },
            }
            for index, message in enumerate(self.freight.messages)
        ]
        return {
            "steps": self.steps,
            "every": self.freight.sync_every,
            "tau": self.freight.tau,
            "messages": messages,
        }


def crossing_of(freight: Traffic, index: int, topology: Topology) -> list[float]:
    """`moved`, `hops` and `last` of the exchange of a message.

    Args:
        freight: among how many, and what.
        index: of the message.
        topology: over which.
    """
    scenario = Scenario(
        freight=freight,
        compute=Compute(step_s=1),
        link=Link.of(8.0, latency_s=1.0),
        topology=topology,
    )
    crossing = scenario.crossing(index, share=1, workers=freight.workers)
    return [crossing.transfer_s, crossing.latency_s, crossing.lag_s]


@final
class Shapes:
    """Shapes of models: each is resolved once, for that takes a second."""

    def __init__(self) -> None:
        self._known: dict[str, Shape] = {}

    def of(self, run: Finished) -> Shape:
        """The shape of the model of `run`.

        Raises:
            ConfigurationError: nothing that is here says what it was.
        """
        source = _source(run)
        if source not in self._known:
            self._known[source] = resolve(source)
        return self._known[source]


def _source(run: Finished) -> str:
    """What the model was: its size if that says it all, else what the run saved."""
    size, saved = str(run.config["model"].get("size")), run.folder / "model"
    byte_level = run.config["data"].get("tokenizer") == "bytes"
    return str(saved) if (saved / "config.json").is_file() and not byte_level else size


def voyage_of(run: Finished, shapes: Shapes) -> Voyage:
    """The exchanges of `run`, if they come to the bytes that it counted.

    Args:
        run: whose.
        shapes: of models.

    Raises:
        ConfigurationError: the planner cannot say what it sent.
    """
    if run.is_elastic:
        raise _unknown(run.folder, "its workers came and went")
    if run.config["machine"].get("worker_size", 1) != 1:
        raise _unknown(run.folder, "its workers have several ranks each")
    method, shape = method_of(run.config["method"]), shapes.of(run)
    freight = traffic(method, shape, workers=run.config["workers"])
    steps = int(run.summary["steps"])
    planned = freight.sent_after(steps), freight.received_after(steps)
    counted = tuple(run.summary[f"{way}_bytes_per_worker"] for way in ("sent", "received"))
    if planned != counted:
        raise _unknown(
            run.folder,
            f"it counted {counted[0]} bytes sent and {counted[1]} received, and the planner "
            f"makes that {planned[0]} and {planned[1]}",
        )
    return Voyage(freight=freight, steps=steps)


def _unknown(folder: Path, because: str) -> ConfigurationError:
    return ConfigurationError(
        f"play the run in {folder} over another link",
        because=because,
        do="plan for its method with thinwire plan",
    )
