"""What `thinwire compare` shows while its runs train."""

import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from run_folders import config_of, write_run
from thinwire.cli.compare_display import CompareDisplay
from thinwire.experiments.runners import PlannedRun
from thinwire.runs.status import RunState, RunStatus, read_run

TITLE = "muloco:bits=2 K=4 H=15 inner_lr=0.005 outer_lr=0.8"
WAITING = RunStatus(state=RunState.ABSENT)


class Seconds:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def planned(folder: Path, seed: int, steps: int = 100) -> PlannedRun:
    config = config_of("muloco:bits=2", seed=seed, steps=steps)
    return PlannedRun(title=f"{TITLE} seed {seed}", folder=folder / f"run{seed}", config=config)


def record(step: int, **others: float) -> dict[str, float]:
    measured = {"rounds": 2, "sent_bytes": 10, "received_bytes": 20, "wait_s": 0.5}
    return {"step": step, "loss": 2.5, "tokens_per_s": 100.0, **measured, **others}


class Screen:
    """A display on a terminal that is never drawn to, but asked what it would show."""

    def __init__(self, width: int, height: int) -> None:
        self.clock = Seconds()
        console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height)
        self.display, self.console = CompareDisplay(console, self.clock), console

    def lines(self) -> list[str]:
        plain = Console(
            file=io.StringIO(), width=self.console.width, height=self.console.height, no_color=True
        )
        plain.print(self.display.shown())
        return plain.file.getvalue().splitlines()

    def line(self, text: str) -> str:
        (found,) = (line for line in self.lines() if text in line)
        return " ".join(found.split())


@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_run_has_a_line_that_says_how_far_it_is(tmp_path, width: int) -> None:
    screen = Screen(width, 40)
    runs = [planned(tmp_path, seed) for seed in range(5)]
    done = read_run(write_run(tmp_path / "run0", runs[0].config, loss=1.25))
    screen.display.note_planned([(runs[0], done), *((run, WAITING) for run in runs[1:])])
    assert screen.line("seed 0").endswith("100/100 1.2500 done")
    observers = [screen.display.observe(run) for run in runs[1:4]]
    assert screen.line("seed 1").endswith("0/100 begins")
    for step in (20, 40):
        observers[0].record(record(step, val_loss=2.25))
        screen.clock.now_s += 10
    observers[0].record(record(45))  # the last validation loss stays
    assert screen.line("seed 1").endswith("45/100 2.5000 2.2500 44 s")
    observers[1].fail("RuntimeError: the accelerator is on fire")
    observers[1].close()
    observers[2].fail("NonFiniteError: cannot take the step")
    observers[2].close()
    shown = screen.lines()
    assert max(map(len, shown)) <= width
    states = [line.split()[-1] for line in shown[3:6]]
    assert states == ["failed", "diverged", "waits"]
    assert "1 of 5 runs done, about 1.15 min left" in screen.line("runs done")
    assert any("seed 2: Runtime" in line for line in shown)
    observers[0].record(record(100))
    observers[0].close()
    assert screen.line("2 of 5 runs done")


def test_a_run_that_failed_names_its_log_until_it_begins_again(tmp_path) -> None:
    screen, run = Screen(80, 24), planned(tmp_path, 1)
    run.log.parent.mkdir()
    run.log.write_text("Traceback")
    screen.display.note_planned([(run, WAITING)])
    observer = screen.display.observe(run)
    observer.fail("killed: its process ended with status -9")
    observer.close()
    assert "run1.log" in "".join(screen.lines()).replace("\n", "")
    screen.display.observe(run)
    assert "run1.log" not in "".join(screen.lines())
    assert screen.line("0/100").endswith("begins")


def test_a_run_that_was_interrupted_is_not_done(tmp_path) -> None:
    screen, run = Screen(80, 24), planned(tmp_path, 1)
    screen.display.note_planned([(run, WAITING)])
    observer = screen.display.observe(run)
    observer.record(record(99))
    observer.close()
    assert screen.line("99/100").endswith("stopped")
    assert screen.line("0 of 1 runs done")


@pytest.mark.parametrize("height", [8, 12, 24])
def test_of_more_runs_than_lines_those_that_train_are_shown(tmp_path, height: int) -> None:
    screen = Screen(80, height)
    runs = [planned(tmp_path, seed) for seed in range(40)]
    screen.display.note_planned([(run, WAITING) for run in runs])
    for run in runs[:30]:
        observer = screen.display.observe(run)
        observer.record(record(100))
        observer.close()
    screen.display.observe(runs[33]).record(record(7))
    failed = screen.display.observe(runs[2])
    failed.fail("RuntimeError: no")
    failed.close()
    shown = screen.lines()
    assert len(shown) < height
    assert screen.line("7/100")
    assert "not shown: " in "\n".join(shown)
    assert "29 of 40 runs done" in shown[-1]


@pytest.mark.parametrize("terminal", [False, True])
def test_elsewhere_lines_follow_each_other_and_nothing_is_drawn(
    tmp_path, monkeypatch, terminal: bool
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=terminal)
    run = planned(tmp_path, 1)
    with CompareDisplay(console) as display:
        display.note_planned([(run, WAITING)])
        observer = display.observe(run)
        observer.record(record(20, val_loss=2.25))
        observer.fail("RuntimeError: no")
        observer.close()
    evaluated, failed = out.getvalue().splitlines()
    assert f"{TITLE} seed 1  20/100  loss 2.5000 val 2.2500" in evaluated
    assert failed == f"{TITLE} seed 1 failed: RuntimeError: no"
    assert "\x1b" not in out.getvalue()


@pytest.mark.slow
def test_ctrl_c_leaves_a_terminal_that_can_be_used(tmp_path) -> None:
    """A real comparison of two processes on a pseudo-terminal."""
    (tmp_path / "corpus.txt").write_text("thin wires carry little " * 600)
    small = ["--steps", "5000", "--sync-every", "2", "--sequence-length", "16", "--workers", "2"]
    small += ["--global-batch", "4", "--warmup-steps", "2", "--corpus", "corpus.txt"]
    small += ["--methods", "ddp,diloco", "--seeds", "0"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "thinwire", "compare", "--out", "runs", "--jobs", "2", *small],
        cwd=tmp_path,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24", "HF_HUB_OFFLINE": "1"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""
    while b" s  " not in seen and b" min" not in seen:  # a run is under way
        seen += os.read(ours, 65536)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of its processes
    while True:
        try:
            read = os.read(ours, 65536)
        except OSError:  # all that had it open are gone
            break
        if not read:
            break
        seen += read
    assert process.wait(60) == 130
    os.close(ours)
    assert b"\x1b[?25l" in seen
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
    assert b"Traceback" not in seen
    assert b"leaked" not in seen
    assert b"stopped; to go on" in seen
