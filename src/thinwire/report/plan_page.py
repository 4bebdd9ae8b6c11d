"""The page of `thinwire plan --sweep`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from thinwire.plan.advice import Advice
from thinwire.plan.advice_text import advice_cells, advice_head, advice_notes, advice_title
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
from thinwire.report.blocks import Block, Chart, Heading, Paragraph, TextTable
from thinwire.report.page import Page

_FEW_POINTS: Final = 30


def plan_page(
    job: Job, rows: Sequence[Row], swept: Sweep, *, target: float, advice: Advice | None = None
) -> Page:
    """Utilisation against what was swept, and the tables of the job as it is.

    Args:
        job: what was planned.
        rows: of `forecasts`.
        swept: of `sweep`.
        target: utilisation.
        advice: of `advise`; None: it was not asked for.
    """
    blocks: list[Block] = [
        Heading(text="In short", name="summary", below=verdict(rows, target)),
        *advice_blocks(advice, job),
        sweep_chart(job, swept, target=target),
        _table(
            "Bytes that each worker sends, and how busy it is",
            OUTCOME_HEAD,
            rows,
            outcome_cells,
            main=("a round", "busy"),
        ),
    ]
    if job.tokens_per_step is not None:
        blocks.append(
            _table(
                "The run: tokens of all workers, bytes of each",
                run_head(job),
                rows,
                run_cells,
                main=() if job.tokens is None else ("wall-clock", "sent"),
            )
        )
    blocks += [
        _table(
            "Bandwidth in bit/s for a utilisation of",
            BANDWIDTH_HEAD,
            rows,
            bandwidth_cells,
            main=("50 %", "90 %"),
        ),
        Paragraph(text=_READING),
    ]
    return Page(title=job_text(job), lead=link_text(job), blocks=blocks, scripts=("table.js",))


def advice_blocks(advice: Advice | None, job: Job) -> list[Block]:
    """What to run, as a table with its notes; nothing without advice."""
    if advice is None:
        return []
    title = advice_title(advice)
    table = TextTable(
        title=title[0].upper() + title[1:],
        head=(*advice_head(job), "in Python"),
        rows=tuple(
            (*cells, row.choice.python)
            for cells, row in zip(
                advice_cells(advice, job),
                advice.recommended or ((advice.closest,) if advice.closest else ()),
                strict=True,
            )
        ),
        main=("method", "loss"),
    )
    return [table, *(Paragraph(text=note) for note in advice_notes(advice))]


_READING = (
    "Simulated, not measured: thinwire plan. Utilisation (busy) is the share of the time in which "
    "inner steps are computed. Bytes are those that a worker hands over, each message counted "
    "once; peak is the rate at which what is due after one step has left when the next one is "
    "computed. any: there is nothing to wait for; none: latency alone takes too long."
)


def _table(
    title: str, head: tuple[str, ...], rows: Sequence[Row], cells: Any, *, main: tuple[str, ...]
) -> TextTable:
    return TextTable(
        title=title,
        head=head,
        rows=tuple(
            cells(row) if isinstance(row, Forecast) else (row.method, row.error) for row in rows
        ),
        main=main,
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
        "legend": True,
        "xaxis": {
            "type": "log",
            "title": {"text": quantity.label},
            "tickvals": ticks,
            "ticktext": [quantity.text(tick) for tick in ticks],
            **({"format": "si", "unit": unit} if unit else {}),
        },
        "yaxis": {
            "title": {"text": "compute utilisation"},
            "range": [0, 1.03],
            "format": "percent",
        },
        "marks": [
            {"y": target, "text": f"target {share_text(target)}"},
            *([] if here is None else [{"x": here, "text": "this job"}]),
        ],
    }
