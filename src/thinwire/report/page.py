"""A page, one HTML file that opens without a network, and its blocks.

The macros in templates/blocks.html render the blocks.
"""

from abc import ABC
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import Environment, FunctionLoader
from markupsafe import Markup

from thinwire.errors import ConfigurationError
from thinwire.files import replace_text

Cell: TypeAlias = str | tuple[str, float | str]
"""The text of a cell, and the value by which a table sorts it."""


@cache
def templates() -> Environment:
    """The templates; they escape all values."""
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(lambda name: asset(f"templates/{name}")),
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def asset(name: str) -> str:
    """The text of a file of this package."""
    return files("thinwire.report").joinpath(name).read_text(encoding="utf-8")


class Block(ABC):  # noqa: B024 - only the macros of its kinds differ
    """A part of a page, from top to bottom."""

    def html(self) -> Markup:
        """The HTML elements of this part of the page."""
        macros: Any = templates().get_template("blocks.html").module
        return getattr(macros, type(self).__name__)(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTable(Block):
    """A table whose first column names the row; the others are right-aligned.

    Args:
        title: heading above the table.
        head: headings of the columns.
        rows: rows of cells; in a row shorter than the head, the last cell spans the rest.
        main: columns that a narrow window shows beside the first one; empty for all.
        rest: indices of rows that are hidden until a reader shows all.
        name: name of the element; named tables can be sorted, and copied as text with tabs.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    main: tuple[str, ...] = ()
    rest: Collection[int] = ()
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart(Block):
    """A figure that chart.js draws with uPlot, in the colours of the page.

    A trace has

        name         of the legend
        mode         "lines", "markers" and "text" (the name beside the point) joined by +
        x, y         numbers
        error        standard errors of y: a band around a line, bars at points
        bars         true: bars at the points of a line
        line         width, dash (pixels), and "hv" as `shape`, for stairs
        meta         series    index of its colour; without one it is grey
                     dash      index of its dash
                     variant   index of its variant in `report-data`, which a reader can hide

    and the layout has `xaxis` and `yaxis`, with title, type "log", tickvals and ticktext, and
    `format`: bytes, percent, duration, or si with a `unit`.

    Args:
        title: heading above the figure.
        traces: as above.
        layout: as above.
        alt: description in words, which says where to find the numbers.
    """

    title: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    alt: str


class Macro(Block):
    """A block that consists of a macro and its arguments.

    Args:
        macro: name of the macro in templates/blocks.html.
        values: arguments of the macro.

    >>> Macro("Paragraph", text="5 < 7").html()
    Markup('<p>5 &lt; 7</p>')
    """

    def __init__(self, macro: str, **values: Any) -> None:
        self.macro, self.values = macro, values

    def html(self) -> Markup:
        """The HTML elements of this part of the page."""
        return getattr(templates().get_template("blocks.html").module, self.macro)(**self.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Contents of a page.

    Args:
        title: title of the page and of its window.
        lead: a line below the title.
        blocks: blocks from top to bottom.
        scripts: files of this package with the page's JavaScript.
        refresh_s: seconds after which the page reloads itself while its runs train; None for never.
    """

    title: str
    lead: str
    blocks: Sequence[Block]
    scripts: Sequence[str] = ()
    refresh_s: float | None = None

    def html(self) -> str:
        """The file's text."""
        body = [block.html() for block in self.blocks]
        names, style = list(self.scripts), asset("page.css")
        if any('class="chart"' in html for html in body):
            names = ["vendor/uPlot.iife.min.js", "chart.js", *names]
            style = asset("vendor/uPlot.min.css") + style
        scripts = [asset(name) for name in names]
        if len(names) > len(self.scripts):  # each copy of uPlot has to carry its licence
            scripts[0] = f"/*! {asset('vendor/LICENSE')}*/\n{scripts[0]}"
        return (
            templates()
            .get_template("page.html")
            .render(page=self, body=body, style=Markup(style), scripts=map(Markup, scripts))
        )


def write_page(page: Page, path: Path) -> None:
    """Write `page` to `path` atomically, and create its folder.

    Args:
        page: page to write.
        path: path of the file, which is replaced if it exists.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    html = page.html()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, html)
    except (OSError, ValueError) as error:  # a path without a name is a ValueError
        raise ConfigurationError(
            f"write {path}", because=str(error), do="pass a file that can be written"
        ) from error
