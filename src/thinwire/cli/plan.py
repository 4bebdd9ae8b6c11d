"""`thinwire plan`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from thinwire.cli.advice import plain_table, show_advice
from thinwire.cli.flags import Flat, Option, Switch, read_flag
from thinwire.cli.job_flags import JobFlags, check_flags
from thinwire.cli.output import say
from thinwire.plan.units import parse_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from thinwire.method import Method
    from thinwire.plan.advice import Advice
    from thinwire.plan.calibration import Calibration
    from thinwire.plan.forecast import Row
    from thinwire.plan.job import Job


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """What a link allows, before you rent it: bytes, seconds and utilisation of every method.

    Nothing is run and no network is used.

    $ thinwire plan --parameters 10B --layers 48 --workers 2 --step-time 0.8s \\
        --bandwidth 10Gbit/s --latency 50ms
    $ thinwire plan --from runs/mine/diloco-seed0 --bandwidth 100Mbit/s
    """

    methods: Option[str] = None
    """Comma-separated, such as ddp,muloco:bits=2; default all, or the run's with --from."""
    target: str = "90%"
    """Utilisation from which on a link carries a method."""
    sweep: Option[Literal["bandwidth", "latency", "workers", "step-time", "sync-every"]] = None
    """Plot utilisation against it into a page that opens offline."""
    out: Option[Path] = None
    """The page of --sweep; default plan-QUANTITY.html."""
    json: Switch = False
    """Print everything as JSON, with the units in its names."""
    flags: Flat[JobFlags] = field(default_factory=JobFlags)

    def main(self, console: Console) -> None:
        """Run the command."""
        own = {name for name in ("sweep", "out") if getattr(self, name) is not None}
        check_flags(own | self.flags.given())
        target = read_flag("target", parse_share, self.target)
        from thinwire.plan import text
        from thinwire.plan.forecast import forecasts
        from thinwire.plan.sweep import sweep
        from thinwire.plan.to_json import plan_record

        calibration = self.flags.calibration()
        methods = self._methods(calibration)
        job = self.flags.job(calibration)
        rows = forecasts(methods, job, target=target)
        advice = self._advice(job, rows, target)
        swept = out = None
        if self.sweep is not None:
            from thinwire import report

            swept = sweep(self.sweep, methods, job, rows)
            out = self.out or Path(f"plan-{self.sweep}.html")
            report.write_page(report.plan_page(job, rows, swept, target=target, advice=advice), out)
        if self.json:
            record = plan_record(
                job, rows, target=target, swept=swept, calibration=calibration, advice=advice
            )
            say(console, json.dumps(record, indent=2))
            return
        if calibration is not None:
            say(console, text.run_text(calibration))
        _show(console, job, rows)
        said = [*text.refusals(rows), text.verdict(rows, target)]
        # Among all presets at their own settings are some that are there to be reproduced.
        say(console, "\n".join(said[:-1] if self.methods is None and advice else said))
        if advice is not None:
            model, accelerators = self.flags.model, self.flags.sharing()
            show_advice(console, advice, job, model=model, accelerators=accelerators)
        if out is not None:
            say(console, f"wrote {out}")

    def _advice(self, job: Job, rows: Sequence[Row], target: float) -> Advice | None:
        """What to run; None where methods were asked for, of which one reaches the target."""
        from thinwire.plan.advice import advise
        from thinwire.plan.forecast import Forecast

        fits = any(isinstance(row, Forecast) and row.fits for row in rows)
        return None if self.methods is not None and fits else advise(job, target=target)

    def _methods(self, calibration: Calibration | None) -> list[Method]:
        from thinwire import presets

        if self.methods is not None:
            return [presets.from_text(name.strip()) for name in self.methods.split(",")]
        if calibration is not None:
            return [calibration.method]
        return [presets.by_name(name)() for name in presets.names()]


def _show(console: Console, job: Job, rows: Sequence[Row]) -> None:
    from thinwire.plan import text
    from thinwire.plan.forecast import Forecast

    say(console, f"{text.job_text(job)}; {text.link_text(job)}\n")
    found = [row for row in rows if isinstance(row, Forecast)]
    console.print(
        plain_table(
            "bytes that each worker sends, and how busy it is",
            text.OUTCOME_HEAD,
            [text.outcome_cells(row) for row in found],
        )
    )
    if job.tokens_per_step is not None:
        cells = [text.run_cells(row) for row in found]
        console.print(
            plain_table("the run: tokens of all workers, bytes of each", text.run_head(job), cells)
        )
    if job.price is not None:
        cells = [text.cost_cells(row, job) for row in found]
        console.print(
            plain_table(
                "what all workers ask the store for, and the price", text.cost_head(job), cells
            )
        )
    console.print(
        plain_table(
            "bandwidth in bit/s for a utilisation of",
            text.BANDWIDTH_HEAD,
            [text.bandwidth_cells(row) for row in found],
        )
    )
