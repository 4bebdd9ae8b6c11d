"""A link between workers, and how long an exchange over it takes."""

import math
from dataclasses import dataclass

from thinwire.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What joins every worker to all others: full duplex, and the same for every worker.

    Args:
        up_bits_per_s: what a worker sends at; infinity is allowed.
        down_bits_per_s: what it receives at.
        latency_s: from the last bit's departure to its arrival, one way.

    Raises:
        ConfigurationError: a rate that is not above 0, or a latency that is negative or infinite.

    >>> Link.of(10e9, latency_s=0.05).seconds(1_250_000_000)
    1.0
    """

    up_bits_per_s: float
    down_bits_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for way, rate in (("up", self.up_bits_per_s), ("down", self.down_bits_per_s)):
            if not rate > 0:
                raise ConfigurationError(
                    f"plan with a link of {rate:g} bit/s {way}",
                    because="nothing would ever arrive",
                    do="pass a rate above 0",
                )
        if not 0 <= self.latency_s < math.inf:
            raise ConfigurationError(
                f"plan with a latency of {self.latency_s:g} s",
                because="it must be finite and cannot be negative",
                do="pass a latency of 0 s or more",
            )

    @classmethod
    def of(cls, bits_per_s: float, *, latency_s: float = 0.0) -> "Link":
        """A link of one rate both ways."""
        return cls(up_bits_per_s=bits_per_s, down_bits_per_s=bits_per_s, latency_s=latency_s)

    def seconds(self, nbytes: float) -> float:
        """Seconds to move `nbytes` from one worker to another, without latency."""
        return 8 * nbytes / min(self.up_bits_per_s, self.down_bits_per_s)

    def up_s(self, nbytes: float) -> float:
        """Seconds to send `nbytes`."""
        return 8 * nbytes / self.up_bits_per_s

    def down_s(self, nbytes: float) -> float:
        """Seconds to receive `nbytes`."""
        return 8 * nbytes / self.down_bits_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferTime:
    """How long one exchange takes, from when all workers are ready for it.

    The link is held for `held_s`; the answer is there `lag_s` after that. So the last hop's latency
    does not keep the next exchange waiting, as those of the hops before do.

    Args:
        transfer_s: in which bits move.
        latency_s: of all hops, one after the other.
        lag_s: latency of the last hop.
        coding_s: in which messages are decoded and encoded between the halves of a reduction.

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

    def then(self, later: "TransferTime", *, coding_s: float = 0.0) -> "TransferTime":
        """This one, something done in between, and `later`."""
        return TransferTime(
            transfer_s=self.transfer_s + later.transfer_s,
            latency_s=self.latency_s + later.latency_s,
            lag_s=later.lag_s,
            coding_s=self.coding_s + later.coding_s + coding_s,
        )
