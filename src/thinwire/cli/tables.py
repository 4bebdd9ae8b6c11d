"""What `thinwire compare` prints."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from thinwire.experiments import Comparison
from thinwire.experiments.comparison import TuningResult
from thinwire.plan.units import nbytes_text
from thinwire.runs.statistics import Estimate
from thinwire.runs.status import RunStatus
from thinwire.runs.variants import Variant


def _table(title: str, first: str, *columns: str, caption: str | None = None) -> Table:
    # No borders: seven columns and a method's text have to fit into 80 columns.
    table = Table(box=SIMPLE_HEAD, padding=0, title=title, caption=caption)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _text(estimate: Estimate | None) -> str:
    return "none" if estimate is None else estimate.text(".4f")


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
        table.add_row(escape(row.label), _text(row.loss), *_measured(row.variant))
    return table


def _measured(variant: Variant | None) -> list[str]:
    if variant is None:
        return ["-"] * 5
    memory = variant.memory_ratio
    return [
        nbytes_text(variant.sent_bytes),
        nbytes_text(variant.mean(lambda run: run.summary.received_bytes_per_worker)),
        nbytes_text(variant.mean(lambda run: run.summary.peak_sent_bytes_per_step)),
        "not recorded" if memory is None else f"{memory:.2f} x",
        f"{variant.mean(lambda run: run.summary.wall_s):.1f}",
    ]


def difference_table(comparison: Comparison) -> Table:
    """One row per method: its loss minus the baseline's, paired by seed."""
    caption = "± standard error, which one seed does not have"
    columns = ("difference", "of", "minus", "seeds")
    table = _table("differences of loss, paired by seed", *columns, caption=caption)
    for row in comparison.rows:
        label = row.label
        base = comparison.baselines.get(label, "none here")
        if base != label:
            difference = comparison.difference(row)
            seeds = "" if difference is None else ",".join(map(str, difference.seeds))
            table.add_row(_text(difference), escape(label), escape(base), seeds or "none")
    return table


def tuning_table(results: Sequence[TuningResult]) -> Table:
    """One row per method: which rates the search chose."""
    table = _table(
        f"rates, out of {len(results[0].tried)} tried for each; all in tuning.json",
        "method",
        "chosen",
        caption="* the lowest or highest that was tried: a better one may lie beyond",
    )
    for result in results:
        table.add_row(escape(result.spec.label), escape(_chosen_text(result)))
    return table


def _chosen_text(result: TuningResult) -> str:
    if result.chosen is None:
        return f"none: {result.why}"
    edges = result.edges()
    return " ".join(f"{n}={v}{'*' if n in edges else ''}" for n, v in result.chosen.searched)


def problem_table(statuses: Mapping[str, RunStatus]) -> Table:
    """Folders that are left out of the tables, and why."""
    table = Table(box=SIMPLE_HEAD, padding=0, title="left out of the tables above")
    for column in ("folder", "state", "why"):
        table.add_column(column, overflow="fold")
    for folder, status in statuses.items():
        table.add_row(escape(folder), str(status.state), escape(status.why))
    return table
