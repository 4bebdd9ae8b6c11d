"""A page: one HTML file with everything in it, that opens without a network."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import final

from thinwire.errors import ConfigurationError
from thinwire.report.blocks import Block, Chart

__all__ = ["Page", "plotly_source", "write_page"]

# What is not in the file is not there: a browser that is asked to fetch anything refuses.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What a page shows.

    Args:
        title: what it is about, also in the window's.
        lead: a line below the title.
        blocks: from top to bottom.
        scripts: files of this package that make the page answer its reader.
    """

    title: str
    lead: str
    blocks: Sequence[Block]
    scripts: Sequence[str] = ()

    def html(self) -> str:
        """The file's text.

        Raises:
            ConfigurationError: it has charts, and plotly is not installed.
        """
        body = "\n".join(block.html() for block in self.blocks)
        scripts = [_asset(name) for name in self.scripts]
        if self._has_charts:
            scripts = [plotly_source(), *scripts, _asset("chart.js")]
        return "\n".join(
            (
                '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
                f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                '<meta name="color-scheme" content="light dark">',
                f"<title>{escape(self.title)}</title>",
                f"<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n<main>",
                f'<h1>{escape(self.title)}</h1>\n<p class="lead">{escape(self.lead)}</p>',
                body,
                "</main>",
                *(f"<script>{script}</script>" for script in scripts),
                "</body>\n</html>\n",
            )
        )

    @property
    def _has_charts(self) -> bool:
        return any(isinstance(block, Chart) for block in self.blocks)


def plotly_source() -> str:
    """plotly.js, as the installed plotly brings it.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        offline = importlib.import_module("plotly.offline")
    except ImportError as error:
        raise ConfigurationError(
            "write a page with charts",
            because=str(error),
            do="pip install 'thinwire[report]'",
        ) from error
    return offline.get_plotlyjs().replace("</script", "<\\/script")


def write_page(page: Page, path: Path) -> None:
    """Write `page` to `path`, whose folder is made if there is none.

    Args:
        page: what to write.
        path: of the file; one that exists is replaced.

    Raises:
        ConfigurationError: it cannot be written, or plotly is needed and not installed.
    """
    html = page.html()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"write {path}", because=str(error), do="pass a file that can be written"
        ) from error


def _asset(name: str) -> str:
    return files("thinwire.report").joinpath(name).read_text(encoding="utf-8")
