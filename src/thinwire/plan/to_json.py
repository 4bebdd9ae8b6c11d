"""A plan as JSON-able data: every quantity has its unit in its name, and none is rounded.

What has no value is null: a bandwidth that no link reaches, or the fields of a method that does not
fit.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, Final

from thinwire.plan.advice import Advice, Recommendation
from thinwire.plan.advice_text import LOSS_SOURCE
from thinwire.plan.calibration import Calibration
from thinwire.plan.forecast import Forecast, RefusedMethod, Row
from thinwire.plan.job import Job
from thinwire.plan.money import bill
from thinwire.plan.sweep import Sweep

FORMAT: Final = 1
"""Changes when a field goes or changes its meaning; new fields may come without a change."""


def plan_record(
    job: Job,
    rows: Sequence[Row],
    *,
    target: float,
    swept: Sweep | None = None,
    calibration: Calibration | None = None,
    advice: Advice | None = None,
) -> dict[str, Any]:
    """The job, a row for each method, and the sweep.

    Args:
        job: what was planned.
        rows: of `forecasts`.
        target: utilisation.
        swept: None without a sweep.
        calibration: of the run that the job was taken from, if it was.
        advice: of `advise`; None: it was not asked for.

    >>> from thinwire import presets
    >>> from thinwire.plan.compute import Compute
    >>> from thinwire.plan.forecast import forecasts
    >>> from thinwire.plan.link import Link
    >>> from thinwire.plan.shape import Shape
    >>> job = Job(
    ...     shape=Shape.of_size(1000, 2), workers=2, compute=Compute(step_s=1), link=Link.of(1e6)
    ... )
    >>> record = plan_record(job, forecasts([presets.diloco()], job), target=0.9)
    >>> record["link"]["up_bits_per_s"], record["methods"][0]["sent_bytes_per_round"]
    (1000000.0, 4064)
    """
    return {
        "format": FORMAT,
        "model": {
            "name": job.shape.name,
            "parameters": job.shape.parameters,
            "layers": job.shape.layers,
        },
        "workers": job.workers,
        "added_bytes_per_message": job.added_nbytes,
        "step_s": job.compute.step_s,
        "link": {
            "topology": job.topology.name,
            "up_bits_per_s": _finite(job.link.up_bits_per_s),
            "down_bits_per_s": _finite(job.link.down_bits_per_s),
            "latency_s": job.link.latency_s,
        },
        "tokens_per_step_per_worker": job.tokens_per_step,
        "tokens": job.tokens,
        "target_utilisation": target,
        "methods": [_row(row) for row in rows],
        "sweep": None if swept is None else _sweep(swept),
        "run": None if calibration is None else _run(calibration),
        "advice": None if advice is None else _advice(advice, job),
    }


def _advice(advice: Advice, job: Job) -> dict[str, Any]:
    closest = advice.closest
    return {
        "target_utilisation": advice.target,
        "recommended": [_recommendation(row, job) for row in advice.recommended],
        "closest": None if closest is None else _recommendation(closest, job),
        "changes": [
            {"quantity": change.quantity, "value": change.value, "method": change.choice.text}
            for change in advice.changes
        ],
        "loss_source": LOSS_SOURCE,
        "currency": None if job.prices is None else job.prices.currency,
    }


def _recommendation(row: Recommendation, job: Job) -> dict[str, Any]:
    return {
        "method": row.choice.text,
        "python": row.choice.python,
        "forecast": _row(row.forecast),
        "loss_share": asdict(row.estimate.loss),
        "not_measured": list(row.estimate.beyond),
        "bill": asdict(bill(row.forecast, job)),
    }


def _row(row: Row) -> dict[str, Any]:
    if isinstance(row, RefusedMethod):
        blank = dict.fromkeys((field.name for field in fields(Forecast)), None)
        return blank | {"method": row.method, "fits": False, "error": row.error}
    record = asdict(row) | {"error": None}
    record["target_bits_per_s"] = _finite(row.target_bits_per_s)
    record["required_bits_per_s"] = {
        f"{share:g}": _finite(rate) for share, rate in row.required_bits_per_s.items()
    }
    return record


def _run(calibration: Calibration) -> dict[str, Any]:
    measured = calibration.measured
    return {
        "method": calibration.method.name,
        "steps": calibration.steps,
        "utilisation": measured.utilisation,
        **asdict(measured),
    }


def _sweep(swept: Sweep) -> dict[str, Any]:
    return {
        "quantity": swept.name,
        "unit": swept.quantity.unit,
        "values": swept.values,
        "utilisation": {curve.method: curve.utilisation for curve in swept.curves},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
