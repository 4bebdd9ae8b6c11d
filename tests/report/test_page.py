"""What every page has: colours that stand out from what is behind them, and nothing that moves."""

import re
from importlib.resources import files

import pytest

from thinwire import report
from thinwire.errors import ConfigurationError
from thinwire.report.blocks import MethodControls, SortableTable

CSS = files("thinwire.report").joinpath("page.css").read_text()
SCRIPTS = [file for file in files("thinwire.report").iterdir() if file.name.endswith(".js")]
_PALETTE = re.compile(r"--([\w-]+): (#[0-9a-f]{6});")


def palettes() -> dict[str, dict[str, str]]:
    light, dark = CSS.split("@media (prefers-color-scheme: dark)", 1)
    return {
        "light": dict(_PALETTE.findall(light)),
        "dark": dict(_PALETTE.findall(dark[: dark.index("* {")])),
    }


def luminance(colour: str) -> float:
    """WCAG 2.2's relative luminance of #rrggbb."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_ratio_is_that_of_the_guidelines() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_line_stands_out_from_what_is_behind_it(scheme: str) -> None:
    """WCAG 2.2, 1.4.11: at least 3 to 1; also in the controls, whose ground is that of stripes."""
    colours = palettes()[scheme]
    lines = {name: value for name, value in colours.items() if name.startswith("series-")}
    assert len(lines) == MethodControls.colours == len(set(lines.values()))
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


def test_a_narrow_window_shows_columns_that_there_are() -> None:
    head = ("method", "loss", "bytes", *"cdefghi")
    table = report.TextTable(title="t", head=head, rows=(), main=("bytes", "f"))
    assert 'data-main="1 3 7"' in table.html()
    assert "data-main" not in report.TextTable(title="t", head=head, rows=()).html()
    for name in ("method", "x", "h", "i"):  # page.css tells eight columns apart
        with pytest.raises(ConfigurationError, match=f"cannot show the column {name} first"):
            report.TextTable(title="t", head=head, rows=(), main=(name,))
        with pytest.raises(ConfigurationError, match="move it forward"):
            SortableTable(title="t", name="t", head=head, rows=(), main=(name,))
    told = re.findall(r'data-main~="(\d)"\]\) tr > :nth-child\((\d)\)', CSS)
    assert told == [(str(n), str(n)) for n in range(2, 9)]


def test_families_of_one_are_together() -> None:
    controls = MethodControls(
        labels=list("abcdefg"),
        styles=[{"series": 0, "dash": 0}] * 7,
        front=[0],
        families=["x", "y", "x", "x", "z", "y", "w"],
        shown=[0, 5],
    )
    assert controls.groups == {"": [0, 5], "x": [2, 3], "others": [1, 4, 6]}
