"""Traces of charts, and what the scripts of a page read of them.

A chart is plotly's own JSON, without colours. What the scripts need besides is under `meta`:

    in a trace (chart.js, report.js)
        series     index of its colour; without one it is drawn grey
        dash       index of its dash and its marker; without one that of its colour
        variant    index of its variant in `report-data`, which a reader can hide
        loss       "validation" or "training": shown if the reader chose that one
        steps      inner step of each point: report.js works out seconds of a link from them
        band       true: the area between two lines, filled in the colour of the series
    in a layout (report.js)
        draw       "link", "shares" or "timeline": the traces are made in the page for the link that
                   its reader chooses

The element `report-data` holds `variants`, a list of `label` and `replay` (what link.js simulates,
null where it cannot). Colours are `--series-0` to `--series-7` of page.css; dashes and markers are
those of chart.js, and `MethodControls` draws the same.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from thinwire.runs.schema import RunRecord
from thinwire.runs.statistics import MeanCurve
from thinwire.runs.variants import Variant

__all__ = ["LOSSES", "band", "line", "styles_of"]

LOSSES: Final[Mapping[str, Callable[[RunRecord], float | None]]] = {
    "validation": lambda record: record.val_loss,
    "training": lambda record: record.loss,
}
"""What a reader chooses between."""


def styles_of(variants: Sequence[Variant]) -> list[dict[str, int]]:
    """`meta` of the traces of each variant: a colour for its method, and a dash of its own.

    Args:
        variants: all of the page.
    """
    names = list(dict.fromkeys(variant.config.method for variant in variants))
    alone, before = len(names) == len(variants), dict.fromkeys(names, 0)
    styles: list[dict[str, int]] = []
    for index, variant in enumerate(variants):
        name = variant.config.method
        dash = index if alone else before[name]
        styles.append({"variant": index, "series": names.index(name), "dash": dash})
        before[name] += 1
    return styles


def line(style: Mapping[str, int], label: str, curve: MeanCurve, x: list[Any]) -> dict[str, Any]:
    """The mean over seeds."""
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 20 else "lines",
        "name": label,
        "x": x,
        "y": curve.means,
        "meta": {**style, "steps": list(curve.steps)},
    }


def band(style: Mapping[str, int], curve: MeanCurve, x: list[Any]) -> dict[str, Any] | None:
    """One standard error above and below the mean; None where there is one seed."""
    if any(point.standard_error is None for point in curve.points):
        return None
    errors = [point.standard_error or 0.0 for point in curve.points]
    high = [mean + error for mean, error in zip(curve.means, errors, strict=True)]
    low = [mean - error for mean, error in zip(curve.means, errors, strict=True)]
    steps = list(curve.steps)
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [*x, *reversed(x)],
        "y": [*high, *reversed(low)],
        "hoverinfo": "skip",
        "meta": {**style, "steps": [*steps, *reversed(steps)], "band": True},
    }
