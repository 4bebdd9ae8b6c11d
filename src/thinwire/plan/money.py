"""What a run costs: workers by the hour, and what they send by the byte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.errors import ConfigurationError

if TYPE_CHECKING:
    from thinwire.plan.forecast import Forecast
    from thinwire.plan.job import Job

_HOUR_S, _DAY_S, _GB = 3600.0, 86_400.0, 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """What workers and what they send cost, in one currency.

    Args:
        currency: a code such as USD.
        worker_per_hour: of a worker with all its accelerators; None: not known.
        traffic_per_gb: of 10^9 bytes that a worker sends over its link; None: not known.

    Raises:
        ConfigurationError: a price that is negative or not finite.
    """

    currency: str
    worker_per_hour: float | None = None
    traffic_per_gb: float | None = None

    def __post_init__(self) -> None:
        for name in ("worker_per_hour", "traffic_per_gb"):
            value: float | None = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigurationError(
                    f"plan with {name}={value:g}",
                    because="a price is finite and not below 0",
                    do="pass 0 or more",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """What all workers cost together in the whole run, or in a day where its length is not known.

    Args:
        is_of_run: whether it is that of the whole run.
        hours: from beginning to end.
        worker_hours: of all workers.
        waiting_hours: of these, the time in which no inner step is computed.
        traffic_bytes: that leave all workers; a ring passes messages on, and counts each hop.
        cost: of workers, traffic and store, as far as prices are known; None: none is.
        waiting_cost: of the time in which workers wait; None: not known.
    """

    is_of_run: bool
    hours: float
    worker_hours: float
    waiting_hours: float
    traffic_bytes: float
    cost: float | None
    waiting_cost: float | None


def bill(row: Forecast, job: Job) -> Bill:
    """The bill of one method.

    cost = worker hours x price of an hour + bytes x price of a byte + what a store charges

    Args:
        row: of `forecast`.
        job: that it was forecast for.

    >>> from thinwire import presets
    >>> from thinwire.plan.compute import Compute
    >>> from thinwire.plan.forecast import forecast
    >>> from thinwire.plan.job import Job
    >>> from thinwire.plan.link import Link
    >>> from thinwire.plan.shape import Shape
    >>> job = Job(
    ...     shape=Shape.of_size(10**9, 24),
    ...     workers=2,
    ...     compute=Compute(step_s=1),
    ...     link=Link.of(1e9),
    ...     prices=Prices(currency="USD", worker_per_hour=2),
    ... )
    >>> found = bill(forecast(presets.diloco(), job), job)
    >>> found.worker_hours, round(found.waiting_hours, 1), round(found.cost)
    (48.0, 24.8, 96)
    """
    is_of_run = row.wall_s is not None
    seconds = row.wall_s if row.wall_s is not None else _DAY_S
    received = row.received_bytes if is_of_run else row.received_bytes_per_day
    hours = seconds / _HOUR_S
    computed_s = job.compute.step_s * row.steps if row.steps and is_of_run else None
    busy = row.utilisation if computed_s is None else min(1.0, computed_s / seconds)
    worker_hours = job.workers * hours
    traffic = job.workers * float(received or 0)
    store = row.cost if is_of_run else row.cost_per_day
    prices = job.prices
    hourly = None if prices is None else prices.worker_per_hour
    per_gb = None if prices is None else prices.traffic_per_gb
    parts = [
        None if hourly is None else hourly * worker_hours,
        None if per_gb is None else per_gb * traffic / _GB,
        store,
    ]
    known = [part for part in parts if part is not None]
    waiting_hours = worker_hours * (1 - busy)
    return Bill(
        is_of_run=is_of_run,
        hours=hours,
        worker_hours=worker_hours,
        waiting_hours=waiting_hours,
        traffic_bytes=traffic,
        cost=sum(known) if known else None,
        waiting_cost=None if hourly is None else hourly * waiting_hours,
    )
