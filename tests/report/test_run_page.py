"""The page of a report of runs: what it shows, and that it says the same as the runs."""

import dataclasses
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from run_folders import change, comparison, config_of, runs_in, shape, write_run
from thinwire import presets, report
from thinwire.cli import main
from thinwire.errors import ConfigurationError
from thinwire.plan.compute import Compute
from thinwire.plan.link import TOPOLOGIES, Link
from thinwire.plan.simulate import Scenario
from thinwire.plan.traffic import traffic
from thinwire.report.charts import curves_of, front_chart, styles_of
from thinwire.report.link_replay import ShapeCache, crossing_of, replay_data
from thinwire.report.pareto import first_shown, front_of, pareto_front
from thinwire.report.results import curves_table, results_table
from thinwire.report.scaling import families, scaling_charts
from thinwire.report.settings import differences_table, shared_table
from thinwire.runs.schema import FinishedRun
from thinwire.runs.status import read_run
from thinwire.runs.variants import Variant, variants_of


def run_of(folder: Path) -> FinishedRun:
    status = read_run(folder)
    assert status.run is not None, status
    return status.run


def variants_in(folder: Path) -> list[Variant]:
    return variants_of(runs_in(folder))


def html_of(folder: Path) -> str:
    return report.run_page(report.read_report_data([folder])).html()


def named(name: str, **changes):
    config = config_of("diloco", **changes)
    return dataclasses.replace(config, method=dataclasses.replace(config.method, name=name))


def test_methods_of_one_name_are_told_apart_by_what_differs(tmp_path) -> None:
    for name, config in {
        "a": config_of("diloco"),
        "b": config_of("diloco", workers=8),
        "c": config_of("diloco", workers=8, sync_every=5),
        "d": config_of("ddp"),
        "e": config_of("diloco", seed=1),
    }.items():
        write_run(tmp_path / name, config)
    variants = variants_in(tmp_path)
    assert [variant.label for variant in variants] == [
        "diloco K=4 H=10",
        "diloco K=8 H=5",
        "diloco K=8 H=10",
        "ddp",
    ]
    assert variants[0].seeds == (0, 1)
    # A colour for a method, a dash for what it differs in.
    assert [(style["series"], style["dash"]) for style in styles_of(variants)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
    ]


def test_differences_are_paired_by_seed(tmp_path) -> None:
    for seed, noise in enumerate((0.0, 0.5, -0.3)):
        write_run(tmp_path / f"a{seed}", config_of("diloco", seed=seed), loss=2 + noise)
        write_run(tmp_path / f"b{seed}", config_of("muloco", seed=seed), loss=1.75 + noise)
    write_run(tmp_path / "c", config_of("ddp", seed=9), loss=3)
    rows = results_table(variants_in(tmp_path)).rows
    assert [(row[0], row[2][0]) for row in rows] == [
        ("muloco", "the best"),
        ("diloco", "+0.2500 ± 0.0000"),
        ("ddp", "no seed in common"),
    ]


def test_families_of_k_and_h(tmp_path) -> None:
    comparison(tmp_path)
    variants = variants_in(tmp_path)
    (by_k,) = families(variants, "K")
    assert [variant.config.workers for variant in by_k.variants] == [2, 4, 8]
    (by_h,) = families(variants, "H")
    assert [variant.config.sync_every for variant in by_h.variants] == [5, 10]
    (k_line,), (h_line,) = (chart.traces for chart in scaling_charts(variants))
    assert (k_line["name"], k_line["x"], k_line["y"]) == (
        "diloco H=10",
        [2, 4, 8],
        pytest.approx([1.95, 1.91, 1.95]),
    )
    assert (h_line["name"], h_line["x"]) == ("diloco K=4", [5, 10])


def test_learning_rates_tuned_for_each_k_are_named(tmp_path) -> None:
    write_run(tmp_path / "a", config_of("diloco"))
    tuned = config_of("diloco", workers=8)
    outer = dataclasses.replace(tuned.method, outer=dataclasses.replace(tuned.method.outer, lr=0.5))
    write_run(tmp_path / "b", dataclasses.replace(tuned, method=outer))
    (family,) = families(variants_in(tmp_path), "K")
    assert family.besides == ("method.outer.lr",)
    # Two at one K: now a line would have two values there.
    write_run(tmp_path / "c", config_of("diloco", workers=8))
    (family,) = families(variants_in(tmp_path), "K")
    assert family.besides == ()
    assert [variant.runs[0].folder.name for variant in family.variants] == ["a", "c"]


def test_each_k_may_have_a_name_of_its_own(tmp_path) -> None:
    for name, workers in (("diloco", 4), ("diloco K=2", 2), ("diloco K=8", 8)):
        write_run(tmp_path / name, named(name, workers=workers))
    write_run(tmp_path / "other", config_of("muloco", workers=2))
    (family,) = families(variants_in(tmp_path), "K")
    assert [variant.config.workers for variant in family.variants] == [2, 4, 8]
    assert (family.name, family.besides) == ("diloco", ())


def test_a_lone_worker_that_sends_nothing_is_not_on_the_front(tmp_path) -> None:
    write_run(tmp_path / "lone", config_of("diloco", workers=1), loss=1.0)
    write_run(tmp_path / "few", config_of("muloco:bits=2"), loss=1.6)
    write_run(tmp_path / "many", config_of("ddp"), loss=1.7)
    variants = variants_in(tmp_path)
    assert [variant.label for variant in front_of(variants)] == ["muloco:bits=2"]
    # The figure has no place for nothing on an axis of powers.
    drawn = {trace["name"] for trace in front_chart(variants).traces}
    assert drawn == {"front", "ddp", "muloco:bits=2"}
    (lone,) = (variant for variant in variants if variant.config.workers == 1)
    assert front_of([lone]) == [lone]


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


def test_numbers_in_charts_have_six_digits(tmp_path) -> None:
    write_run(tmp_path / "run", config_of("diloco"), loss=1.23456789123)
    (found,) = re.findall(r'id="report-data">(.*?)</script>', html_of(tmp_path))
    assert "1.23457" in found
    assert "1.234567" not in found


def test_methods_have_rows_and_parts_have_columns(tmp_path) -> None:
    tuned = config_of("diloco", workers=8)
    inner = dataclasses.replace(tuned.method.inner, lr=0.125)
    tuned = dataclasses.replace(tuned, method=dataclasses.replace(tuned.method, inner=inner))
    for name, config in {
        "a": config_of("ddp"),
        "b": tuned,
        "c": config_of("muloco:bits=2"),
        "d": config_of("sparseloco:density=1/64"),
    }.items():
        write_run(tmp_path / name, config)
    variants = variants_in(tmp_path)
    table = differences_table(variants)
    assert table.head[0] == "method"
    assert {"inner", "codec", "K", "H"} <= set(table.head)
    # What differs most comes first, and is what a narrow window shows.
    kinds = [len({row[n] for row in table.rows}) for n in range(1, len(table.head))]
    assert kinds == sorted(kinds, reverse=True)
    assert table.main == table.head[1:3]
    cells = {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}
    ddp, diloco, muloco, sparseloco = cells.values()
    assert ddp["codec"] == diloco["codec"] == "Identity"
    assert muloco["codec"].startswith("Quantise")
    assert sparseloco["codec"].startswith("TopK")
    assert (ddp["K"], diloco["K"]) == ("4", "8")
    assert diloco["inner"] == "AdamW, lr 0.125"
    # What all Muon have is no difference, though AdamW lacks it; nothing is lost.
    assert not any("scale" in text for its in cells.values() for text in its.values())
    shared = dict(shared_table(variants).rows)
    assert shared["method.inner.scale"] == "rms of Muon"
    assert shared["steps"] == "23"
    told = set(shared)
    differ = {name for variant in variants for name in variant.settings} - told
    assert {"method.inner.lr", "method.codec.kind", "workers"} <= differ


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([], []),
        ([(1, 1)], [0]),
        ([(1, 1), (1, 1)], [0, 1]),
        ([(1, 2), (1, 1)], [1]),
        ([(3, 1), (1, 3), (2, 2), (2, 3), (4, 1)], [1, 2, 0]),
    ],
)
def test_no_point_beats_those_of_the_front(points, front) -> None:
    assert pareto_front(points) == front


def test_the_front_against_its_definition() -> None:
    draw = random.Random(7)
    for _ in range(50):
        points = [(draw.randrange(6), draw.randrange(6)) for _ in range(draw.randrange(12))]

        def beaten(p, points=points):
            return any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)

        expected = {i for i, p in enumerate(points) if not beaten(p)}
        assert set(pareto_front(points)) == expected


# -- over a link -----------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("method", ["ddp", "sparseloco", "streaming_muloco"])
def test_what_an_exchange_takes_is_linear_in_the_link(topology, workers: int, method: str) -> None:
    freight = traffic(presets.from_text(method), shape(), workers=workers)
    link = Link.of(3e6, latency_s=0.07)
    scenario = Scenario(
        traffic=freight, compute=Compute(step_s=1), link=link, topology=TOPOLOGIES[topology]
    )
    for index in range(len(freight.messages)):
        moved, hops, last = crossing_of(freight, index, TOPOLOGIES[topology])
        taken = scenario.transfer_time(index)
        assert 8 * moved / 3e6 == pytest.approx(taken.transfer_s)
        assert hops * 0.07 == pytest.approx(taken.latency_s)
        assert last * 0.07 == pytest.approx(taken.lag_s)


def test_a_run_is_played_only_if_its_bytes_are_those_of_the_planner(tmp_path) -> None:
    folder = write_run(tmp_path / "run", config_of("muloco:bits=2"))
    assert replay_data(run_of(folder), ShapeCache()).steps == 23
    for file, fields, because in (
        ("summary.json", {"received_bytes_per_worker": 3}, "the planner makes that"),
        ("config.json", {"machine__worker_size": 2}, "2 ranks each"),
        ("config.json", {"method__codec__kind": "Mystery"}, "Mystery is no part of this package"),
        ("summary.json", {"events": {}}, "came and went"),
    ):
        before = (folder / file).read_text()
        change(folder / file, **fields)
        with pytest.raises(ConfigurationError, match=because):
            replay_data(run_of(folder), ShapeCache())
        (folder / file).write_text(before)


# -- the page --------------------------------------------------------------------------------------


class Tags(HTMLParser):
    VOID = ("meta", "input", "line", "path", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asked: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.asked += [value for key, value in attrs if key in {"src", "href", "action"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        pass

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


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
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert tags.asked == ["#main", "#left-out"]
    assert "default-src 'none'" in html
    assert "1.6100 ± 0.0058" in html
    assert "Permission is hereby granted" in html  # a copy of uPlot carries its licence
    figures = re.findall(r'<script type="application/json">(.*?)</script>', html, re.S)
    assert len(figures) == 3
    assert html.count('<section class="chart curves"') == 4
    left = html[html.index('id="left-out"') :]
    assert "unfinished: it has" in left[: left.index("</section>")]


def test_a_page_of_one_run_without_extras(tmp_path) -> None:
    write_run(tmp_path / "run", config_of("ddp", workers=1))
    html = html_of(tmp_path)
    assert "none sent" in html
    assert "There is one method, so nothing differed." in html
    for name in ("differences", "left-out", "contributions"):
        assert f'id="{name}"' not in html


def test_statistics_of_earlier_versions_are_passed_over(tmp_path) -> None:
    noted = {"cosine/0": 0.5, "feedback_norm/3": 0.1, "spread/0": 0.02}
    write_run(tmp_path / "run", config_of("noloco"), **noted)
    assert "cosine" not in html_of(tmp_path)


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


def test_names_of_others_do_no_harm(tmp_path) -> None:
    evil = "</script><script>alert(1)</script>"
    folder = write_run(tmp_path / "run", config_of("diloco"))
    change(folder / "config.json", method__name=evil)
    change(folder / "summary.json", method=evil, versions={"python": evil})
    assert "<script>alert" not in html_of(tmp_path)


@pytest.mark.parametrize("arguments", [["missing"], ["."], ["unfinished", "missing"]])
def test_nothing_to_show_is_one_clear_line(tmp_path, monkeypatch, capsys, arguments) -> None:
    monkeypatch.chdir(tmp_path)
    if "unfinished" in arguments:
        (write_run(tmp_path / "unfinished", config_of("diloco")) / "summary.json").unlink()
    assert main(["report", *arguments, "--out", "report.html"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: cannot write a report; because there is no finished run")
    assert error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_a_page_whose_runs_go_on_loads_itself_again(tmp_path) -> None:
    (write_run(tmp_path / "run", config_of("diloco")) / "summary.json").rename(tmp_path / "kept")
    empty = report.read_report_data([tmp_path], may_be_empty=True)
    html = report.run_page(empty, refresh_s=2.5).html()
    assert "No run is finished yet" in html
    assert 'data-every="2.5"' in html
    assert "unfinished: it has no summary" in html
    (tmp_path / "kept").rename(tmp_path / "run" / "summary.json")
    assert 'id="live"' not in html_of(tmp_path)
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ConfigurationError, match="not above 0"):
            report.run_page(report.read_report_data([tmp_path]), refresh_s=wrong)


def test_of_many_methods_the_front_and_the_baselines_are_shown_first(tmp_path) -> None:
    losses = {"ddp": 1.9, "diloco": 1.95, "muloco:bits=2": 1.6}
    for name, loss in losses.items():
        write_run(tmp_path / name, config_of(name), loss=loss)
    assert first_shown(variants_in(tmp_path)) == [0, 1, 2]
    for density in range(3, 13):
        name = f"sparseloco:density=1/{2**density}"
        write_run(tmp_path / f"s{density}", config_of(name), loss=2.5)
    variants = variants_in(tmp_path)
    shown = {variants[index].label for index in first_shown(variants)}
    assert shown >= {"ddp", "diloco"}
    assert shown == {"ddp", "diloco", *(its.label for its in front_of(variants))}
    assert len(shown) < len(variants) == 13
    html = html_of(tmp_path)
    assert f"{len(variants) - len(shown)} more methods" in html
    # Also in the tables that have a row for each.
    assert html.count('<tr class="extra">') == 3 * (len(variants) - len(shown))
    # They have the first colours, of which the page has eight.
    styles = styles_of(variants)
    assert {styles[index]["series"] for index in first_shown(variants)} == set(range(len(shown)))
    boxes = re.findall(r'<input type="checkbox" data-variant[^>]*>', html)
    assert sum(" checked" in box for box in boxes) == len(shown)
    assert len(boxes) == 13
