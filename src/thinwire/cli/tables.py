"""The tables of `thinwire compare`."""

from collections.abc import Iterator

from rich.table import Table

from thinwire.cli.output import table
from thinwire.experiments import Comparison
from thinwire.experiments.comparison import TuningResult
from thinwire.plan.units import nbytes_text
from thinwire.runs.statistics import Estimate
from thinwire.runs.variants import Variant


def comparison_tables(comparison: Comparison) -> Iterator[Table]:
    """Rates that a search chose, means of each method, and differences."""
    if comparison.tuning:
        yield table(
            f"rates, out of {len(comparison.tuning[0].tried)} tried for each; all in tuning.json",
            ("method", "chosen"),
            [(result.spec.label, _chosen_text(result)) for result in comparison.tuning],
            caption="* the lowest or highest that was tried: a better one may be beyond",
        )
    yield table(
        "validation loss of the outer parameters in nats per token; bytes per worker",
        ("method", "loss", "sent", "received", "peak/step", "memory", "wall s"),
        [(row.label, _text(row.loss), *_measured(row.variant)) for row in comparison.rows],
        caption="± standard error over seeds; memory: weights, inner state, anchor, outer state "
        "and feedback, over the weights",
    )
    if len(comparison.rows) > 1:
        yield table(
            "differences of loss, paired by seed",
            ("difference", "of", "minus", "seeds"),
            _differences(comparison),
            caption="± standard error, which one seed does not have",
        )


def _text(estimate: Estimate | None) -> str:
    return "none" if estimate is None else estimate.text(".4f")


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


def _differences(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Each method's loss minus the baseline's."""
    for row in comparison.rows:
        base = comparison.baselines.get(row.label, "none here")
        if base != row.label:
            difference = comparison.difference(row)
            seeds = "" if difference is None else ",".join(map(str, difference.seeds))
            yield _text(difference), row.label, base, seeds or "none"


def _chosen_text(result: TuningResult) -> str:
    if result.chosen is None:
        return f"none: {result.why}"
    edges = result.edges()
    return " ".join(f"{n}={v}{'*' if n in edges else ''}" for n, v in result.chosen.searched)
