"""The charts of a report of runs: figures, without colours and without choices of the reader."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from thinwire.plan.units import nbytes_text
from thinwire.report.arms import Arm, styles_of
from thinwire.report.blocks import Chart
from thinwire.report.front import final_loss, front_of, senders, sent_bytes
from thinwire.report.seeds import Curve, mean_curve

__all__ = ["LOSSES", "front_chart", "link_charts", "loss_charts", "waits_chart"]

LOSSES: Final[Mapping[str, str]] = {"validation": "val_loss", "training": "loss"}
"""What a reader chooses between, and its name in a record."""

_FEW: Final = 12
_LOSS_AXIS: Final[Mapping[str, Any]] = {"title": {"text": "loss, nats per token"}}
_LEGEND: Final[Mapping[str, Any]] = {
    "orientation": "h",
    "yref": "container",
    "y": 0,
    "yanchor": "bottom",
}


def loss_charts(arms: Sequence[Arm]) -> list[Chart]:
    """Loss against tokens, and against the bytes that a worker sent."""
    return [
        Chart(
            title="Loss against tokens",
            traces=_curves(arms, lambda arm, curve: _at(arm, curve, "tokens")),
            layout=_layout({"title": {"text": "tokens of all workers"}, "rangemode": "tozero"}),
            alt="Lines of loss against tokens, one for each method; the table below has the "
            "numbers.",
        ),
        Chart(
            title="Loss against bytes sent",
            traces=_curves(arms, lambda arm, curve: _at(arm, curve, "sent_bytes")),
            layout=_layout(_bytes_axis("bytes sent by a worker")),
            alt="Lines of loss against the bytes that a worker sent, one for each method; the "
            "table below has the numbers.",
        ),
    ]


def link_charts(arms: Sequence[Arm]) -> dict[str, Chart]:
    """What is worked out in the page, for the link that its reader chooses.

    Args:
        arms: of all methods; the page leaves out those that cannot be played.
    """
    curves = _curves(arms, lambda _arm, curve: list(curve.steps))
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
            height_px=130 + 34 * len(arms),
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


def front_chart(arms: Sequence[Arm]) -> Chart:
    """Final loss against bytes, and the methods that no other beats in both."""
    sending = senders(arms)
    styles = [style for style, arm in zip(styles_of(arms), arms, strict=True) if arm in sending]
    arms = sending
    losses, sent = [final_loss(arm) for arm in arms], [sent_bytes(arm) for arm in arms]
    front = [(sent_bytes(arm), final_loss(arm).mean) for arm in front_of(arms)]
    line: Mapping[str, Any] = {
        "type": "scatter",
        "mode": "lines",
        "name": "front",
        "x": [x for x, _ in front],
        "y": [y for _, y in front],
        "line": {"shape": "hv", "width": 1.5, "dash": "dot"},
        "hoverinfo": "skip",
        "meta": {},
    }
    right = math.sqrt(min(sent, default=0) * max(sent, default=0))
    dots = [
        {
            "type": "scatter",
            "mode": "markers+text" if len(arms) <= _FEW else "markers",
            "name": arm.label,
            "x": [x],
            "y": [loss.mean],
            "text": [arm.label],
            "textposition": "top left" if x > right else "top right",
            "textfont": {"size": 11},
            "cliponaxis": False,
            "hovertemplate": f"{arm.label}<br>%{{x:.3s}}B, loss %{{y:.4f}}<extra></extra>",
            "error_y": {"type": "data", "array": [loss.error or 0.0]},
            "marker": {"size": 11},
            "meta": style,
        }
        for style, arm, x, loss in zip(styles, arms, sent, losses, strict=True)
    ]
    return Chart(
        title="Pareto front of loss and bytes",
        traces=[line, *dots],
        layout=_layout(_bytes_axis("bytes sent by a worker in the whole run"))
        | {
            "hovermode": "closest",
            "yaxis": {"title": {"text": "final loss, nats per token"}},
        },
        alt="A point for each method, its final validation loss against the bytes that a worker "
        "sent, and a line through those that none beats in both; the table of results has the "
        "numbers.",
    )


def waits_chart(arms: Sequence[Arm]) -> Chart:
    """What the runs themselves waited, and what travelled meanwhile."""
    traces: list[dict[str, Any]] = []
    for style, arm in zip(styles_of(arms), arms, strict=True):
        runs = [run.records for run in arm.runs]
        for name, words in (("wait_s", "waited"), ("overlapped_s", "hidden")):
            curve, wall = mean_curve(runs, name), mean_curve(runs, "wall_s")
            dots = {"width": 1.2, "dash": "dot"} if name == "overlapped_s" else {}
            traces.append(
                _line(style, arm, curve, wall.means)
                | {"name": f"{arm.label}: {words}"}
                # The chart's own dashes tell the two quantities apart, and not the methods.
                | {"line": dots or {"dash": "solid"}, "mode": "lines"}
            )
    return Chart(
        title="Waits and hidden exchanges, as measured",
        traces=traces,
        layout=_layout({"title": {"text": "wall-clock of the run itself, seconds"}})
        | {"yaxis": {"title": {"text": "seconds so far"}, "rangemode": "tozero"}},
        alt="Two lines for each method against the run's own wall-clock: seconds that a worker "
        "waited so far, and, dotted, seconds in which exchanges travelled while it trained.",
    )


def _curves(arms: Sequence[Arm], where: Callable[[Arm, Curve], list[Any]]) -> list[dict[str, Any]]:
    """A band and a line for each method and loss."""
    traces: list[dict[str, Any]] = []
    for style, arm in zip(styles_of(arms), arms, strict=True):
        for loss, name in LOSSES.items():
            curve = mean_curve([run.records for run in arm.runs], name)
            if not curve.steps:
                continue
            x = where(arm, curve)
            lines = [_band(style, curve, x), _line(style, arm, curve, x)]
            for trace in lines:
                if trace:
                    trace["meta"] |= {"loss": loss}
                    traces.append(trace)
    return traces


def _line(style: Mapping[str, int], arm: Arm, curve: Curve, x: list[Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 20 else "lines",
        "name": arm.label,
        "x": x,
        "y": curve.means,
        "meta": {**style, "steps": list(curve.steps)},
    }


def _band(style: Mapping[str, int], curve: Curve, x: list[Any]) -> dict[str, Any]:
    """The mean and its standard error above and below; nothing of one seed."""
    if any(point.error is None for point in curve.points):
        return {}
    errors = [point.error or 0.0 for point in curve.points]
    high = [mean + error for mean, error in zip(curve.means, errors, strict=True)]
    low = [mean - error for mean, error in zip(curve.means, errors, strict=True)]
    steps = list(curve.steps)
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [*x, *reversed(x)],
        "y": [*high, *reversed(low)],
        "hoverinfo": "skip",
        "meta": {
            **style,
            "steps": [*steps, *reversed(steps)],
            "band": True,
        },
    }


def _at(arm: Arm, curve: Curve, name: str) -> list[float]:
    """The mean of `name` over the seeds at the steps of `curve`."""
    found = mean_curve([run.records for run in arm.runs], name)
    by_step = dict(zip(found.steps, found.means, strict=True))
    return [by_step[step] for step in curve.steps]


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
