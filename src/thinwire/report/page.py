"""A page: one HTML file that opens without a network."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from thinwire.errors import ConfigurationError
from thinwire.files import replace_text
from thinwire.report.blocks import Block, asset, templates


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Contents of a page.

    Args:
        title: of the page and of its window.
        lead: a line below the title.
        blocks: from top to bottom.
        scripts: files of this package with the page's JavaScript.
        refresh_s: seconds after which the page reloads itself while its runs train; None: never.
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
        page: to write.
        path: of the file, which is replaced if it exists.

    Raises:
        ConfigurationError: it cannot be written.
    """
    html = page.html()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, html)
    except (OSError, ValueError) as error:  # a path without a name is a ValueError
        raise ConfigurationError(
            f"write {path}", because=str(error), do="pass a file that can be written"
        ) from error
