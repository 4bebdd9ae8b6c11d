"""Parts of a page that its reader can use: tables to sort and copy, details, commands, data."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeAlias, final

from thinwire.report.blocks import Block

__all__ = ["Cell", "Commands", "Data", "Details", "Heading", "Notice", "SortableTable"]

Cell: TypeAlias = tuple[str, float | str]
"""What is shown, and by what it is sorted."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Heading(Block):
    """A heading, and perhaps a paragraph below it.

    Args:
        text: of the heading.
        name: by which the page's links find it.
        below: the paragraph.
    """

    text: str
    name: str
    below: str = ""

    def html(self) -> str:
        """The elements."""
        below = f"<p>{escape(self.below)}</p>" if self.below else ""
        return f'<h2 id="{escape(self.name)}">{escape(self.text)}</h2>{below}'


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Notice(Block):
    """Something that nobody should overlook, with a link to the rest of it.

    Args:
        text: plain.
        target: name of the heading that it links to.
    """

    text: str
    target: str

    def html(self) -> str:
        """The element."""
        return f'<p class="notice">{escape(self.text)} <a href="#{escape(self.target)}">Why</a></p>'


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SortableTable(Block):
    """A table whose columns sort it, and which can be copied as text with tabs.

    Args:
        title: above it.
        head: of the columns; the first says what a row is.
        rows: a cell for each column.
        name: of the element, for scripts and links.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    name: str

    def html(self) -> str:
        """Buttons in the head, so that the keyboard reaches them."""
        head = "".join(
            f'<th scope="col"><button type="button" class="sort">{escape(text)}</button></th>'
            for text in self.head
        )
        body = "".join(f"<tr>{_row(row)}</tr>" for row in self.rows)
        title = escape(self.title)
        return (
            f'<section class="table sortable" id="{escape(self.name)}"><h2>{title}</h2>'
            '<p class="tools"><button type="button" class="copy">Copy</button> '
            '<span class="told" role="status"></span></p>'
            f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table><thead>'
            f"<tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
        )


def _row(row: Sequence[Cell]) -> str:
    (first, by), *others = row
    cells = "".join(f"<td{_value(value)}>{escape(text)}</td>" for text, value in others)
    return f'<th scope="row"{_value(by)}>{escape(first)}</th>{cells}'


def _value(value: float | str) -> str:
    return f' data-value="{escape(str(value))}"'


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Details(Block):
    """Blocks that are shown when somebody asks for them.

    Args:
        title: what to ask for.
        blocks: what is shown then.
    """

    title: str
    blocks: Sequence[Block]

    def html(self) -> str:
        """Works without a script."""
        inner = "\n".join(block.html() for block in self.blocks)
        return f"<details><summary>{escape(self.title)}</summary>\n{inner}\n</details>"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Commands(Block):
    """Lines for a terminal.

    Args:
        lines: of it.
        label: what they are.
    """

    lines: Sequence[str]
    label: str

    def html(self) -> str:
        """A scrolling element of its own."""
        text = escape("\n".join(self.lines))
        label = escape(self.label)
        return f'<pre tabindex="0" role="region" aria-label="{label}"><code>{text}</code></pre>'


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Data(Block):
    """What the page's scripts work with.

    Args:
        name: by which they find it.
        data: JSON-able.
    """

    name: str
    data: Any

    def html(self) -> str:
        """Not shown."""
        text = json.dumps(self.data, allow_nan=False).replace("<", "\\u003c")
        return f'<script type="application/json" id="{escape(self.name)}">{text}</script>'
