"""How the loss of methods changes with more workers and longer rounds."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from thinwire.report.blocks import Chart
from thinwire.runs.variants import Variant, differing


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Variants of a method that differ in K or in H: a line of a chart.

    Args:
        name: of the method.
        variants: by the rising quantity; no two have the same.
        besides: what else differs between them: learning rates that were tuned for each, say.
    """

    name: str
    variants: tuple[Variant, ...]
    besides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Quantity:
    symbol: str
    words: str
    field: str
    of: Callable[[Variant], int]
    other: Callable[[Variant], int]


_QUANTITIES: Final[Mapping[str, _Quantity]] = {
    "K": _Quantity(
        symbol="K",
        words="workers",
        field="workers",
        of=lambda variant: variant.config.workers,
        other=lambda variant: variant.config.sync_every,
    ),
    "H": _Quantity(
        symbol="H",
        words="inner steps between two exchanges",
        field="method.sync_every",
        of=lambda variant: variant.config.sync_every,
        other=lambda variant: variant.config.workers,
    ),
}


def families(variants: Sequence[Variant], symbol: str) -> list[Family]:
    """Methods of one name that were run with several K, or several H, and the same H, or K.

    Where several variants of a name have one value (several learning rates, say), only those that
    differ in nothing else make a family; so do those that are alone with their name.

    Args:
        variants: all.
        symbol: K or H.
    """
    quantity = _QUANTITIES[symbol]

    def all_else(variant: Variant) -> object:
        return sorted((f, v) for f, v in variant.settings.items() if f != quantity.field)

    groups: list[list[Variant]] = []
    for group in _grouped(variants, lambda its: (_name(its), quantity.other(its))):
        distinct = len({quantity.of(variant) for variant in group}) == len(group)
        groups += [group] if distinct else _grouped(group, all_else)
    # A recipe may give each K, or H, a name of its own.
    alone = [group[0] for group in groups if len(group) == 1]
    groups = [group for group in groups if len(group) > 1] + _grouped(alone, all_else)
    return [
        Family(
            name=min((_name(variant) for variant in group), key=len),
            variants=tuple(sorted(group, key=quantity.of)),
            besides=tuple(
                f for f in differing([its.settings for its in group]) if f != quantity.field
            ),
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
    found = ((quantity, families(variants, symbol)) for symbol, quantity in _QUANTITIES.items())
    return [_chart(quantity, members) for quantity, members in found if members]


def _chart(quantity: _Quantity, members: Sequence[Family]) -> Chart:
    values = sorted({quantity.of(variant) for family in members for variant in family.variants})
    return Chart(
        title=f"Loss against {quantity.symbol}, {quantity.words}",
        traces=[_trace(index, family, quantity) for index, family in enumerate(members)],
        layout={
            "legend": True,
            "xaxis": {
                "type": "log",
                "title": {"text": f"{quantity.symbol}, {quantity.words}"},
                "tickvals": values,
                "ticktext": [str(value) for value in values],
            },
            "yaxis": {"title": {"text": "final loss, nats per token"}, "format": "loss"},
        },
        alt=f"Lines of final validation loss against {quantity.words}; the table of results has "
        "the numbers.",
    )


def _trace(index: int, family: Family, quantity: _Quantity) -> dict[str, Any]:
    losses = [variant.loss for variant in family.variants]
    other = quantity.other(family.variants[0])
    symbol = "H" if quantity.symbol == "K" else "K"
    besides = f" ({', '.join(f.rpartition('.')[2] for f in family.besides)} differ as well)"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"{family.name} {symbol}={other}" + (besides if family.besides else ""),
        "x": [quantity.of(variant) for variant in family.variants],
        "y": [loss.mean for loss in losses],
        "error": [loss.standard_error or 0.0 for loss in losses],
        "bars": True,
        "meta": {"series": index},
    }
