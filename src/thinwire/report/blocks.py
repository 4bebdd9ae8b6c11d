"""Blocks of a page: data that the macros of templates/blocks.html show."""

from abc import ABC
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

from jinja2 import Environment, FunctionLoader
from markupsafe import Markup

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
        """The HTML elements of this part of the page.

        >>> Paragraph(text="5 < 7").html()
        Markup('<p>5 &lt; 7</p>')
        """
        macros: Any = templates().get_template("blocks.html").module
        return getattr(macros, type(self).__name__)(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Paragraph(Block):
    """A paragraph.

    Args:
        text: plain.
    """

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Heading(Block):
    """A heading, with an optional paragraph below it.

    Args:
        text: of the heading.
        name: of the element, for links.
        below: the paragraph.
    """

    text: str
    name: str
    below: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTable(Block):
    """A table whose first column names the row; the others are right-aligned.

    Args:
        title: above it.
        head: of the columns.
        rows: each as long as the head, or shorter: then its last cell takes the rest.
        main: columns that a narrow window shows beside the first one; empty: all.
        rest: indices of rows that are hidden until a reader shows all.
        name: of the element; a table with a name can be sorted, and copied as text with tabs.
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
        title: above it.
        traces: as above.
        layout: of the axes.
        alt: description in words, and the place of the numbers.
    """

    title: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    alt: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Block):
    """A block with another macro.

    Args:
        macro: its name in templates/blocks.html.
        values: its arguments.
    """

    macro: str
    values: Mapping[str, Any]

    def html(self) -> Markup:
        """The HTML elements of this part of the page."""
        return getattr(templates().get_template("blocks.html").module, self.macro)(**self.values)


def rounded(value: Any) -> Any:
    """`value` with all floats to six digits: more than a screen shows, a third of the bytes.

    >>> rounded({"y": [1.23456789, 2, "3.00000001"], "x": (1e-9 / 3,)})
    {'y': [1.23457, 2, '3.00000001'], 'x': [3.33333e-10]}
    """
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(held) for held in value]
    return value
