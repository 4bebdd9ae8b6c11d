"""Advice as text: the rows of a table, and lines to paste."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from thinwire.errors import ConfigurationError
from thinwire.plan.advice import USED_SHARE, Advice, NeededChange, Recommendation
from thinwire.plan.choice import Choice
from thinwire.plan.job import Job
from thinwire.plan.loss import LossEstimate
from thinwire.plan.money import bill
from thinwire.plan.text import share_text
from thinwire.plan.units import duration_text, nbytes_text, rate_text

LOSS_SOURCE: Final = (
    "Loss: what is expected against data-parallel AdamW on as many tokens, and in brackets how far "
    "the evidence allows it to be off. It is from runs of 0.25M parameters with three seeds, and, "
    "for dense methods in models of 100M parameters or more, from one published run a size (arXiv "
    "2505.23725). It is no promise: compare at your own size."
)
"""What the ranges are made of, for below a table."""

_PAPER_RECIPE_FROM: Final = 50e6


def advice_title(advice: Advice) -> str:
    """What the table below it shows."""
    busy = share_text(advice.target)
    if advice.recommended:
        return f"what to run: busy {busy} of the time or more, least expected loss first"
    return f"nothing tried is busy {busy} of the time; the busiest"


def advice_head(job: Job) -> tuple[str, ...]:
    """Headings of `advice_cells`."""
    head = ("", "method", "H", "a round", "busy", "loss")
    if job.prices is None and job.price is None:
        return head
    per = "run" if job.tokens is not None else "day"
    code = "" if job.prices is None else f", {job.prices.currency}"
    return (*head, f"{per}{code}", "waiting")


def advice_cells(advice: Advice, job: Job) -> list[tuple[str, ...]]:
    """A row for each recommendation, or for the busiest choice where none reaches the target."""
    found = advice.recommended or (() if advice.closest is None else (advice.closest,))
    return [_cells(number, row, job) for number, row in enumerate(found, start=1)]


def advice_notes(advice: Advice) -> Iterator[str]:
    """What no run had, what would have to change, and where losses are from."""
    for number, row in enumerate(advice.recommended, start=1):
        if row.estimate.beyond:
            yield f"{number}: no run here had {' or '.join(row.estimate.beyond)}."
    hidden = [
        str(n) for n, row in enumerate(advice.recommended, start=1) if row.choice.tau is not None
    ]
    if hidden:
        kept = share_text(1 - USED_SHARE)
        yield f"{', '.join(hidden)}: {kept} of the rate is kept for headers and delays."
    if not advice.recommended:
        yield from _changes(advice)
    if advice.recommended or advice.closest is not None:
        yield LOSS_SOURCE


def pasted_lines(advice: Advice, command: Callable[[Choice], str]) -> Iterator[str]:
    """For each recommendation a command line and a line of Python.

    Args:
        advice: of `advise`.
        command: of a choice, such as `command_line`.
    """
    for number, row in enumerate(advice.recommended, start=1):
        yield f"{number}  {command(row.choice)}"
        yield f"   method = {row.choice.python}"


def command_line(
    choice: Choice,
    job: Job,
    *,
    model: str | None = None,
    accelerators: int = 1,
    where: str | None = None,
) -> str:
    """The command that each worker starts with, but for the address and the folder.

    Workers meet at a lighthouse, or in an object store where the job has one; those that cannot
    come and go by torchrun.

    Args:
        choice: what is run.
        job: for how many workers of which model.
        model: value of --model; None: a config.json of the user's own.
        accelerators: that share a worker.
        where: the run is, with what `thinwire join` needs to find it; default a placeholder.

    >>> from thinwire.plan.compute import Compute
    >>> from thinwire.plan.link import Link
    >>> from thinwire.plan.shape import Shape
    >>> job = Job(
    ...     shape=Shape.of_size(1000, 2), workers=2, compute=Compute(step_s=1), link=Link.of(1e6)
    ... )
    >>> command_line(Choice(preset="muloco", bits=2), job, model="250k")
    "thinwire join 'TICKET' --model 250k --method muloco:bits=2 --workers 2 --out runs/here"
    """
    recipe = "--recipe paper " if job.shape.parameters >= _PAPER_RECIPE_FROM else ""
    rest = f"{recipe}--model {model or 'config.json'} --method {choice.text}"
    try:
        choice.method().check_elastic()
    except ConfigurationError:
        return (
            f"torchrun --nnodes {job.workers} --nproc-per-node {accelerators} --rdzv-backend c10d "
            f"--rdzv-endpoint HOST:29400 -m thinwire train {rest} --out runs/here"
        )
    if where is None:
        where = "'TICKET'" if job.price is None else "s3://BUCKET --run-name NAME"
    start, shared = "thinwire", ""
    if accelerators > 1:
        start = f"torchrun --nproc-per-node {accelerators} -m thinwire"
        shared = f" --worker-size {accelerators}"
    return f"{start} join {where} {rest} --workers {job.workers}{shared} --out runs/here"


def loss_text(estimate: LossEstimate) -> str:
    """A range in percent.

    >>> from thinwire.plan.loss import LossRange
    >>> loss_text(LossEstimate(loss=LossRange(low=-0.01, middle=0.02, high=0.1), beyond=()))
    '+2 % (-1 to +10)'
    """
    low, middle, high = (_signed(getattr(estimate.loss, end)) for end in ("low", "middle", "high"))
    return f"{middle} % ({low} to {high})"


def _signed(share: float) -> str:
    return f"{round(100 * share):+d}" if round(100 * share) else "0"


def _cells(number: int, row: Recommendation, job: Job) -> tuple[str, ...]:
    found, choice = row.forecast, row.choice
    shown = (
        str(number),
        choice.label,
        str(found.sync_every_steps),
        nbytes_text(found.sent_bytes_per_round),
        share_text(found.utilisation),
        loss_text(row.estimate),
    )
    if job.prices is None and job.price is None:
        return shown
    costs = bill(found, job)
    return (*shown, _money(costs.cost), _money(costs.waiting_cost))


def _money(cost: float | None) -> str:
    if cost is None:
        return "-"
    return f"{cost:,.3g}" if cost < 1000 else f"{cost:,.0f}"


def _changes(advice: Advice) -> Iterator[str]:
    if not advice.changes:
        yield "No bandwidth, length of rounds or number of workers that was tried would change it."
        return
    yield "One of these would change it:"
    for change in advice.changes:
        yield f"  {_change(change)}"


def _change(change: NeededChange) -> str:
    by = change.choice.text
    if change.quantity == "bandwidth":
        return f"a link of {rate_text(change.value)} up and down ({by})"
    if change.quantity == "workers":
        return f"{change.value:g} workers ({by})"
    return f"rounds of {change.value:g} steps ({by}), which no run here had"


def bill_text(rows: Sequence[Recommendation], job: Job) -> str:
    """Hours and bytes of the first recommendation.

    Args:
        rows: recommendations; at least one.
        job: that they are for.
    """
    costs = bill(rows[0].forecast, job)
    per = f"The run of 1 takes {duration_text(3600 * costs.hours)}" if costs.is_of_run else "A day"
    return (
        f"{per}: {costs.worker_hours:,.3g} worker-hours, of which {costs.waiting_hours:,.3g} "
        f"waiting, and {nbytes_text(costs.traffic_bytes)} that leave all workers."
    )
