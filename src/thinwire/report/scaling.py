"""How methods bear more workers and longer rounds, where the runs have several of either."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from thinwire.report.arms import Arm, differing
from thinwire.report.blocks import Chart
from thinwire.report.front import final_loss

__all__ = ["Family", "families", "scaling_charts"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Methods that differ in one quantity.

    Args:
        name: of all of them.
        arms: by the rising quantity; no two have the same.
        besides: what else differs between them: learning rates that were tuned for each, say.
    """

    name: str
    arms: tuple[Arm, ...]
    besides: tuple[str, ...]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Quantity:
    symbol: str
    words: str
    field: str
    of: Callable[[Arm], int]
    other: Callable[[Arm], int]


_QUANTITIES: Final[Mapping[str, _Quantity]] = {
    "K": _Quantity(
        symbol="K",
        words="workers",
        field="workers",
        of=lambda arm: arm.workers,
        other=lambda arm: arm.sync_every,
    ),
    "H": _Quantity(
        symbol="H",
        words="inner steps between two exchanges",
        field="method.sync_every",
        of=lambda arm: arm.sync_every,
        other=lambda arm: arm.workers,
    ),
}


def families(arms: Sequence[Arm], symbol: str) -> list[Family]:
    """Methods of one name that were run with several K, or several H, and the same H, or K.

    Where several arms of a name have one value (several learning rates, say), only those that
    differ in nothing else make a family; so do those that are alone with their name.

    Args:
        arms: all.
        symbol: K or H.
    """
    quantity = _QUANTITIES[symbol]
    alike: dict[tuple[object, ...], list[Arm]] = {}
    for arm in arms:
        alike.setdefault((_name(arm), quantity.other(arm)), []).append(arm)
    groups = [part for group in alike.values() for part in _unambiguous(group, quantity)]
    # A recipe may give each K, or H, a name of its own.
    alone = [arm for group in groups if len(group) == 1 for arm in group]
    groups = [group for group in groups if len(group) > 1] + _strictly(alone, quantity)
    return [_family(group, quantity) for group in groups if len(group) > 1]


def _unambiguous(group: list[Arm], quantity: _Quantity) -> list[list[Arm]]:
    values = [quantity.of(arm) for arm in group]
    if len(set(values)) == len(values):
        return [group]
    return _strictly(group, quantity)


def _strictly(arms: Sequence[Arm], quantity: _Quantity) -> list[list[Arm]]:
    """Those that differ in the quantity and in nothing else."""
    strict: dict[tuple[object, ...], list[Arm]] = {}
    for arm in arms:
        rest = tuple(sorted((f, v) for f, v in arm.fields.items() if f != quantity.field))
        strict.setdefault(rest, []).append(arm)
    return list(strict.values())


def _family(group: list[Arm], quantity: _Quantity) -> Family:
    besides = [f for f in differing([arm.fields for arm in group]) if f != quantity.field]
    return Family(
        name=min((_name(arm) for arm in group), key=len),
        arms=tuple(sorted(group, key=quantity.of)),
        besides=tuple(besides),
    )


def _name(arm: Arm) -> str:
    """Of its method, without an H that was asked for in it."""
    return re.sub(r"(?<=[:,])sync_every=\d+,?|[:,]$", "", arm.first.method).rstrip(":,")


def scaling_charts(arms: Sequence[Arm]) -> list[Chart]:
    """Final loss against K, and against H, as far as the runs have several."""
    found = ((quantity, families(arms, symbol)) for symbol, quantity in _QUANTITIES.items())
    return [_chart(quantity, members) for quantity, members in found if members]


def _chart(quantity: _Quantity, members: Sequence[Family]) -> Chart:
    values = sorted({quantity.of(arm) for family in members for arm in family.arms})
    return Chart(
        title=f"Loss against {quantity.symbol}, {quantity.words}",
        traces=[_trace(index, family, quantity) for index, family in enumerate(members)],
        layout={
            "hovermode": "closest",
            "showlegend": True,
            "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
            "xaxis": {
                "type": "log",
                "title": {"text": f"{quantity.symbol}, {quantity.words}"},
                "tickvals": values,
                "ticktext": [str(value) for value in values],
            },
            "yaxis": {"title": {"text": "final loss, nats per token"}},
        },
        height_px=360 + 20 * len(members),
        alt=f"Lines of final validation loss against {quantity.words}; the table of results has "
        "the numbers.",
    )


def _trace(index: int, family: Family, quantity: _Quantity) -> dict[str, Any]:
    losses = [final_loss(arm) for arm in family.arms]
    other = quantity.other(family.arms[0])
    symbol = "H" if quantity.symbol == "K" else "K"
    besides = f" ({', '.join(f.rpartition('.')[2] for f in family.besides)} differ as well)"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"{family.name} {symbol}={other}" + (besides if family.besides else ""),
        "x": [quantity.of(arm) for arm in family.arms],
        "y": [loss.mean for loss in losses],
        "error_y": {"type": "data", "array": [loss.error or 0.0 for loss in losses]},
        "meta": {"series": index},
    }
