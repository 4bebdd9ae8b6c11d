"""A scenario: what a method sends, how fast its workers compute, and what joins them."""

from dataclasses import dataclass, field, replace
from typing import Final

from thinwire.errors import ConfigurationError
from thinwire.plan.compute import Coding, Compute
from thinwire.plan.link import Link, TransferTime
from thinwire.plan.topology import Ring, Topology
from thinwire.plan.traffic import MessageSpec, Traffic

_EXCHANGES: Final = ("gather", "reduce_scatter", "pairs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Everything that a simulation depends on, besides its length.

    Args:
        traffic: what a method sends, when and among how many.
        compute: an inner step of every worker.
        link: of every worker.
        topology: which worker sends to which.
        coding: what encoding and decoding take.

    Raises:
        ConfigurationError: nothing is sent, or by an exchange that is not known, or a size, a
            number of workers or a tau that cannot be.

    >>> from thinwire import presets
    >>> from thinwire.plan.shape import Shape
    >>> from thinwire.plan.traffic import traffic
    >>> sent = traffic(presets.diloco(), Shape.of_size(1000, 2), workers=2)
    >>> link = Link.of(8 * sent.sent_per_round, latency_s=0.5)
    >>> Scenario(traffic=sent, compute=Compute(step_s=1), link=link).transfer_time(0).total_s
    1.5
    """

    traffic: Traffic
    compute: Compute
    link: Link
    topology: Topology = field(default_factory=Ring)
    coding: Coding = field(default_factory=Coding)

    def __post_init__(self) -> None:
        traffic = self.traffic
        if min(len(traffic.messages), traffic.workers, traffic.sync_every) < 1 or traffic.tau < 0:
            raise ConfigurationError(
                f"plan for {traffic.workers} workers with {len(traffic.messages)} messages every "
                f"{traffic.sync_every} steps and tau={traffic.tau}",
                because="there must be at least one of each, and tau cannot be negative",
                do="pass 1 or more, and tau >= 0",
            )
        for message in traffic.messages:
            _check_message(message)

    def transfer_time(self, index: int) -> TransferTime:
        """How long the exchange of message `index` takes."""
        message, workers = self.traffic.messages[index], self.traffic.workers
        if workers == 1:
            return TransferTime()
        taken = self._exchange(message, workers)
        if message.vote_nbytes:
            taken = taken.then(self.topology.gather(message.vote_nbytes, workers, self.link))
        return taken

    def _exchange(self, message: MessageSpec, workers: int) -> TransferTime:
        gather = self.topology.gather
        if message.exchange == "gather":
            return gather(message.payload_nbytes, workers, self.link)
        if message.exchange == "pairs":
            # Every pair has links of its own. Of an odd number all wait as long as those in pairs.
            return gather(message.payload_nbytes, 2, self.link)
        scattered = self.topology.scatter(message.payload_nbytes / workers, workers, self.link)
        gathered = gather(message.result_nbytes, workers, self.link)
        shard = message.parameters / workers
        between_s = self.coding.decode_s(shard, workers) + self.coding.encode_s(shard)
        return scattered.then(gathered, coding_s=between_s)

    def encode_s(self, index: int) -> float:
        """Seconds in which a worker encodes message `index` before it is sent."""
        return self.coding.encode_s(self.traffic.messages[index].parameters)

    def decode_s(self, index: int) -> float:
        """Seconds in which it decodes the answer and takes the outer step."""
        message, workers = self.traffic.messages[index], self.traffic.workers
        payloads = {"gather": workers, "pairs": min(2, workers), "reduce_scatter": 1}
        decode_s = self.coding.decode_s(message.parameters, payloads[message.exchange])
        return decode_s + self.coding.outer_s(message.parameters)

    def at_rate(self, bits_per_s: float) -> "Scenario":
        """The same scenario over a link of that rate, up and down."""
        return replace(self, link=Link.of(bits_per_s, latency_s=self.link.latency_s))


def _check_message(message: MessageSpec) -> None:
    if message.exchange not in _EXCHANGES:
        raise ConfigurationError(
            f"plan for an exchange called {message.exchange!r}",
            because=f"it is one of {', '.join(_EXCHANGES)}",
            do="take the messages from thinwire.plan.traffic",
        )
    sizes = message.payload_nbytes, message.result_nbytes, message.vote_nbytes
    if min(*sizes, message.parameters) < 0:
        raise ConfigurationError(
            f"plan for a message of {message.payload_nbytes:g} bytes and {message.parameters} "
            "parameters",
            because="sizes are 0 or more",
            do="take the messages from thinwire.plan.traffic",
        )
