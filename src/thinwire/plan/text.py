"""Advice as a table, for a terminal or a page."""

from typing import Final, TypeAlias

from thinwire.plan.advice import Advice
from thinwire.plan.forecast import bill
from thinwire.plan.job import Job
from thinwire.plan.units import nbytes_text, share_text

LOSS_SOURCE: Final = (
    "Loss: measured against data-parallel AdamW on as many tokens, with 0.25M parameters, 4 "
    "workers, rounds of 10 steps and three seeds. Longer rounds and more workers lose more. It is "
    "no forecast: compare at your own size."
)
"""Source of the losses, printed below the table."""

Table: TypeAlias = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""A title, headings, and rows of cells."""


def advice_table(advice: Advice, job: Job) -> Table:
    """A row for each recommendation, or for the busiest choice where none reaches the target."""
    busy, rows = share_text(advice.target), list[tuple[str, ...]]()
    title = f"what to run: busy {busy} of the time or more, least measured loss first"
    if not advice.recommended:
        title = f"nothing tried is busy {busy} of the time; the busiest"
    head: tuple[str, ...] = ("", "method", "H", "a round", "busy", "loss")
    if job.prices is not None:
        per = "run" if job.tokens is not None else "day"
        head = (*head, f"{per}, {job.prices.currency}")
        if job.prices.worker_per_hour is not None:
            head = (*head, "waiting")
    closest = () if advice.closest is None else (advice.closest,)
    for number, row in enumerate(advice.recommended or closest, start=1):
        found, share = row.forecast, row.choice.loss_share
        cells = (
            str(number),
            row.choice.label,
            str(found.sync_every_steps),
            nbytes_text(found.sent_bytes_per_round),
            share_text(found.utilisation),
            "not measured" if share is None else f"{round(100 * share):+d} %".replace("+0", "0"),
        )
        costs = bill(found, job)
        money = (money_text(costs.cost), money_text(costs.waiting_cost))
        rows.append((*cells, *money)[: len(head)])
    return title, head, rows


def money_text(cost: float | None) -> str:
    """A sum in three digits, or in full from 1,000 on; "-": not known.

    >>> money_text(12.345), money_text(12345.6), money_text(None)
    ('12.3', '12,346', '-')
    """
    if cost is None:
        return "-"
    return f"{cost:,.3g}" if cost < 1000 else f"{cost:,.0f}"
