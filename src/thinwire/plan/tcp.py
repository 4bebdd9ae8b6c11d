"""What TCP and gloo add to an exchange, which bare bits over a link do not have."""

from dataclasses import dataclass, field, replace
from typing import Final, final

from thinwire.errors import ConfigurationError
from thinwire.plan.link import Crossing, Link
from thinwire.plan.topology import Ring, Topology

__all__ = ["OverTcp"]

# IPv4, TCP and its timestamps.
_HEADER_NBYTES: Final = 20 + 20 + 12
_SEGMENTS_PER_ACKNOWLEDGEMENT: Final = 2


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class OverTcp(Topology):
    """Messages as `Distributed` sends them over gloo: in packets, once their receiver is ready.

        n' = n (packet + header / 2) / (packet - header)        the acknowledgements of what comes
                                                                share the way with what goes
        transfer(n'), a latency more in which the receiver says that it is ready, late_s

    Exchanges that wait for the link say so meanwhile, so the link is not held for it. Differs: no
    start of a stream is slow, as with congestion control that keeps its rate (BBR); with Reno or
    Cubic an exchange after a pause takes some round trips more.

    Args:
        over: who sends to whom.
        packet_nbytes: the largest packet, with headers.
        late_s: by which each answer comes later for any other reason, as measured: workers that are
            late, and the work of sending.

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
                because=f"headers take {_HEADER_NBYTES} bytes, and nothing arrives too early",
                do="pass larger packets, and 0 s or more",
            )

    @property
    def name(self) -> str:
        """That of who sends to whom."""
        return self.over.name

    def gather(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """All receivers say at the beginning that they are ready, those of later hops too."""
        return self._later(self.over.gather(self._on_wire(nbytes), workers, link), link)

    def scatter(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """As a gather."""
        return self._later(self.over.scatter(self._on_wire(nbytes), workers, link), link)

    def swap(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """As a gather."""
        return self._later(self.over.swap(self._on_wire(nbytes), workers, link), link)

    def _on_wire(self, nbytes: float) -> float:
        sent = self.packet_nbytes + _HEADER_NBYTES / _SEGMENTS_PER_ACKNOWLEDGEMENT
        return nbytes * sent / (self.packet_nbytes - _HEADER_NBYTES)

    def _later(self, crossing: Crossing, link: Link) -> Crossing:
        more_s = link.latency_s + self.late_s
        return replace(
            crossing, latency_s=crossing.latency_s + more_s, lag_s=crossing.lag_s + more_s
        )
