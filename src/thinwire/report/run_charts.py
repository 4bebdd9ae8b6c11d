"""The charts of a report of runs: figures, without colours and without choices of the reader."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from thinwire.report.blocks import Chart
from thinwire.report.pareto import front_of, senders
from thinwire.report.traces import line, styles_of
from thinwire.runs.variants import Variant

_FEW: Final = 12
_LOSS_AXIS: Final[Mapping[str, Any]] = {
    "title": {"text": "loss, nats per token"},
    "format": "loss",
}


def loss_charts() -> list[Chart]:
    """Loss against tokens, and against the bytes that a worker sent, drawn by the page."""
    return [
        Chart(
            title="Loss against tokens",
            traces=[],
            layout=_layout(
                {"title": {"text": "tokens of all workers"}, "rangemode": "tozero", "format": "si"}
            )
            | {"meta": {"draw": "curves", "against": "tokens"}},
            alt="Lines of loss against tokens, one for each method; the table below has the "
            "numbers.",
        ),
        Chart(
            title="Loss against bytes sent",
            traces=[],
            layout=_layout(_bytes_axis("bytes sent by a worker"))
            | {"meta": {"draw": "curves", "against": "bytes"}},
            alt="Lines of loss against the bytes that a worker sent, one for each method; the "
            "table below has the numbers.",
        ),
    ]


def link_charts() -> dict[str, Chart]:
    """Charts that the page works out for the link that its reader chooses."""
    return {
        "wall": Chart(
            title="Loss against wall-clock on this link",
            traces=[],
            layout=_layout(
                {
                    "type": "log",
                    "format": "duration",
                    "title": {"text": "wall-clock on this link"},
                }
            )
            | {"meta": {"draw": "link"}},
            alt="Lines of loss against wall-clock on the chosen link, one for each method; the "
            "table below has how long each takes.",
        ),
        "shares": Chart(
            title="Where the time goes on this link",
            traces=[],
            layout={
                "meta": {"draw": "shares"},
                "xaxis": {
                    "title": {"text": "share of the run"},
                    "format": "percent",
                    "range": [0, 1],
                },
                "yaxis": {},
                "legend": True,
            },
            alt="A bar for each method: the shares of computing with an idle link, of computing "
            "while something is on it, and of waiting; the table below has the numbers.",
        ),
        "timeline": Chart(
            title="Rounds from the middle of the run",
            height_px=260,
            traces=[],
            layout={
                "meta": {"draw": "timeline"},
                "xaxis": {"title": {"text": "seconds"}, "rangemode": "tozero", "format": "seconds"},
                "yaxis": {"categoryarray": ["link", "worker"]},
                "legend": True,
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
    front = front_of(variants)
    stairs: Mapping[str, Any] = {
        "type": "scatter",
        "mode": "lines",
        "name": "front",
        "x": [variant.sent_bytes for variant in front],
        "y": [variant.loss.mean for variant in front],
        "line": {"shape": "hv", "width": 1.5, "dash": "2.5 5"},
        "hoverinfo": "skip",
        "meta": {},
    }
    dots = [
        {
            "type": "scatter",
            "mode": "markers+text" if len(sending) <= _FEW else "markers",
            "name": variant.label,
            "x": [variant.sent_bytes],
            "y": [variant.loss.mean],
            "error": [variant.loss.standard_error or 0.0],
            "meta": style,
        }
        for style, variant in styled
    ]
    return Chart(
        title="Pareto front of loss and bytes",
        traces=[stairs, *dots],
        layout=_layout(_bytes_axis("bytes sent by a worker in the whole run"))
        | {
            "yaxis": {"title": {"text": "final loss, nats per token"}, "format": "loss"},
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
            waited | {"name": f"{variant.label}: waited", "line": {"dash": ""}},
            hidden | {"name": f"{variant.label}: hidden", "line": {"width": 1.2, "dash": "2.5 5"}},
        ]
    return Chart(
        title="Waits and hidden exchanges, as measured",
        traces=[trace | {"mode": "lines"} for trace in traces],
        layout=_layout(
            {"title": {"text": "wall-clock of the run itself, seconds"}, "format": "duration"}
        )
        | {
            "yaxis": {
                "title": {"text": "seconds so far"},
                "rangemode": "tozero",
                "format": "seconds",
            }
        },
        alt="Two lines for each method against the run's own wall-clock: seconds that a worker "
        "waited so far, and, dotted, seconds in which exchanges travelled while it trained.",
    )


def _bytes_axis(title: str) -> dict[str, Any]:
    return {"type": "log", "title": {"text": title}, "format": "bytes"}


def _layout(xaxis: Mapping[str, Any]) -> dict[str, Any]:
    return {"xaxis": xaxis, "yaxis": _LOSS_AXIS}
