"""What a page is made of: text, tables and charts."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, final

from thinwire.errors import ConfigurationError

__all__ = ["Block", "Chart", "Table", "Text"]


class Block(ABC):
    """A part of a page, from top to bottom."""

    @abstractmethod
    def html(self) -> str:
        """Its element."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Text(Block):
    """A paragraph.

    Args:
        text: plain.

    >>> Text(text="5 < 7").html()
    '<p>5 &lt; 7</p>'
    """

    text: str

    def html(self) -> str:
        """Escaped."""
        return f"<p>{escape(self.text)}</p>"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Table(Block):
    """Rows of text: the first column says what a row is, the others are right-aligned.

    Args:
        title: above it.
        head: of the columns.
        rows: each as long as the head, or shorter: then its last cell takes the rest.

    Raises:
        ConfigurationError: a row without cells, or with more than there are columns.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if not 1 <= len(row) <= len(self.head):
                raise ConfigurationError(
                    f"make a table of {len(self.head)} columns",
                    because=f"a row has {len(row)} cells",
                    do="pass a cell for each column, or fewer",
                )

    def html(self) -> str:
        """A table that scrolls by itself where the window is narrow."""
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.head)
        body = "".join(f"<tr>{self._row(row)}</tr>" for row in self.rows)
        return (
            f'<section class="table"><h2>{escape(self.title)}</h2><div class="scroll" '
            f'tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
            "</div></section>"
        )

    def _row(self, row: Sequence[str]) -> str:
        first, *others = (escape(cell) for cell in row)
        if others and len(row) < len(self.head):
            *others, wide = others
            span = len(self.head) - len(row) + 1
            return f"{_header(first)}{_cells(others)}<td class=wide colspan={span}>{wide}</td>"
        return _header(first) + _cells(others)


def _header(text: str) -> str:
    return f'<th scope="row">{text}</th>'


def _cells(texts: Sequence[str]) -> str:
    return "".join(f"<td>{text}</td>" for text in texts)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Chart(Block):
    """A plotly figure, whose colours the page chooses, so that they suit a light and a dark one.

    Args:
        title: above it.
        traces: as plotly takes them. `meta.series`, a number, stands for a colour.
        layout: as plotly takes it.
        alt: what it shows, for who cannot see it.
        height_px: None is the page's own.
    """

    title: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    alt: str
    height_px: int | None = None

    def html(self) -> str:
        """A frame with the figure's data, drawn when the page is opened."""
        figure = json.dumps(
            {"data": _rounded(self.traces), "layout": self.layout},
            allow_nan=False,
            separators=(",", ":"),
        )
        # Nothing in the data may end the element that it is in.
        data = figure.replace("<", "\\u003c")
        size = "" if self.height_px is None else f' style="height:{self.height_px}px"'
        return (
            f'<section class="chart"><h2>{escape(self.title)}</h2>'
            f'<div class="plot"{size} role="img" aria-label="{escape(self.alt)}"></div>'
            f'<script type="application/json">{data}</script></section>'
        )


def _rounded(value: Any) -> Any:
    """`value` with every float in it to six digits: more than a screen shows, a third of the file.

    >>> _rounded({"y": [1.23456789, 2, "3.00000001"], "x": (1e-9 / 3,)})
    {'y': [1.23457, 2, '3.00000001'], 'x': [3.33333e-10]}
    """
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(held) for held in value]
    return value
