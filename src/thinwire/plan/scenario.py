"""A scenario: a method's freight, the workers that carry it, and what joins them."""

from dataclasses import dataclass, field, replace
from typing import final

from thinwire.errors import ConfigurationError
from thinwire.plan.compute import Coding, Compute
from thinwire.plan.engine import Engine, Piece, StepWise
from thinwire.plan.freight import Freight, Parcel
from thinwire.plan.link import NOTHING, Crossing, Link
from thinwire.plan.pace import Pace, Steady
from thinwire.plan.patience import Everyone, Patience
from thinwire.plan.presence import Always, Presence
from thinwire.plan.topology import Ring, Topology

__all__ = ["Scenario"]

_EXCHANGES = ("gather", "reduce_scatter", "pairs")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Everything that a simulation depends on, besides its length and seed.

    Args:
        freight: what a method sends, when and among how many: a `thinwire.plan.traffic.Traffic`.
        compute: an inner step of a worker of normal speed.
        link: of every worker.
        topology: who sends to whom.
        engine: where in a step something is sent, and where its answer is needed.
        coding: what encoding and decoding take.
        pace: how workers and steps differ from normal.
        presence: who takes part in which round.
        patience: for how many workers an exchange waits.

    Raises:
        ConfigurationError: there is nothing to be sent, or in a way that is not known, or a number
            of workers or of speeds that does not fit.

    >>> from thinwire.fragments import Whole
    >>> from thinwire.plan.ideal import ideal_freight
    >>> freight = ideal_freight(Whole(), parameters=8, layers=2, bits=16, sync_every=3)
    >>> scenario = Scenario(freight=freight, compute=Compute(step_s=1), link=Link.of(64))
    >>> scenario.crossing(0, share=1, workers=2).total_s
    2.0
    """

    freight: Freight
    compute: Compute
    link: Link
    topology: Topology = field(default_factory=Ring)
    engine: Engine = field(default_factory=StepWise)
    coding: Coding = field(default_factory=Coding)
    pace: Pace = field(default_factory=Steady)
    presence: Presence = field(default_factory=Always)
    patience: Patience = field(default_factory=Everyone)

    def __post_init__(self) -> None:
        freight = self.freight
        if min(len(freight.messages), freight.workers, freight.sync_every) < 1 or freight.tau < 0:
            raise ConfigurationError(
                f"plan for {freight.workers} workers with {len(freight.messages)} messages every "
                f"{freight.sync_every} steps and tau={freight.tau}",
                because="there is at least one of each, and an answer comes after its question",
                do="pass 1 or more, and tau of 0 or more",
            )
        for message in freight.messages:
            _check_message(message)
        self.pace.constant(freight.workers)

    @property
    def layers(self) -> int:
        """L: layers of the model, as far as any message has one."""
        known = (layer for message in self.freight.messages for layer in message.layers)
        return 1 + max((layer for layer in known if layer is not None), default=0)

    def pieces(self) -> list[tuple[Piece, ...]]:
        """What each message is cut into."""
        share = self.compute.forward_share
        return [
            self.engine.pieces(index, message, layers=self.layers, forward_share=share)
            for index, message in enumerate(self.freight.messages)
        ]

    def crossing(self, index: int, *, share: float, workers: int) -> Crossing:
        """What the exchange of a `share` of message `index` takes among `workers` of them."""
        message = self.freight.messages[index]
        if workers == 1:
            return NOTHING
        crossing = self._exchange(message, share, workers)
        if message.vote_nbytes:
            crossing = crossing.then(self.topology.gather(message.vote_nbytes, workers, self.link))
        return crossing

    def _exchange(self, message: Parcel, share: float, workers: int) -> Crossing:
        payload_nbytes, link = share * message.payload_nbytes, self.link
        if message.exchange == "gather":
            return self.topology.gather(payload_nbytes, workers, link)
        if message.exchange == "pairs":
            return self.topology.swap(payload_nbytes, workers, link)
        # Sized for K of the freight; whoever is left makes shards of K' that are as much larger.
        result_nbytes = share * message.result_nbytes * self.freight.workers / workers
        scattered = self.topology.scatter(payload_nbytes / workers, workers, link)
        gathered = self.topology.gather(result_nbytes, workers, link)
        shard = share * message.parameters / workers
        between_s = self.coding.decode_s(shard, workers) + self.coding.encode_s(shard)
        return scattered.then(gathered, coding_s=between_s)

    def encode_s(self, index: int, *, share: float) -> float:
        """For which a worker encodes a `share` of message `index` before it is sent."""
        return self.coding.encode_s(share * self.freight.messages[index].parameters)

    def decode_s(self, index: int, *, share: float, workers: int) -> float:
        """For which it decodes the answer, and takes the outer step."""
        message = self.freight.messages[index]
        parameters = share * message.parameters
        payloads = {"gather": workers, "pairs": min(2, workers), "reduce_scatter": 1}
        decode_s = self.coding.decode_s(parameters, payloads[message.exchange])
        return decode_s + self.coding.outer_s(parameters)

    def at_rate(self, bits_per_s: float) -> "Scenario":
        """The same over a link of that rate, up and down."""
        link = Link.of(bits_per_s, latency_s=self.link.latency_s)
        return replace(self, link=link)


def _check_message(message: Parcel) -> None:
    if message.exchange not in _EXCHANGES:
        raise ConfigurationError(
            f"plan for an exchange called {message.exchange!r}",
            because=f"it is one of {', '.join(_EXCHANGES)}",
            do="take the messages from thinwire.plan.traffic",
        )
    sizes = message.payload_nbytes, message.result_nbytes, message.vote_nbytes
    if min(*sizes, message.parameters) < 0 or not message.layers:
        raise ConfigurationError(
            f"plan for a message of {message.payload_nbytes:g} bytes, {message.parameters} "
            f"parameters and {len(message.layers)} layers",
            because="sizes are 0 or more, and what is sent belongs to some layer",
            do="take the messages from thinwire.plan.traffic",
        )
