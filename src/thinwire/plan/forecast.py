"""Forecast of a method for a job: bytes, utilisation, and what limits it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from thinwire.errors import ConfigurationError, check
from thinwire.method import Method
from thinwire.plan.job import Job, Prices, meeting_requests
from thinwire.plan.simulate import BUSY, Scenario, required_bandwidth, simulate, steady_utilisation
from thinwire.transport.metered import times_fewer

UTILISATIONS: Final = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Utilisations for which to compute the bandwidth: those of Streaming DiLoCo's Table 4."""

_HOUR_S, _DAY_S, _GB = 3600.0, 86_400, 1e9
_ROUNDS: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Bytes, time and cost of a method in the long run, for one worker unless noted.

    Args:
        method: name of the method.
        sync_every_steps: H.
        tau_steps: inner steps that an answer may take.
        fragments: number of fragments.
        exchanges: kinds of exchange: gather, reduce_scatter, pairs, server.
        up_bytes_per_round: bytes that leave through the worker's link: each message once in a star
            or to a server; in a ring as much as arrives.
        down_bytes_per_round: bytes from all other workers.
        times_fewer: how many times fewer bytes, up + down, than a ring all-reduce of 16-bit
            gradients at every step; None if the method sends none.
        up_bytes_per_day: bytes up at this utilisation.
        down_bytes_per_day: bytes down at this utilisation.
        peak_up_bytes_per_step: the most bytes that are due after one step.
        peak_up_bits_per_s: rate that sends these bytes within the next step.
        utilisation: share of the time that goes into inner steps.
        limit: the largest part of the other time.
        fits: whether the utilisation reaches the target.
        step_s: seconds of an inner step, with its share of waits and coding.
        target_bits_per_s: the least rate, up and down, that reaches the target; 0 if any does,
            infinity if none does.
        required_bits_per_s: the least rate for each of the requested utilisations.
        tokens_per_day: tokens of all workers; None if unknown.
        steps: inner steps of the whole run.
        wall_s: seconds of the whole run, its end included.
        up_bytes: bytes up in the whole run.
        down_bytes: bytes down in the whole run.
        puts_per_round: objects that a worker writes to an object store.
        gets_per_round: objects that a worker reads from it.
        meeting_puts_per_round: puts and lists by which all elastic workers agree on the members.
        meeting_gets_per_round: gets for the same purpose.
        cost_per_round: charge of the store for all workers; None if its prices are unknown.
        cost_per_day: the same charge for a day at this utilisation.
        cost: the same charge for the whole run.
    """

    method: str
    sync_every_steps: int
    tau_steps: int
    fragments: int
    exchanges: tuple[str, ...]
    up_bytes_per_round: int
    down_bytes_per_round: int
    times_fewer: float | None
    up_bytes_per_day: float
    down_bytes_per_day: float
    peak_up_bytes_per_step: int
    peak_up_bits_per_s: float
    utilisation: float
    limit: str
    fits: bool
    step_s: float
    target_bits_per_s: float
    required_bits_per_s: Mapping[float, float]
    tokens_per_day: float | None = None
    steps: int | None = None
    wall_s: float | None = None
    up_bytes: int | None = None
    down_bytes: int | None = None
    puts_per_round: int
    gets_per_round: int
    meeting_puts_per_round: int = 0
    meeting_gets_per_round: int = 0
    cost_per_round: float | None = None
    cost_per_day: float | None = None
    cost: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedMethod:
    """A method that cannot train the model in rounds of that length.

    Args:
        method: name of the method.
        error: message of the error.
    """

    method: str
    error: str


Row: TypeAlias = Forecast | RefusedMethod


def forecasts(methods: Sequence[Method], job: Job, *, target: float = 0.9) -> list[Row]:
    """A row for each method; one that does not fit is an error only if no other does.

    Args:
        methods: to compare.
        job: job to compare them for.
        target: utilisation at which a link counts as carrying a method.

    Raises:
        ConfigurationError: no method fits, or the target is outside of (0, 1).
    """
    rows: list[Row] = []
    errors: list[ConfigurationError] = []
    for method in methods:
        try:
            rows.append(forecast(method, job, target=target))
        except ConfigurationError as error:
            errors.append(error)
            rows.append(RefusedMethod(method=method.name, error=str(error)))
    if len(errors) == len(methods):
        raise errors[0]
    return rows


def forecast(
    method: Method, job: Job, *, target: float = 0.9, utilisations: Sequence[float] = UTILISATIONS
) -> Forecast:
    """The forecast of one method.

    Args:
        method: method of the run.
        job: model, workers and link.
        target: utilisation at which the link counts as carrying the method.
        utilisations: shares for which to compute the bandwidth, which takes most of the time.

    Raises:
        ConfigurationError: the method does not fit the model, or the target is outside of (0, 1).

    >>> from thinwire import presets
    >>> from thinwire.plan.compute import Compute
    >>> from thinwire.plan.link import Link
    >>> from thinwire.plan.shape import Shape
    >>> job = Job(
    ...     shape=Shape.of_size(10**9, 24),
    ...     workers=2,
    ...     compute=Compute(step_s=1),
    ...     link=Link.of(1e9),
    ... )
    >>> found = forecast(presets.diloco(), job)
    >>> round(found.utilisation, 3), found.limit, found.fits
    (0.484, 'bandwidth', False)
    """
    sent = job.traffic(method)
    carried = sent.on_links(relayed=job.topology.name == "star")
    up, down = carried.sent_nbytes(), carried.received_nbytes()
    scenario = job.scenario(sent)
    utilisation = steady_utilisation(scenario)
    what = f"plan for {method.name} over so slow a link"
    because, do = "the first exchange would never end", "pass a higher rate"
    check(utilisation > 0, what, because=because, do=do)
    step_s = job.compute.step_s / utilisation
    required = {share: required_bandwidth(share, scenario) for share in {*utilisations, target}}
    rounds_per_day = _DAY_S / (step_s * sent.sync_every)
    size = {"workers": job.workers, "parameters": job.shape.parameters}
    known: dict[str, Any] = {}
    if job.elastic:
        puts, gets, lists = meeting_requests(job.workers)
        known |= {"meeting_puts_per_round": puts + lists, "meeting_gets_per_round": gets}
    if job.tokens_per_step is not None:
        known["tokens_per_day"] = job.workers * job.tokens_per_step * _DAY_S / step_s
    if (cost := job.store_cost(sent, step_s * sent.sync_every)) is not None:
        known |= {"cost_per_round": cost, "cost_per_day": rounds_per_day * cost}
    if (steps := job.steps) is not None:
        wall_s = _wall_s(scenario, steps, step_s)
        known |= {"steps": steps, "wall_s": wall_s, "cost": job.store_cost(sent, wall_s, steps)}
        known["up_bytes"] = carried.sent_nbytes(steps)
        known["down_bytes"] = carried.received_nbytes(steps)
    return Forecast(
        method=method.name,
        sync_every_steps=sent.sync_every,
        tau_steps=sent.tau,
        fragments=len(sent.messages),
        exchanges=tuple(sorted({message.exchange for message in sent.messages})),
        up_bytes_per_round=up,
        down_bytes_per_round=down,
        times_fewer=times_fewer(up, down, steps=sent.sync_every, **size),
        up_bytes_per_day=rounds_per_day * up,
        down_bytes_per_day=rounds_per_day * down,
        peak_up_bytes_per_step=carried.peak_sent_per_step,
        peak_up_bits_per_s=8 * carried.peak_sent_per_step / job.compute.step_s,
        utilisation=utilisation,
        limit=_limit(scenario, utilisation),
        fits=utilisation >= target,
        step_s=step_s,
        target_bits_per_s=required[target],
        required_bits_per_s={share: required[share] for share in utilisations},
        puts_per_round=sent.puts(),
        gets_per_round=sent.gets(),
        **known,
    )


def _limit(scenario: Scenario, utilisation: float) -> str:
    """What limits rounds in the middle of a run; its beginning and end differ."""
    if utilisation >= BUSY:
        return "compute"
    every = scenario.traffic.sync_every
    early, late = (simulate(scenario, steps=rounds * every) for rounds in (_ROUNDS, 2 * _ROUNDS))
    return late.limit(since=early)


def _wall_s(scenario: Scenario, steps: int, step_s: float) -> float:
    """Seconds of a run: simulates its first rounds and its end, and takes the others as equal."""
    every = scenario.traffic.sync_every
    simulated = min(steps, 4 * _ROUNDS * every + steps % every)
    return simulate(scenario, steps=simulated).wall_s + (steps - simulated) * step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """Cost of all workers in the whole run, or in a day if its length is unknown.

    Args:
        is_of_run: true for the whole run, false for a day.
        hours: hours from beginning to end.
        worker_hours: hours of all workers together.
        waiting_hours: worker hours outside of inner steps.
        traffic_bytes: bytes that leave all workers. On a ring, each hop counts; through a store or
            a server, only what workers upload.
        cost: cost of workers, traffic and store, as far as prices are known; None if none is.
        waiting_cost: cost of the waiting hours; None if unknown.
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

    cost = worker hours x price of an hour + bytes x price of a byte + charge of a store

    Args:
        row: the forecast of the method.
        job: job of the forecast.

    >>> from thinwire import presets
    >>> from thinwire.plan.compute import Compute
    >>> from thinwire.plan.job import Prices
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
    seconds, busy, store_cost = _DAY_S, row.utilisation, row.cost_per_day
    up = row.up_bytes_per_day
    is_of_run = row.wall_s is not None
    if row.wall_s is not None and row.steps is not None:
        seconds, store_cost = row.wall_s, row.cost
        up = row.up_bytes or 0
        busy = min(1.0, job.compute.step_s * row.steps / seconds)
    traffic = job.workers * float(up)
    prices = job.prices or Prices()
    worker_hours = job.workers * seconds / _HOUR_S
    waiting_hours = worker_hours * (1 - busy)
    hourly, per_gb = prices.worker_per_hour, prices.traffic_per_gb
    parts = [
        None if hourly is None else hourly * worker_hours,
        None if per_gb is None else per_gb * traffic / _GB,
        store_cost,
    ]
    known = [part for part in parts if part is not None]
    return Bill(
        is_of_run=is_of_run,
        hours=seconds / _HOUR_S,
        worker_hours=worker_hours,
        waiting_hours=waiting_hours,
        traffic_bytes=traffic,
        cost=sum(known) if known else None,
        waiting_cost=None if hourly is None else hourly * waiting_hours,
    )
