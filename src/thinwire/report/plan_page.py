"""The page of `thinwire plan --sweep`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from thinwire.plan.forecast import Forecast, Row
from thinwire.plan.job import Job
from thinwire.plan.sweep import Sweep, SweepCurve
from thinwire.plan.text import (
    BANDWIDTH_HEAD,
    OUTCOME_HEAD,
    bandwidth_cells,
    job_text,
    link_text,
    outcome_cells,
    run_cells,
    run_head,
    share_text,
    verdict,
)
from thinwire.report.blocks import Block, Chart, Paragraph, TextTable
from thinwire.report.page import Page

__all__ = ["plan_page"]

_FEW_POINTS: Final = 30


def plan_page(job: Job, rows: Sequence[Row], swept: Sweep, *, target: float) -> Page:
    """Utilisation against what was swept, and the tables of the job as it is.

    Args:
        job: what was planned.
        rows: of `forecasts`.
        swept: of `sweep`.
        target: utilisation.
    """
    blocks: list[Block] = [
        Paragraph(text=verdict(rows, target)),
        sweep_chart(job, swept, target=target),
        _table(
            "Bytes that each worker sends, and how busy it is", OUTCOME_HEAD, rows, outcome_cells
        ),
    ]
    if job.tokens_per_step is not None:
        blocks.append(
            _table("The run: tokens of all workers, bytes of each", run_head(job), rows, run_cells)
        )
    blocks += [
        _table("Bandwidth in bit/s for a utilisation of", BANDWIDTH_HEAD, rows, bandwidth_cells),
        Paragraph(text=_READING),
    ]
    return Page(title=job_text(job), lead=link_text(job), blocks=blocks)


_READING = (
    "Simulated, not measured: thinwire plan. Utilisation (busy) is the share of the time in which "
    "inner steps are computed. Bytes are those that a worker hands over, each message counted "
    "once; peak is the rate at which what is due after one step has left when the next one is "
    "computed. any: there is nothing to wait for; none: latency alone takes too long."
)


def _table(title: str, head: tuple[str, ...], rows: Sequence[Row], cells: Any) -> TextTable:
    return TextTable(
        title=title,
        head=head,
        rows=tuple(
            cells(row) if isinstance(row, Forecast) else (row.method, row.error) for row in rows
        ),
    )


def sweep_chart(job: Job, swept: Sweep, *, target: float) -> Chart:
    """Utilisation against what was swept, a line for all methods that the wire cannot tell apart.

    Args:
        job: whose own value is marked.
        swept: of `sweep`.
        target: utilisation, marked as well.
    """
    label = swept.quantity.label
    marks = "lines+markers" if len(swept.values) < _FEW_POINTS else "lines"
    traces = [
        {
            "type": "scatter",
            "mode": marks,
            "name": ", ".join(names),
            "x": swept.values,
            "y": utilisation,
            "meta": {"series": series},
        }
        for series, (utilisation, names) in enumerate(_alike(swept.curves).items())
    ]
    return Chart(
        title=f"Compute utilisation against {label}",
        traces=traces,
        layout=_layout(job, swept, target),
        alt=f"Lines of compute utilisation against {label}; the tables below have the numbers.",
    )


def _alike(curves: Sequence[SweepCurve]) -> Mapping[tuple[float | None, ...], list[str]]:
    names: dict[tuple[float | None, ...], list[str]] = {}
    for curve in curves:
        names.setdefault(curve.utilisation, []).append(curve.method)
    return names


def _layout(job: Job, swept: Sweep, target: float) -> dict[str, Any]:
    here, quantity = swept.quantity.here(job), swept.quantity
    ticks, unit = quantity.ticks(swept.values), quantity.unit
    return {
        "hovermode": "x unified",
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
        "xaxis": {
            "type": "log",
            "title": {"text": quantity.label},
            "tickvals": ticks,
            "ticktext": [quantity.text(tick) for tick in ticks],
            "unifiedhovertitle": {"text": f"%{{x:.3s}}{unit}" if unit else "%{x:,d}"},
        },
        "yaxis": {
            "title": {"text": "compute utilisation"},
            "range": [0, 1.03],
            "tickformat": ".0%",
            "hoverformat": ".1%",
        },
        "shapes": [_target_line(target), *([] if here is None else [_here_line(here)])],
        "annotations": [
            _target_note(target),
            *([] if here is None else [_here_note(here)]),
        ],
    }


def _target_line(target: float) -> dict[str, Any]:
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target}


def _here_line(here: float) -> dict[str, Any]:
    return {"type": "line", "yref": "paper", "x0": here, "x1": here, "y0": 0, "y1": 1}


def _target_note(target: float) -> dict[str, Any]:
    return _note(f"target {share_text(target)}", x=0, xref="paper", xanchor="left", y=target)


def _here_note(here: float) -> dict[str, Any]:
    # Annotations, unlike shapes, are placed on the logarithm.
    return _note("this job", x=math.log10(here), yref="paper", y=1)


def _note(text: str, **place: Any) -> dict[str, Any]:
    return {"text": text, "showarrow": False, "yanchor": "bottom", **place}
