"""The charts of a report of runs, and the curves that its page draws them from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from thinwire.report.blocks import Chart, Part
from thinwire.report.pareto import first_shown, front_of, senders
from thinwire.runs.schema import RunRecord
from thinwire.runs.variants import Variant

_FEW: Final = 12
_Axes: TypeAlias = Mapping[str, tuple[str, str, Callable[[RunRecord], float | None]]]

# Title, format of its numbers, and value in a record.
X_AXES: Final[_Axes] = {
    "steps": ("inner steps", "si", lambda record: record.step),
    "tokens": ("tokens of all workers", "si", lambda record: record.tokens),
    "bytes": ("bytes sent by a worker", "bytes", lambda record: record.sent_bytes),
    "seconds": ("wall-clock of the run itself", "duration", lambda record: record.wall_s),
}
Y_AXES: Final[_Axes] = {
    "validation": ("validation loss, nats per token", "loss", lambda record: record.val_loss),
    "training": ("training loss, nats per token", "loss", lambda record: record.loss),
    "waited": ("waits for exchanges", "duration", lambda record: record.wait_s),
    "hidden": ("exchanges behind training", "duration", lambda record: record.overlapped_s),
}


def styles_of(variants: Sequence[Variant]) -> list[dict[str, int]]:
    """`meta` of the traces of each variant: a colour per method, and a dash per variant.

    The page has eight colours; the first ones are for the variants that it shows first.

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


def curves_of(variant: Variant) -> dict[str, list[float | None]]:
    """Each quantity of `X_AXES` and `Y_AXES` at the steps of the records, as means over seeds.

    None: not measured. With several seeds, the standard errors of a quantity's means are under its
    name and " error".
    """
    axes = {**X_AXES, **Y_AXES}
    points = {
        name: dict(zip(curve.steps, curve.points, strict=True))
        for name, (_, _, value) in axes.items()
        for curve in [variant.curve(value)]
    }
    steps = sorted(set[int]().union(*points.values()))
    found: dict[str, list[float | None]] = {}
    for name, its in points.items():
        found[name] = [its[step].mean if step in its else None for step in steps]
        if name in Y_AXES and len(variant.runs) > 1:
            errors = [its[step].standard_error if step in its else None for step in steps]
            found[f"{name} error"] = errors
    return found


def curves(*, y: str, x: str, name: str, has_link: bool) -> Part:
    """Lines of one quantity against another; the reader can choose both, and logarithmic axes.

    Args:
        y: of `Y_AXES`, until the reader chooses another.
        x: of `X_AXES`, or "link".
        name: of the element.
        has_link: the page computes the time of each step on a link.
    """
    choices = {
        axis: {key: (title, form) for key, (title, form, _) in axes.items()}
        for axis, axes in (("x", X_AXES), ("y", Y_AXES))
    }
    if has_link:
        choices["x"]["link"] = ("wall-clock on the chosen link", "duration")
    return Part(
        macro="Curves",
        values={"name": name, "chosen": {"x": x, "y": y}, "choices": choices},
    )


def front_chart(variants: Sequence[Variant]) -> Chart:
    """Final loss against bytes, and the methods that no other beats in both."""
    sending, front = senders(variants), front_of(variants)
    mode = "markers+text" if len(sending) <= _FEW else "markers"
    stairs: dict[str, Any] = {
        "name": "front",
        "mode": "lines",
        "x": [variant.sent_bytes for variant in front],
        "y": [variant.loss.mean for variant in front],
        "line": {"shape": "hv", "width": 1.5, "dash": [2.5, 5]},
        "meta": {},
    }
    dots = [
        {
            "name": variant.label,
            "mode": mode,
            "x": [variant.sent_bytes],
            "y": [variant.loss.mean],
            "error": [variant.loss.standard_error or 0.0],
            "meta": style,
        }
        for style, variant in zip(styles_of(variants), variants, strict=True)
        if variant in sending
    ]
    sent = "bytes sent by a worker in the whole run"
    return Chart(
        title="Pareto front of loss and bytes",
        traces=[stairs, *dots],
        layout={
            "xaxis": {"type": "log", "title": {"text": sent}, "format": "bytes"},
            "yaxis": {"title": {"text": "final loss, nats per token"}, "format": "loss"},
        },
        alt="A point for each method, its final validation loss against the bytes that a worker "
        "sent, and a line through those that none beats in both; the table of results has the "
        "numbers.",
    )
