"""The network of a plan: a link per worker, a topology, and the duration of an exchange."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from thinwire.errors import check

# Headers of IPv4 and of TCP with timestamps; one acknowledgement for every two packets.
_PACKET_NBYTES, _HEADER_NBYTES = 1500, 20 + 20 + 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The link of each worker to all others: full duplex, equal for all workers.

    Args:
        up_bits_per_s: rate at which a worker sends; infinity is allowed.
        down_bits_per_s: rate at which it receives.
        latency_s: one-way time from the departure of the last bit to its arrival.

    Raises:
        ConfigurationError: a rate that is not above 0, or a latency that is negative or infinite.

    >>> Link.of(10e9, latency_s=0.05).seconds(1_250_000_000)
    1.0
    """

    up_bits_per_s: float
    down_bits_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        is_rated = self.up_bits_per_s > 0 and self.down_bits_per_s > 0
        because = "a rate is above 0, and a latency finite and not negative"
        do = "pass such a link"
        check(is_rated and 0 <= self.latency_s < math.inf, f"use {self}", because=because, do=do)

    @classmethod
    def of(cls, bits_per_s: float, *, latency_s: float = 0.0) -> "Link":
        """A link with the same rate both ways."""
        return cls(up_bits_per_s=bits_per_s, down_bits_per_s=bits_per_s, latency_s=latency_s)

    def seconds(self, nbytes: float) -> float:
        """Seconds to move `nbytes` from one worker to another, without latency."""
        return 8 * nbytes / min(self.up_bits_per_s, self.down_bits_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferTime:
    """Seconds of one exchange, from the time at which all workers are ready.

    An exchange holds the link for `held_s`, and the answer arrives `lag_s` later: the latency of
    the last hop does not delay the next exchange, unlike those of earlier hops.

    Args:
        transfer_s: time in which bits are sent.
        latency_s: sum over all hops.
        lag_s: latency of the last hop.
        coding_s: time to decode and encode messages between the halves of a reduction.

    >>> TransferTime(transfer_s=2, latency_s=3, lag_s=1).held_s
    4.0
    """

    transfer_s: float = 0.0
    latency_s: float = 0.0
    lag_s: float = 0.0
    coding_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds from the start to the answer."""
        return self.transfer_s + self.latency_s + self.coding_s

    @property
    def held_s(self) -> float:
        """Seconds in which no other exchange can use the link."""
        return self.transfer_s + (self.latency_s - self.lag_s) + self.coding_s


class Topology(ABC):
    """Paths of messages between K workers with equal links.

    Two movements make up every exchange: a gather brings one message of each worker to all others;
    a scatter brings a different message of each worker to every other. Messages are passed on
    whole, and never summed on the way: payloads are compressed, and only their owner can decode and
    combine them.

    All methods take the bytes of one message, K >= 2, and the workers' link.
    """

    name: str
    """The name on the command line."""

    @abstractmethod
    def gather(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """Time until every worker has the messages of all."""

    @abstractmethod
    def scatter(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """Time until every worker has the K - 1 messages addressed to it."""


def hops(count: int, moving_s: float, link: Link) -> TransferTime:
    """`count` hops in sequence, which send bits for `moving_s` in total."""
    latency_s = link.latency_s
    return TransferTime(transfer_s=moving_s, latency_s=count * latency_s, lag_s=latency_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring(Topology):
    """Every worker forwards what it receives from its neighbour, as `Distributed` does over gloo.

    gather:  (K - 1) (latency + n / rate)
    scatter: latency + (K - 1) n / rate: shards have one receiver each and go to it directly

    >>> Ring().gather(1000, 5, Link.of(8000, latency_s=0.5)).total_s
    6.0
    """

    name = "ring"

    def gather(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """K - 1 hops, in each of which every worker sends and receives one message."""
        return hops(workers - 1, (workers - 1) * link.seconds(nbytes), link)

    def scatter(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """All K - 1 shards leave one after the other; their latencies overlap."""
        return hops(1, link.seconds((workers - 1) * nbytes), link)


@dataclass(frozen=True, kw_only=True, slots=True)
class Star(Topology):
    """Everything goes through a hub that is never the bottleneck, such as an object store.

    gather:  2 latency + n / up + (K - 1) n / down
    scatter: 2 latency + (K - 1) n / up + (K - 1) n / down

    The hub passes messages on when all have come.

    >>> Star().gather(1000, 5, Link.of(8000, latency_s=0.5)).total_s
    6.0
    """

    name = "star"

    def gather(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """One message up, K - 1 down."""
        return self.through(nbytes, (workers - 1) * nbytes, link)

    def scatter(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """K - 1 messages up and K - 1 down."""
        return self.through((workers - 1) * nbytes, (workers - 1) * nbytes, link)

    def through(self, up_nbytes: float, down_nbytes: float, link: Link) -> TransferTime:
        """Time for a worker's bytes up to the hub, then for bytes down from it."""
        moving_s = 8 * up_nbytes / link.up_bits_per_s + 8 * down_nbytes / link.down_bits_per_s
        return hops(2, moving_s, link)


TOPOLOGIES: Final[Mapping[str, Topology]] = {"ring": Ring(), "star": Star()}
"""Topologies by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverTcp(Ring):
    """A ring of TCP packets, sent once their receiver is ready, as gloo sends them.

        n' = n (packet + header / 2) / (packet - header)    acknowledgements share the link
        seconds = transfer(n') + latency + late_s           the receiver reports ready

    While an exchange waits for the link, its receivers report ready, so reporting does not hold the
    link. Differs: streams start at full rate, as with congestion control that keeps its rate (BBR);
    with Reno or Cubic an exchange after a pause takes some more round trips.

    Args:
        late_s: measured delay of each answer for any other reason, such as late workers or the work
            of sending.

    >>> OverTcp(late_s=0.1).gather(1448, 2, Link.of(8 * 1526, latency_s=0.5)).total_s
    2.1
    """

    late_s: float = 0.0

    def gather(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """Receivers of all hops report ready at the beginning."""
        return self._later(Ring.gather(self, _on_wire(nbytes), workers, link), link)

    def scatter(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """A shard to each of the others, with the same delays as a gather."""
        return self._later(Ring.scatter(self, _on_wire(nbytes), workers, link), link)

    def _later(self, bare: TransferTime, link: Link) -> TransferTime:
        more_s = link.latency_s + self.late_s
        return replace(bare, latency_s=bare.latency_s + more_s, lag_s=bare.lag_s + more_s)


def _on_wire(nbytes: float) -> float:
    return nbytes * (_PACKET_NBYTES + _HEADER_NBYTES / 2) / (_PACKET_NBYTES - _HEADER_NBYTES)
