"""A forecast: what a method sends for a job, how busy the workers are, and what limits them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from thinwire.errors import ConfigurationError, check
from thinwire.method import Method
from thinwire.plan.job import Job, MeetingRequests
from thinwire.plan.simulate import Scenario, required_bandwidth, simulate, steady_utilisation
from thinwire.plan.traffic import Traffic

UTILISATIONS: Final = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Utilisations for which the bandwidth is worked out: those of Streaming DiLoCo's Table 4."""

_HOUR_S, _DAY_S, _GB = 3600.0, 86_400, 1e9
_BUSY: Final = 0.99
_ROUNDS: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a method costs and brings, as one worker sees it in the long run.

    Args:
        method: name.
        sync_every_steps: H.
        tau_steps: inner steps that an answer may take.
        fragments: that are sent apart from each other.
        exchanges: those that occur: gather, reduce_scatter, pairs.
        sent_bytes_per_round: each message counted once, as a run counts.
        received_bytes_per_round: from all others.
        sent_bytes_per_day: at the pace that the link allows.
        received_bytes_per_day: likewise.
        peak_sent_bytes_per_step: the most that is due after one step.
        peak_sent_bits_per_s: at which that has left when the next step is computed.
        utilisation: share of the time in which inner steps are computed.
        limit: what most of the other time goes to.
        fits: whether the utilisation reaches the target.
        step_s: an inner step and its share of all that it waits for.
        target_bits_per_s: the least rate, up and down, that reaches the target; 0: any does,
            infinity: no rate does.
        required_bits_per_s: likewise for each of the utilisations asked for, `UTILISATIONS`.
        tokens_per_day: of all workers together; None: not known.
        steps: of the whole run.
        wall_s: of the whole run, its end included.
        sent_bytes: in the whole run.
        received_bytes: in the whole run.
        puts_per_round: objects that a worker writes where they exchange over an object store.
        gets_per_round: objects that it reads there.
        meeting_puts_per_round: that all workers together write or list there besides, where they
            come and go.
        meeting_gets_per_round: that they read.
        cost_per_round: of all workers together there; None: prices are not known.
        cost_per_day: likewise.
        cost: of the whole run.
    """

    method: str
    sync_every_steps: int
    tau_steps: int
    fragments: int
    exchanges: tuple[str, ...]
    sent_bytes_per_round: int
    received_bytes_per_round: int
    sent_bytes_per_day: float
    received_bytes_per_day: float
    peak_sent_bytes_per_step: int
    peak_sent_bits_per_s: float
    utilisation: float
    limit: str
    fits: bool
    step_s: float
    target_bits_per_s: float
    required_bits_per_s: Mapping[float, float]
    tokens_per_day: float | None
    steps: int | None
    wall_s: float | None
    sent_bytes: int | None
    received_bytes: int | None
    puts_per_round: int
    gets_per_round: int
    meeting_puts_per_round: int
    meeting_gets_per_round: int
    cost_per_round: float | None
    cost_per_day: float | None
    cost: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedMethod:
    """A method that cannot train the model in rounds of that length.

    Args:
        method: name.
        error: why, and what to do.
    """

    method: str
    error: str


Row: TypeAlias = Forecast | RefusedMethod


def forecasts(methods: Sequence[Method], job: Job, *, target: float = 0.9) -> list[Row]:
    """A row for each method; one that does not fit is an error only where it is the only one.

    Args:
        methods: to be compared.
        job: what they are compared for.
        target: utilisation at which a link carries a method.

    Raises:
        ConfigurationError: the only method does not fit, or the target is outside of (0, 1).
    """
    rows: list[Row] = []
    for method in methods:
        try:
            sent = job.traffic(method)
        except ConfigurationError as error:
            if len(methods) == 1:
                raise
            rows.append(RefusedMethod(method=method.name, error=str(error)))
        else:
            rows.append(_forecast(method.name, sent, job, target, UTILISATIONS))
    return rows


def forecast(
    method: Method,
    job: Job,
    *,
    target: float = 0.9,
    utilisations: Sequence[float] = UTILISATIONS,
) -> Forecast:
    """The forecast of one method.

    Args:
        method: as a run would have it.
        job: what it is forecast for.
        target: utilisation at which the link carries it.
        utilisations: for which the bandwidth is worked out, which takes most of the time.

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
    return _forecast(method.name, job.traffic(method), job, target, utilisations)


def _forecast(
    name: str, sent: Traffic, job: Job, target: float, utilisations: Sequence[float]
) -> Forecast:
    scenario, steps = job.scenario(sent), job.steps
    utilisation = steady_utilisation(scenario)
    what, because = f"plan for {name} over so slow a link", "the first exchange would never end"
    check(utilisation > 0, what, because=because, do="pass a higher rate")
    step_s = job.compute.step_s / utilisation
    required = {share: required_bandwidth(share, scenario) for share in {*utilisations, target}}
    meeting = MeetingRequests.of(job.workers) if job.elastic else None
    cost_per_round = job.store_cost(sent, step_s * sent.sync_every)
    wall_s = None if steps is None else _wall_s(scenario, steps, step_s)
    tokens_per_step = job.tokens_per_step
    rounds_per_day = _DAY_S / (step_s * sent.sync_every)
    return Forecast(
        method=name,
        sync_every_steps=sent.sync_every,
        tau_steps=sent.tau,
        fragments=len(sent.messages),
        exchanges=tuple(sorted({message.exchange for message in sent.messages})),
        sent_bytes_per_round=sent.sent_per_round,
        received_bytes_per_round=sent.received_per_round,
        sent_bytes_per_day=rounds_per_day * sent.sent_per_round,
        received_bytes_per_day=rounds_per_day * sent.received_per_round,
        peak_sent_bytes_per_step=sent.peak_sent_per_step,
        peak_sent_bits_per_s=8 * sent.peak_sent_per_step / job.compute.step_s,
        utilisation=utilisation,
        limit=_limit(scenario, utilisation),
        fits=utilisation >= target,
        step_s=step_s,
        target_bits_per_s=required[target],
        required_bits_per_s={share: required[share] for share in utilisations},
        tokens_per_day=(
            None if tokens_per_step is None else job.workers * tokens_per_step * _DAY_S / step_s
        ),
        steps=steps,
        wall_s=wall_s,
        sent_bytes=None if steps is None else sent.sent_after(steps),
        received_bytes=None if steps is None else sent.received_after(steps),
        puts_per_round=sent.puts_per_round,
        gets_per_round=sent.gets_per_round,
        meeting_puts_per_round=0 if meeting is None else meeting.puts + meeting.lists,
        meeting_gets_per_round=0 if meeting is None else meeting.gets,
        cost_per_round=cost_per_round,
        cost_per_day=None if cost_per_round is None else rounds_per_day * cost_per_round,
        cost=None if wall_s is None else job.store_cost(sent, wall_s, steps),
    )


def _limit(scenario: Scenario, utilisation: float) -> str:
    """What limits rounds in the middle of a run: its first rounds and its end differ from them."""
    if utilisation >= _BUSY:
        return "compute"
    every = scenario.traffic.sync_every
    early, late = (
        simulate(scenario, steps=rounds * every).seconds for rounds in (_ROUNDS, 2 * _ROUNDS)
    )
    return late.since(early).limit(satisfied=_BUSY)


def _wall_s(scenario: Scenario, steps: int, step_s: float) -> float:
    """Seconds of a run: its first rounds and end are simulated, its other rounds are all alike."""
    every = scenario.traffic.sync_every
    simulated = min(steps, 4 * _ROUNDS * every + steps % every)
    return simulate(scenario, steps=simulated).wall_s + (steps - simulated) * step_s


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
    is_of_run = row.wall_s is not None
    seconds = _DAY_S if row.wall_s is None else row.wall_s
    received = row.received_bytes if is_of_run else row.received_bytes_per_day
    busy = row.utilisation
    if is_of_run and row.steps:
        busy = min(1.0, job.compute.step_s * row.steps / seconds)
    hours, traffic = seconds / _HOUR_S, job.workers * float(received or 0)
    worker_hours = job.workers * hours
    waiting_hours = worker_hours * (1 - busy)
    hourly = None if job.prices is None else job.prices.worker_per_hour
    per_gb = None if job.prices is None else job.prices.traffic_per_gb
    parts = [
        None if hourly is None else hourly * worker_hours,
        None if per_gb is None else per_gb * traffic / _GB,
        row.cost if is_of_run else row.cost_per_day,
    ]
    known = [part for part in parts if part is not None]
    return Bill(
        is_of_run=is_of_run,
        hours=hours,
        worker_hours=worker_hours,
        waiting_hours=waiting_hours,
        traffic_bytes=traffic,
        cost=sum(known) if known else None,
        waiting_cost=None if hourly is None else hourly * waiting_hours,
    )
