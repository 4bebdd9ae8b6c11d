"""The charts of a report of runs: figures, without colours and without choices of the reader."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from thinwire.plan.units import nbytes_text
from thinwire.report.blocks import Chart
from thinwire.report.pareto import front_of, senders
from thinwire.report.traces import LOSSES, band, line, styles_of
from thinwire.runs.schema import RunRecord
from thinwire.runs.variants import Variant

__all__ = ["front_chart", "link_charts", "loss_charts", "waits_chart"]

_FEW: Final = 12
_LOSS_AXIS: Final[Mapping[str, Any]] = {"title": {"text": "loss, nats per token"}}
_LEGEND: Final[Mapping[str, Any]] = {
    "orientation": "h",
    "yref": "container",
    "y": 0,
    "yanchor": "bottom",
}


def loss_charts(variants: Sequence[Variant]) -> list[Chart]:
    """Loss against tokens, and against the bytes that a worker sent."""
    return [
        Chart(
            title="Loss against tokens",
            traces=_curves(variants, lambda record: record.tokens),
            layout=_layout({"title": {"text": "tokens of all workers"}, "rangemode": "tozero"}),
            alt="Lines of loss against tokens, one for each method; the table below has the "
            "numbers.",
        ),
        Chart(
            title="Loss against bytes sent",
            traces=_curves(variants, lambda record: record.sent_bytes),
            layout=_layout(_bytes_axis("bytes sent by a worker")),
            alt="Lines of loss against the bytes that a worker sent, one for each method; the "
            "table below has the numbers.",
        ),
    ]


def link_charts(variants: Sequence[Variant]) -> dict[str, Chart]:
    """Charts that the page works out for the link that its reader chooses.

    Args:
        variants: all; the page leaves out those that cannot be played.
    """
    curves = _curves(variants, lambda record: record.step)
    return {
        "wall": Chart(
            title="Loss against wall-clock on this link",
            traces=[trace | {"x": []} for trace in curves],
            layout=_layout({"type": "log", "title": {"text": "wall-clock on this link"}})
            | {"meta": {"draw": "link"}},
            alt="Lines of loss against wall-clock on the chosen link, one for each method; the "
            "table below has how long each takes.",
        ),
        "shares": Chart(
            title="Where the time goes on this link",
            traces=[],
            layout={
                "barmode": "stack",
                "meta": {"draw": "shares"},
                "xaxis": {"title": {"text": "share of the run"}, "tickformat": ".0%"},
                "yaxis": {},
                "legend": _LEGEND | {"traceorder": "normal"},
            },
            height_px=130 + 34 * len(variants),
            alt="A bar for each method: the shares of computing with an idle link, of computing "
            "while something is on it, and of waiting; the table below has the numbers.",
        ),
        "timeline": Chart(
            title="Rounds from the middle of the run",
            height_px=260,
            traces=[],
            layout={
                "barmode": "overlay",
                "meta": {"draw": "timeline"},
                "xaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"},
                "yaxis": {"categoryarray": ["link", "worker"], "range": [-0.6, 1.6]},
                "legend": _LEGEND,
            },
            alt="Two lanes against time: a worker that computes or waits, and the link with the "
            "exchanges on it; the line above says how long it waits.",
        ),
    }


def front_chart(variants: Sequence[Variant]) -> Chart:
    """Final loss against bytes, and the methods that no other beats in both."""
    sending = senders(variants)
    styled = [
        (style, variant)
        for style, variant in zip(styles_of(variants), variants, strict=True)
        if variant in sending
    ]
    sent = [variant.sent_bytes for variant in sending]
    front = front_of(variants)
    stairs: Mapping[str, Any] = {
        "type": "scatter",
        "mode": "lines",
        "name": "front",
        "x": [variant.sent_bytes for variant in front],
        "y": [variant.loss.mean for variant in front],
        "line": {"shape": "hv", "width": 1.5, "dash": "dot"},
        "hoverinfo": "skip",
        "meta": {},
    }
    right = math.sqrt(min(sent, default=0) * max(sent, default=0))
    dots = [
        {
            "type": "scatter",
            "mode": "markers+text" if len(sending) <= _FEW else "markers",
            "name": variant.label,
            "x": [variant.sent_bytes],
            "y": [variant.loss.mean],
            "text": [variant.label],
            "textposition": "top left" if variant.sent_bytes > right else "top right",
            "textfont": {"size": 11},
            "cliponaxis": False,
            "hovertemplate": f"{variant.label}<br>%{{x:.3s}}B, loss %{{y:.4f}}<extra></extra>",
            "error_y": {"type": "data", "array": [variant.loss.standard_error or 0.0]},
            "marker": {"size": 11},
            "meta": style,
        }
        for style, variant in styled
    ]
    return Chart(
        title="Pareto front of loss and bytes",
        traces=[stairs, *dots],
        layout=_layout(_bytes_axis("bytes sent by a worker in the whole run"))
        | {
            "hovermode": "closest",
            "yaxis": {"title": {"text": "final loss, nats per token"}},
        },
        alt="A point for each method, its final validation loss against the bytes that a worker "
        "sent, and a line through those that none beats in both; the table of results has the "
        "numbers.",
    )


def waits_chart(variants: Sequence[Variant]) -> Chart:
    """Seconds that the runs themselves waited, and seconds of exchanges while they trained."""
    traces: list[dict[str, Any]] = []
    for style, variant in zip(styles_of(variants), variants, strict=True):
        x = variant.curve(lambda record: record.wall_s).means
        waited = line(style, variant.label, variant.curve(lambda record: record.wait_s), x)
        hidden = line(style, variant.label, variant.curve(lambda record: record.overlapped_s), x)
        # The chart's own dashes tell the two quantities apart, and not the variants.
        traces += [
            waited | {"name": f"{variant.label}: waited", "line": {"dash": "solid"}},
            hidden | {"name": f"{variant.label}: hidden", "line": {"width": 1.2, "dash": "dot"}},
        ]
    return Chart(
        title="Waits and hidden exchanges, as measured",
        traces=[trace | {"mode": "lines"} for trace in traces],
        layout=_layout({"title": {"text": "wall-clock of the run itself, seconds"}})
        | {"yaxis": {"title": {"text": "seconds so far"}, "rangemode": "tozero"}},
        alt="Two lines for each method against the run's own wall-clock: seconds that a worker "
        "waited so far, and, dotted, seconds in which exchanges travelled while it trained.",
    )


def _curves(
    variants: Sequence[Variant], quantity: Callable[[RunRecord], float]
) -> list[dict[str, Any]]:
    """A band and a line for each variant and loss, against `quantity`."""
    traces: list[dict[str, Any]] = []
    for style, variant in zip(styles_of(variants), variants, strict=True):
        against = variant.curve(quantity)
        at = dict(zip(against.steps, against.means, strict=True))
        for loss, value in LOSSES.items():
            curve = variant.curve(value)
            x = [at[step] for step in curve.steps]
            found = (band(style, curve, x), line(style, variant.label, curve, x))
            for trace in found if x else ():
                if trace is not None:
                    trace["meta"] |= {"loss": loss}
                    traces.append(trace)
    return traces


def _bytes_axis(title: str) -> dict[str, Any]:
    powers = [10.0**power for power in range(16)]
    return {
        "type": "log",
        "title": {"text": title},
        "tickvals": powers,
        "ticktext": [nbytes_text(power) for power in powers],
        "hoverformat": ".3s",
    }


def _layout(xaxis: Mapping[str, Any]) -> dict[str, Any]:
    return {"hovermode": "closest", "showlegend": False, "xaxis": xaxis, "yaxis": _LOSS_AXIS}
