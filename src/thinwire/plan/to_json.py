"""A plan as JSON-able data: every quantity has its unit in its name, and none is rounded.

Absent values are null, such as a bandwidth that no link reaches or the fields of a method that does
not fit.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, Final

from thinwire.plan.advice import LOSS_SOURCE, Advice, Recommendation
from thinwire.plan.calibration import Calibration
from thinwire.plan.forecast import Forecast, RefusedMethod, Row, bill
from thinwire.plan.job import Job

FORMAT: Final = 3
"""Changes if a field is removed or changes its meaning, not if one is added."""


def plan_record(
    job: Job,
    rows: Sequence[Row],
    *,
    target: float,
    calibration: Calibration | None = None,
    advice: Advice | None = None,
) -> dict[str, Any]:
    """The job, a row for each method, and advice.

    Args:
        job: job of the plan.
        rows: result of `forecasts`.
        target: utilisation to reach.
        calibration: the run that the job was taken from; None without one.
        advice: result of `advise`; None if not requested.

    >>> from thinwire import presets
    >>> from thinwire.plan.compute import Compute
    >>> from thinwire.plan.forecast import forecasts
    >>> from thinwire.plan.link import Link
    >>> from thinwire.plan.shape import Shape
    >>> job = Job(
    ...     shape=Shape.of_size(1000, 2), workers=2, compute=Compute(step_s=1), link=Link.of(1e6)
    ... )
    >>> record = plan_record(job, forecasts([presets.diloco()], job), target=0.9)
    >>> record["link"]["up_bits_per_s"], record["methods"][0]["up_bytes_per_round"]
    (1000000.0, 4064)
    """
    run: dict[str, Any] = {}
    if calibration is not None:
        measured = calibration.measured
        named = {"method": calibration.method.name, "steps": calibration.steps}
        run = {**named, "utilisation": measured.utilisation, **asdict(measured)}
    shape = job.shape
    record = {
        "format": FORMAT,
        "model": {"name": shape.name, "parameters": shape.parameters, "layers": shape.layers},
        "workers": job.workers,
        "added_bytes_per_message": job.added_nbytes,
        "step_s": job.compute.step_s,
        "link": {"topology": job.topology.name, **asdict(job.link)},
        "tokens_per_step_per_worker": job.tokens_per_step,
        "tokens": job.tokens,
        "target_utilisation": target,
        "methods": [_row(row) for row in rows],
        "run": run or None,
        "advice": advice
        and {
            "target_utilisation": advice.target,
            "recommended": [_recommendation(row, job) for row in advice.recommended],
            "closest": advice.closest and _recommendation(advice.closest, job),
            "changes": [
                {"quantity": change.quantity, "value": change.value, "method": change.choice.text}
                for change in advice.changes
            ],
            "loss_source": LOSS_SOURCE,
            "currency": job.prices and job.prices.currency,
        },
    }
    # Turns keys into text, and infinity into null.
    return json.loads(json.dumps(record, default=asdict), parse_constant=lambda _: None)


def _recommendation(row: Recommendation, job: Job) -> dict[str, Any]:
    return {
        "method": row.choice.text,
        "python": row.choice.python,
        "forecast": _row(row.forecast),
        "loss_share": row.choice.loss_share,
        "bill": bill(row.forecast, job),
    }


def _row(row: Row) -> dict[str, Any]:
    if isinstance(row, RefusedMethod):
        blank = dict.fromkeys((field.name for field in fields(Forecast)), None)
        return blank | {"method": row.method, "fits": False, "error": row.error}
    return asdict(row) | {"error": None}
