"""How far workers agree in pseudo-gradients and anchors, and what error feedback holds."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from thinwire.report.blocks import (
    Block,
    Cell,
    Chart,
    Details,
    Heading,
    Paragraph,
    SortableTable,
)
from thinwire.report.traces import styles_of
from thinwire.runs.schema import FinishedRun
from thinwire.runs.statistics import estimate, mean_curve
from thinwire.runs.variants import Variant

_STATISTICS: Final[Mapping[str, tuple[str, str]]] = {
    "cosine": ("Cosine between workers' pseudo-gradients", "mean cosine of two workers"),
    "feedback_norm": ("Norm of the error feedback", "mean norm of feedback"),
    "pseudo_gradient_norm": ("Norm of pseudo-gradients", "mean norm"),
    "spread": ("Spread of the workers' own anchors", "rms from their mean / rms of the mean"),
}
_READING: Final = (
    "Noted where simulated workers share a process, every --statistics-steps inner steps. A "
    "pseudo-gradient is what a worker is about to send, before feedback is added; of ddp it is the "
    "gradient. Anchors spread where every worker has its own. Of methods with several fragments "
    "the lines are means over them."
)


def agreement_blocks(variants: Sequence[Variant]) -> list[Block]:
    """A chart for each statistic that a run recorded, and a table by fragment."""
    charts = [chart for name in _STATISTICS if (chart := _chart(name, variants)) is not None]
    heading = Heading(text="How far workers agree", name="agreement", below=_READING)
    if not charts:
        none = "No run here noted it: train with --statistics-steps 10, or so."
        return [Heading(text=heading.text, name=heading.name), Paragraph(text=none)]
    return [
        heading,
        *charts,
        Details(title="By fragment, as noted last", blocks=[_fragments_table(variants)]),
    ]


def _means(run: FinishedRun, name: str) -> dict[int, float]:
    """The mean over fragments by step, at the steps where most fragments were measured."""
    found = [(record.step, its) for record in run.records if (its := record.statistics.get(name))]
    most = len({fragment for _, its in found for fragment in its})
    whole = [(step, its) for step, its in found if len(its) == most]
    return {step: sum(its.values()) / len(its) for step, its in whole or found}


def _chart(name: str, variants: Sequence[Variant]) -> Chart | None:
    title, axis = _STATISTICS[name]
    styled = zip(styles_of(variants), variants, strict=True)
    traces = [t for style, variant in styled if (t := _trace(name, style, variant)) is not None]
    if not traces:
        return None
    range_ = {} if name == "cosine" else {"rangemode": "tozero"}
    return Chart(
        title=title,
        traces=traces,
        layout={
            "xaxis": {"title": {"text": "inner steps"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": axis}, **range_},
        },
        height_px=340,
        alt=f"Lines of the {axis} against inner steps, one for each method that noted it; the "
        "table below has what was noted last.",
    )


def _trace(name: str, style: Mapping[str, int], variant: Variant) -> dict[str, Any] | None:
    # Seeds that were run without statistics say nothing against the others.
    noted = {run.seed: means for run in variant.runs if (means := _means(run, name))}
    curve = mean_curve(noted)
    if not curve.steps:
        return None
    return {
        "type": "scatter",
        "mode": "lines",
        "name": variant.label,
        "x": list(curve.steps),
        "y": curve.means,
        "meta": style,
    }


def _fragments_table(variants: Sequence[Variant]) -> SortableTable:
    return SortableTable(
        title="Fragments",
        name="fragments",
        head=(
            "method",
            "fragment",
            "seeds",
            "cosine",
            "feedback norm",
            "pseudo-gradient norm",
            "spread of anchors",
        ),
        rows=tuple(row for variant in variants for row in _rows(variant)),
        main=("fragment", "cosine"),
    )


def _rows(variant: Variant) -> list[tuple[Cell, ...]]:
    last = {name: {run.seed: _last(run, name) for run in variant.runs} for name in _STATISTICS}
    fragments = sorted({f for by_seed in last.values() for its in by_seed.values() for f in its})
    seeds = max(sum(map(bool, by_seed.values())) for by_seed in last.values())
    return [
        (
            (variant.label, variant.label),
            (str(fragment), fragment),
            (str(seeds), seeds),
            *(
                _cell({s: its[fragment] for s, its in last[name].items() if fragment in its})
                for name in _STATISTICS
            ),
        )
        for fragment in fragments
    ]


def _last(run: FinishedRun, name: str) -> dict[int, float]:
    """The value of each fragment when it was measured last."""
    found: dict[int, float] = {}
    for record in run.records:
        found |= record.statistics.get(name, {})
    return found


def _cell(by_seed: Mapping[int, float]) -> Cell:
    if not by_seed:
        return ("-", "")
    mean = estimate(by_seed)
    return (mean.text(".3g"), mean.mean)
