"""The tables of a report of runs, but for those of settings."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from thinwire.plan.units import duration_text, nbytes_text
from thinwire.rejection import CLIPPED
from thinwire.report.blocks import Cell, TextTable
from thinwire.report.charts import curves_of
from thinwire.report.pareto import first_shown, front_of
from thinwire.runs.statistics import paired_difference
from thinwire.runs.status import RunStatus
from thinwire.runs.variants import Variant


def ranked(variants: Sequence[Variant]) -> list[Variant]:
    """`variants` by rising loss."""
    return sorted(variants, key=lambda variant: variant.loss.mean)


def results_table(variants: Sequence[Variant]) -> TextTable:
    """A row for each method, the lowest loss first; of many methods, some are hidden at first."""
    front = front_of(variants)
    shown = [variants[index] for index in first_shown(variants)]
    best, *_ = rows = ranked(variants)
    most = max(variant.sent_bytes for variant in variants)
    cells: list[tuple[Cell, ...]] = []
    for variant in rows:
        loss, sent, config = variant.loss, variant.sent_bytes, variant.config
        received = variant.mean(lambda run: run.summary.received_bytes_per_worker)
        peak = variant.mean(lambda run: run.summary.peak_sent_bytes_per_step)
        wall, memory = variant.mean(lambda run: run.summary.wall_s), variant.memory_ratio
        apart = paired_difference(variant.losses, best.losses)
        behind = ("no seed in common", "") if apart is None else (apart.text("+.4f"), apart.mean)
        fewer = most / sent if sent else 0
        times = f"{fewer:,.0f} x" if fewer >= 100 else f"{fewer:.3g} x"
        cells.append(
            (
                variant.label,
                (loss.text(".4f"), loss.mean),
                ("the best", 0.0) if variant is best else behind,
                (nbytes_text(sent), sent),
                (times, fewer) if sent else ("none sent", ""),
                "yes" if variant in front else "",
                str(len(loss.seeds)),
                str(config.workers),
                str(config.sync_every),
                (nbytes_text(received), received),
                (nbytes_text(peak), peak),
                ("not recorded", "") if memory is None else (f"{memory:.2f} x", memory),
                (duration_text(wall), wall),
            )
        )
    figures = ("loss", "behind the best", "sent", "fewer bytes", "front", "seeds", "K", "H")
    return TextTable(
        title="Results",
        name="results",
        head=("method", *figures, "received", "peak a step", "memory", "wall-clock"),
        rows=tuple(cells),
        main=("loss", "sent"),
        rest=[index for index, variant in enumerate(rows) if variant not in shown],
    )


def curves_table(variants: Sequence[Variant]) -> TextTable:
    """The numbers of the charts, at the steps at which validation loss was measured."""
    rows: list[tuple[Cell, ...]] = []
    for variant in variants:
        of = curves_of(variant)
        for place, loss in enumerate(of["validation"]):
            if loss is None:
                continue
            step, tokens, sent, training, wall, waited, hidden = (
                of[name][place] or 0.0
                for name in ("steps", "tokens", "bytes", "training", "seconds", "waited", "hidden")
            )
            error = of.get("validation error", {place: None})[place]
            rows.append(
                (
                    variant.label,
                    (f"{step:,.0f}", step),
                    (f"{loss:.4f}" + ("" if error is None else f" ± {error:.4f}"), loss),
                    (f"{training:.4f}", training),
                    (f"{tokens:,.0f}", tokens),
                    (nbytes_text(sent), sent),
                    *((duration_text(seconds), seconds) for seconds in (wall, waited, hidden)),
                )
            )
    losses = ("validation loss", "training loss")
    return TextTable(
        title="The numbers of these charts",
        name="curves",
        head=("method", "step", *losses, "tokens", "sent", "wall-clock", "waited", "hidden"),
        rows=tuple(rows),
        main=("step", "validation loss"),
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


def contributions_table(variants: Sequence[Variant]) -> TextTable | None:
    """Number and reason of rejected and clipped contributions, by member; None without any."""
    rows: list[tuple[str, ...]] = []
    for variant in variants:
        for run in variant.runs:
            for member, found in run.summary.contributions.items():
                rejected = {kind: count for kind, count in found.items() if kind != CLIPPED}
                why = ", ".join(f"{kind} {count}" for kind, count in rejected.items())
                total, clipped = str(sum(rejected.values())), str(found.get(CLIPPED, 0))
                rows.append((variant.label, str(run.seed), member, total, why, clipped))
    head = ("method", "seed", "member", "rejected", "reason", "clipped")
    return (
        TextTable(title="Rejected and clipped", name="contributions", head=head, rows=tuple(rows))
        if rows
        else None
    )


def left_out_table(left_out: Mapping[Path, RunStatus]) -> TextTable:
    """Folders that are not shown, with the reason."""
    return TextTable(
        title="Folders",
        head=("folder", "why", ""),
        rows=tuple((str(folder), str(status)) for folder, status in left_out.items()),
    )
