"""The page of `thinwire status`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from thinwire.plan.units import count_text, duration_text, nbytes_text

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from thinwire.membership import WorkerMetrics

T = TypeVar("T")

_WIDE = 116
"""Columns of a terminal that has room for all of the table."""
_REST = 60
"""Columns that a narrow one needs for all but names."""
_ONLY_WIDE = ("address", "sent", "received")
_NUMBERS = {"outer": 5, "inner": 5, "loss": 6, "tokens/s": 6, "sent": 7, "received": 8, "waited": 8}
"""Columns of numbers, and how many characters of each are never cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusPage:
    """What is shown of a run.

    Args:
        headlines: about the run.
        rows: a worker each: cell by column; a column that none has is not shown.
        contributions: how often a worker's was rejected or clipped, by identity and kind.
        record: all of it as JSON-able data.
    """

    headlines: Sequence[str]
    rows: Sequence[Mapping[str, str]]
    contributions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    record: Mapping[str, Any]

    def shown(self, width: int) -> Group:
        """The page for a terminal of `width` columns."""
        from rich.console import Group
        from rich.text import Text

        shown: list[RenderableType] = [Text("\n".join(self.headlines)), self._table(width)]
        if self.contributions:
            shown.append(_contributions(self.contributions))
        if width < _WIDE:
            left_out = [name for name in _ONLY_WIDE if name in self._columns()]
            shown.append(Text(f"a terminal of {_WIDE} columns shows {', '.join(left_out)}, too"))
        return Group(*shown)

    def _columns(self) -> list[str]:
        named = {name for row in self.rows for name in row}
        return [name for name in ("address", *_NUMBERS) if name in named or not self.rows]

    def _table(self, width: int) -> Table:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        is_wide = width >= _WIDE
        names = [name for name in self._columns() if is_wide or name not in _ONLY_WIDE]
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        # Names are cut before anything else is.
        name_width = None if is_wide else max(10, width - _REST)
        table.add_column("worker", no_wrap=True, max_width=name_width)
        for name in names:
            justify = "right" if name in _NUMBERS else "left"
            table.add_column(name, justify=justify, no_wrap=True, min_width=_NUMBERS.get(name))
        table.add_column("state", min_width=14)
        for row in self.rows:
            table.add_row(*(Text(row[name]) for name in ("worker", *names, "state")))
        return table


def metric_cells(metrics: WorkerMetrics) -> dict[str, str]:
    """The cells of what a worker measured; a dash is what it did not."""
    return {
        "loss": _cell(metrics.loss, "{:.5g}".format),
        "tokens/s": _cell(metrics.tokens_per_s, count_text),
        "sent": _cell(metrics.sent_bytes, nbytes_text),
        "received": _cell(metrics.received_bytes, nbytes_text),
        "waited": _cell(metrics.wait_s, duration_text),
    }


def _cell(value: T | None, text: Callable[[T], str]) -> str:
    return "-" if value is None else text(value)


def _contributions(found: Mapping[str, Mapping[str, int]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from thinwire.contributions import CLIPPED

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("contributions of", no_wrap=True)
    table.add_column("rejected", justify="right")
    table.add_column("clipped", justify="right")
    table.add_column("why")
    for identity, counts in found.items():
        rejected = {kind: count for kind, count in counts.items() if kind != CLIPPED}
        why = ", ".join(f"{kind} {count}" for kind, count in rejected.items())
        numbers = (str(sum(rejected.values())), str(counts.get(CLIPPED, 0)))
        table.add_row(*map(Text, (identity, *numbers, why)))
    return table
