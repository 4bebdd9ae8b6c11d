"""The page of a report of runs: what it shows, and that it says the same as the runs."""

import dataclasses
import json
import random
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from run_folders import change, comparison, config_of, runs_in, shape, write_run
from thinwire import presets, report
from thinwire.cli import main
from thinwire.cli.flags import RateFlags, RunFlags, apply_flags
from thinwire.errors import ConfigurationError
from thinwire.plan.compute import Compute
from thinwire.plan.link import TOPOLOGIES, Link
from thinwire.plan.simulate import Scenario
from thinwire.plan.traffic import traffic
from thinwire.report.link_replay import ShapeCache, crossing_of, replay_data
from thinwire.report.pareto import first_shown, front_of, pareto_front
from thinwire.report.reproduce import _FLAGS, command_of, compare_command
from thinwire.report.results import results_table
from thinwire.report.run_charts import front_chart
from thinwire.report.scaling import families
from thinwire.report.traces import styles_of
from thinwire.runs.schema import FinishedRun
from thinwire.runs.status import read_run
from thinwire.runs.variants import Variant, variants_of
from thinwire.train.models import Model


def run_of(folder: Path) -> FinishedRun:
    status = read_run(folder)
    assert status.run is not None, status
    return status.run


def variants_in(folder: Path) -> list[Variant]:
    return variants_of(runs_in(folder))


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
    assert [(row[0][0], row[2][0]) for row in rows] == [
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


def named(name: str, **changes):
    config = config_of("diloco", **changes)
    return dataclasses.replace(config, method=dataclasses.replace(config.method, name=name))


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


@pytest.mark.parametrize(("seeds", "folded"), [(6, False), (7, True)])
def test_many_folders_of_own_recipes_are_folded_away(tmp_path, seeds: int, folded: bool) -> None:
    for seed in range(seeds):
        write_run(tmp_path / f"run{seed}", named("mine", seed=seed))
    page = report.run_page(report.read_report_data([tmp_path]), [tmp_path], tmp_path / "out.html")
    html = page.html()
    assert f"No flags of thinwire train make {seeds} runs of these" in html
    assert ("<summary>Their folders</summary>" in html) is folded
    assert html.count("/run5") == 1


def test_numbers_in_charts_have_six_digits(tmp_path) -> None:
    write_run(tmp_path / "run", config_of("diloco"), loss=1.23456789123)
    data = report.read_report_data([tmp_path])
    html = report.run_page(data, [tmp_path], tmp_path / "x.html").html()
    (found,) = re.findall(r'id="report-data">(.*?)</script>', html)
    assert "1.23457" in found
    assert "1.234567" not in found


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


# -- commands --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ddp", "muloco:bits=2", "streaming_diloco:tau=2"])
def test_a_command_makes_the_configuration_that_a_run_had(tmp_path, method: str) -> None:
    config = config_of(method, workers=2, seed=3, clip_norm=0.0)
    if method != "ddp":
        outer = dataclasses.replace(config.method.outer, momentum=0.0, nesterov=False)
        slots = dataclasses.replace(config.method, outer=outer, sync_every=7)
        config = dataclasses.replace(config, method=slots)
    command = command_of(run_of(write_run(tmp_path / "run", config)), "runs/x")
    assert command is not None
    thinwire, train, *arguments = shlex.split(command)
    assert (thinwire, train) == ("thinwire", "train")
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert flags.pop("--out") == "runs/x"
    assert flags.pop("--method") == method
    assert flags.pop("--seed") == "3"
    names = {flag.removeprefix("--").replace("-", "_"): text for flag, text in flags.items()}
    given = [_filled(kind, names) for kind in (RunFlags, RateFlags)]
    assert names.keys() <= {field.name for flags in given for field in dataclasses.fields(flags)}
    run, rates = given
    assert apply_flags(run, method, 3, rates) == config


def test_every_field_that_a_command_can_set_has_a_flag() -> None:
    flags = {f.name for kind in (RunFlags, RateFlags) for f in dataclasses.fields(kind)} | {"seed"}
    parts = {"method", "model", "data", "schedule", "periods", "machine"}
    names = {flag.replace("-", "_") for flag in _FLAGS.values()}
    assert names - parts == flags - {"recipe", "model"}
    assert _FLAGS["model.size"] == "model"


def _filled(kind: Any, texts: dict[str, str]) -> Any:
    """The flags of `kind` as `texts` give them."""
    cast = {"int | None": int, "float | None": float}
    types = {field.name: cast.get(str(field.type), str) for field in dataclasses.fields(kind)}
    return kind(**{name: types[name](text) for name, text in texts.items() if name in types})


def test_a_run_of_an_earlier_version_has_a_command(tmp_path) -> None:
    folder = write_run(tmp_path / "run", config_of("diloco"))
    now = command_of(run_of(folder), "x")
    config = json.loads((folder / "config.json").read_text())
    assert now is not None
    config["method"]["codec"] = {"kind": "CastBF16"}
    (folder / "config.json").write_text(json.dumps(config))
    assert command_of(run_of(folder), "x") is None


def test_a_model_of_ones_own_is_named_by_its_file(tmp_path) -> None:
    file = tmp_path / "model.json"
    file.write_text('{"model_type": "llama", "hidden_size": 64}')
    config = config_of("diloco", model=Model(size=str(file)))
    command = command_of(run_of(write_run(tmp_path / "run", config)), "x")
    assert command is not None
    assert f"--model {file}" in command


def test_a_run_of_an_unknown_recipe_has_no_command(tmp_path) -> None:
    folder = write_run(tmp_path / "run", config_of("diloco"))
    change(folder / "config.json", method__inner__betas=[0.8, 0.9])
    assert command_of(run_of(folder), "x") is None
    change(folder / "config.json", method__name="mine")
    change(folder / "summary.json", method="mine")
    assert command_of(run_of(folder), "x") is None


def test_a_comparison_is_one_command(tmp_path) -> None:
    for method in ("ddp", "diloco"):
        for seed in (0, 1):
            config = config_of(method, sync_every=None if method == "ddp" else 7, seed=seed)
            write_run(tmp_path / f"{method}{seed}", config)
    runs = runs_in(tmp_path)
    command = compare_command(runs)
    assert command is not None
    assert "thinwire compare --methods ddp,diloco --seeds 0,1" in command
    assert "--sync-every 7" in command
    assert compare_command(runs[1:]) is None  # a seed of one of them is missing
    write_run(tmp_path / "k8", config_of("diloco", sync_every=7, workers=8))
    assert compare_command(runs_in(tmp_path)) is None


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
    assert "1.6100 ± 0.0058" in html
    figures = re.findall(r'<script type="application/json">(.*?)</script>', html, re.S)
    assert len(figures) == 9
    left = html[html.index('id="left-out"') :]
    assert "unfinished: it has" in left[: left.index("</section>")]


def test_a_page_of_one_run_without_extras(tmp_path) -> None:
    write_run(tmp_path / "run", config_of("ddp", workers=1))
    data = report.read_report_data([tmp_path])
    html = report.run_page(data, [tmp_path], tmp_path / "x.html").html()
    assert "none sent" in html
    assert "There is one method, so nothing differed." in html
    assert 'id="differences"' not in html
    assert 'id="left-out"' not in html


def test_a_table_names_members_that_were_rejected_or_clipped_if_any_were(tmp_path) -> None:
    folder = write_run(tmp_path / "run", config_of("diloco"))
    write_run(tmp_path / "other", config_of("muloco"))

    def page() -> str:
        data = report.read_report_data([tmp_path])
        return report.run_page(data, [tmp_path], tmp_path / "x.html").html()

    assert 'id="contributions"' not in page()
    told = {"lyon<b>": {"not finite": 1, "outlier": 12, "clipped": 3}, "oslo": {"clipped": 4}}
    change(folder / "summary.json", contributions=told)
    html = page()
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
    html = report.run_page(report.read_report_data([tmp_path]), [tmp_path], Path(evil)).html()
    assert "<script>alert" not in html


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


@pytest.mark.slow
def test_a_page_whose_runs_go_on_loads_itself_again(tmp_path) -> None:
    (write_run(tmp_path / "run", config_of("diloco")) / "summary.json").rename(tmp_path / "kept")
    empty = report.read_report_data([tmp_path], may_be_empty=True)
    html = report.run_page(empty, [tmp_path], tmp_path / "x.html", refresh_s=2.5).html()
    assert "No run is finished yet" in html
    assert 'data-every="2.5"' in html
    assert "unfinished: it has no summary" in html
    (tmp_path / "kept").rename(tmp_path / "run" / "summary.json")
    data = report.read_report_data([tmp_path])
    assert 'id="live"' not in report.run_page(data, [tmp_path], tmp_path / "x.html").html()
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ConfigurationError, match="not above 0"):
            report.run_page(data, [tmp_path], tmp_path / "x.html", refresh_s=wrong)


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
    data = report.read_report_data([tmp_path])
    html = report.run_page(data, [tmp_path], tmp_path / "x.html").html()
    assert html.count('class="family"') == 1
    # Also in the tables that have a row for each.
    assert html.count('data-rest="9"') == 3
    assert html.count('<tr class="rest">') == 3 * (len(variants) - len(shown))
    # They have the first colours, of which the page has eight.
    styles = styles_of(variants)
    assert {styles[index]["series"] for index in first_shown(variants)} == set(range(len(shown)))
    boxes = re.findall(r'<input type="checkbox"[^>]*>', html)
    assert sum(" checked" in box for box in boxes) == len(shown)
    assert len(boxes) == 13
