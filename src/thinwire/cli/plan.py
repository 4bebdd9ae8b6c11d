"""`thinwire plan`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from thinwire.cli.advice import show_advice
from thinwire.cli.flags import Option, Switch, arg, reads
from thinwire.cli.job_flags import JobFlags, check_flags
from thinwire.cli.output import say, table
from thinwire.plan.units import (
    count_text,
    duration_text,
    nbytes_text,
    parse_share,
    rate_text,
    share_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from thinwire.method import Method
    from thinwire.plan.calibration import Calibration
    from thinwire.plan.forecast import Forecast
    from thinwire.plan.job import Job
    from thinwire.plan.text import Table


@dataclass(frozen=True, kw_only=True)
class PlanCommand(JobFlags):
    """Compute bytes, seconds and utilisation of every method on a link, before you rent it.

    Nothing runs, and no network is used.

    $ thinwire plan --parameters 10B --layers 48 --workers 2 --step-time 0.8s \\
        --bandwidth 10Gbit/s --latency 50ms
    $ thinwire plan --from runs/mine/diloco-seed0 --bandwidth 100Mbit/s
    """

    methods: Option[str] = None
    """Comma-separated, such as ddp,muloco:bits=2; default all, or the run's with --from."""
    target: Annotated[float, reads(parse_share, "SHARE"), arg()] = 0.9
    """Utilisation at which a link carries a method; default 90%."""
    json: Switch = False
    """Print everything as JSON, with units in its names."""

    def main(self, console: Console) -> None:
        """Run the command."""
        check_flags(self.given())
        from thinwire.plan.advice import advise
        from thinwire.plan.forecast import Forecast, RefusedMethod, forecasts
        from thinwire.plan.to_json import plan_record

        calibration = self.calibration()
        methods = self._methods(calibration)
        job = self.job(calibration)
        rows = forecasts(methods, job, target=self.target)
        found = [row for row in rows if isinstance(row, Forecast)]
        fitting = [row.method for row in found if row.fits]
        # Not where methods were asked for, of which one reaches the target.
        advice = None if self.methods and fitting else advise(job, target=self.target)
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
        said = [f"{row.method}: {row.error}" for row in rows if isinstance(row, RefusedMethod)]
        # Among all presets at their own settings are some that are there to be reproduced.
        if self.methods is not None or advice is None:
            said.append(verdict(fitting, len(rows), self.target))
        say(console, "\n".join(said))
        if advice is not None:
            accelerators = self.accelerators_per_worker or 1
            show_advice(console, advice, job, model=self.model, accelerators=accelerators)

    def _methods(self, calibration: Calibration | None) -> list[Method]:
        from thinwire import presets

        if self.methods is not None:
            return [presets.from_text(name.strip()) for name in self.methods.split(",")]
        if calibration is not None:
            return [calibration.method]
        return [presets.by_name(name)() for name in presets.names()]


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


def verdict(fitting: Sequence[str], methods: int, target: float) -> str:
    """Which of so many methods the link carries."""
    busy = f"busy {share_text(target)} of the time"
    if not fitting:
        return f"No method keeps the workers {busy} on this link."
    if len(fitting) == methods:
        return f"Every method keeps the workers {busy}."
    return f"The workers are {busy} with {', '.join(fitting)}."


def _tables(job: Job, rows: Sequence[Forecast]) -> Iterator[Table]:
    from thinwire.plan.forecast import UTILISATIONS

    title = "bytes that each worker sends, and how busy it is"
    head = ("method", "H", "a round", "a day", "peak bit/s", "busy", "limit", "fits")
    yield title, head, [_outcome(row) for row in rows]
    if job.tokens_per_step is not None:
        head = ("method", "tokens a day", "wall-clock", "sent", "received")
        title = "the run: tokens of all workers, bytes of each"
        yield title, head[:2] if job.tokens is None else head, [_run(row) for row in rows]
    if job.prices is not None and job.prices.egress_per_gb is not None:
        title = "what all workers ask the store for, and the price"
        head = ("method", "puts a round", "gets a round", "read a round", "a round", "a day")
        last = () if job.tokens is None else ("the run",)
        yield title, (*head, *last), [_cost(row, job.workers) for row in rows]
    shares = [f"{100 * share:.0f} %" for share in UTILISATIONS]
    needed = [(row.method, *map(_bits, row.required_bits_per_s.values())) for row in rows]
    yield "bandwidth in bit/s for a utilisation of", ("method", *shares), needed


def _outcome(row: Forecast) -> tuple[str, ...]:
    """Bytes that a worker sends, at what rate at most, and how busy the link keeps it."""
    return (
        row.method,
        str(row.sync_every_steps),
        nbytes_text(row.sent_bytes_per_round),
        nbytes_text(row.sent_bytes_per_day),
        _bits(row.peak_sent_bits_per_s, none="0"),
        share_text(row.utilisation),
        row.limit,
        "yes" if row.fits else "no",
    )


def _run(row: Forecast) -> tuple[str, ...]:
    """Tokens of a day, and the whole run if its length is known."""
    day = count_text(row.tokens_per_day or 0)
    if row.wall_s is None or row.sent_bytes is None or row.received_bytes is None:
        return row.method, day
    sent, received = nbytes_text(row.sent_bytes), nbytes_text(row.received_bytes)
    return row.method, day, duration_text(row.wall_s), sent, received


def _cost(row: Forecast, workers: int) -> tuple[str, ...]:
    """What all workers ask an object store for in a round, and what that costs."""
    from thinwire.plan.text import money_text

    costs = (row.cost_per_round, row.cost_per_day, row.cost)
    return (
        row.method,
        str(workers * row.puts_per_round + row.meeting_puts_per_round),
        str(workers * row.gets_per_round + row.meeting_gets_per_round),
        nbytes_text(workers * row.received_bytes_per_round),
        *(money_text(cost) for cost in costs if cost is not None),
    )


def _bits(per_s: float, none: str = "any") -> str:
    """A rate that is sent or needed."""
    if math.isinf(per_s):
        return "none"
    return rate_text(per_s).removesuffix("bit/s").rstrip() if per_s else none
