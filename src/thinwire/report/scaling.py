"""Loss against the number of workers, and against the length of a round."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from thinwire.report.blocks import Chart
from thinwire.runs.variants import Variant, differing

_FIELDS: Final[Mapping[str, tuple[str, str]]] = {
    "K": ("workers", "workers"),
    "H": ("method.sync_every", "inner steps between two exchanges"),
}


class Family(NamedTuple):
    """Variants of a method that differ in K or in H: a line of a chart.

    Args:
        name: of the method.
        variants: by the rising quantity; no two have the same.
        besides: other fields that differ, such as learning rates tuned for each.
    """

    name: str
    variants: tuple[Variant, ...]
    besides: tuple[str, ...]


def _value(variant: Variant, symbol: str) -> int:
    return variant.config.workers if symbol == "K" else variant.config.sync_every


def families(variants: Sequence[Variant], symbol: str) -> list[Family]:
    """Variants of a method with several K and one H, or with several H and one K.

    If two variants have the same value (with other learning rates, for example), only those that
    are equal in all else make a family, as do variants without others of their name.

    Args:
        variants: all.
        symbol: K or H.
    """
    field, other = _FIELDS[symbol][0], "H" if symbol == "K" else "K"

    def all_else(variant: Variant) -> object:
        return sorted((f, v) for f, v in variant.settings.items() if f != field)

    groups: list[list[Variant]] = []
    for group in _grouped(variants, lambda its: (_name(its), _value(its, other))):
        distinct = len({_value(variant, symbol) for variant in group}) == len(group)
        groups += [group] if distinct else _grouped(group, all_else)
    # A recipe may name each K, or H, differently.
    alone = [group[0] for group in groups if len(group) == 1]
    groups = [group for group in groups if len(group) > 1] + _grouped(alone, all_else)
    return [
        Family(
            name=min((_name(variant) for variant in group), key=len),
            variants=tuple(sorted(group, key=lambda its: _value(its, symbol))),
            besides=tuple(f for f in differing([its.settings for its in group]) if f != field),
        )
        for group in groups
        if len(group) > 1
    ]


def _grouped(variants: Sequence[Variant], key: Callable[[Variant], object]) -> list[list[Variant]]:
    """Variants with equal keys together, in the order of the first of each group."""
    groups: dict[str, list[Variant]] = {}
    for variant in variants:
        groups.setdefault(repr(key(variant)), []).append(variant)
    return list(groups.values())


def _name(variant: Variant) -> str:
    """The method of `variant`, without an H in its text."""
    return re.sub(r"(?<=[:,])sync_every=\d+,?|[:,]$", "", variant.config.method).rstrip(":,")


def scaling_charts(variants: Sequence[Variant]) -> list[Chart]:
    """Final loss against K, and against H, where the runs have several values of it."""
    found = ((symbol, families(variants, symbol)) for symbol in _FIELDS)
    return [_chart(symbol, members) for symbol, members in found if members]


def _chart(symbol: str, members: Sequence[Family]) -> Chart:
    words, other = _FIELDS[symbol][1], "H" if symbol == "K" else "K"
    values = sorted({_value(its, symbol) for family in members for its in family.variants})
    traces: list[dict[str, object]] = []
    for index, (name, its, besides) in enumerate(members):
        tuned = f" ({', '.join(f.rpartition('.')[2] for f in besides)} differ as well)"
        losses = [variant.loss for variant in its]
        traces.append(
            {
                "name": f"{name} {other}={_value(its[0], other)}" + (tuned if besides else ""),
                "mode": "lines+markers",
                "x": [_value(variant, symbol) for variant in its],
                "y": [loss.mean for loss in losses],
                "error": [loss.standard_error or 0.0 for loss in losses],
                "bars": True,
                "meta": {"series": index},
            }
        )
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
            "yaxis": {"title": {"text": "final loss, nats per token"}, "format": "loss"},
        },
        alt=f"Lines of final validation loss against {words}; the table of results has the "
        "numbers.",
    )
