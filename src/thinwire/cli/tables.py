"""What `thinwire compare` prints."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from thinwire.experiments import Comparison, Estimate, Standing
from thinwire.experiments.tuning import Choice
from thinwire.train.observers import bytes_text

__all__ = ["difference_table", "estimate_text", "row_table", "search_table", "trouble_table"]


def _table(title: str, first: str, *columns: str, caption: str | None = None) -> Table:
    # No borders: seven columns and a method's text have to fit into 80 columns.
    table = Table(box=SIMPLE_HEAD, padding=0, title=title, caption=caption)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def estimate_text(estimate: Estimate | None) -> str:
    """A mean with its standard error; one seed has none.

    >>> estimate_text(Estimate(mean=1.0, standard_error=0.25, seeds=(0, 1)))
    '1.0000 ± 0.2500'
    >>> estimate_text(Estimate(mean=1.0, standard_error=None, seeds=(0,)))
    '1.0000'
    """
    if estimate is None:
        return "none"
    if estimate.standard_error is None:
        return f"{estimate.mean:.4f}"
    return f"{estimate.mean:.4f} ± {estimate.standard_error:.4f}"


def row_table(comparison: Comparison) -> Table:
    """One row per method: means over its runs."""
    table = _table(
        "validation loss of the outer parameters in nats per token; bytes per worker",
        "method",
        *("loss", "sent", "received", "peak/step", "memory", "wall s"),
        caption="± standard error over seeds; memory: weights, inner state, anchor, outer state "
        "and feedback, over the weights",
    )
    for row in comparison.rows:
        table.add_row(
            escape(row.arm.label), estimate_text(comparison.loss(row)), *_measured(row.runs)
        )
    return table


def _measured(runs: Sequence[dict[str, Any]]) -> list[str]:
    if not runs:
        return ["-"] * 5

    def mean(key: str) -> float:
        return statistics.fmean(run[key] for run in runs)

    return [
        bytes_text(mean("sent_bytes_per_worker")),
        bytes_text(mean("received_bytes_per_worker")),
        bytes_text(mean("peak_sent_bytes_per_step")),
        _memory_text([run["memory_bytes"] for run in runs]),
        f"{mean('wall_s'):.1f}",
    ]


def _memory_text(held: Sequence[Mapping[str, int]]) -> str:
    if not all(held):
        return "not recorded"
    return f"{statistics.fmean(sum(its.values()) / its['live_weights'] for its in held):.2f} x"


def difference_table(comparison: Comparison) -> Table:
    """One row per method: its loss minus the baseline's, paired by seed."""
    table = Table(
        box=SIMPLE_HEAD,
        padding=0,
        title="differences of loss, paired by seed",
        caption="± standard error, which one seed does not have",
    )
    table.add_column("difference", justify="right", no_wrap=True)
    for column in ("of", "minus", "seeds"):
        table.add_column(column)
    for row in comparison.rows:
        label = row.arm.label
        base = comparison.baselines.get(label, "none here")
        if base != label:
            difference = comparison.difference(row)
            seeds = "" if difference is None else ",".join(map(str, difference.seeds))
            table.add_row(estimate_text(difference), escape(label), escape(base), seeds or "none")
    return table


def search_table(choices: Sequence[Choice]) -> Table:
    """One row per method: which rates the search chose."""
    table = _table(
        f"rates, out of {len(choices[0].tried)} tried for each; all in tuning.json",
        "method",
        "chosen",
        caption="* the lowest or highest that was tried: a better one may lie beyond",
    )
    for choice in choices:
        table.add_row(escape(choice.arm.label), escape(_chosen_text(choice)))
    return table


def _chosen_text(choice: Choice) -> str:
    if choice.chosen is None:
        return f"none: {choice.why}"
    edges = choice.edges()
    return " ".join(f"{n}={v}{'*' if n in edges else ''}" for n, v in choice.chosen.chosen)


def trouble_table(standings: Mapping[str, Standing]) -> Table:
    """Folders that are left out of the tables, and why."""
    table = Table(box=SIMPLE_HEAD, padding=0, title="left out of the tables above")
    for column in ("folder", "state", "why"):
        table.add_column(column, overflow="fold")
    for folder, standing in standings.items():
        table.add_row(escape(folder), str(standing.state), escape(standing.why))
    return table
