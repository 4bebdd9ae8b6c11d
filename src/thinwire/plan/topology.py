"""Topologies: who sends what to whom, hop by hop, until everyone has what it needs."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from thinwire.errors import ConfigurationError
from thinwire.plan.link import Crossing, Link

__all__ = ["Mesh", "Once", "Ring", "Star", "Topology", "Tree"]


class Topology(ABC):
    """How messages travel between K workers whose links are alike.

    Three movements make up every exchange: a gather brings a message of each worker to all others;
    a scatter brings a message of each worker to each other one, all of them different; a swap
    exchanges the messages of two. Messages are passed on whole, and never summed on the way:
    payloads are compressed, and only their owner can decode and combine them.

    Args of its methods: bytes of one message; K >= 2; the workers' link.
    """

    @property
    def name(self) -> str:
        """For people."""
        return type(self).__name__.lower()

    @abstractmethod
    def gather(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """Until everyone has everyone's message."""

    @abstractmethod
    def scatter(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """Until everyone has the K - 1 messages that are for it."""

    @abstractmethod
    def swap(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """Until two workers have each other's message, while all other pairs do the same."""


def _hops(count: int, moving_s: float, link: Link) -> Crossing:
    """`count` hops one after the other, in which bits move for `moving_s` altogether."""
    latency_s = link.latency_s
    return Crossing(transfer_s=moving_s, latency_s=count * latency_s, lag_s=latency_s)


def _directly(nbytes: float, link: Link) -> Crossing:
    return _hops(1, link.seconds(nbytes), link)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh(Topology):
    """Everyone sends straight to everyone.

    gather, scatter: latency + (K - 1) n / rate

    >>> Mesh().gather(1000, 5, Link.of(8000, latency_s=0.5)).total_s
    4.5
    """

    def gather(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """All K - 1 copies leave one after the other; latencies pass together."""
        return _directly((workers - 1) * nbytes, link)

    def scatter(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """As a gather: only what the messages say differs."""
        return _directly((workers - 1) * nbytes, link)

    def swap(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """One message each way."""
        del workers  # other pairs have links of their own
        return _directly(nbytes, link)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Ring(Topology):
    """Everyone passes on to the right what comes from the left: what `Distributed` does over gloo.

    gather: (K - 1) (latency + n / rate). Shards have one receiver each and go to it directly, as
    swaps do.

    >>> Ring().gather(1000, 5, Link.of(8000, latency_s=0.5)).total_s
    6.0
    """

    def gather(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """K - 1 hops, in each of which everyone sends and receives one message."""
        return _hops(workers - 1, (workers - 1) * link.seconds(nbytes), link)

    def scatter(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """One message to everybody, as over a `Mesh`."""
        return Mesh().scatter(nbytes, workers, link)

    def swap(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """One message each way."""
        del workers  # other pairs have links of their own
        return _directly(nbytes, link)


@final
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

    def gather(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """In hop i everyone sends what it has, at most 2^i messages, to who is 2^i away."""
        return _hops(_depth(workers), (workers - 1) * link.seconds(nbytes), link)

    def scatter(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """In hop i a message moves on by 2^i if its receiver's distance has that bit."""
        moved = sum(distance.bit_count() for distance in range(workers))
        return _hops(_depth(workers), moved * link.seconds(nbytes), link)

    def swap(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """One message each way."""
        del workers  # other pairs have links of their own
        return _directly(nbytes, link)


def _depth(workers: int) -> int:
    return (workers - 1).bit_length()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Star(Topology):
    """Everything goes to a hub, or an object store, and from there to whom it is for.

    gather:  2 latency + max(n / up, K n / hub down) + max((K - 1) n / down, K (K - 1) n / hub up)
    scatter: the same with (K - 1) n up

    The hub passes messages on when all have come.

    Args:
        hub_up_bits_per_s: what the hub sends at; infinity is an object store.
        hub_down_bits_per_s: what it receives at.

    Raises:
        ConfigurationError: a rate that is not above 0.

    >>> Star().gather(1000, 5, Link.of(8000, latency_s=0.5)).total_s
    6.0
    """

    hub_up_bits_per_s: float = math.inf
    hub_down_bits_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (self.hub_up_bits_per_s > 0 and self.hub_down_bits_per_s > 0):
            raise ConfigurationError(
                f"plan with a hub of {self.hub_up_bits_per_s:g} bit/s up and "
                f"{self.hub_down_bits_per_s:g} bit/s down",
                because="nothing would ever arrive",
                do="pass rates above 0",
            )

    def gather(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """One message up, K - 1 down."""
        return self._through(nbytes, (workers - 1) * nbytes, workers, link)

    def scatter(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """K - 1 messages up and as many down."""
        return self._through((workers - 1) * nbytes, (workers - 1) * nbytes, workers, link)

    def swap(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """One message up and one down."""
        return self._through(nbytes, nbytes, workers, link)

    def _through(self, up: float, down: float, workers: int, link: Link) -> Crossing:
        in_s = max(link.up_s(up), 8 * workers * up / self.hub_down_bits_per_s)
        out_s = max(link.down_s(down), 8 * workers * down / self.hub_up_bits_per_s)
        return _hops(2, in_s + out_s, link)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Once(Topology):
    """One payload crosses the link once, whatever the exchange and however many workers.

    No network does that with payloads that cannot be summed on the way; papers count so.

    Source: Streaming DiLoCo (arXiv 2501.18512), Table 4; MuLoCo (arXiv 2505.23725), wall-clock.

    >>> Once().gather(1000, 5, Link.of(8000)).total_s
    1.0
    """

    def gather(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """One message."""
        del workers
        return _directly(nbytes, link)

    def scatter(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """Nothing: the gather that follows is all that is counted."""
        del nbytes, workers, link
        return Crossing()

    def swap(self, nbytes: float, workers: int, link: Link) -> Crossing:
        """One message."""
        del workers
        return _directly(nbytes, link)
