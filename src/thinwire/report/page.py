"""A page: one HTML file with everything in it, that opens without a network."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from thinwire.errors import ConfigurationError
from thinwire.files import replace_text
from thinwire.report.blocks import Block, Chart, asset, templates


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What a page shows.

    Args:
        title: what it is about, also of the window.
        lead: a line below the title.
        blocks: from top to bottom.
        scripts: files of this package that make the page answer its reader.
        refresh_s: after how many seconds the page loads itself again, because it is written anew
            while its runs go on; None if it is not. What its reader chose stays as it was.

    Raises:
        ConfigurationError: `refresh_s` is not above 0.
    """

    title: str
    lead: str
    blocks: Sequence[Block]
    scripts: Sequence[str] = ()
    refresh_s: float | None = None

    def __post_init__(self) -> None:
        if self.refresh_s is not None and not self.refresh_s > 0:
            raise ConfigurationError(
                f"load a page again after {self.refresh_s} seconds",
                because="that is not above 0",
                do="pass a number of seconds, or None for a page that stays as it is",
            )

    def html(self) -> str:
        """The file's text."""
        scripts = [asset(name) for name in self.scripts]
        if any(isinstance(block, Chart) for block in self.blocks):
            scripts = [asset("lazy.js"), asset("numbers.js"), *scripts, asset("chart.js")]
        scripts.append(asset("keep.js"))
        return (
            templates()
            .get_template("page.html")
            .render(
                page=self,
                style=Markup(asset("page.css")),
                scripts=[Markup(script) for script in scripts],
            )
        )


def write_page(page: Page, path: Path) -> None:
    """Write `page` to `path`, whose folder is created if it is missing.

    A browser that loads it meanwhile finds the old page or the new one.

    Args:
        page: what to write.
        path: of the file; one that exists is replaced.

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
