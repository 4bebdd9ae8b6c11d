"""A plan as text: headings and rows of tables, for a terminal or a page."""

import math
from collections.abc import Sequence
from typing import Final

from thinwire.plan.calibration import Calibration
from thinwire.plan.forecast import UTILISATIONS, Forecast, RefusedMethod, Row
from thinwire.plan.job import Job
from thinwire.plan.units import count_text, duration_text, nbytes_text, rate_text

OUTCOME_HEAD: Final = ("method", "H", "a round", "a day", "peak bit/s", "busy", "limit", "fits")
"""Headings of `outcome_cells`."""

BANDWIDTH_HEAD: Final = ("method", *(f"{share:.0%}".replace("%", " %") for share in UTILISATIONS))
"""Headings of `bandwidth_cells`."""


def outcome_cells(row: Forecast) -> tuple[str, ...]:
    """Bytes that a worker sends, at what rate at most, and how busy the link keeps it."""
    return (
        row.method,
        str(row.sync_every_steps),
        nbytes_text(row.sent_bytes_per_round),
        nbytes_text(row.sent_bytes_per_day),
        _bits(row.peak_sent_bits_per_s),
        share_text(row.utilisation),
        row.limit,
        "yes" if row.fits else "no",
    )


def bandwidth_cells(row: Forecast) -> tuple[str, ...]:
    """The least rate for each utilisation."""
    return (row.method, *(required_text(rate) for rate in row.required_bits_per_s.values()))


def run_head(job: Job) -> tuple[str, ...]:
    """Headings of `run_cells`."""
    if job.tokens is None:
        return ("method", "tokens a day")
    return ("method", "tokens a day", "wall-clock", "sent", "received")


def run_cells(row: Forecast) -> tuple[str, ...]:
    """Tokens of a day, and the whole run if its length is known."""
    day = count_text(row.tokens_per_day or 0)
    if row.wall_s is None or row.sent_bytes is None or row.received_bytes is None:
        return row.method, day
    sent, received = nbytes_text(row.sent_bytes), nbytes_text(row.received_bytes)
    return row.method, day, duration_text(row.wall_s), sent, received


def cost_head(job: Job) -> tuple[str, ...]:
    """Headings of `cost_cells`."""
    head = ("method", "puts a round", "gets a round", "read a round", "a round", "a day")
    return head if job.tokens is None else (*head, "the run")


def cost_cells(row: Forecast, job: Job) -> tuple[str, ...]:
    """What all workers ask an object store for in a round, and what that costs."""
    workers = job.workers
    costs = (row.cost_per_round, row.cost_per_day, row.cost)
    return (
        row.method,
        str(workers * row.puts_per_round + row.meeting_puts_per_round),
        str(workers * row.gets_per_round + row.meeting_gets_per_round),
        nbytes_text(workers * row.received_bytes_per_round),
        *(f"{cost:,.3g}" if cost < 1000 else f"{cost:,.0f}" for cost in costs if cost is not None),
    )


def job_text(job: Job) -> str:
    """Model, workers and step time."""
    topology = job.topology.name
    workers = "1 worker" if job.workers == 1 else f"{job.workers} workers in a {topology}"
    return f"{job.shape.name} on {workers}, {duration_text(job.compute.step_s)} a step"


def run_text(calibration: Calibration) -> str:
    """The run that the job was taken from."""
    measured = calibration.measured
    return (
        f"the run: {calibration.steps} steps of {calibration.method.name} in "
        f"{duration_text(measured.training_s)}, {share_text(measured.utilisation)} busy"
    )


def link_text(job: Job) -> str:
    """Rates and latency."""
    link = job.link
    up, down = rate_text(link.up_bits_per_s), rate_text(link.down_bits_per_s)
    rates = f"{up} up and down" if up == down else f"{up} up, {down} down"
    return f"{rates}, {duration_text(link.latency_s)} one way"


def _bits(per_s: float) -> str:
    return rate_text(per_s).removesuffix("bit/s").rstrip()


def required_text(bits_per_s: float) -> str:
    """A rate in bit/s that is needed.

    >>> required_text(0), required_text(math.inf), required_text(2e9)
    ('any', 'none', '2 G')
    """
    if math.isinf(bits_per_s):
        return "none"
    return _bits(bits_per_s) if bits_per_s else "any"


def share_text(share: float) -> str:
    """A share in percent, never rounded up to a whole that it is not.

    >>> share_text(0.98247), share_text(0.99999), share_text(1)
    ('98.2 %', '99.9 %', '100 %')
    """
    if share < 0.1:
        return f"{100 * share:.2g} %"
    return f"{math.floor(1000 * share + 1e-9) / 10:.3g} %"


def verdict(rows: Sequence[Row], target: float) -> str:
    """Which methods the link carries.

    Args:
        rows: of `forecasts`.
        target: utilisation.
    """
    fitting = [row.method for row in rows if isinstance(row, Forecast) and row.fits]
    busy = f"busy {share_text(target)} of the time"
    if not fitting:
        return f"No method keeps the workers {busy} on this link."
    if len(fitting) == len(rows):
        return f"Every method keeps the workers {busy}."
    return f"The workers are {busy} with {', '.join(fitting)}."


def refusals(rows: Sequence[Row]) -> list[str]:
    """A line for each method that does not fit."""
    return [f"{row.method}: {row.error}" for row in rows if isinstance(row, RefusedMethod)]
