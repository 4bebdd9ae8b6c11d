"""The tables of a report of runs."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from thinwire.contributions import CLIPPED
from thinwire.plan.units import duration_text, nbytes_text
from thinwire.report.blocks import Cell, SortableTable, TextTable
from thinwire.report.pareto import first_shown, front_of
from thinwire.runs.statistics import paired_difference
from thinwire.runs.status import RunStatus
from thinwire.runs.variants import Variant


def ranked(variants: Sequence[Variant]) -> list[Variant]:
    """`variants` by rising loss."""
    return sorted(variants, key=lambda variant: variant.loss.mean)


def results_table(variants: Sequence[Variant]) -> SortableTable:
    """A row for each method, the lowest loss first; of many methods not all are shown at once."""
    front = {variant.label for variant in front_of(variants)}
    shown = {variants[index].label for index in first_shown(variants)}
    rows = ranked(variants)
    most = max(variant.sent_bytes for variant in variants)
    return SortableTable(
        title="Results",
        name="results",
        head=(
            "method",
            "loss",
            "behind the best",
            "sent",
            "fewer bytes",
            "front",
            "seeds",
            "K",
            "H",
            "received",
            "peak a step",
            "memory",
            "wall-clock",
        ),
        rows=tuple(_result(variant, front, most, rows[0]) for variant in rows),
        main=("loss", "sent"),
        rest=[index for index, variant in enumerate(rows) if variant.label not in shown],
    )


def _behind(variant: Variant, best: Variant) -> Cell:
    if variant is best:
        return "the best", 0.0
    found = paired_difference(variant.losses, best.losses)
    return ("no seed in common", "") if found is None else (found.text("+.4f"), found.mean)


def _result(variant: Variant, front: set[str], most: float, best: Variant) -> tuple[Cell, ...]:
    loss, sent = variant.loss, variant.sent_bytes
    received = variant.mean(lambda run: run.summary.received_bytes_per_worker)
    peak = variant.mean(lambda run: run.summary.peak_sent_bytes_per_step)
    wall, memory = variant.mean(lambda run: run.summary.wall_s), variant.memory_ratio
    return (
        (variant.label, variant.label),
        (loss.text(".4f"), loss.mean),
        _behind(variant, best),
        (nbytes_text(sent), sent),
        (_times(most / sent), most / sent) if sent else ("none sent", ""),
        ("yes", 0) if variant.label in front else ("", 1),
        (str(len(loss.seeds)), len(loss.seeds)),
        (str(variant.config.workers), variant.config.workers),
        (str(variant.config.sync_every), variant.config.sync_every),
        (nbytes_text(received), received),
        (nbytes_text(peak), peak),
        ("not recorded", "") if memory is None else (f"{memory:.2f} x", memory),
        (duration_text(wall), wall),
    )


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} x" if ratio >= 100 else f"{ratio:.3g} x"


def curves_table(variants: Sequence[Variant]) -> SortableTable:
    """The numbers of the charts of validation loss."""
    return SortableTable(
        title="Validation loss by steps",
        name="curves",
        head=("method", "step", "tokens", "sent", "loss"),
        rows=tuple(row for variant in variants for row in _points(variant)),
        main=("step", "loss"),
    )


def _points(variant: Variant) -> list[tuple[Cell, ...]]:
    curve = variant.curve(lambda record: record.val_loss)
    tokens, sent = (
        dict(zip(found.steps, found.means, strict=True))
        for found in (
            variant.curve(lambda record: record.tokens),
            variant.curve(lambda record: record.sent_bytes),
        )
    )
    return [
        (
            (variant.label, variant.label),
            (f"{step:,}", step),
            (f"{tokens[step]:,.0f}", tokens[step]),
            (nbytes_text(sent[step]), sent[step]),
            (point.text(".4f"), point.mean),
        )
        for step, point in zip(curve.steps, curve.points, strict=True)
    ]


def link_table(playable: Mapping[int, str], shown: Collection[int]) -> SortableTable:
    """An empty table, which the page fills in for the chosen link.

    Args:
        playable: label of each method that can be played over a link, by its number.
        shown: numbers of those that are shown at once.
    """
    return SortableTable(
        title="On this link",
        name="on-link",
        head=("method", "wall-clock", "computing", "waiting", "hidden"),
        rows=tuple(((label, variant), *(("", ""),) * 4) for variant, label in playable.items()),
        main=("wall-clock", "computing"),
        rest=[index for index, variant in enumerate(playable) if variant not in shown],
    )


def versions_table(variants: Sequence[Variant]) -> TextTable:
    """Versions of Python, torch and others; several where the runs differ."""
    versions = [run.summary.versions for variant in variants for run in variant.runs]
    names = sorted({name for its in versions for name in its})
    rows = [
        (name, ", ".join(sorted({str(its.get(name, "not recorded")) for its in versions})))
        for name in names
    ]
    return TextTable(
        title="Versions",
        head=("what", "version"),
        rows=tuple(rows) or (("versions", "not recorded"),),
    )


def contributions_table(variants: Sequence[Variant]) -> SortableTable | None:
    """Whose contributions were rejected or clipped, how often and why; None if none was."""
    rows = tuple(
        _contributions_of(variant.label, run.seed, member, found)
        for variant in variants
        for run in variant.runs
        for member, found in run.summary.contributions.items()
    )
    if not rows:
        return None
    head = ("method", "seed", "member", "rejected", "reason", "clipped")
    return SortableTable(title="Rejected and clipped", name="contributions", head=head, rows=rows)


def _contributions_of(
    label: str, seed: int, member: str, found: Mapping[str, int]
) -> tuple[Cell, ...]:
    rejected = {kind: count for kind, count in found.items() if kind != CLIPPED}
    total, clipped = sum(rejected.values()), found.get(CLIPPED, 0)
    why = ", ".join(f"{kind} {count}" for kind, count in rejected.items())
    return (
        (label, label),
        (str(seed), seed),
        (member, member),
        (str(total), total),
        (why, why),
        (str(clipped), clipped),
    )


def left_out_table(left_out: Mapping[Path, RunStatus]) -> TextTable:
    """Folders that are not shown, and why."""
    return TextTable(
        title="Folders",
        head=("folder", "why", ""),
        rows=tuple((str(folder), str(status)) for folder, status in left_out.items()),
    )
