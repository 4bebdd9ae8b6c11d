"""The blocks that pages are made of."""

import json
import tomllib
from pathlib import Path

import pytest

from thinwire import report
from thinwire.errors import ConfigurationError

ASSETS = {".css", ".html", ".js"}


def test_text_is_escaped() -> None:
    evil = "</script><script>alert(1)</script>&"
    table = report.TextTable(title=evil, head=(evil, evil), rows=((evil,), (evil, evil)))
    chart = report.Chart(title=evil, traces=[{"name": evil}], layout={}, alt=f'"{evil}')
    html = "".join(block.html() for block in (report.Paragraph(text=evil), table, chart))
    assert "<script>" not in html
    assert html.count("</script>") == 1
    assert json.loads(html[html.index('{"data"') : html.index("</script>")])["data"] == [
        {"name": evil}
    ]


def test_a_page_without_blocks_is_small_and_asks_nobody() -> None:
    html = report.Page(title="T", lead="l", blocks=[]).html()
    assert len(html) < 20_000
    assert "default-src 'none'" in html
    assert '<meta name="viewport"' in html


def test_a_table_is_as_wide_as_its_head() -> None:
    with pytest.raises(ConfigurationError, match="2 columns"):
        report.TextTable(title="t", head=("a", "b"), rows=(("1", "2", "3"),))


def test_all_that_a_page_is_made_of_is_packaged() -> None:
    root = Path(__file__).parents[2]
    declared = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = root / "src" / "thinwire"
    packaged = {
        file for glob in declared["package-data"]["thinwire"] for file in package.glob(glob)
    }
    used = {file for file in (package / "report").rglob("*.*") if file.suffix in ASSETS}
    assert used <= packaged
    assert {file.suffix for file in used} == ASSETS


def test_a_page_that_cannot_be_written_is_an_error(tmp_path) -> None:
    simple = report.Page(title="T", lead="", blocks=[])
    report.write_page(simple, tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(ConfigurationError, match="cannot write"):
        report.write_page(simple, tmp_path / "new")
