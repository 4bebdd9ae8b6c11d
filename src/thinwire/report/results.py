"""The tables of a report of runs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from thinwire.plan.units import duration_text, nbytes_text, times_text
from thinwire.rejection import CLIPPED
from thinwire.report.charts import curves_of, first_shown, front_of
from thinwire.report.page import Cell, TextTable
from thinwire.runs.statistics import paired_difference
from thinwire.runs.variants import Variant, differing


def ranked(variants: Sequence[Variant]) -> list[Variant]:
    """`variants` by rising loss."""
    return sorted(variants, key=lambda variant: variant.loss.mean)


def results_table(variants: Sequence[Variant]) -> TextTable:
    """A row for each method, the lowest loss first; if there are many, some are hidden at first."""
    front = front_of(variants)
    shown = [variants[index] for index in first_shown(variants)]
    best, *_ = rows = ranked(variants)
    cells: list[tuple[Cell, ...]] = []
    for variant in rows:
        loss, config = variant.loss, variant.config
        up, down = variant.up_and_down(relayed=True)
        peak = variant.mean(lambda run: run.summary.peak_sent_bytes_per_step)
        wall, memory = variant.mean(lambda run: run.summary.wall_s), variant.memory_ratio
        apart = paired_difference(variant.losses, best.losses)
        behind = ("no seed in common", "") if apart is None else (apart.text("+.4f"), apart.mean)
        cells.append(
            (
                variant.label,
                (loss.text(".4f"), loss.mean),
                ("the best", 0.0) if variant is best else behind,
                (nbytes_text(up), up),
                (nbytes_text(down), down),
                *((times_text(fewer), fewer or "") for fewer in variant.times_fewer),
                "yes" if variant in front else "",
                str(len(loss.seeds)),
                str(config.workers),
                str(config.sync_every),
                (nbytes_text(peak), peak),
                ("not recorded", "") if memory is None else (f"{memory:.2f} x", memory),
                (duration_text(wall), wall),
            )
        )
    moved = ("up, store", "down", "times fewer, store", "point to point")
    figures = ("loss", "behind the best", *moved, "front", "seeds", "K", "H")
    return TextTable(
        title="Results",
        name="results",
        head=("method", *figures, "peak a step", "memory", "wall-clock"),
        rows=tuple(cells),
        main=("loss", "times fewer, store"),
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
            step, tokens, moved, training, wall, waited, hidden = (
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
                    (nbytes_text(moved), moved),
                    *((duration_text(seconds), seconds) for seconds in (wall, waited, hidden)),
                )
            )
    losses = ("validation loss", "training loss")
    return TextTable(
        title="The numbers of these charts",
        name="curves",
        head=("method", "step", *losses, "tokens", "up + down", "wall-clock", "waited", "hidden"),
        rows=tuple(rows),
        main=("step", "validation loss"),
    )


def versions_table(variants: Sequence[Variant]) -> TextTable:
    """Versions of Python, torch and others; several where the runs differ."""
    versions = [run.summary.versions for variant in variants for run in variant.runs]
    rows = [
        (name, ", ".join(sorted({str(its.get(name, "not recorded")) for its in versions})))
        for name in sorted(set[str]().union(*versions))
    ]
    return TextTable(title="Versions", head=("what", "version"), rows=tuple(rows))


def contributions_table(variants: Sequence[Variant]) -> TextTable:
    """Number and reason of rejected and clipped contributions, by member, if there are any."""
    rows: list[tuple[str, ...]] = []
    for variant in variants:
        for run in variant.runs:
            for member, found in run.summary.contributions.items():
                rejected = {kind: count for kind, count in found.items() if kind != CLIPPED}
                why = ", ".join(f"{kind} {count}" for kind, count in rejected.items())
                total, clipped = str(sum(rejected.values())), str(found.get(CLIPPED, 0))
                rows.append((variant.label, str(run.config.seed), member, total, why, clipped))
    head = ("method", "seed", "member", "rejected", "reason", "clipped")
    title = "Rejected and clipped"
    return TextTable(title=title, name="contributions", head=head, rows=tuple(rows))


# -- settings --------------------------------------------------------------------------------------

_SYMBOLS: Final = {"workers": "K", "sync_every": "H"}


def differences_table(variants: Sequence[Variant]) -> TextTable:
    """A row for each method, a column for each part in which they differ, most values first.

    Settings that are equal wherever they exist, such as the betas of AdamW, are in `shared_table`.
    """
    settings = [variant.settings for variant in variants]
    parts: dict[str, list[str]] = {}
    for name in _differing_fields(settings):
        # `inner` from `method.inner.lr`.
        parts.setdefault(name.removeprefix("method.").partition(".")[0], []).append(name)
    columns = {part: [_text(part, its, names) for its in settings] for part, names in parts.items()}
    by_worth = sorted(columns, key=lambda part: -len(set(columns[part])))
    head = ("method", *(_SYMBOLS.get(part, part) for part in by_worth))
    shown = first_shown(variants)
    return TextTable(
        title="What differed",
        name="differences",
        head=head,
        rows=tuple(
            (variant.label, *(columns[part][index] for part in by_worth))
            for index, variant in enumerate(variants)
        ),
        main=head[1:3],
        rest=[index for index in range(len(variants)) if index not in shown],
    )


def shared_table(variants: Sequence[Variant]) -> TextTable:
    """Fields of the configurations that are the same for all methods that have them."""
    settings = [variant.settings for variant in variants]
    values = {name: value for its in settings for name, value in its.items()}
    apart = _differing_fields(settings)
    return TextTable(
        title="Settings that all have in common, or all with the same part",
        head=("field", "value"),
        rows=tuple((name, values[name]) for name in sorted(values) if name not in apart),
    )


def _text(part: str, its: Mapping[str, str], names: Collection[str]) -> str:
    """Kind of one method's part, then those of its settings that differ.

    >>> names = ("method.codec.bits", "method.codec.grid.kind", "method.codec.kind")
    >>> _text("codec", dict(zip(names, ("2", "Linear", "Quantise"))), names)
    'Quantise, bits 2, grid Linear'
    """
    places = {
        name: name.removeprefix("method.").removeprefix(part).removesuffix(".kind").strip(".")
        for name in names
        if name in its
    }
    # The kind of the part itself has no name within the part, and comes first.
    ordered = sorted(places, key=lambda name: (places[name] != "", name.count("."), name))
    return ", ".join(f"{places[name]} {its[name]}".strip() for name in ordered) or "-"


def _differing_fields(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Fields that take several values, and kinds of parts that only some methods have."""
    return [
        name
        for name in differing(settings)
        if name.endswith(".kind") or len({its[name] for its in settings if name in its}) > 1
    ]
