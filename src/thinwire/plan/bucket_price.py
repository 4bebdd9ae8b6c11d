"""What a run over an object store costs: bytes that leave it, and requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from thinwire.errors import ConfigurationError
from thinwire.plan.traffic import Traffic

_GB, _MILLION = 10**9, 10**6


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingRequests:
    """What all workers ask of a store so as to agree on who takes part in a round.

    Args:
        puts: one of each worker, which says how far it is, and the roll of all of them.
        gets: of the others' by the worker that writes the roll, and of the roll by the others.
        lists: of who else has come, by that worker.

    >>> MeetingRequests.of(4)
    MeetingRequests(puts=5, gets=6, lists=1)
    """

    puts: int
    gets: int
    lists: int

    @classmethod
    def of(cls, workers: int) -> Self:
        """Those of `workers` workers that all come in time."""
        return cls(puts=workers + 1, gets=2 * (workers - 1), lists=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPrice:
    """Prices of an object store, in one currency.

    Not counted are requests for messages that are not there yet (one a second at most for each
    worker that waits), deleting, which is free, and keeping a few rounds; nor, where workers come
    and go, snapshots.

    Args:
        egress_per_gb: for 10^9 bytes that workers read.
        put_per_million: for 10^6 objects written.
        get_per_million: for 10^6 objects read.
        elastic: workers come and go, and agree on who takes part in each round.

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
    elastic: bool = False

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
        exchanged = traffic.workers * self._of(
            traffic.received_per_round, traffic.puts_per_round, traffic.gets_per_round
        )
        return exchanged + self._of_meetings(1, traffic.workers)

    def of_run(self, traffic: Traffic, steps: int) -> float:
        """Of a run of `steps` inner steps of all workers, with its end."""
        exchanged = traffic.workers * self._of(
            traffic.received_after(steps), traffic.puts_after(steps), traffic.gets_after(steps)
        )
        return exchanged + self._of_meetings(1 + -(-steps // traffic.sync_every), traffic.workers)

    def _of_meetings(self, times: int, workers: int) -> float:
        if not self.elastic:
            return 0.0
        asked = MeetingRequests.of(workers)
        # Stores charge as much for a listing as for a put.
        return times * self._of(0, asked.puts + asked.lists, asked.gets)

    def _of(self, read_nbytes: int, puts: int, gets: int) -> float:
        requests = puts * self.put_per_million + gets * self.get_per_million
        return read_nbytes / _GB * self.egress_per_gb + requests / _MILLION
