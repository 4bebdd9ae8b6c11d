"""What a page is made of: data, which the macro of the same name in templates/blocks.html shows."""

from abc import ABC
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, ClassVar, Final, TypeAlias

from jinja2 import Environment, FunctionLoader
from markupsafe import Markup

from thinwire.errors import ConfigurationError

MAIN_WITHIN: Final = 8
"""Among which columns page.css can tell those that a narrow window shows first."""

Cell: TypeAlias = tuple[str, float | str]
"""What is shown, and by what it is sorted."""


@cache
def templates() -> Environment:
    """The templates; everything they are given is escaped."""
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
    """A heading, and perhaps a paragraph below it.

    Args:
        text: of the heading.
        name: by which the page's links find it.
        below: the paragraph.
    """

    text: str
    name: str
    below: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice(Block):
    """Something that a reader should not overlook, with a link to the rest of it.

    Args:
        text: plain.
        target: name of the heading that it links to.
    """

    text: str
    target: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Details(Block):
    """Blocks that are folded away until a reader opens them; works without a script.

    Args:
        title: what is to be opened.
        blocks: what is shown then.
    """

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True, slots=True)
class Commands(Block):
    """Lines for a terminal.

    Args:
        lines: of it.
        label: what they are.
    """

    lines: Sequence[str]
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PageData(Block):
    """What the page's scripts work with; not shown.

    Args:
        name: by which they find it.
        data: JSON-able.
    """

    name: str
    data: Any


# -- tables and charts -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTable(Block):
    """Rows of text: the first column says what a row is, the others are right-aligned.

    Args:
        title: above it.
        head: of the columns.
        rows: each as long as the head, or shorter: then its last cell takes the rest.
        main: those of the head that a narrow window shows beside the first, the others when its
            reader asks for them; empty: it shows all.

    Raises:
        ConfigurationError: a row without cells, or with more than there are columns; or `main`
            names no column.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    main: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_main(self.main, self.head)
        for row in self.rows:
            if not 1 <= len(row) <= len(self.head):
                raise ConfigurationError(
                    f"make a table of {len(self.head)} columns",
                    because=f"a row has {len(row)} cells",
                    do="pass a cell for each column, or fewer",
                )

    @property
    def main_columns(self) -> list[int]:
        """Columns that a narrow window shows first, counted from 1, as page.css does."""
        return _main_columns(self.main, self.head)


def _main_columns(main: tuple[str, ...], head: tuple[str, ...]) -> list[int]:
    return [1, *(head.index(name) + 1 for name in main)]


def _check_main(main: tuple[str, ...], head: tuple[str, ...]) -> None:
    unknown = [name for name in main if name not in head[1:MAIN_WITHIN]]
    if unknown:
        raise ConfigurationError(
            f"show the column {unknown[0]} first",
            because=f"the first {MAIN_WITHIN} columns are {', '.join(head[:MAIN_WITHIN])}",
            do="name one of these, or move it forward",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SortableTable(Block):
    """A table whose columns sort it, and which can be copied as text with tabs.

    Args:
        title: above it.
        head: of the columns; the first says what a row is.
        rows: a cell for each column.
        name: of the element, for scripts and links.
        main: as in `TextTable`.
        rest: indices of rows that are shown when a reader asks for them.

    Raises:
        ConfigurationError: `main` names no column.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    name: str
    main: tuple[str, ...] = ()
    rest: Collection[int] = ()

    def __post_init__(self) -> None:
        _check_main(self.main, self.head)

    @property
    def main_columns(self) -> list[int]:
        """Columns that a narrow window shows first, counted from 1, as page.css does."""
        return _main_columns(self.main, self.head)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart(Block):
    """A figure, whose colours the page chooses, so that they suit a light and a dark one.

    Args:
        title: above it.
        traces: as `thinwire.report.traces` has them.
        layout: as `thinwire.report.traces` has it.
        alt: what it shows, in words.
        height_px: None is the page's own.
    """

    title: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    alt: str
    height_px: int | None = None

    @property
    def figure(self) -> Mapping[str, Any]:
        """What is drawn when the page is opened."""
        return {"data": rounded(self.traces), "layout": self.layout}


def rounded(value: Any) -> Any:
    """`value` with every float in it to six digits: more than a screen shows, a third of the file.

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


# -- what a reader chooses -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodControls(Block):
    """The legend of all charts: what it does not tick is not drawn; and which loss they show.

    Args:
        labels: of the variants.
        styles: of `styles_of`.
        families: of each variant; where there are many, each family is folded away.
        shown: indices of the variants that are drawn first.
        front: indices of the variants that no other beats in loss and bytes.
    """

    labels: Sequence[str]
    styles: Sequence[Mapping[str, int]]
    front: Sequence[int]
    families: Sequence[str]
    shown: Sequence[int]

    @property
    def groups(self) -> dict[str, list[int]]:
        """Indices of the variants that are drawn first, and of the others by family.

        Families of one are together, after those of several.
        """
        found: dict[str, list[int]] = {}
        for index, family in enumerate(self.families):
            if index not in self.shown:
                found.setdefault(family, []).append(index)
        alone = [members[0] for members in found.values() if len(members) == 1]
        if len(alone) > 1:
            found = {family: its for family, its in found.items() if len(its) > 1}
            found["others"] = alone
        return {"": list(self.shown), **found}

    # As chart.js has them: dashes, colours, and markers in the middle of a line of 34 x 10.
    dashes: ClassVar = ("", "9 6", "2.5 5", "9 4 2.5 4", "14 6", "14 4 2.5 4")
    colours: ClassVar = 8
    symbols: ClassVar = (
        "M12.5 5a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
        "M13 1h8v8h-8z",
        "M17 0l5 5l-5 5l-5 -5z",
        "M17 0l5 9h-10z",
        "M17 10l5 -9h-10z",
        "M15.5 0h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",
        "M14 0l3 3l3 -3l2 2l-3 3l3 3l-2 2l-3 -3l-3 3l-2 -2l3 -3l-3 -3z",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkControls(Block):
    """The link on which wall-clock is worked out.

    Args:
        topologies: among which to choose.
    """

    topologies: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineControls(Block):
    """The choice of the variant whose rounds are shown.

    Args:
        labels: of the variants that can be replayed, by their index.
    """

    labels: Mapping[int, str]
