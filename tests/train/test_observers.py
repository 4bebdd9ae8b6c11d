import io
import re
import sys
from unittest import mock

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

import thinwire as tw
from thinwire.elastic.events import EventLog
from thinwire.runs.folder import RunFolder
from thinwire.train.observers import (
    FolderWriter,
    Observer,
    Terminal,
    forward_events,
    tensorboard,
    tracker,
)

RECORD = {
    "step": 5,
    "loss": 2.5,
    "tokens_per_s": 1234.5,
    "rounds": 2,
    "sent_bytes": 1_500_000,
    "received_bytes": 4_500_000,
    "wait_s": 0.25,
}


@pytest.mark.parametrize("terminal", [True, False])
def test_the_display_shows_a_record_and_a_title_that_looks_like_markup(terminal: bool) -> None:
    out, log = io.StringIO(), EventLog()
    console = Console(file=out, force_terminal=terminal, width=80)
    display = Terminal(console, title="mine[/red][bold]", steps=10)
    forward_events(log, [display])
    display.record(RECORD)
    # Without a terminal only evaluations are printed.
    assert terminal or "loss" not in out.getvalue()
    for kind in ("left", "committed"):  # rounds are counted, and not told
        log.note(kind, round=2, who=("bob",), why="it did not come", lost_s=5.2)
    display.record(RECORD | {"val_loss": 2.25})
    display.close()
    for shown in ("5/10", "2.5000", "2.2500", "1,234", "2 rounds", "1.5 MB", "4.5 MB", "0.2 s"):
        assert shown in out.getvalue()
    assert "mine[/red][bold]" in out.getvalue()
    assert out.getvalue().count("round 2: left bob it did not come (5.2 s lost)") == 1
    assert "committed" not in out.getvalue()


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("width", [50, 60, 70, 80])
def test_the_bar_fits_a_terminal_and_shows_all_of_it(width: int, colour: bool, monkeypatch) -> None:
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system="truecolor")
    display = Terminal(console, title="streaming_muloco elastic", steps=100_000)
    for step in (99_990, 99_999):
        display.record(RECORD | {"step": step, "val_loss": 2.25, "workers": 3})
    display.close()
    drawn = out.getvalue().rpartition("\x1b[2K")[2]
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn).strip("\r\n").split("\n")
    assert max(len(line.rstrip()) for line in lines) <= width
    for shown in ("99999/100000", "loss 2.5000 val 2.2500", "1,234 tokens/s", "2 rounds"):
        assert any(shown in line for line in lines), lines  # also: not in two parts
    for shown in ("sent 1.5 MB", "received 4.5 MB", "waited 0.2 s", "3 workers"):
        assert any(shown in line for line in lines), lines
    assert bool(re.search(r"\x1b\[[0-9;]*m", drawn)) == colour


def test_the_time_left_is_told_of_records_that_are_minutes_apart() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    display = Terminal(console, title="diloco K=4", steps=10)
    seconds = [0.0]
    display._progress.get_time = lambda: seconds[0]
    display._progress.reset(display._task, start=True)
    for step in (1, 2, 3):
        seconds[0] = 120.0 * step
        display.record(RECORD | {"step": step})
    (task,) = display._progress.tasks
    display.close()
    assert task.time_remaining == 7 * 120


WRITTEN = {key: value for key, value in RECORD.items() if key != "step"}


def test_tensorboard_reads_every_field_of_every_worker(tmp_path) -> None:
    for worker in ("amsterdam", "oslo"):
        observer = tensorboard(tmp_path / worker / "tensorboard")
        observer.record(RECORD)
        observer.close()
    events = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    runs = {"amsterdam/tensorboard", "oslo/tensorboard"}
    assert set(events.Runs()) == runs
    for run in runs:
        found = {name: events.Scalars(run, name) for name in events.Runs()[run]["scalars"]}
        assert {name: scalar.value for name, (scalar,) in found.items()} == WRITTEN
        assert {scalar.step for (scalar,) in found.values()} == {5}


ABOUT = {"name": "amsterdam", "group": "h:1", "config": {"steps": 10}}


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_tracker_gets_every_record_with_its_step_or_says_why_not(package, monkeypatch) -> None:
    client = mock.Mock()
    client.init.return_value = client
    monkeypatch.setitem(sys.modules, package, client)
    observer = tracker(package, "project", **ABOUT)
    observer.record(RECORD)
    client.finish.assert_not_called()
    observer.close()
    client.init.assert_called_once_with(project="project", **ABOUT)
    client.log.assert_called_once_with(WRITTEN, step=5)
    client.finish.assert_called_once_with()
    failing = mock.Mock(**{"init.side_effect": ValueError("a write\ntoken is missing.")})
    for there, said in (
        (None, f"pip install {package}"),
        (failing, "project 'p'.*a write token is missing;"),
    ):
        monkeypatch.setitem(sys.modules, package, there)
        with pytest.raises(tw.ConfigurationError, match=said):
            tracker(package, "p", **ABOUT)


def test_every_event_is_told_once_in_order_also_those_kept_from_before() -> None:
    log, listeners = EventLog(), [mock.Mock(spec=Observer), mock.Mock(spec=Observer)]

    def heard() -> list[list[str]]:
        return [[call.args[0].why for call in each.event.call_args_list] for each in listeners]

    log.note("joined", round=0, why="first")
    forward_events(log, listeners)
    assert heard() == [["first"]] * 2
    log.note("committed", round=1, why="second")
    log.note("left", round=1, why="third")
    assert heard() == [["first", "second", "third"]] * 2
    assert not any(each.record.called for each in listeners)
    assert [event.why for event in log.events] == ["first", "third"]


def test_events_that_cannot_be_written_are_kept_from_nobody_else(tmp_path, caplog) -> None:
    log, heard = EventLog(), []
    forward_events(log, [FolderWriter(RunFolder(tmp_path / "gone"))])
    log.listen(lambda event: 1 / 0)
    log.listen(lambda event: heard.append(event.kind))
    for kind in ("joined", "committed", "left"):
        log.note(kind, round=1)  # in the thread that keeps this worker in the run
    assert heard == ["joined", "committed", "left"]
    assert log.summary()["counts"] == dict.fromkeys(heard, 1)
    assert caplog.text.count("a listener failed on an event") == 3
    assert "cannot write to" in caplog.text
