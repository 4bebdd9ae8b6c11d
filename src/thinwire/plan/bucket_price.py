"""What a run over an object store costs: bytes that leave it, and requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from thinwire.errors import ConfigurationError
from thinwire.plan.traffic import Traffic

__all__ = ["BucketPrice"]

_GB, _MILLION = 10**9, 10**6


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPrice:
    """Prices of an object store, in one currency.

    Not counted are requests for messages that are not there yet (one a second at most for each
    worker that waits), deleting, which is free, and keeping a few rounds.

    Args:
        egress_per_gb: for 10^9 bytes that workers read.
        put_per_million: for 10^6 objects written.
        get_per_million: for 10^6 objects read.

    Raises:
        ConfigurationError: a price below 0.

    >>> from thinwire import presets
    >>> from thinwire.plan.shape import Shape
    >>> from thinwire.plan.traffic import traffic
    >>> price = BucketPrice(egress_per_gb=0.09)
    >>> sent = traffic(presets.diloco(), Shape.of_size(10**9, 10), workers=2)
    >>> round(price.of_round(sent), 3), round(price.of_run(sent, 60) / price.of_round(sent), 3)
    (0.72, 2.0)
    """

    egress_per_gb: float
    put_per_million: float = 5.0
    get_per_million: float = 0.4

    def __post_init__(self) -> None:
        for name in ("egress_per_gb", "put_per_million", "get_per_million"):
            value: float = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigurationError(
                    f"plan with {name}={value:g}",
                    because="a price is finite and not below 0",
                    do="pass 0 or more",
                )

    def of_round(self, traffic: Traffic) -> float:
        """Of H inner steps of all workers."""
        return traffic.workers * self._of(
            traffic.received_per_round, traffic.puts_per_round, traffic.gets_per_round
        )

    def of_run(self, traffic: Traffic, steps: int) -> float:
        """Of a run of `steps` inner steps of all workers, with its end."""
        return traffic.workers * self._of(
            traffic.received_after(steps), traffic.puts_after(steps), traffic.gets_after(steps)
        )

    def _of(self, read_nbytes: int, puts: int, gets: int) -> float:
        requests = puts * self.put_per_million + gets * self.get_per_million
        return read_nbytes / _GB * self.egress_per_gb + requests / _MILLION
