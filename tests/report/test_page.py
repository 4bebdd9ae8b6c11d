"""What every page has: colours that stand out, nothing that moves, and nothing that is fetched."""

import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from thinwire import report
from thinwire.errors import ConfigurationError

CSS = files("thinwire.report").joinpath("page.css").read_text()
SCRIPTS = [file for file in files("thinwire.report").iterdir() if file.name.endswith(".js")]
_PALETTE = re.compile(r"--([\w-]+): (#[0-9a-f]{6});")


def luminance(colour: str) -> float:
    """WCAG 2.2's relative luminance of #rrggbb."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_line_stands_out_from_what_is_behind_it(scheme: str) -> None:
    """WCAG 2.2, 1.4.11: at least 3 to 1; also in the controls, whose ground is that of stripes."""
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    light, dark = CSS.split("@media (prefers-color-scheme: dark)", 1)
    text = light if scheme == "light" else dark[: dark.index("* {")]
    colours = dict(_PALETTE.findall(text))
    lines = {name: value for name, value in colours.items() if name.startswith("series-")}
    assert len(lines) == len(set(lines.values())) == 8
    lines["muted"] = colours["muted"]  # lines of no method
    for ground in ("page", "stripe"):
        low = {name: contrast(value, colours[ground]) for name, value in lines.items()}
        assert {name: ratio for name, ratio in low.items() if ratio < 3} == {}


def test_nothing_moves_by_itself() -> None:
    """So a page honours prefers-reduced-motion without asking for it."""
    moving = re.compile(
        r"transition|animat(?!ionFrame)|@keyframes|smooth|setInterval|<marquee|requestVideoFrame"
    )
    texts = {"page.css": CSS} | {file.name: file.read_text() for file in SCRIPTS}
    assert {name: moving.findall(text) for name, text in texts.items() if moving.search(text)} == {}


def test_a_table_shows_its_main_columns_and_rows_first() -> None:
    table = report.TextTable(
        title="t",
        name="t",
        head=("method", "loss", "bytes"),
        rows=(("a", ("1.5", 1.5), "2"), ("b", "3", "4")),
        main=("bytes",),
        rest=(1,),
    )
    html = table.html()
    assert re.findall(r'<t[hd][^>]* class="extra"[^>]*>([^<]*)<', html) == ["", "1.5", "3"]
    assert html.count('<tr class="extra">') == 1
    assert 'data-value="1.5"' in html
    assert "extra" not in report.TextTable(title="t", head=("a",), rows=(("1",),)).html()


def test_text_is_escaped() -> None:
    evil = "</script><script>alert(1)</script>&"
    table = report.TextTable(title=evil, head=(evil, evil), rows=((evil,), (evil, (evil, evil))))
    chart = report.Chart(title=evil, traces=[{"name": evil}], layout={}, alt=f'"{evil}')
    html = "".join(block.html() for block in (report.Paragraph(text=evil), table, chart))
    assert "<script>" not in html
    assert html.count("</script>") == 1
    data = json.loads(html[html.index('{"data"') : html.index("</script>")])["data"]
    assert data == [{"name": evil}]


def test_a_page_without_charts_is_small() -> None:
    assert len(report.Page(title="T", lead="l", blocks=[]).html()) < 20_000


def test_all_that_a_page_is_made_of_is_packaged_with_the_licence_of_uplot() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    globs = project["tool"]["setuptools"]["package-data"]["thinwire"]
    package = root / "src" / "thinwire"
    packaged = {file for glob in globs for file in package.glob(glob)}
    used = {
        file
        for file in (package / "report").rglob("*.*")
        if file.suffix in {".css", ".html", ".js"}
    }
    assert len(used) == 9
    assert used | {package / "report/vendor/LICENSE"} <= packaged


def test_a_page_that_cannot_be_written_is_an_error(tmp_path) -> None:
    simple = report.Page(title="T", lead="", blocks=[])
    report.write_page(simple, tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(ConfigurationError, match="cannot write"):
        report.write_page(simple, tmp_path / "new")
