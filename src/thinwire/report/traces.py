"""What a chart is made of, and what the scripts of a page read of it.

A figure is JSON, without colours, in words that plotly has too. A trace has

    type, mode   "scatter" with "lines", "markers" and "text" joined by +, or "bar": horizontal
    name         of the legend, and where the pointer is
    x, y         numbers; of bars, lengths and the names of their lanes, `base` where they begin
    error        standard errors of y: a band around a line, bars at points
    bars         true: errors are bars at the points of a line, not a band
    line         width, dash and "hv" as `shape`, for stairs
    pattern      "/" or "x": lines across bars
    meta         series    index of its colour; without one it is drawn grey
                 dash      index of its dash and its marker; without one that of its colour
                 variant   index of its variant in `report-data`, which a reader can hide

and a layout

    xaxis, yaxis  title, type "log", range, rangemode "tozero", tickvals and ticktext; `format`:
                  bytes, percent, duration, seconds, loss, or si with a `unit`
    marks         lines across the figure, at an x or a y, with a text
    legend        true: buttons below the figure that hide and show its traces
    meta          draw: "curves", "link", "shares" or "timeline": the traces are made in the page
                  from `report-data`; of curves, `against` says which of its quantities

The element `report-data` holds `variants`, a list of `label`, `curves` (by the loss that a reader
chooses) and `replay` (what link.js simulates, null where it cannot). Colours are `--series-0` to
`--series-7` of page.css; dashes and markers are those of chart.js, and `MethodControls` draws the
same.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from thinwire.report.pareto import first_shown
from thinwire.runs.schema import RunRecord
from thinwire.runs.statistics import MeanCurve
from thinwire.runs.variants import Variant

LOSSES: Final[Mapping[str, Callable[[RunRecord], float | None]]] = {
    "validation": lambda record: record.val_loss,
    "training": lambda record: record.loss,
}
"""What a reader chooses between."""


def styles_of(variants: Sequence[Variant]) -> list[dict[str, int]]:
    """`meta` of the traces of each variant: a colour for its method, and a dash of its own.

    The first colours are for what a page of many methods draws first: there are eight.

    Args:
        variants: all of the page.
    """
    first = [variants[index] for index in first_shown(variants)]
    names = list(dict.fromkeys(variant.config.method for variant in [*first, *variants]))
    alone, before = len(names) == len(variants), dict.fromkeys(names, 0)
    styles: list[dict[str, int]] = []
    for index, variant in enumerate(variants):
        name = variant.config.method
        dash = names.index(name) if alone else before[name]
        styles.append({"variant": index, "series": names.index(name), "dash": dash})
        before[name] += 1
    return styles


def curves_of(variant: Variant) -> dict[str, Any]:
    """The curves of each loss: steps, tokens and bytes at them, means, and errors if there are."""
    tokens, sent = (
        dict(zip(found.steps, found.means, strict=True))
        for found in (
            variant.curve(lambda record: record.tokens),
            variant.curve(lambda record: record.sent_bytes),
        )
    )
    found = {loss: variant.curve(value) for loss, value in LOSSES.items()}
    return {
        loss: {
            "steps": list(curve.steps),
            "tokens": [tokens[step] for step in curve.steps],
            "bytes": [sent[step] for step in curve.steps],
            "y": curve.means,
            "error": errors(curve),
        }
        for loss, curve in found.items()
    }


def errors(curve: MeanCurve) -> list[float] | None:
    """Standard errors of the means; None where there is one seed."""
    if any(point.standard_error is None for point in curve.points):
        return None
    return [point.standard_error or 0.0 for point in curve.points]


def line(style: Mapping[str, int], label: str, curve: MeanCurve, x: list[Any]) -> dict[str, Any]:
    """The mean over seeds."""
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 20 else "lines",
        "name": label,
        "x": x,
        "y": curve.means,
        "error": errors(curve),
        "meta": style,
    }
