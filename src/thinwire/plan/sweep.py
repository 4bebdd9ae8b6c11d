"""A sweep: how busy every method keeps the workers when one quantity of a job changes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from thinwire.errors import ConfigurationError, unknown_name
from thinwire.method import Method
from thinwire.plan.compute import Compute
from thinwire.plan.forecast import Forecast, Row
from thinwire.plan.job import Job
from thinwire.plan.link import Link
from thinwire.plan.required import steady_utilisation
from thinwire.plan.traffic import Traffic
from thinwire.plan.units import duration_text, rate_text

_POINTS: Final = 100
_TEXTS: Final[Mapping[str, Callable[[float], str]]] = {
    "bit/s": rate_text,
    "s": duration_text,
    "": lambda value: str(round(value)),
}


class Quantity(ABC):
    """One property of a job that a sweep changes, in a unit of its own."""

    label: str
    """What it is, in words."""
    unit: str
    """What its values count: bit/s, s or nothing."""

    def text(self, value: float) -> str:
        """A value as it is shown."""
        return _TEXTS[self.unit](value)

    def ticks(self, values: Sequence[float]) -> list[float]:
        """Ticks of an axis from the first to the last of `values`: powers of ten."""
        first, last = math.log10(values[0]), math.log10(values[-1])
        return [10.0**power for power in range(math.ceil(first), math.floor(last) + 1)]

    @abstractmethod
    def here(self, job: Job) -> float | None:
        """The axis' value in `job`; None if the job has no single one."""

    @abstractmethod
    def at(self, job: Job, value: float) -> Job:
        """`job` with another value of it."""

    @abstractmethod
    def values(self, job: Job, rows: Sequence[Row]) -> list[float]:
        """Values to simulate, rising; the value in `job` is one of them."""


class Bandwidth(Quantity):
    """Rate of every worker's link, up and down."""

    label, unit = "bandwidth up and down", "bit/s"

    def here(self, job: Job) -> float | None:
        """The rate, if it is the same both ways."""
        link = job.link
        return link.up_bits_per_s if link.up_bits_per_s == link.down_bits_per_s else None

    def at(self, job: Job, value: float) -> Job:
        """A link of another rate and the same latency."""
        return replace(job, link=Link.of(value, latency_s=job.link.latency_s))

    def values(self, job: Job, rows: Sequence[Row]) -> list[float]:
        """From where the first method is half busy to where the last one is busy enough."""
        link = job.link
        rates = [min(link.up_bits_per_s, link.down_bits_per_s)]
        for row in rows:
            if isinstance(row, Forecast):
                half, busy = row.required_bits_per_s[0.5], row.target_bits_per_s
                rates += [rate for rate in (half / 5, busy * 1.5) if 0 < rate < math.inf]
        return _spread(min(rates) / 2, max(rates) * 2, self.here(job))


class Latency(Quantity):
    """Latency one way."""

    label, unit = "latency one way", "s"

    def here(self, job: Job) -> float | None:
        """The latency of `job`; None for 0, which a logarithmic axis does not have."""
        return job.link.latency_s or None

    def at(self, job: Job, value: float) -> Job:
        """A link of the same rates and another latency."""
        return replace(job, link=replace(job.link, latency_s=value))

    def values(self, job: Job, rows: Sequence[Row]) -> list[float]:
        """0.1 ms to 10 s."""
        del rows
        here = self.here(job) or 1e-2
        return _spread(min(1e-4, here / 10), max(10.0, here * 10), self.here(job))


class StepTime(Quantity):
    """Seconds of an inner step, around those of the job."""

    label, unit = "time of an inner step", "s"

    def here(self, job: Job) -> float | None:
        """The step time of the job."""
        return job.compute.step_s

    def at(self, job: Job, value: float) -> Job:
        """Steps of another length."""
        return replace(job, compute=Compute(step_s=value))

    def values(self, job: Job, rows: Sequence[Row]) -> list[float]:
        """A hundredth of it to a hundred times it."""
        del rows
        step_s = job.compute.step_s
        return _spread(step_s / 100, step_s * 100, step_s)


class Workers(Quantity):
    """How many workers there are."""

    label, unit = "workers", ""

    def ticks(self, values: Sequence[float]) -> list[float]:
        """Powers of two."""
        return [float(2**power) for power in range(1, math.floor(math.log2(values[-1])) + 1)]

    def here(self, job: Job) -> float | None:
        """K of the job."""
        return job.workers

    def at(self, job: Job, value: float) -> Job:
        """More or fewer of the same workers."""
        return replace(job, workers=round(value))

    def values(self, job: Job, rows: Sequence[Row]) -> list[float]:
        """Powers of two up to 1024, and K."""
        del rows
        powers = range(1, max(10, job.workers.bit_length()) + 1)
        return sorted({*(2.0**power for power in powers), float(job.workers)})


class SyncEvery(Quantity):
    """H of all methods that have rounds."""

    label, unit = "inner steps in a round (H)", ""

    def here(self, job: Job) -> float | None:
        """H, if one was given for all methods."""
        return job.sync_every

    def at(self, job: Job, value: float) -> Job:
        """Rounds of another length."""
        return replace(job, sync_every=round(value))

    def values(self, job: Job, rows: Sequence[Row]) -> list[float]:
        """1 to 1000 in steps that are about even on a logarithmic axis, and H."""
        del rows
        each = {10.0**power * digit for power in range(3) for digit in (1, 1.5, 2, 3, 4, 5, 7)}
        wanted = {value for value in each if value == round(value)} | {1000.0}
        return sorted(wanted | ({float(job.sync_every)} if job.sync_every else set[float]()))


QUANTITIES: Final[Mapping[str, Quantity]] = {
    "bandwidth": Bandwidth(),
    "latency": Latency(),
    "workers": Workers(),
    "step-time": StepTime(),
    "sync-every": SyncEvery(),
}
"""Quantities that can be swept, by the name of their flag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepCurve:
    """A method's utilisation.

    Args:
        method: name.
        utilisation: at each value; None where the method does not fit.
    """

    method: str
    utilisation: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The curves of all methods over one quantity.

    Args:
        name: of the quantity.
        quantity: that was changed.
        values: rising.
        curves: one for each method.
    """

    name: str
    quantity: Quantity
    values: tuple[float, ...]
    curves: tuple[SweepCurve, ...]


def sweep(name: str, methods: Sequence[Method], job: Job, rows: Sequence[Row]) -> Sweep:
    """The utilisation of every method at all values of a quantity.

    Args:
        name: one of `QUANTITIES`.
        methods: to be compared.
        job: in which only that quantity is changed.
        rows: `forecasts` of these methods and this job.

    Raises:
        ConfigurationError: there is no such quantity.
    """
    if name not in QUANTITIES:
        raise unknown_name(f"sweep {name!r}", name, QUANTITIES)
    quantity = QUANTITIES[name]
    values = quantity.values(job, rows)
    jobs = [quantity.at(job, value) for value in values]
    known: list[tuple[Method, SweepCurve]] = []
    for method in methods:
        same = next((curve for other, curve in known if _travel_alike(method, other)), None)
        found = _curve(method, jobs) if same is None else same.utilisation
        known.append((method, SweepCurve(method=method.name, utilisation=found)))
    return Sweep(
        name=name,
        quantity=quantity,
        values=tuple(values),
        curves=tuple(curve for _, curve in known),
    )


def _curve(method: Method, jobs: Sequence[Job]) -> tuple[float | None, ...]:
    # What is sent depends on these alone, and takes longer to work out than its simulation.
    known: dict[tuple[int, int | None], Traffic | None] = {}

    def utilisation(job: Job) -> float | None:
        key = job.workers, job.sync_every
        if key not in known:
            known[key] = _traffic(method, job)
        sent = known[key]
        return None if sent is None else steady_utilisation(job.scenario(sent))

    return tuple(utilisation(job) for job in jobs)


def _traffic(method: Method, job: Job) -> Traffic | None:
    try:
        return job.traffic(method)
    except ConfigurationError:
        return None  # a gap in the curve


_SLOTS: Final = ("sync_every", "codec", "fragments", "overlap", "aggregate", "exchange")


def _travel_alike(one: Method, other: Method) -> bool:
    """Whether both send the same: inner and outer optimizers make no difference to messages."""
    return all(getattr(one, slot) == getattr(other, slot) for slot in _SLOTS)


def _spread(low: float, high: float, here: float | None) -> list[float]:
    """Points of equal ratio from `low` to `high`, and `here`."""
    ratio = (high / low) ** (1 / (_POINTS - 1))
    points = {low * ratio**index for index in range(_POINTS)}
    return sorted(points | ({here} if here is not None else set[float]()))
