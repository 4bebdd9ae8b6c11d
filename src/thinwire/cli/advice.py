"""What to run, as `thinwire plan` and `thinwire doctor` print it."""

from __future__ import annotations

import shlex
from contextlib import suppress
from typing import TYPE_CHECKING

from thinwire.cli.output import say, table
from thinwire.errors import ConfigurationError
from thinwire.plan.units import duration_text, nbytes_text, rate_text, share_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from thinwire.address import Address
    from thinwire.plan.advice import Advice, Choice, NeededChange
    from thinwire.plan.job import Job

_PAPER_RECIPE_FROM = 50e6


def show_advice(
    console: Console,
    advice: Advice,
    job: Job,
    *,
    model: str | None,
    accelerators: int = 1,
    at: Address | None = None,
) -> None:
    """Print a table, lines to paste, and what the numbers are worth.

    Args:
        console: console to print to.
        advice: result of `advise` for `job`.
        job: model, workers and link.
        model: value of --model; None for a config.json of the user's own.
        accelerators: number of accelerators per worker.
        at: address of the run; default a placeholder.
    """
    from thinwire.plan.advice import advice_table

    say(console, "")
    title, head, rows = advice_table(advice, job)
    if rows:
        console.print(table(title, head, rows, named=1))
    for number, row in enumerate(advice.recommended, start=1):
        choice = row.choice
        line = command_line(choice, job, model=model, accelerators=accelerators, at=at)
        say(console, f"{number}  {line}\n   method = {choice.python}")
    say(console, "")
    say(console, "\n".join(_notes(advice, job)))


def command_line(
    choice: Choice,
    job: Job,
    *,
    model: str | None = None,
    accelerators: int = 1,
    at: Address | None = None,
) -> str:
    """The command that each worker runs, except for the address, its number and the folder.

    In a star, workers meet in an object store; in a ring, at a port of worker 0. They have numbers,
    except in a store with a method that lets them come and go.

    Args:
        choice: preset and settings to run.
        job: the model and the number of workers.
        model: value of --model; None for a config.json of the user's own.
        accelerators: number of accelerators per worker.
        at: address of the run; default a placeholder.
    """
    recipe = " --recipe paper" if job.shape.parameters >= _PAPER_RECIPE_FROM else ""
    place, start, size = "tcp://HOST:29400", "thinwire", ""
    if at is not None or job.topology.name == "star":
        place = str(at or "s3://BUCKET/RUN").replace("hub://", "hub://TOKEN@")
    if accelerators > 1:
        start = f"torchrun --nproc-per-node {accelerators} -m thinwire"
        size = f" --worker-size {accelerators}"
    numbers, workers = f"?workers={job.workers}&worker=0", ""
    with suppress(ConfigurationError):
        choice.method().check_elastic()
        if not place.startswith("tcp"):
            numbers, workers = "", f" --workers {job.workers}"
    return (
        f"{start} join {shlex.quote(place + numbers)}{recipe} --model {model or 'config.json'} "
        f"--method {choice.text}{workers}{size} --out runs/here"
    )


def _notes(advice: Advice, job: Job) -> Iterator[str]:
    """Cost of the first choice, share of the rate kept free, helpful changes, source of losses."""
    from thinwire.plan.advice import FEWEST_ROUNDS, INTERVALS, LOSS_SOURCE, USED_SHARE
    from thinwire.plan.forecast import bill

    if advice.recommended and job.prices:
        costs = bill(advice.recommended[0].forecast, job)
        run = f"The run of 1 takes {duration_text(3600 * costs.hours)}"
        yield (
            f"{run if costs.is_of_run else 'A day'}: {costs.worker_hours:,.3g} worker-hours, of "
            f"which {costs.waiting_hours:,.3g} waiting, and {nbytes_text(costs.traffic_bytes)} "
            "that leave all workers."
        )
    numbered = enumerate(advice.recommended, start=1)
    if hidden := [str(number) for number, row in numbered if row.choice.tau is not None]:
        kept = share_text(1 - USED_SHARE)
        yield f"{', '.join(hidden)}: {kept} of the rate is kept for headers and delays."
    if advice.changes:
        yield "One of these would change it:"
        yield from (f"  {_change(change)}" for change in advice.changes)
    elif not advice.recommended:
        wanted = job.sync_every or INTERVALS[-1]
        longest = wanted if job.steps is None else job.steps // FEWEST_ROUNDS
        if longest >= wanted:
            yield "No bandwidth or length of rounds that was tried would change it."
        else:
            yield (
                f"The run has {job.steps} steps, so that only rounds of up to {longest} were "
                f"tried, {FEWEST_ROUNDS} of them; more --tokens allow longer ones."
            )
    if advice.recommended or advice.closest is not None:
        yield LOSS_SOURCE


def _change(change: NeededChange) -> str:
    by = change.choice.text
    if change.quantity == "bandwidth":
        return f"a link of {rate_text(change.value)} up and down ({by})"
    return f"rounds of {change.value:g} steps ({by}), which no run here had"
