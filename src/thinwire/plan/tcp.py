"""What TCP and gloo add to an exchange, which bare bits over a link do not have."""

from dataclasses import dataclass, field, replace
from typing import Final

from thinwire.errors import ConfigurationError
from thinwire.plan.link import Link, TransferTime
from thinwire.plan.topology import Ring, Topology

# IPv4, TCP and its timestamps.
_HEADER_NBYTES: Final = 20 + 20 + 12
_SEGMENTS_PER_ACKNOWLEDGEMENT: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class OverTcp(Topology):
    """Messages as `Distributed` sends them over gloo: in packets, once their receiver is ready.

        n' = n (packet + header / 2) / (packet - header)    acknowledgements share the way
        seconds = transfer(n') + latency + late_s           the receiver says that it is ready

    An exchange that waits for the link has its receiver say so meanwhile, so the link is not held
    for that. Differs: streams start at full rate, as with congestion control that keeps its rate
    (BBR); with Reno or Cubic an exchange after a pause takes some round trips more.

    Args:
        over: which worker sends to which.
        packet_nbytes: the largest packet, with headers.
        late_s: by which each answer comes later for any other reason, as measured: late workers,
            the work of sending.

    Raises:
        ConfigurationError: packets without room for data, or a negative time.

    >>> OverTcp(late_s=0.1).gather(1448, 2, Link.of(8 * 1526, latency_s=0.5)).total_s
    2.1
    """

    over: Topology = field(default_factory=Ring)
    packet_nbytes: int = 1500
    late_s: float = 0.0

    def __post_init__(self) -> None:
        if self.packet_nbytes <= _HEADER_NBYTES or not self.late_s >= 0:
            raise ConfigurationError(
                f"plan with packets of {self.packet_nbytes} bytes and answers that are "
                f"{self.late_s:g} s late",
                because=f"headers take {_HEADER_NBYTES} bytes, and a delay is not negative",
                do=f"pass packet_nbytes above {_HEADER_NBYTES} and late_s >= 0",
            )

    @property
    def name(self) -> str:
        """The name of the topology beneath."""
        return self.over.name

    def gather(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """Receivers of later hops, too, say at the beginning that they are ready."""
        return self._later(self.over.gather(self._on_wire(nbytes), workers, link), link)

    def scatter(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """A shard to each of the others, with the same delays as a gather."""
        return self._later(self.over.scatter(self._on_wire(nbytes), workers, link), link)

    def _on_wire(self, nbytes: float) -> float:
        sent = self.packet_nbytes + _HEADER_NBYTES / _SEGMENTS_PER_ACKNOWLEDGEMENT
        return nbytes * sent / (self.packet_nbytes - _HEADER_NBYTES)

    def _later(self, bare: TransferTime, link: Link) -> TransferTime:
        more_s = link.latency_s + self.late_s
        return replace(bare, latency_s=bare.latency_s + more_s, lag_s=bare.lag_s + more_s)
