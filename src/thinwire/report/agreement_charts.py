"""What the runs noted of their pseudo-gradients: how far workers agree, and what feedback holds."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from thinwire.experiments.records import Finished
from thinwire.report.arms import Arm, styles_of
from thinwire.report.blocks import Block, Chart, Text
from thinwire.report.parts import Cell, Details, Heading, SortableTable
from thinwire.report.seeds import estimate, mean_curve

__all__ = ["agreement_blocks", "by_fragment"]

_STATISTICS: Final[Mapping[str, tuple[str, str]]] = {
    "cosine": ("Cosine between workers' pseudo-gradients", "mean cosine of two workers"),
    "feedback_norm": ("Norm of the error feedback", "mean norm of feedback"),
    "pseudo_gradient_norm": ("Norm of pseudo-gradients", "mean norm"),
}
_READING: Final = (
    "Noted where simulated workers share a process, every --statistics-steps inner steps. A "
    "pseudo-gradient is what a worker is about to send, before feedback is added; of ddp it is the "
    "gradient. Of methods with several fragments the lines are means over them."
)


def agreement_blocks(arms: Sequence[Arm]) -> list[Block]:
    """A chart for each statistic that some run noted, and a table by fragment."""
    charts = [chart for name in _STATISTICS if (chart := _chart(name, arms)) is not None]
    heading = Heading(text="How far workers agree", name="agreement", below=_READING)
    if not charts:
        none = "No run here noted it: train with --statistics-steps 10, or so."
        return [Heading(text=heading.text, name=heading.name), Text(text=none)]
    return [
        heading,
        *charts,
        Details(title="By fragment, as noted last", blocks=[_fragments_table(arms)]),
    ]


def by_fragment(record: Mapping[str, Any], name: str) -> dict[int, float]:
    """A statistic of each fragment that a record has it of.

    >>> by_fragment({"step": 5, "cosine/0": 0.5, "cosine/2": 0.25}, "cosine")
    {0: 0.5, 2: 0.25}
    """
    prefix = f"{name}/"
    return {
        int(key.removeprefix(prefix)): value
        for key, value in record.items()
        if key.startswith(prefix) and key.removeprefix(prefix).isdecimal()
    }


def _means(run: Finished, name: str) -> list[dict[str, Any]]:
    """Records of the mean over fragments, where all of them were measured if that ever happened."""
    found = [(record["step"], by_fragment(record, name)) for record in run.records]
    most = len({index for _, its in found for index in its})
    whole = [(step, its) for step, its in found if its and len(its) == most]
    kept = whole or [(step, its) for step, its in found if its]
    return [{"step": step, name: sum(its.values()) / len(its)} for step, its in kept]


def _chart(name: str, arms: Sequence[Arm]) -> Chart | None:
    title, axis = _STATISTICS[name]
    styled = zip(styles_of(arms), arms, strict=True)
    traces = [t for style, arm in styled if (t := _trace(name, style, arm)) is not None]
    if not traces:
        return None
    range_ = {} if name == "cosine" else {"rangemode": "tozero"}
    return Chart(
        title=title,
        traces=traces,
        layout={
            "hovermode": "closest",
            "showlegend": False,
            "xaxis": {"title": {"text": "inner steps"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": axis}, **range_},
        },
        height_px=340,
        alt=f"Lines of the {axis} against inner steps, one for each method that noted it; the "
        "table below has what was noted last.",
    )


def _trace(name: str, style: Mapping[str, int], arm: Arm) -> dict[str, Any] | None:
    # Seeds that were run without statistics say nothing against the others.
    noted = [means for run in arm.runs if (means := _means(run, name))]
    curve = mean_curve(noted, name)
    if not curve.steps:
        return None
    return {
        "type": "scatter",
        "mode": "lines",
        "name": arm.label,
        "x": list(curve.steps),
        "y": curve.means,
        "meta": style,
    }


def _fragments_table(arms: Sequence[Arm]) -> SortableTable:
    return SortableTable(
        title="Fragments",
        name="fragments",
        head=("method", "fragment", "seeds", "cosine", "feedback norm", "pseudo-gradient norm"),
        rows=tuple(row for arm in arms for row in _rows(arm)),
    )


def _rows(arm: Arm) -> list[tuple[Cell, ...]]:
    last = {name: [_last(run, name) for run in arm.runs] for name in _STATISTICS}
    indices = sorted({index for runs in last.values() for its in runs for index in its})
    seeds = max(sum(map(bool, runs)) for runs in last.values())
    return [
        (
            (arm.label, arm.label),
            (str(index), index),
            (str(seeds), seeds),
            *(_cell([its[index] for its in last[name] if index in its]) for name in _STATISTICS),
        )
        for index in indices
    ]


def _last(run: Finished, name: str) -> dict[int, float]:
    found: dict[int, float] = {}
    for record in run.records:
        found |= by_fragment(record, name)
    return found


def _cell(values: Sequence[float]) -> Cell:
    if not values:
        return ("-", "")
    mean = estimate(values)
    return (mean.text(".3g"), mean.mean)
