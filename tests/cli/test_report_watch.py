"""`thinwire report --watch`, beside a comparison that runs."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from processes import until
from run_folders import config_of, write_run
from thinwire.cli import main
from thinwire.cli import report as command
from thinwire.experiments import Experiment, compare
from thinwire.runs.find import find_planned_runs, is_over, note_planned_runs
from thinwire.runs.status import RunState

LIVE = 'id="live"'


def text_of(page: Path) -> str:
    return page.read_text() if page.exists() else ""


def unfinished(folder: Path, method: str) -> Path:
    """A run that goes on; its summary is kept beside it."""
    (write_run(folder, config_of(method)) / "summary.json").rename(folder.parent / "kept")
    return folder


@pytest.mark.slow
def test_the_page_follows_a_comparison_to_its_end(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "_PERIOD_S", 0.01)
    runs, page = tmp_path / "runs", tmp_path / "page.html"
    planned, diloco = ["diloco-seed0", "ddp-seed0"], runs / "diloco-seed0"
    note_planned_runs(runs, planned, is_over=False)
    unfinished(diloco, "diloco")
    ended: list[int] = []
    watch = ["report", str(runs), "--out", str(page), "--watch"]
    thread = threading.Thread(target=lambda: ended.append(main(watch)))
    thread.start()
    until(lambda: "No run is finished yet" in text_of(page))
    for shown in (LIVE, "unfinished: it has no summary", "not begun: its turn has not come"):
        assert shown in text_of(page)
    (runs / "kept").rename(diloco / "summary.json")
    until(lambda: "Lowest loss: diloco" in text_of(page))
    # The run that is to come keeps it going, though all that there are have ended.
    assert LIVE in text_of(page)
    assert thread.is_alive()
    write_run(runs / "ddp-seed0", config_of("ddp"), loss=1.5)
    note_planned_runs(runs, planned, is_over=True)
    thread.join(20)
    assert ended == [0]
    assert LIVE not in text_of(page)
    assert "Lowest loss: ddp" in text_of(page)
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

    def interrupt(_) -> None:
        for shown in (LIVE, 'data-every="3.0"', "No run is finished yet", "it has no summary"):
            assert shown in text_of(page)
        raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=interrupt, monotonic=time.monotonic)
    monkeypatch.setattr(command, "time", clock)
    watch = ["report", str(tmp_path / "runs"), more, "--watch", "--out", str(page)]
    assert main(watch) == 0
    printed, error = capsys.readouterr()
    assert error == ""
    assert "more does not exist yet: waiting for it" in printed
    assert LIVE not in text_of(page)
