"""Topologies: which worker sends what to which, hop by hop."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from thinwire.plan.link import Link, TransferTime


class Topology(ABC):
    """How messages travel between K workers whose links are alike.

    Two movements make up every exchange: a gather brings a message of each worker to all others; a
    scatter brings a message of each worker to each other one, all of them different. Messages are
    passed on whole, and never summed on the way: payloads are compressed, and only their owner can
    decode and combine them.

    Args of its methods: bytes of one message; K >= 2; the workers' link.
    """

    @property
    def name(self) -> str:
        """The name on the command line."""
        return type(self).__name__.lower()

    @abstractmethod
    def gather(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """Until every worker has the messages of all."""

    @abstractmethod
    def scatter(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """Until every worker has the K - 1 messages that are for it."""


def _hops(count: int, moving_s: float, link: Link) -> TransferTime:
    """`count` hops one after the other, in which bits move for `moving_s` altogether."""
    latency_s = link.latency_s
    return TransferTime(transfer_s=moving_s, latency_s=count * latency_s, lag_s=latency_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh(Topology):
    """Every worker sends straight to every other one.

    gather, scatter: latency + (K - 1) n / rate

    >>> Mesh().gather(1000, 5, Link.of(8000, latency_s=0.5)).total_s
    4.5
    """

    def gather(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """All K - 1 copies leave one after the other; latencies pass together."""
        return _hops(1, link.seconds((workers - 1) * nbytes), link)

    def scatter(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """A shard to each of the others: takes as long as a gather of messages of that size."""
        return self.gather(nbytes, workers, link)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring(Topology):
    """Every worker passes on what comes from its neighbour: what `Distributed` does over gloo.

    gather:  (K - 1) (latency + n / rate)
    scatter: latency + (K - 1) n / rate: shards have one receiver each and go to it directly

    >>> Ring().gather(1000, 5, Link.of(8000, latency_s=0.5)).total_s
    6.0
    """

    def gather(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """K - 1 hops, in each of which every worker sends and receives one message."""
        return _hops(workers - 1, (workers - 1) * link.seconds(nbytes), link)

    def scatter(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """Each shard goes to its owner directly, as over a `Mesh`."""
        return Mesh().scatter(nbytes, workers, link)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree(Topology):
    """Every message goes down a binomial tree of its own: ceil(log2 K) hops instead of K - 1.

    gather:  ceil(log2 K) latency + (K - 1) n / rate
    scatter: ceil(log2 K) latency + sum_(j < K) popcount(j) n / rate: hop i carries all messages
             whose receiver's distance has bit i, so latency is bought with bytes

    Source: J. Bruck et al., Efficient algorithms for all-to-all communications (1997).

    >>> Tree().gather(1000, 5, Link.of(8000, latency_s=0.5)).total_s
    5.5
    """

    def gather(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """In hop i every worker sends what it has, at most 2^i messages, to the one 2^i away."""
        return _hops((workers - 1).bit_length(), (workers - 1) * link.seconds(nbytes), link)

    def scatter(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """In hop i a message moves on by 2^i if its receiver's distance has that bit."""
        moved = sum(distance.bit_count() for distance in range(workers))
        return _hops((workers - 1).bit_length(), moved * link.seconds(nbytes), link)


@dataclass(frozen=True, kw_only=True, slots=True)
class Star(Topology):
    """Everything goes through a hub that is never the bottleneck, such as an object store.

    gather:  2 latency + n / up + (K - 1) n / down
    scatter: 2 latency + (K - 1) n / up + (K - 1) n / down

    The hub passes messages on when all have come.

    >>> Star().gather(1000, 5, Link.of(8000, latency_s=0.5)).total_s
    6.0
    """

    def gather(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """One message up, K - 1 down."""
        return _hops(2, link.up_s(nbytes) + link.down_s((workers - 1) * nbytes), link)

    def scatter(self, nbytes: float, workers: int, link: Link) -> TransferTime:
        """K - 1 messages up and as many down."""
        nbytes *= workers - 1
        return _hops(2, link.up_s(nbytes) + link.down_s(nbytes), link)


TOPOLOGIES: Final[Mapping[str, Topology]] = {
    topology.name: topology for topology in (Ring(), Tree(), Star(), Mesh())
}
"""Topologies by name; the first is what `tw.transport.Distributed` does over gloo."""
