"""`thinwire report --watch`, beside a comparison that runs."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from run_folders import config_of, write_run
from thinwire.cli import main
from thinwire.cli import report as command
from thinwire.experiments import Experiment, compare
from thinwire.runs.find import find_planned_runs, is_over, note_planned_runs
from thinwire.runs.status import RunState

LIVE = 'id="live"'


def at_each_wait(work: Callable[[], None], monkeypatch) -> None:
    """Where the command would sleep."""
    clock = SimpleNamespace(sleep=lambda _: work(), monotonic=time.monotonic)
    monkeypatch.setattr(command, "time", clock)


def unfinished(folder: Path, method: str) -> Path:
    """A run that goes on; its summary is kept beside it."""
    (write_run(folder, config_of(method)) / "summary.json").rename(folder.parent / "kept")
    return folder


def test_the_page_follows_a_comparison_to_its_end(tmp_path, monkeypatch, capsys) -> None:
    runs, page = tmp_path / "runs", tmp_path / "page.html"
    planned, diloco = ["diloco-seed0", "ddp-seed0"], runs / "diloco-seed0"
    note_planned_runs(runs, planned, is_over=False)
    unfinished(diloco, "diloco")

    def first() -> None:
        for shown in (LIVE, "No run is finished yet", "it has no summary", "its turn has not come"):
            assert shown in page.read_text()
        (runs / "kept").rename(diloco / "summary.json")

    def second() -> None:
        # The run that is to come keeps it going, though all that there are have ended.
        for shown in (LIVE, "Lowest loss: diloco"):
            assert shown in page.read_text()
        write_run(runs / "ddp-seed0", config_of("ddp"), loss=1.5)
        note_planned_runs(runs, planned, is_over=True)

    meanwhile = iter((first, second))
    at_each_wait(lambda: next(meanwhile)(), monkeypatch)
    assert main(["report", str(runs), "--out", str(page), "--watch"]) == 0
    assert LIVE not in page.read_text()
    assert "Lowest loss: ddp" in page.read_text()
    printed = capsys.readouterr().out
    assert f"open {page.as_uri()} in a browser" in printed
    assert printed.endswith(f"wrote {page}: 2 methods, 2 runs\n")


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": 3, "is_over": "yes"}'])
def test_runs_of_no_comparison_are_followed_until_all_have_ended(tmp_path, text: str) -> None:
    assert not is_over([tmp_path / "missing"])
    run = unfinished(tmp_path / "run", "diloco")
    write_run(tmp_path / "other", config_of("ddp"))
    assert not is_over([tmp_path])
    (tmp_path / "kept").rename(run / "summary.json")
    assert is_over([tmp_path])
    (tmp_path / "planned.json").write_text(text)  # a damaged one is passed over
    assert is_over([tmp_path])
    assert sorted(find_planned_runs([tmp_path])) == [tmp_path / "other", run]


def test_a_comparison_notes_its_runs_before_they_begin(tmp_path, monkeypatch) -> None:
    states: list[RunState] = []

    def look(run) -> None:
        assert not is_over([tmp_path])
        states.extend(status.state for status in find_planned_runs([tmp_path]).values())
        raise RuntimeError("seen enough")

    monkeypatch.setattr("thinwire.experiments.runners.forget_failure", look)
    compare(Experiment(methods=("ddp", "diloco")), tmp_path)
    assert states[-2:] == [RunState.ABSENT, RunState.ABSENT]
    assert is_over([tmp_path])


def test_ctrl_c_leaves_a_page_that_loads_nothing_again(tmp_path, monkeypatch, capsys) -> None:
    page, more = tmp_path / "page.html", str(tmp_path / "more")
    unfinished(tmp_path / "runs" / "diloco", "diloco")

    def interrupt() -> None:
        assert 'data-every="3.0"' in page.read_text()
        raise KeyboardInterrupt

    at_each_wait(interrupt, monkeypatch)
    watch = ["report", str(tmp_path / "runs"), more, "--watch", "--out", str(page)]
    assert main(watch) == 0
    printed, error = capsys.readouterr()
    assert error == ""
    assert "more does not exist yet: waiting for it" in printed
    assert LIVE not in page.read_text()
