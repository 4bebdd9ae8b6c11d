"""What the planner would run with a report's model, link by link."""

from typing import Final

from thinwire.plan.advice import advise
from thinwire.plan.compute import Compute
from thinwire.plan.job import Job
from thinwire.plan.link import Link
from thinwire.plan.shape import Shape
from thinwire.plan.text import LOSS_SOURCE, advice_table
from thinwire.plan.units import duration_text, rate_text
from thinwire.report.blocks import Block, Paragraph, TextTable

_BITS_PER_S: Final = (1e5, 1e6, 1e7, 1e8, 1e9)
# Those that the page's link has when it is opened.
_STEP_S, _LATENCY_S = 0.1, 0.05
_READING: Final = (
    "By the planner, not from these runs: of what keeps the workers busy 90 % of the time what "
    "lost least when it was measured. thinwire plan says it for your model, step time and link."
)


def link_advice(shape: Shape, workers: int) -> list[Block]:
    """The first advice for links from 100 kbit/s to 1 Gbit/s, and where its losses are from.

    Args:
        shape: of the model.
        workers: K.
    """
    jobs = [
        Job(
            shape=shape,
            workers=workers,
            compute=Compute(step_s=_STEP_S),
            link=Link.of(bits_per_s, latency_s=_LATENCY_S),
        )
        for bits_per_s in _BITS_PER_S
    ]
    given = f"{duration_text(_STEP_S)} a step, {duration_text(_LATENCY_S)} one way"
    found = [advise(job) for job in jobs]
    tables = [advice_table(advice, job) for advice, job in zip(found, jobs, strict=True)]
    head = tables[0][1][1:]
    nothing = ("nothing that was tried", *("" for _ in head[1:]))
    table = TextTable(
        title=f"What to run with this model and {workers} workers, by bandwidth ({given})",
        head=("bandwidth", *head),
        rows=tuple(
            (rate_text(rate), *(rows[0][1:] if advice.recommended else nothing))
            for rate, advice, (_, _, rows) in zip(_BITS_PER_S, found, tables, strict=True)
        ),
        main=("method",),
    )
    return [table, Paragraph(text=f"{_READING} {LOSS_SOURCE}")]
