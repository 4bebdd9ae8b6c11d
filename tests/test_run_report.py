import dataclasses
import json
import math
import random
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from run_folders import change, comparison, config_of, shape, write_run
from thinwire import presets, report
from thinwire.cli import main
from thinwire.cli.flags import RateFlags, RunFlags, apply_flags
from thinwire.errors import ConfigurationError
from thinwire.experiments.records import Finished
from thinwire.experiments.standing import judge
from thinwire.plan.compute import Compute
from thinwire.plan.link import Link
from thinwire.plan.scenario import Scenario
from thinwire.plan.traffic import traffic
from thinwire.report.agreement_charts import agreement_blocks, by_fragment
from thinwire.report.arms import arms_of, styles_of, without_doubles
from thinwire.report.blocks import Chart
from thinwire.report.folders import comparable, find_runs
from thinwire.report.front import front_of
from thinwire.report.parts import Details
from thinwire.report.reproduce import command_of, compare_command
from thinwire.report.results import results_table
from thinwire.report.run_charts import front_chart, loss_charts
from thinwire.report.scaling import families
from thinwire.report.seeds import estimate, mean_curve, pareto_front
from thinwire.report.voyage import TOPOLOGIES, Shapes, crossing_of, voyage_of
from thinwire.train.data import Data
from thinwire.train.models import Model


def run_of(folder: Path) -> Finished:
    found = judge(folder)
    assert isinstance(found, Finished), found
    return found


# -- folders ---------------------------------------------------------------------------------------


def test_runs_are_found_at_any_depth_once_each(tmp_path) -> None:
    for name in ("a", "deep/er/b"):
        write_run(tmp_path / name, config_of("diloco"))
    (tmp_path / "notes.txt").write_text("x")
    found = find_runs([tmp_path, tmp_path / "a", tmp_path / "missing", tmp_path / "notes.txt"])
    assert [run.folder.name for run in found.runs] == ["a", "b"]
    assert [(f.folder.name, f.reason) for f in found.left_out] == [
        ("missing", "not begun: there is no such folder"),
        ("notes.txt", "corrupt: it is a file, not the folder of a run"),
    ]
    (tmp_path / "empty").mkdir()
    (left,) = find_runs([tmp_path / "empty"]).left_out
    assert left.reason == "not begun: no run was begun in it"


def spoil_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"kind": "Tr')


def spoil_line(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 24, "lo')


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda f: (f / "summary.json").unlink(), "unfinished: it has no summary, 23 of 23 steps"),
        (lambda f: (f / "config.json").unlink(), "corrupt: config.json is missing"),
        (lambda f: (f / "metrics.jsonl").unlink(), "corrupt: metrics.jsonl cannot be read"),
        (lambda f: (f / "metrics.jsonl").write_text(""), "corrupt: metrics.jsonl is empty"),
        (lambda f: (f / "metrics.jsonl").write_bytes(b"\xff\xfe"), "metrics.jsonl cannot be read"),
        (spoil_config, "corrupt: config.json cannot be read"),
        (spoil_line, "corrupt: line 4 of metrics.jsonl cannot be read"),
        (lambda f: (f / "config.json").write_text('{"hidden_size": 64}'), "not that of a run"),
        (lambda f: (f / "summary.json").write_text("[]"), "summary.json holds no object"),
        (lambda f: change(f / "config.json", method=None), "config.json has method missing"),
        (lambda f: change(f / "config.json", method__name=3), "config.json has method.name 3"),
        (lambda f: change(f / "summary.json", val_loss=math.nan), "summary.json has val_loss nan"),
        (lambda f: change(f / "summary.json", steps=7), "steps 7, which config.json makes 23"),
        (lambda f: change(f / "summary.json", workers=2), "workers 2, which config.json makes 4"),
        (lambda f: change(f / "summary.json", tokens=9), "tokens 9, which config.json makes 2944"),
        (lambda f: change(f / "summary.json", method="ddp"), "which config.json makes diloco"),
        (lambda f: change(f / "summary.json", val_loss=1.0), "the last record has val_loss 2.0"),
        (lambda f: change(f / "summary.json", sent_bytes_per_worker=1), "has sent_bytes"),
        (lambda f: (f / "data.json").write_text("{}"), "data.json has fingerprint missing"),
    ],
)
def test_a_damaged_folder_says_what_is_wrong_with_it(tmp_path, spoil, reason: str) -> None:
    folder = write_run(tmp_path / "run", config_of("diloco"))
    run_of(folder)
    spoil(folder)
    (left,) = find_runs([tmp_path]).left_out
    assert reason in left.reason


def test_records_out_of_order_or_not_finite_are_corrupt(tmp_path) -> None:
    folder = write_run(tmp_path / "run", config_of("diloco"))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([lines[1], lines[0], lines[2]]))
    assert "step 7 after 20" in find_runs([folder]).left_out[0].reason
    bad = lines[0].replace('"val_loss": ', '"val_loss": NaN, "x": ')
    (folder / "metrics.jsonl").write_text("".join([bad, *lines[1:]]))
    assert "line 1 of metrics.jsonl has val_loss nan" in find_runs([folder]).left_out[0].reason


def test_why_a_run_failed_is_told(tmp_path) -> None:
    folder = write_run(tmp_path / "run", config_of("diloco"))
    (folder / "summary.json").unlink()
    (folder / "failed.json").write_text('{"kind": "NonFiniteError", "why": "the loss is nan"}')
    (left,) = find_runs([folder]).left_out
    assert left.reason == "diverged: the loss is nan (23 of 23 steps recorded)"


# -- what can be compared --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"steps": 40}, "tokens is 5120, not 2944"),
        ({"model": Model(size="1m")}, "model.size is 1m, not 250k"),
        ({"data": Data(sequence_length=8)}, "data.sequence_length is 8, not 16"),
    ],
)
def test_other_tokens_models_and_data_are_left_out(tmp_path, other, reason: str) -> None:
    if "model" in other:
        folder = write_run(tmp_path / "other", config_of("muloco"))
        change(folder / "config.json", model__size="1m")
    else:
        write_run(tmp_path / "other", config_of("muloco", **other))
    for seed in (0, 1):
        write_run(tmp_path / f"run{seed}", config_of("diloco", seed=seed))
    kept, (left,) = comparable(find_runs([tmp_path]).runs)
    assert [run.folder.name for run in kept] == ["run0", "run1"]
    assert left.folder.name == "other"
    assert reason in left.reason


def test_one_name_of_a_corpus_may_mean_other_tokens(tmp_path) -> None:
    a, b, c = (
        write_run(tmp_path / name, config_of("diloco", seed=seed))
        for seed, name in enumerate("abc")
    )
    change(c / "summary.json", versions__python="3.12.1")
    _, (left,) = comparable(find_runs([tmp_path]).runs)
    assert "corpus fingerprint is not recorded (Python 3.12.1)" in left.reason
    for folder in (a, c):
        (folder / "data.json").write_text('{"fingerprint": "abc"}')
    kept, (left,) = comparable(find_runs([tmp_path]).runs)
    assert [run.folder for run in kept] == [a, c]
    assert left.folder == b


def test_nothing_is_comparable_with_nothing() -> None:
    assert comparable([]) == ([], [])


def test_a_copy_of_a_run_is_no_second_seed(tmp_path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, config_of("diloco"))
    kept, (left,) = without_doubles(find_runs([tmp_path]).runs)
    assert [run.folder.name for run in kept] == ["a"]
    assert "the same configuration and seed" in left.reason


def test_methods_of_one_name_are_told_apart_by_what_differs(tmp_path) -> None:
    for name, config in {
        "a": config_of("diloco"),
        "b": config_of("diloco", workers=8),
        "c": config_of("diloco", workers=8, sync_every=5),
        "d": config_of("ddp"),
        "e": config_of("diloco", seed=1),
    }.items():
        write_run(tmp_path / name, config)
    arms = arms_of(find_runs([tmp_path]).runs)
    assert [arm.label for arm in arms] == [
        "diloco K=4 H=10",
        "diloco K=8 H=5",
        "diloco K=8 H=10",
        "ddp",
    ]
    assert arms[0].seeds == (0, 1)
    # A colour for a method, a dash for what it differs in.
    assert [(style["series"], style["variant"]) for style in styles_of(arms)] == [
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
    rows = results_table(arms_of(find_runs([tmp_path]).runs)).rows
    assert [(row[0][0], row[2][0]) for row in rows] == [
        ("muloco", "the best"),
        ("diloco", "+0.2500 ± 0.0000"),
        ("ddp", "no seed in common"),
    ]


def test_threads_and_periods_make_no_other_method(tmp_path) -> None:
    a = write_run(tmp_path / "a", config_of("diloco"))
    change(a / "config.json", machine__threads=7, periods__log_steps=1)
    write_run(tmp_path / "b", config_of("diloco", seed=1))
    (arm,) = arms_of(find_runs([tmp_path]).runs)
    assert arm.seeds == (0, 1)


def test_families_of_k_and_h(tmp_path) -> None:
    comparison(tmp_path)
    arms = arms_of(find_runs([tmp_path]).runs)
    (by_k,) = families(arms, "K")
    assert [arm.workers for arm in by_k.arms] == [2, 4, 8]
    (by_h,) = families(arms, "H")
    assert [arm.sync_every for arm in by_h.arms] == [5, 10]


def test_learning_rates_tuned_for_each_k_are_named(tmp_path) -> None:
    write_run(tmp_path / "a", config_of("diloco"))
    tuned = config_of("diloco", workers=8)
    outer = dataclasses.replace(tuned.method, outer=dataclasses.replace(tuned.method.outer, lr=0.5))
    write_run(tmp_path / "b", dataclasses.replace(tuned, method=outer))
    (family,) = families(arms_of(find_runs([tmp_path]).runs), "K")
    assert family.besides == ("method.outer.lr",)
    # Two at one K: now a line would have two values there.
    write_run(tmp_path / "c", config_of("diloco", workers=8))
    (family,) = families(arms_of(find_runs([tmp_path]).runs), "K")
    assert family.besides == ()
    assert [arm.first.folder.name for arm in family.arms] == ["a", "c"]


def named(name: str, **changes):
    config = config_of("diloco", **changes)
    return dataclasses.replace(config, method=dataclasses.replace(config.method, name=name))


def test_each_k_may_have_a_name_of_its_own(tmp_path) -> None:
    for name, workers in (("diloco", 4), ("diloco K=2", 2), ("diloco K=8", 8)):
        write_run(tmp_path / name, named(name, workers=workers))
    write_run(tmp_path / "other", config_of("muloco", workers=2))
    (family,) = families(arms_of(find_runs([tmp_path]).runs), "K")
    assert [arm.workers for arm in family.arms] == [2, 4, 8]
    assert (family.name, family.besides) == ("diloco", ())


def test_a_lone_worker_that_sends_nothing_is_not_on_the_front(tmp_path) -> None:
    write_run(tmp_path / "lone", config_of("diloco", workers=1), loss=1.0)
    write_run(tmp_path / "few", config_of("muloco:bits=2"), loss=1.6)
    write_run(tmp_path / "many", config_of("ddp"), loss=1.7)
    arms = arms_of(find_runs([tmp_path]).runs)
    assert [arm.label for arm in front_of(arms)] == ["muloco:bits=2"]
    # The figure has no place for nothing on an axis of powers.
    drawn = {trace["name"] for trace in front_chart(arms).traces}
    assert drawn == {"front", "ddp", "muloco:bits=2"}
    (lone,) = (arm for arm in arms if arm.workers == 1)
    assert front_of([lone]) == [lone]


def test_a_seed_without_statistics_hides_no_others(tmp_path) -> None:
    write_run(tmp_path / "a", config_of("diloco"))
    write_run(tmp_path / "b", config_of("diloco", seed=1), **{"cosine/0": 0.25})
    write_run(tmp_path / "c", config_of("diloco", seed=2), **{"cosine/0": 0.75})
    blocks = agreement_blocks(arms_of(find_runs([tmp_path]).runs))
    (chart,) = (block for block in blocks if isinstance(block, Chart))
    assert chart.traces[0]["y"] == [0.5, 0.5, 0.5]
    (table,) = (table for block in blocks if isinstance(block, Details) for table in block.blocks)
    assert [cell for cell, _ in table.rows[0]][:4] == ["diloco", "0", "2", "0.5 ± 0.25"]


@pytest.mark.parametrize(("seeds", "folded"), [(6, False), (7, True)])
def test_many_folders_of_own_recipes_are_folded_away(tmp_path, seeds: int, folded: bool) -> None:
    for seed in range(seeds):
        write_run(tmp_path / f"run{seed}", named("mine", seed=seed))
    page = report.run_page(report.gather_evidence([tmp_path]), [tmp_path], tmp_path / "out.html")
    html = page.html()
    assert f"No flags of thinwire train make {seeds} runs of these" in html
    assert ("<summary>Their folders</summary>" in html) is folded
    assert html.count("/run5") == 1


def test_numbers_in_charts_have_six_digits(tmp_path) -> None:
    write_run(tmp_path / "run", config_of("diloco"), loss=1.23456789123)
    html = "".join(chart.html() for chart in loss_charts(arms_of(find_runs([tmp_path]).runs)))
    assert "1.23457" in html
    assert "1.234567" not in html


# -- numbers ---------------------------------------------------------------------------------------


def test_the_standard_error_is_that_of_the_mean() -> None:
    assert estimate([5.0]).error is None
    assert estimate([1.0, 2.0, 6.0]).error == pytest.approx(math.sqrt(7 / 3))
    assert estimate([0.1] * 7).text(".1f") == "0.1 ± 0.0"


def test_a_mean_has_only_steps_that_all_runs_have() -> None:
    runs = [[{"step": s, "x": float(s)} for s in steps] for steps in ((1, 2, 3), (2, 3, 5))]
    assert mean_curve(runs, "x").steps == (2, 3)
    assert mean_curve(runs, "y").steps == ()
    assert mean_curve([], "x").steps == ()


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
def test_nobody_beats_the_front(points, front) -> None:
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
        freight=freight, compute=Compute(step_s=1), link=link, topology=TOPOLOGIES[topology]
    )
    for index in range(len(freight.messages)):
        moved, hops, last = crossing_of(freight, index, TOPOLOGIES[topology])
        crossing = scenario.crossing(index, share=1, workers=workers)
        assert 8 * moved / 3e6 == pytest.approx(crossing.transfer_s)
        assert hops * 0.07 == pytest.approx(crossing.latency_s)
        assert last * 0.07 == pytest.approx(crossing.lag_s)


def test_a_run_is_played_only_if_its_bytes_are_those_of_the_planner(tmp_path) -> None:
    folder = write_run(tmp_path / "run", config_of("muloco:bits=2"))
    assert voyage_of(run_of(folder), Shapes()).steps == 23
    for file, fields, because in (
        ("summary.json", {"received_bytes_per_worker": 3}, "the planner makes that"),
        ("config.json", {"machine__worker_size": 2}, "several ranks"),
        ("config.json", {"method__codec__kind": "Mystery"}, "Mystery is no part of this package"),
        ("summary.json", {"events": {}}, "came and went"),
    ):
        before = (folder / file).read_text()
        change(folder / file, **fields)
        with pytest.raises(ConfigurationError, match=because):
            voyage_of(run_of(folder), Shapes())
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


def _filled(kind: Any, texts: dict[str, str]) -> Any:
    """The flags of `kind` as `texts` give them."""
    cast = {"int | None": int, "float | None": float}
    types = {field.name: cast.get(str(field.type), str) for field in dataclasses.fields(kind)}
    return kind(**{name: types[name](text) for name, text in texts.items() if name in types})


def test_a_run_of_an_earlier_version_has_a_command(tmp_path) -> None:
    folder = write_run(tmp_path / "run", config_of("diloco"))
    now = command_of(run_of(folder), "x")
    config = json.loads((folder / "config.json").read_text())
    del config["machine"]["simulation"], config["periods"]["statistics_steps"]
    (folder / "config.json").write_text(json.dumps(config))
    assert now is not None
    assert command_of(run_of(folder), "x") == now
    config["method"]["codec"] = {"kind": "CastBF16"}
    (folder / "config.json").write_text(json.dumps(config))
    assert command_of(run_of(folder), "x") is None


def test_a_run_of_nobody_knows_what_recipe_has_no_command(tmp_path) -> None:
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
    runs = find_runs([tmp_path]).runs
    command = compare_command(runs)
    assert command is not None
    assert "thinwire compare --methods ddp,diloco --seeds 0,1" in command
    assert "--sync-every 7" in command
    assert compare_command(runs[1:]) is None  # a seed of one of them is missing
    write_run(tmp_path / "k8", config_of("diloco", sync_every=7, workers=8))
    assert compare_command(find_runs([tmp_path]).runs) is None


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


def test_the_page_holds_all_it_shows_and_plotly_takes_its_figures(tmp_path, capsys) -> None:
    import plotly.graph_objects as go

    comparison(tmp_path / "runs")
    out = tmp_path / "new" / "report.html"
    assert main(["report", str(tmp_path / "runs"), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "left out" in printed
    assert "unfinished: it has no summary" in printed
    assert "7 methods, 13 runs" in printed
    assert out.stat().st_size < 6_000_000
    html = out.read_text()
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert tags.asked == ["#left-out"]
    assert "1.6100 ± 0.0058" in html
    figures = re.findall(r'<script type="application/json">(.*?)</script>', html, re.S)
    assert len(figures) == 12
    for figure in figures:
        go.Figure(json.loads(figure))  # an unknown property raises
    left = html[html.index('id="left-out"') :]
    assert "unfinished: it has" in left[: left.index("</section>")]


def test_a_page_of_one_run_without_extras(tmp_path) -> None:
    write_run(tmp_path / "run", config_of("ddp", workers=1))
    evidence = report.gather_evidence([tmp_path])
    html = report.run_page(evidence, [tmp_path], tmp_path / "x.html").html()
    assert "none sent" in html
    assert "No run here noted it" in html
    assert 'id="left-out"' not in html


def test_names_of_others_do_no_harm(tmp_path) -> None:
    evil = "</script><script>alert(1)</script>"
    folder = write_run(tmp_path / "run", config_of("diloco"))
    change(folder / "config.json", method__name=evil)
    change(folder / "summary.json", method=evil, versions={"python": evil})
    html = report.run_page(report.gather_evidence([tmp_path]), [tmp_path], Path(evil)).html()
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


def test_fragments_are_read_from_the_names_of_statistics() -> None:
    record = {"cosine/0": 1.0, "cosine/12": 2.0, "cosine/x": 3.0, "cosine": 4.0}
    assert by_fragment(record, "cosine") == {0: 1.0, 12: 2.0}
