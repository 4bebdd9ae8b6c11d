"""The page of a sweep of the planner, and the blocks that pages are made of."""

import dataclasses
import json
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from thinwire import presets, report
from thinwire.errors import ConfigurationError
from thinwire.plan.compute import Compute
from thinwire.plan.forecast import forecasts
from thinwire.plan.job import Job
from thinwire.plan.link import Link
from thinwire.plan.shape import Shape
from thinwire.plan.sweep import QUANTITIES, sweep

ASSETS = {".css", ".html", ".js"}
METHODS = [presets.from_text(name) for name in ("ddp", "diloco", "muloco", "streaming_diloco")]
JOB = Job(
    shape=Shape.of_size(10_007, 5),
    workers=2,
    compute=Compute(step_s=0.1),
    link=Link.of(1e6, latency_s=0.01),
    sync_every=7,
)


def page(name: str, job: Job = JOB) -> report.Page:
    rows = forecasts(METHODS, job)
    return report.plan_page(job, rows, sweep(name, METHODS, job, rows), target=0.9)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asked: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.asked += [value for key, value in attrs if key in {"src", "href", "action"}]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", QUANTITIES)
def test_a_page_asks_nobody_for_anything(name: str) -> None:
    html = page(name).html()
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert tags.asked == ["#main"]
    assert "default-src 'none'" in html
    assert '<meta name="viewport"' in html
    figures = re.findall(r'<script type="application/json">(.*?)</script>', html, re.S)
    (figure,) = (json.loads(text) for text in figures)
    assert [trace["name"] for trace in figure["data"]] == [
        "ddp",
        "diloco, muloco",
        "streaming_diloco",
    ]
    assert figure["layout"]["xaxis"]["type"] == "log"
    assert [mark["text"] for mark in figure["layout"]["marks"]] == ["target 90 %", "this job"]


def test_a_method_that_does_not_fit_has_a_row_that_says_why() -> None:
    html = page("latency", dataclasses.replace(JOB, sync_every=1)).html()
    row = html[html.index('<th scope="row">streaming_diloco') :]
    assert row.index("cannot ") < row.index("</tr>")


def test_a_link_without_latency_has_no_place_on_a_logarithmic_axis() -> None:
    near = dataclasses.replace(JOB, link=Link(up_bits_per_s=1e6, down_bits_per_s=2e6))
    for name in ("latency", "bandwidth"):
        assert "this job" not in page(name, near).html()


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


def test_pages_are_small() -> None:
    assert len(report.Page(title="T", lead="l", blocks=[]).html()) < 20_000
    assert len(page("latency").html()) < 100_000


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
