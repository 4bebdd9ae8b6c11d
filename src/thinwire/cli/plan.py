"""`thinwire plan`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from thinwire.cli.advice import show_advice
from thinwire.cli.flags import RARE, Option, Switch, arg, flag, given_in, reads
from thinwire.cli.job_flags import Count, Duration, ModelFlags, check_flags
from thinwire.cli.output import say, table
from thinwire.errors import check
from thinwire.plan.compute import peak_flops_per_s
from thinwire.plan.units import (
    count_text,
    duration_text,
    nbytes_text,
    parse_latency,
    parse_price,
    parse_rate,
    parse_share,
    rate_text,
    share_text,
    times_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console

    from thinwire.method import Method
    from thinwire.plan.advice import Table
    from thinwire.plan.calibration import Calibration
    from thinwire.plan.forecast import Forecast
    from thinwire.plan.job import Job, Prices


_MFU: Final = 0.4

_Rate: TypeAlias = Annotated[float | None, reads(parse_rate, "RATE"), arg()]
_Price: TypeAlias = Annotated[tuple[float, str | None] | None, reads(parse_price, "PRICE"), arg()]


@dataclass(frozen=True, kw_only=True)
class PlanCommand(ModelFlags):
    """Compute bytes, seconds and utilisation of every method on a link, before you rent it.

    Nothing runs, and no network is used.

    $ thinwire plan --parameters 10B --layers 48 --workers 2 --step-time 0.8s \\
        --bandwidth 10Gbit/s --latency 50ms
    $ thinwire plan --from runs/mine/diloco-seed0 --bandwidth 100Mbit/s
    """

    workers: Count = None
    """K, the number of workers."""
    sync_every: Count = None
    """H: inner steps between two exchanges; default each method's own."""
    step_time: Duration = None
    """Of an inner step, such as 0.8s."""
    accelerator: Annotated[float | None, reads(peak_flops_per_s, "NAME"), arg()] = None
    """H100, MI300X, ...: works out the step's time from --tokens-per-step."""
    mfu: Annotated[float | None, reads(parse_share, "SHARE"), arg()] = None
    """Share of the accelerator's peak that training reaches; default 40%."""
    accelerators_per_worker: Annotated[Count, RARE] = None
    """Accelerators that share a worker's step; default 1."""
    tokens_per_step: Count = None
    """Of one worker in an inner step, such as 64k."""
    tokens: Count = None
    """Of the whole run, such as 300B: plans its wall-clock."""
    bandwidth: _Rate = None
    """Of every worker, up and down, such as 10Gbit/s."""
    up: _Rate = None
    """Of what a worker sends, where it differs from --bandwidth."""
    down: _Rate = None
    """Of what a worker receives, where it differs from --bandwidth."""
    latency: Annotated[float, reads(parse_latency, "DURATION"), arg()] = 0.0
    """One way, such as 50ms; default 0."""
    topology: Option[Literal["ring", "star"]] = None
    """ring over gloo, star by an object store; default star with --egress-price, else ring."""
    elastic: Switch = False
    """Count requests with which elastic workers meet in the store."""
    sealed: Switch = False
    """Count 28 bytes a message for sealing."""
    encode_time: Annotated[Duration, RARE] = None
    """Of a parameter, such as 7ns, before it is sent: benchmarks/bench.py codecs measures it."""
    decode_time: Annotated[Duration, RARE] = None
    """Of a parameter in one worker's payload."""
    worker_price: _Price = None
    """Of a worker with all its accelerators for an hour, such as 2.50USD."""
    traffic_price: _Price = None
    """Of a GB that a worker sends over its link, such as 0.05USD."""
    egress_price: _Price = None
    """Of a GB read from the store, such as 0.09USD."""
    put_price: Annotated[_Price, RARE] = None
    """Of a million objects written there; default that of S3."""
    get_price: Annotated[_Price, RARE] = None
    """Of a million objects read there; default that of S3."""
    run: Annotated[Path | None, arg(name="from")] = None
    """Folder of a finished run: the same model, workers, step and method over another link."""
    methods: Option[str] = None
    """Comma-separated, such as ddp,muloco:bits=2; default all, or the run's with --from."""
    target: Annotated[float, reads(parse_share, "SHARE"), arg()] = 0.9
    """Utilisation at which a link carries a method; default 90%."""
    json: Switch = False
    """Print everything as JSON, with units in its names."""

    def main(self, console: Console) -> None:
        """Run the command."""
        check_flags({"from" if name == "run" else name for name in given_in(self)})
        check(
            not (self.bandwidth and self.up and self.down),
            "plan with --bandwidth, --up and --down",
            because="the two are rates of both directions already",
            do="leave --bandwidth out",
        )
        check(
            self.sync_every is None or ":sync_every=" not in (self.methods or ""),
            f"plan with --sync-every {self.sync_every} and --methods {self.methods}",
            because="a method has an H of its own",
            do="leave one of them out",
        )
        from thinwire.plan.advice import advise
        from thinwire.plan.calibration import calibrate
        from thinwire.plan.forecast import Forecast, RefusedMethod, forecasts
        from thinwire.plan.to_json import plan_record

        calibration = None if self.run is None else calibrate(self.run, step_s=self.step_time)
        methods = self._methods(calibration)
        job = self.job(calibration)
        # The run may have been a short one, just to measure.
        planned = job if calibration is None or self.tokens else replace(job, tokens=None)
        rows = forecasts(methods, job, target=self.target)
        found = [row for row in rows if isinstance(row, Forecast)]
        # No advice if the user asked for methods and one of them reaches the target.
        is_answered = self.methods is not None and any(row.fits for row in found)
        advice = None if is_answered else advise(planned, target=self.target)
        if self.json:
            record = plan_record(
                job, rows, target=self.target, calibration=calibration, advice=advice
            )
            say(console, json.dumps(record, indent=2))
            return
        if calibration is not None:
            measured, name = calibration.measured, calibration.method.name
            seconds, busy = duration_text(measured.training_s), share_text(measured.utilisation)
            say(console, f"the run: {calibration.steps} steps of {name} in {seconds}, {busy} busy")
        say(console, f"{job_text(job)}; {link_text(job)}\n")
        for each in _tables(job, found):
            console.print(table(*each))
        for row in rows:
            if isinstance(row, RefusedMethod):
                say(console, f"{row.method}: {row.error}")
        if advice is not None:
            accelerators = self.accelerators_per_worker or 1
            show_advice(console, advice, planned, model=self.model, accelerators=accelerators)

    def job(self, calibration: Calibration | None) -> Job:
        """The job that the flags describe, once `check_flags` has passed them.

        Args:
            calibration: calibration by the run in --from.

        Raises:
            ConfigurationError: values do not fit, or a model cannot be resolved.
        """
        check(
            self.egress_price is None or self.topology != "ring",
            "plan with --egress-price and --topology ring",
            because="it is the price of reading from an object store, which is a star",
            do="leave one of them out",
        )
        from thinwire.plan.compute import Compute
        from thinwire.plan.job import Job
        from thinwire.plan.link import TOPOLOGIES, Link
        from thinwire.security.sealing import SEAL_NBYTES

        given = given_in(self)
        rates: list[Any] = [self.up or self.bandwidth, self.down or self.bandwidth]
        asked = ("workers", "sync_every", "tokens_per_step", "tokens")
        job: dict[str, Any] = {name: given[name] for name in asked if name in given} | {
            "link": Link(up_bits_per_s=rates[0], down_bits_per_s=rates[1], latency_s=self.latency),
            "prices": _prices(given),
        }
        coding = {
            "encode_s_per_parameter": self.encode_time or 0.0,
            "decode_s_per_parameter": self.decode_time or 0.0,
        }
        if calibration is not None:
            if self.encode_time or self.decode_time:
                job["compute"] = Compute(step_s=calibration.job.compute.step_s, **coding)
            return replace(calibration.job, **job)
        # Last, once all else is known to be right: a model may take seconds to resolve.
        shape: Any = self.shape()
        if self.step_time is not None:
            compute = Compute(step_s=self.step_time)
        else:
            flops_per_s = (self.accelerator or 0.0) * (self.accelerators_per_worker or 1)
            tokens, mfu = self.tokens_per_step or 0, self.mfu or _MFU
            compute = Compute.of_flops(shape.parameters, tokens, flops_per_s, mfu)
        return Job(
            **job,
            shape=shape,
            compute=replace(compute, **coding),
            topology=TOPOLOGIES[self.topology or ("star" if self.egress_price else "ring")],
            elastic=self.elastic,
            added_nbytes=SEAL_NBYTES if self.sealed else 0,
        )

    def _methods(self, calibration: Calibration | None) -> list[Method]:
        from thinwire import presets

        if self.methods is not None:
            return [presets.from_text(name.strip()) for name in self.methods.split(",")]
        if calibration is not None:
            return [calibration.method]
        return [presets.by_name(name)() for name in presets.names()]


_PRICES: Final = {
    "worker_price": "worker_per_hour",
    "traffic_price": "traffic_per_gb",
    "egress_price": "egress_per_gb",
    "put_price": "put_per_million",
    "get_price": "get_per_million",
}


def _prices(flags: Mapping[str, Any]) -> Prices | None:
    """All prices, which must be in one currency."""
    from thinwire.plan.job import Prices

    s3 = Prices()
    of_s3 = {"put_price": (s3.put_per_million, "USD"), "get_price": (s3.get_per_million, "USD")}
    given = of_s3 if "egress_price" in flags else {}
    given = given | {name: flags[name] for name in _PRICES if name in flags}
    codes = {name: code for name, (_, code) in given.items() if code}
    check(
        len({*codes.values()}) <= 1,
        f"add up {', '.join(f'{flag(name)} in {code}' for name, code in codes.items())}",
        because="they are in different currencies",
        do="give all of these prices in one of them",
    )
    amounts: dict[str, Any] = {_PRICES[name]: amount for name, (amount, _) in given.items()}
    return Prices(currency=next(iter(codes.values()), "USD"), **amounts) if given else None


def job_text(job: Job) -> str:
    """Model, workers and step time."""
    topology = job.topology.name
    workers = "1 worker" if job.workers == 1 else f"{job.workers} workers in a {topology}"
    return f"{job.shape.name} on {workers}, {duration_text(job.compute.step_s)} a step"


def link_text(job: Job) -> str:
    """Rates and latency."""
    link = job.link
    up, down = rate_text(link.up_bits_per_s), rate_text(link.down_bits_per_s)
    rates = f"{up} up and down" if up == down else f"{up} up, {down} down"
    return f"{rates}, {duration_text(link.latency_s)} one way"


def _tables(job: Job, rows: Sequence[Forecast]) -> Iterator[Table]:
    from thinwire.plan.forecast import UTILISATIONS

    title = "bytes of a worker in a round; times fewer than a 16-bit all-reduce moves"
    head = ("method", "H", "up", "down", "fewer", "peak bit/s", "busy", "limit", "fits")
    yield title, head, [_outcome(row) for row in rows]
    if job.tokens_per_step is not None:
        head = ("method", "tokens a day", "wall-clock", "up", "down")
        title = "the run: tokens of all workers, bytes of each"
        yield title, head[:2] if job.tokens is None else head, [_run(row) for row in rows]
    if job.prices is not None and job.prices.egress_per_gb is not None:
        title = "what all workers ask the store for, and the price"
        head = ("method", "puts a round", "gets a round", "read a round", "a round", "a day")
        last = () if job.tokens is None else ("the run",)
        yield title, (*head, *last), [_cost(row, job.workers) for row in rows]
    if job.prices is not None:
        title = f"all workers, {'a day' if job.tokens is None else 'the run'}"
        head = ("method", "worker-hours", "of which waiting", "bytes that leave them")
        yield title, (*head, job.prices.currency), [_bill(row, job) for row in rows]
    shares = [f"{100 * share:.0f} %" for share in UTILISATIONS]
    needed = [(row.method, *map(_bits, row.required_bits_per_s.values())) for row in rows]
    yield "bandwidth in bit/s for a utilisation of", ("method", *shares), needed


def _outcome(row: Forecast) -> tuple[str, ...]:
    """Bytes of a worker, its peak rate, and how busy the link keeps it."""
    return (
        row.method,
        str(row.sync_every_steps),
        nbytes_text(row.up_bytes_per_round),
        nbytes_text(row.down_bytes_per_round),
        times_text(row.times_fewer),
        _bits(row.peak_up_bits_per_s, none="0"),
        share_text(row.utilisation),
        row.limit,
        "yes" if row.fits else "no",
    )


def _run(row: Forecast) -> tuple[str, ...]:
    """Tokens per day, and the whole run if its length is known."""
    day = count_text(row.tokens_per_day or 0)
    if row.wall_s is None or row.up_bytes is None or row.down_bytes is None:
        return row.method, day
    up, down = nbytes_text(row.up_bytes), nbytes_text(row.down_bytes)
    return row.method, day, duration_text(row.wall_s), up, down


def _cost(row: Forecast, workers: int) -> tuple[str, ...]:
    """Requests of all workers to an object store in a round, and their cost."""
    from thinwire.plan.advice import money_text

    costs = (row.cost_per_round, row.cost_per_day, row.cost)
    return (
        row.method,
        str(workers * row.puts_per_round + row.meeting_puts_per_round),
        str(workers * row.gets_per_round + row.meeting_gets_per_round),
        nbytes_text(workers * row.down_bytes_per_round),
        *(money_text(cost) for cost in costs if cost is not None),
    )


def _bill(row: Forecast, job: Job) -> tuple[str, ...]:
    """Hours and bytes of all workers, and what both and a store cost."""
    from thinwire.plan.advice import money_text
    from thinwire.plan.forecast import bill

    its = bill(row, job)
    hours = (f"{its.worker_hours:,.3g}", f"{its.waiting_hours:,.3g}")
    cost = "" if its.cost is None else money_text(its.cost)
    return row.method, *hours, nbytes_text(its.traffic_bytes), cost


def _bits(per_s: float, none: str = "any") -> str:
    """A rate that is sent or needed."""
    if math.isinf(per_s):
        return "none"
    return rate_text(per_s).removesuffix("bit/s").rstrip() if per_s else none
