"""Charts of a report of runs: the curves that its page draws, and those that it shows first."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from thinwire.report.page import Chart, Macro
from thinwire.runs.schema import RunRecord
from thinwire.runs.variants import Variant, differing

_FEW: Final = 12
_BASELINES: Final = ("ddp", "diloco")
_Axes: TypeAlias = Mapping[str, tuple[str, str, Callable[[RunRecord], float | None]]]

# Title, number format, and value in a record.
X_AXES: Final[_Axes] = {
    "steps": ("inner steps", "si", lambda record: record.step),
    "tokens": ("tokens of all workers", "si", lambda record: record.tokens),
    "bytes": (
        "bytes of a worker, up + down through a store",
        "bytes",
        lambda record: record.sent_bytes + record.received_bytes,
    ),
    "seconds": ("wall-clock of the run itself", "duration", lambda record: record.wall_s),
}
Y_AXES: Final[_Axes] = {
    "validation": ("validation loss, nats per token", "loss", lambda record: record.val_loss),
    "training": ("training loss, nats per token", "loss", lambda record: record.loss),
    "waited": ("waits for exchanges", "duration", lambda record: record.wait_s),
    "hidden": ("exchanges behind training", "duration", lambda record: record.overlapped_s),
}


_LOSS_AXIS: Final = {"title": {"text": "final loss, nats per token"}, "format": "loss"}


def senders(variants: Sequence[Variant]) -> list[Variant]:
    """The variants that send bytes, which a lone worker does not; all variants if none does."""
    return [variant for variant in variants if variant.moved_bytes] or list(variants)


def front_of(variants: Sequence[Variant]) -> list[Variant]:
    """The Pareto front, by rising bytes: senders that no other beats in both loss and bytes."""
    points = [(its.moved_bytes, its.loss.mean, its) for its in senders(variants)]
    return [
        variant
        for moved, loss, variant in sorted(points, key=lambda point: point[:2])
        if not any(m <= moved and v <= loss and (m, v) != (moved, loss) for m, v, _ in points)
    ]


def first_shown(variants: Sequence[Variant]) -> list[int]:
    """Indices of the variants that a page shows first: if there are many, front and baselines."""
    front = front_of(variants)
    return [
        index
        for index, variant in enumerate(variants)
        if len(variants) <= _FEW or variant in front or variant.config.method in _BASELINES
    ]


def styles_of(variants: Sequence[Variant]) -> list[dict[str, int]]:
    """`meta` of the traces of each variant: a colour per method, and a dash per variant.

    The page has eight colours; the first go to the variants that it shows first.

    Args:
        variants: all variants of the page.
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


def curves_of(variant: Variant) -> dict[str, list[float | None]]:
    """Each quantity of `X_AXES` and `Y_AXES` at the steps of the records, as means over seeds.

    None if not measured. With several seeds, the standard errors of a quantity's means are under
    its name followed by " error".
    """
    points = {name: variant.curve(value) for name, (_, _, value) in {**X_AXES, **Y_AXES}.items()}
    steps = sorted(set[int]().union(*points.values()))
    found: dict[str, list[float | None]] = {}
    for name, its in points.items():
        found[name] = [its[step].mean if step in its else None for step in steps]
        if name in Y_AXES and len(variant.runs) > 1:
            errors = [its[step].standard_error if step in its else None for step in steps]
            found[f"{name} error"] = errors
    return found


def curves(*, y: str, x: str, name: str, has_link: bool) -> Macro:
    """Lines of one quantity against another; the reader can choose both, and logarithmic axes.

    Args:
        y: key of `Y_AXES`, until the reader chooses another.
        x: key of `X_AXES`, or "link".
        name: name of the element.
        has_link: the page computes the time of each step on a link.
    """
    choices = {
        axis: {key: (title, form) for key, (title, form, _) in axes.items()}
        for axis, axes in (("x", X_AXES), ("y", Y_AXES))
    }
    if has_link:
        choices["x"]["link"] = ("wall-clock on the chosen link", "duration")
    return Macro("Curves", name=name, chosen={"x": x, "y": y}, choices=choices)


def front_chart(variants: Sequence[Variant]) -> Chart:
    """Final loss against bytes, with the methods that no other beats in both."""
    sending, front = senders(variants), front_of(variants)
    mode = "markers+text" if len(sending) <= _FEW else "markers"
    stairs: dict[str, Any] = {
        "name": "front",
        "mode": "lines",
        "x": [variant.moved_bytes for variant in front],
        "y": [variant.loss.mean for variant in front],
        "line": {"shape": "hv", "width": 1.5, "dash": [2.5, 5]},
        "meta": {},
    }
    dots = [
        {
            "name": variant.label,
            "mode": mode,
            "x": [variant.moved_bytes],
            "y": [variant.loss.mean],
            "error": [variant.loss.standard_error or 0.0],
            "meta": style,
        }
        for style, variant in zip(styles_of(variants), variants, strict=True)
        if variant in sending
    ]
    moved = "bytes of a worker in the whole run, up + down through a store"
    return Chart(
        title="Pareto front of loss and bytes",
        traces=[stairs, *dots],
        layout={
            "xaxis": {"type": "log", "title": {"text": moved}, "format": "bytes"},
            "yaxis": _LOSS_AXIS,
        },
        alt="A point for each method, its final validation loss against the bytes of a "
        "worker, and a line through those that none beats in both; the table of results has the "
        "numbers.",
    )


# -- loss against the number of workers, and against the length of a round -------------------------

_SCALES: Final = {
    "workers": ("K", "workers"),
    "method.sync_every": ("H", "inner steps between two exchanges"),
}


def scaling_charts(variants: Sequence[Variant]) -> list[Chart]:
    """Final loss against K, and against H, where the runs of a method have several values of it."""
    workers, sync_every = _SCALES
    return [
        _scaling_chart(field, lines)
        for field, other in ((workers, sync_every), (sync_every, workers))
        if (lines := _lines(variants, field, other))
    ]


def _lines(variants: Sequence[Variant], field: str, other: str) -> dict[str, list[Variant]]:
    """Each method with one value of `other`: its best variants at several values of `field`."""
    best: dict[str, dict[int, Variant]] = {}
    for variant in variants:
        # The method's text without its H.
        method = re.sub(r"(?<=[:,])sync_every=\d+,?|[:,]$", "", variant.config.method).rstrip(":,")
        line = best.setdefault(f"{method} {_SCALES[other][0]}={variant.settings[other]}", {})
        value = int(variant.settings[field])
        line[value] = min(variant, line.get(value, variant), key=lambda its: its.loss.mean)
    return {n: [line[v] for v in sorted(line)] for n, line in best.items() if len(line) > 1}


def _scaling_chart(field: str, lines: Mapping[str, Sequence[Variant]]) -> Chart:
    symbol, words = _SCALES[field]
    traces: list[dict[str, Any]] = []
    for index, (name, line) in enumerate(lines.items()):
        besides = [f for f in differing([its.settings for its in line]) if f != field]
        tuned = f" ({', '.join(f.rpartition('.')[2] for f in besides)} differ as well)"
        trace = {
            "name": name + (tuned if besides else ""),
            "mode": "lines+markers",
            "x": [int(its.settings[field]) for its in line],
            "y": [its.loss.mean for its in line],
            "error": [its.loss.standard_error or 0.0 for its in line],
            "bars": True,
            "meta": {"series": index},
        }
        traces.append(trace)
    values = sorted({value for trace in traces for value in trace["x"]})
    return Chart(
        title=f"Loss against {symbol}, {words}",
        traces=traces,
        layout={
            "xaxis": {
                "type": "log",
                "title": {"text": f"{symbol}, {words}"},
                "tickvals": values,
                "ticktext": [str(value) for value in values],
            },
            "yaxis": _LOSS_AXIS,
        },
        alt=f"Lines of final validation loss against {words}, of several runs at one {symbol} the "
        "best; the table of results has the numbers.",
    )
