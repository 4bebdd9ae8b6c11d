"""What to run, as `thinwire plan` and `thinwire doctor` print it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.cli.output import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from thinwire.plan.advice import Advice
    from thinwire.plan.job import Job


def show_advice(
    console: Console,
    advice: Advice,
    job: Job,
    *,
    model: str | None,
    accelerators: int = 1,
    where: str | None = None,
) -> None:
    """Print a table, lines to paste, and what the numbers are worth.

    Args:
        console: to print to.
        advice: of `advise`, for `job`.
        job: model, workers and link.
        model: value of --model; None: a config.json of the user's own.
        accelerators: that share a worker.
        where: `thinwire join` finds the run; default what `command_line` says.
    """
    from thinwire.plan import advice_text

    say(console, "")
    title, cells = advice_text.advice_title(advice), advice_text.advice_cells(advice, job)
    if cells:
        console.print(plain_table(title, advice_text.advice_head(job), cells, named=1))
    lines = advice_text.pasted_lines(
        advice,
        lambda choice: advice_text.command_line(
            choice, job, model=model, accelerators=accelerators, where=where
        ),
    )
    say(console, "\n".join([*lines, ""]))
    if advice.recommended and (job.prices or job.price):
        say(console, advice_text.bill_text(advice.recommended, job))
    say(console, "\n".join(advice_text.advice_notes(advice)))


def plain_table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, named: int = 0
) -> Table:
    """A table of which column `named` is text, and the others are numbers.

    Args:
        title: above it.
        head: of each column.
        rows: a text for each column.
        named: which column is never folded.
    """
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    # No borders: a method's text and seven numbers have to fit into 80 columns.
    table = Table(box=SIMPLE_HEAD, padding=0, title=title)
    for column, heading in enumerate(head):
        is_name = column == named
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    for row in rows:
        table.add_row(*map(escape, row))
    return table
