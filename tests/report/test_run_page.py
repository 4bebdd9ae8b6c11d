"""Pages of reports: that they say the same as the runs, and what every page has."""

import dataclasses
import json
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from run_folders import change, comparison, config_of, runs_in, shape, write_run
from thinwire import presets, report
from thinwire.cli import main
from thinwire.errors import ConfigurationError
from thinwire.plan.compute import Compute
from thinwire.plan.link import TOPOLOGIES, Link
from thinwire.plan.simulate import Scenario
from thinwire.plan.traffic import traffic
from thinwire.report.charts import (
    curves_of,
    first_shown,
    front_chart,
    front_of,
    scaling_charts,
    styles_of,
)
from thinwire.report.link_replay import crossing_of, replay_data
from thinwire.report.results import curves_table, differences_table, results_table, shared_table
from thinwire.runs.status import read_run
from thinwire.runs.variants import Variant, variants_of
from thinwire.train.config import TrainConfig


def variants_in(folder: Path) -> list[Variant]:
    return variants_of(runs_in(folder))


def html_of(folder: Path) -> str:
    return report.run_page(report.read_report_data([folder])).html()


def named(config: TrainConfig, **slots: Any) -> TrainConfig:
    return dataclasses.replace(config, method=dataclasses.replace(config.method, **slots))


def write(folder: Path, *runs: tuple[TrainConfig, float]) -> list[Variant]:
    """Runs with these final losses."""
    for number, (config, loss) in enumerate(runs):
        write_run(folder / f"run{number:02}", config, loss=loss)
    return variants_in(folder)


def test_methods_of_one_name_are_told_apart_by_what_differs(tmp_path) -> None:
    many = {"workers": 8}
    configs = [config_of("diloco", seed=seed) for seed in (0, 1)]
    configs += [config_of("diloco", **many), config_of("diloco", sync_every=5, **many)]
    variants = write(tmp_path, *((config, 2.0) for config in (*configs, config_of("ddp"))))
    labels = ["diloco K=4 H=10", "diloco K=8 H=5", "diloco K=8 H=10", "ddp"]
    assert [variant.label for variant in variants] == labels
    assert variants[0].loss.seeds == (0, 1)
    # A colour for a method, a dash for what it differs in.
    styles = [(style["series"], style["dash"]) for style in styles_of(variants)]
    assert styles == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_differences_are_paired_by_seed(tmp_path) -> None:
    runs = [(config_of("ddp", seed=9), 3.0)]
    for seed, noise in enumerate((0.0, 0.5, -0.3)):
        runs += [(config_of("diloco", seed=seed), 2 + noise)]
        runs += [(config_of("muloco", seed=seed), 1.75 + noise)]
    rows = results_table(write(tmp_path, *runs)).rows
    assert [(row[0], row[2][0]) for row in rows] == [
        ("muloco", "the best"),
        ("diloco", "+0.2500 ± 0.0000"),
        ("ddp", "no seed in common"),
    ]


def lines_in(folder: Path) -> list[list[dict[str, Any]]]:
    """The lines of the charts against K and H."""
    return [list(chart.traces) for chart in scaling_charts(variants_in(folder))]


def test_lines_are_against_k_and_h_and_have_the_best_run_at_each(tmp_path) -> None:
    (k_line,), (h_line,) = lines_in(comparison(tmp_path / "all"))
    assert (k_line["name"], k_line["x"]) == ("diloco H=10", [2, 4, 8])
    assert k_line["y"] == pytest.approx([1.95, 1.91, 1.95])
    assert (h_line["name"], h_line["x"]) == ("diloco K=4", [5, 10])
    tuned = config_of("diloco", workers=8)
    tuned = named(tuned, outer=dataclasses.replace(tuned.method.outer, lr=0.5))
    both = (config_of("diloco"), 2.0), (tuned, 2.0)
    write(tmp_path / "lr", *both)
    ((line,),) = lines_in(tmp_path / "lr")
    assert line["name"] == "diloco H=10 (lr differ as well)"
    # Of two at one K the better one.
    write(tmp_path / "lr", *both, (config_of("diloco", workers=8), 1.5))
    ((line,),) = lines_in(tmp_path / "lr")
    assert (line["name"], line["x"], line["y"]) == ("diloco H=10", [4, 8], [2.0, 1.5])


def test_a_lone_worker_that_sends_nothing_is_not_on_the_front(tmp_path) -> None:
    lone = config_of("diloco", workers=1)
    few, many = config_of("muloco:bits=2"), config_of("ddp")
    variants = write(tmp_path, (lone, 1.0), (few, 1.6), (many, 1.7))
    assert [variant.label for variant in front_of(variants)] == ["muloco:bits=2"]
    # The figure has no place for nothing on an axis of powers.
    drawn = {trace["name"] for trace in front_chart(variants).traces}
    assert drawn == {"front", "ddp", "muloco:bits=2"}
    (lone,) = (variant for variant in variants if variant.config.workers == 1)
    assert front_of([lone]) == [lone]
    assert lone.times_fewer == (None, None)


def test_bytes_are_up_and_down_beside_a_16_bit_all_reduce(tmp_path) -> None:
    folder = write_run(tmp_path / "run", config_of("muloco:bits=2"))
    (variant,) = variants_in(tmp_path)
    # 23 steps, K = 4: 2 x 3/4 of the vector in 16 bits, as much up as down.
    up, down = variant.up_and_down(relayed=True)
    all_reduce = 23 * 2 * 3 / 4 * 2 * shape().parameters
    assert (down, variant.moved_bytes) == (3 * up, 4 * up)
    assert variant.up_and_down(relayed=False) == (3 * up, 3 * up)
    assert variant.times_fewer == pytest.approx((2 * all_reduce / (4 * up), all_reduce / down))
    cells = dict(zip(results_table([variant]).head, results_table([variant]).rows[0], strict=True))
    assert (cells["up, store"][1], cells["down"][1]) == (up, down)
    assert (cells["times fewer, store"][0], cells["point to point"][0]) == ("46", "30")
    # A worker of an asynchronous run sends to the server alone.
    change(folder / "summary.json", asynchronous={})
    (variant,) = variants_in(tmp_path)
    assert variant.up_and_down(relayed=False) == (up, down)


def test_curves_are_means_over_seeds_with_their_errors(tmp_path) -> None:
    for seed in (0, 1, 2):
        folder = write_run(tmp_path / f"run{seed}", config_of("diloco", seed=seed), loss=1 + seed)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    middle = json.loads(lines[1])
    del middle["val_loss"]  # evaluated less often than it was noted
    lines[1] = json.dumps(middle)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (variant,) = variants_in(tmp_path)
    curves = curves_of(variant)
    assert curves["steps"] == [7, 20, 23]
    assert curves["seconds"] == [3.5, 10, 11.5]
    assert curves["validation"] == [pytest.approx(2 + 3 / 7 - 3 / 23), None, pytest.approx(2)]
    assert curves["validation error"] == [pytest.approx(3**-0.5), None, pytest.approx(3**-0.5)]
    assert curves["training"] == pytest.approx([2 + 1 / 7, 2 + 1 / 20, 2 + 1 / 23])
    first, last = curves_table([variant]).rows
    assert (first[1][0], last[1][0], last[2][0]) == ("7", "23", "2.0000 ± 0.5774")
    assert {name for name in curves if name.endswith("error")} == {
        f"{name} error" for name in ("validation", "training", "waited", "hidden")
    }


def test_methods_have_rows_and_parts_have_columns(tmp_path) -> None:
    tuned = config_of("diloco", workers=8)
    tuned = named(tuned, inner=dataclasses.replace(tuned.method.inner, lr=0.125))
    configs = [config_of("ddp"), tuned, config_of("muloco:bits=2")]
    configs += [config_of("sparseloco:density=1/64")]
    variants = write(tmp_path, *((config, 2.0) for config in configs))
    table = differences_table(variants)
    assert table.head[0] == "method"
    assert {"inner", "codec", "K", "H"} <= set(table.head)
    # What differs most comes first, and is what a narrow window shows.
    kinds = [len({row[n] for row in table.rows}) for n in range(1, len(table.head))]
    assert kinds == sorted(kinds, reverse=True)
    assert table.main == table.head[1:3]
    cells = [dict(zip(table.head, row, strict=True)) for row in table.rows]
    ddp, diloco, muloco, sparseloco = cells
    kinds = [its["codec"].partition(",")[0] for its in (ddp, diloco, muloco, sparseloco)]
    assert kinds == ["Identity", "Identity", "Quantise", "TopK"]
    assert (ddp["K"], diloco["K"]) == ("4", "8")
    assert diloco["inner"] == "AdamW, lr 0.125"
    # What all Muon have is no difference, though AdamW lacks it; nothing is lost.
    assert not any("scale" in text for its in cells for text in its.values())
    shared = dict(shared_table(variants).rows)
    assert (shared["method.inner.scale"], shared["steps"]) == ("rms", "23")
    differ = {name for variant in variants for name in variant.settings} - set(shared)
    assert {"method.inner.lr", "method.codec.kind", "workers"} <= differ


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    given = [SimpleNamespace(moved_bytes=x, loss=SimpleNamespace(mean=y)) for x, y in points]
    return [(its.moved_bytes, its.loss.mean) for its in front_of(given)]


def test_no_point_beats_those_of_the_front() -> None:
    assert front([(3, 1), (1, 3), (2, 2), (2, 3), (4, 1)]) == [(1, 3), (2, 2), (3, 1)]
    for points in ([], [(1, 1)], [(1, 1), (1, 1)]):
        assert front(points) == points
    assert front([(1, 2), (1, 1)]) == [(1, 1)]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("method", ["ddp", "sparseloco", "streaming_muloco"])
def test_what_an_exchange_takes_is_linear_in_the_link(topology, workers: int, method: str) -> None:
    freight = traffic(presets.from_text(method), shape(), workers=workers)
    given = {"link": Link.of(3e6, latency_s=0.07), "topology": TOPOLOGIES[topology]}
    scenario = Scenario(traffic=freight, compute=Compute(step_s=1), **given)
    for index in range(len(freight.messages)):
        moved, hops, last = crossing_of(freight, index, TOPOLOGIES[topology])
        taken = scenario.transfer_time(index)
        assert 8 * moved / 3e6 == pytest.approx(taken.transfer_s)
        assert hops * 0.07 == pytest.approx(taken.latency_s)
        assert last * 0.07 == pytest.approx(taken.lag_s)


def test_a_run_is_played_only_if_its_bytes_are_those_of_the_planner(tmp_path) -> None:
    folder = write_run(tmp_path / "run", config_of("muloco:bits=2"))
    assert replay_data(read_run(folder).run)["steps"] == 23
    for file, fields, because in (
        ("summary.json", {"received_bytes_per_worker": 3}, "the planner makes that"),
        ("config.json", {"machine__worker_size": 2}, "2 ranks each"),
        ("config.json", {"method__codec__kind": "Mystery"}, "Mystery is no part of this package"),
        ("summary.json", {"events": {}}, "came and went"),
    ):
        before = (folder / file).read_text()
        change(folder / file, **fields)
        with pytest.raises(ConfigurationError, match=because):
            replay_data(read_run(folder).run)
        (folder / file).write_text(before)


def unbalanced(html: str) -> Counter[str]:
    """Tags that are opened and not closed, or the reverse."""
    marks = re.sub(r"(?s)(<script[^>]*>).*?(?=</script>)", r"\1", html)
    tags = Counter(re.findall(r"<([a-z]\w*)[^>]*(?<!/)>", marks))
    tags.subtract(re.findall(r"</(\w+)>", marks))
    return Counter({tag: n for tag, n in tags.items() if n and tag not in ("meta", "input", "br")})


def test_the_page_holds_all_it_shows_and_is_small(tmp_path, capsys) -> None:
    comparison(tmp_path / "runs")
    out = tmp_path / "new" / "report.html"
    assert main(["report", str(tmp_path / "runs"), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "left out" in printed
    assert "unfinished: it has no summary" in printed
    assert "7 methods, 13 runs" in printed
    assert out.stat().st_size < 200_000
    html = out.read_text()
    assert unbalanced(html) == Counter()
    assert re.findall(r'\b(?:src|href|action)="?([^"> ]*)', html) == ["#main", "#left-out"]
    assert "default-src 'none'" in html
    assert "1.6100 ± 0.0058" in html
    assert "Permission is hereby granted" in html  # a copy of uPlot carries its licence
    figures = re.findall(r'<script type="application/json">(.*?)</script>', html, re.S)
    assert len(figures) == 3
    assert html.count('<section class="chart curves"') == 4
    left = html[html.index('id="left-out"') :]
    assert "unfinished: it has" in left[: left.index("</section>")]


def test_a_page_of_one_run_without_extras(tmp_path) -> None:
    # Statistics of earlier versions are passed over.
    noted = {"cosine/0": 0.5, "feedback_norm/3": 0.1, "spread/0": 0.02}
    write_run(tmp_path / "run", config_of("ddp", workers=1), loss=1.23456789123, **noted)
    html = html_of(tmp_path)
    assert "There is one method, so nothing differed." in html
    for name in ("differences", "left-out", "contributions"):
        assert f'id="{name}"' not in html
    assert "cosine" not in html
    # Numbers in charts have six digits.
    (found,) = re.findall(r'id="report-data">(.*?)</script>', html)
    assert "1.23457" in found
    assert "1.234567" not in found


def test_a_table_names_members_that_were_rejected_or_clipped_if_any_were(tmp_path) -> None:
    folder = write_run(tmp_path / "run", config_of("diloco"))
    write_run(tmp_path / "other", config_of("muloco"))
    told = {"lyon<b>": {"not finite": 1, "outlier": 12, "clipped": 3}, "oslo": {"clipped": 4}}
    change(folder / "summary.json", contributions=told)
    html = html_of(tmp_path)
    table = html[html.index('id="contributions"') :]
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", table[: table.index("</table>")])
    assert cells == [
        *("diloco", "0", "lyon&lt;b&gt;", "13", "not finite 1, outlier 12", "3"),
        *("diloco", "0", "oslo", "0", "", "4"),
    ]
    # Names of others do no harm.
    evil = "</script><script>alert(1)</script>"
    change(folder / "config.json", method__name=evil)
    change(folder / "summary.json", method=evil, versions={"python": evil})
    assert "<script>alert" not in html_of(tmp_path)


def test_of_many_methods_the_front_and_the_baselines_are_shown_first(tmp_path) -> None:
    for name, loss in {"ddp": 1.9, "diloco": 1.95, "muloco:bits=2": 1.6}.items():
        write_run(tmp_path / name, config_of(name), loss=loss)
    assert first_shown(variants_in(tmp_path)) == [0, 1, 2]
    for density in range(3, 13):
        name = f"sparseloco:density=1/{2**density}"
        write_run(tmp_path / f"s{density}", config_of(name), loss=2.5)
    variants = variants_in(tmp_path)
    first = first_shown(variants)
    shown = {variants[index].label for index in first}
    assert shown == {"ddp", "diloco", *(its.label for its in front_of(variants))}
    assert len(shown) < len(variants) == 13
    html = html_of(tmp_path)
    assert f"{len(variants) - len(shown)} more methods" in html
    # Also in the tables that have a row for each.
    assert html.count('<tr class="extra">') == 3 * (len(variants) - len(shown))
    # They have the first colours, of which the page has eight.
    assert {styles_of(variants)[index]["series"] for index in first} == set(range(len(shown)))
    boxes = re.findall(r'<input type="checkbox" data-variant[^>]*>', html)
    assert (len(boxes), sum(" checked" in box for box in boxes)) == (13, len(shown))


# What every page has: colours that stand out, nothing that moves, and nothing that is fetched.
CSS = files("thinwire.report").joinpath("page.css").read_text()
SCRIPTS = [file for file in files("thinwire.report").iterdir() if file.name.endswith(".js")]


def contrast(*colours: str) -> float:
    """Of two of #rrggbb, by WCAG 2.2's relative luminance."""
    found = []
    for colour in colours:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        found.append(0.2126 * r + 0.7152 * g + 0.0722 * b)
    low, high = sorted(found)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_line_stands_out_from_what_is_behind_it(scheme: str) -> None:
    """WCAG 2.2, 1.4.11: at least 3 to 1; also in the controls, whose ground is that of stripes."""
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    light, dark = CSS.split("@media (prefers-color-scheme: dark)", 1)
    text = light if scheme == "light" else dark[: dark.index("* {")]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", text))
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


def test_a_table_shows_its_main_columns_and_rows_first_and_is_as_wide_as_its_head() -> None:
    rows = (("a", ("1.5", 1.5), "2"), ("b", "3", "4"))
    first = {"head": ("method", "loss", "bytes"), "main": ("bytes",), "rest": (1,)}
    html = report.TextTable(title="t", name="t", rows=rows, **first).html()
    assert re.findall(r'<t[hd][^>]* class="extra"[^>]*>([^<]*)<', html) == ["", "1.5", "3"]
    assert html.count('<tr class="extra">') == 1
    assert 'data-value="1.5"' in html
    assert "extra" not in report.TextTable(title="t", head=("a",), rows=(("1",),)).html()


def test_text_is_escaped() -> None:
    evil = "</script><script>alert(1)</script>&"
    table = report.TextTable(title=evil, head=(evil, evil), rows=((evil,), (evil, (evil, evil))))
    chart = report.Chart(title=evil, traces=[{"name": evil}], layout={}, alt=f'"{evil}')
    html = "".join(block.html() for block in (report.Macro("Paragraph", text=evil), table, chart))
    assert "<script>" not in html
    assert html.count("</script>") == 1
    data = json.loads(html[html.index('{"data"') : html.index("</script>")])["data"]
    assert data == [{"name": evil}]


def test_a_page_without_charts_is_small_and_is_written_or_an_error(tmp_path) -> None:
    page = report.Page(title="T", lead="l", blocks=[])
    report.write_page(page, tmp_path / "new" / "page.html")
    html = (tmp_path / "new" / "page.html").read_text()
    assert len(html) < 20_000
    assert html.startswith("<!DOCTYPE html>")
    assert '<meta name="viewport"' in html
    with pytest.raises(ConfigurationError, match="cannot write"):
        report.write_page(page, tmp_path / "new")
