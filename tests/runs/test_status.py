"""`thinwire compare` and `thinwire report` say the same of the same folder."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from run_folders import change, retell, runs_in, write_run
from thinwire.cli import main
from thinwire.experiments import Experiment, compare
from thinwire.experiments.grid import configure, specs_of
from thinwire.experiments.runners import no_observer
from thinwire.runs.comparable import common_ground, most_common, not_comparable
from thinwire.runs.find import find_runs
from thinwire.runs.status import RunState, note_failure, read_run, status_of
from thinwire.train.config import TrainConfig

METHODS = ("ddp", "diloco", "muloco")


def configs() -> dict[str, TrainConfig]:
    experiment = Experiment(methods=METHODS)
    return {spec.folder(0): configure(experiment, spec, 0) for spec in specs_of(experiment)}


def end(folder: Path, kind: str) -> None:
    (folder / "summary.json").unlink()
    note_failure(folder, kind, "it broke")


def replace_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("x")


OTHER = "not of this comparison: "
NO_DATA = OTHER + "corpus fingerprint is not recorded (Python 3.11.7), not abc"


# What both once judged apart, and what both must see; test_schema.py has more damage.
@pytest.mark.parametrize(
    ("spoil", "verdict"),
    [
        (
            lambda f: change(f / "summary.json", val_loss=-1.0),
            "corrupt: summary.json cannot be used: Expected `float` >= 0.0 - at `$.val_loss`",
        ),
        (replace_by_a_file, "corrupt: it is a file, not the folder of a run"),
        (lambda f: end(f, "NonFiniteError"), "diverged: it broke (400 of 400 steps recorded)"),
        (
            lambda f: (f / "data.json").write_text(json.dumps({"fingerprint": "f" * 64})),
            OTHER + "corpus fingerprint is ffffffffffff, not abc",
        ),
        (lambda f: (f / "data.json").unlink(), NO_DATA),
        (lambda f: change(f / "summary.json", parameters=7), OTHER + "parameters is 7, not "),
    ],
    ids=["loss below zero", "a file", "diverged", "other corpus", "other Python", "other size"],
)
def test_compare_and_report_say_the_same(tmp_path, capsys, spoil, verdict: str) -> None:
    for name, config in configs().items():
        write_run(tmp_path / "runs" / name, config)
        (tmp_path / "runs" / name / "data.json").write_text('{"fingerprint": "abc"}')
    comparing = ["compare", "--methods", ",".join(METHODS), "--out", str(tmp_path / "runs")]
    # Given one by one, for what is no folder is no run among others.
    folders = [str(tmp_path / "runs" / name) for name in configs()]
    reporting = ["report", *folders, "--out", str(tmp_path / "report.html")]
    assert (main(comparing), main(reporting)) == (0, 0)
    assert "left out" not in capsys.readouterr().out
    spoil(tmp_path / "runs" / "diloco-seed0")
    assert main(comparing) == 1
    printed, error = capsys.readouterr()
    assert "left out diloco-seed0: " in printed
    assert f"diloco-seed0 has no result ({verdict}" in error
    assert error.count("\n") == 1
    assert main(reporting) == 0
    assert f"diloco-seed0: {verdict}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "state", "why"),
    [
        (lambda f: (f / "summary.json").unlink(), RunState.UNFINISHED, "it has no summary, 400 of"),
        (lambda f: end(f, "OSError"), RunState.FAILED, "OSError: it broke (400 of 400 steps"),
        (lambda f: [p.unlink() for p in f.iterdir()], RunState.ABSENT, "no run was begun in it"),
    ],
)
def test_what_compare_would_go_on_with_is_what_report_leaves_out(
    tmp_path, spoil, state: RunState, why: str
) -> None:
    config = configs()["diloco-seed0"]
    folder = write_run(tmp_path / "run", config)
    spoil(folder)
    (left,) = find_runs([folder]).values()
    assert status_of(folder, config.describe()) == read_run(folder) == left
    assert left.state is state
    assert why in left.why


def test_a_run_that_failed_is_tried_again(tmp_path) -> None:
    place, config = tmp_path / "diloco-seed0", configs()["diloco-seed0"]
    end(write_run(place, config), "OSError")

    def finish(runs, make_observer) -> list[None]:
        (run,) = runs
        shutil.rmtree(run.folder)
        write_run(run.folder, run.config)
        return [None]

    again = compare(Experiment(methods=("diloco",)), tmp_path, no_observer, finish)
    assert again.problems() == {}


def test_a_sound_run_from_before_memory_was_noted_is_shown(tmp_path, capsys) -> None:
    for name, config in configs().items():
        retell(write_run(tmp_path / "runs" / name, config), "_bytes", "")
        for way in ("sent", "received"):
            retell(tmp_path / "runs" / name, f'"{way}"', f'"{way}_bytes"')
    comparing = ["compare", "--methods", ",".join(METHODS), "--out", str(tmp_path / "runs")]
    assert main(comparing) == 0
    assert capsys.readouterr().out.count("not recorded") == 3
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "runs"), "--out", str(page)]) == 0
    assert "left out" not in capsys.readouterr().out
    assert page.read_text().count(">not recorded<") == 3


def test_as_many_tokens_in_other_batches_and_workers_that_leave_are_no_fair_comparison(
    tmp_path,
) -> None:
    config = configs()["ddp-seed0"]
    other = dataclasses.replace(config, steps=200, global_batch=32)
    for name, its in {"a": config, "b": dataclasses.replace(config, seed=1), "c": other}.items():
        write_run(tmp_path / name, its)
    runs = runs_in(tmp_path)
    why = "global_batch is 32, not 16; steps is 200, not 400"
    assert not_comparable(runs) == {tmp_path / "c": why}
    # A worker that may leave is never one of a fixed team.
    change(tmp_path / "a" / "summary.json", events={})
    assert common_ground(runs[0]) != common_ground(read_run(tmp_path / "a").run)
    a, b = {"x": "1"}, {"x": "2"}
    assert [most_common(grounds) for grounds in ([], [a, b], [a, b, b])] == [None, a, b]
