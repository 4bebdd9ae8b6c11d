"""What `thinwire compare` shows while its runs train."""

import contextlib
import io
import os
import pty
import re
import signal
from pathlib import Path

import pytest
from rich.console import Console

from commands import start
from run_folders import config_of, write_run
from thinwire.cli.compare_display import CompareDisplay
from thinwire.experiments.runners import PlannedRun
from thinwire.runs.status import RunState, RunStatus, read_run

FAILURE = "RuntimeError: it is on fire"
TITLE = "muloco:bits=2 K=4 H=15 inner_lr=0.005 outer_lr=0.8"
WAITING = RunStatus(state=RunState.ABSENT)


def planned(folder: Path, seed: int, steps: int = 100) -> PlannedRun:
    config = config_of("muloco:bits=2", seed=seed, steps=steps)
    return PlannedRun(title=f"{TITLE} seed {seed}", folder=folder / f"run{seed}", config=config)


def record(step: int, **others: float) -> dict[str, float]:
    sent = {"rounds": 2, "sent_bytes": 10, "received_bytes": 20, "wait_s": 0.5}
    return {"step": step, "loss": 2.5, "tokens_per_s": 100.0, **sent, **others}


@pytest.mark.parametrize(("width", "height"), [(60, 8), (80, 40), (200, 24)])
def test_a_run_that_trains_has_a_bar_and_one_that_ends_a_line(tmp_path, width, height) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, height=height)
    runs = [planned(tmp_path, seed) for seed in range(40)]
    done = read_run(write_run(tmp_path / "run0", runs[0].config, loss=1.25))
    now_s = 0.0
    display = CompareDisplay(console)
    with display.progress:
        display.progress.get_time = lambda: now_s

        def bars() -> list[str]:
            plain = Console(file=io.StringIO(), width=width, no_color=True)
            plain.print(display.progress.get_renderable())
            return plain.file.getvalue().splitlines()

        display.note_planned([(runs[0], done), *((run, WAITING) for run in runs[1:])])
        going, failing, _ = (display.observe(run) for run in runs[1:4])
        assert len(bars()) == 4  # no more than train, and one for all: it fits any terminal
        for step in (20, 40):
            going.record(record(step, val_loss=2.25))
            now_s += 10
        all_runs, first, *_ = bars()
        assert max(map(len, bars())) <= width
        assert re.match(r"all runs .* 1/40 ", all_runs)
        # 20 steps in 10 s: the 60 that are left take 30.
        assert re.search(r" seed 1 +\S+ +40/100 +loss 2.5000    30 B 00:30$", first)
        failing.fail(runs[2].failed(FAILURE))
        failing.close()
        going.record(record(100, val_loss=2.0))
        going.close()
        assert len(bars()) == 2
        assert " 2/40 " in bars()[0]
    printed = " ".join(screen.getvalue().split())
    assert f"{TITLE} seed 2 failed: RuntimeError: it is on fire" in printed
    assert f"{TITLE} seed 1: loss 2.0000" in printed


@pytest.mark.parametrize("terminal", [False, True])
def test_elsewhere_lines_follow_each_other_and_nothing_is_drawn(
    tmp_path, monkeypatch, terminal: bool
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=terminal)
    run = planned(tmp_path, 1)
    run.log.parent.mkdir()
    run.log.write_text("Traceback")
    display = CompareDisplay(console)
    with display.progress:
        display.note_planned([(run, WAITING)])
        observer = display.observe(run)
        observer.record(record(20, val_loss=2.25))
        observer.fail(run.failed(FAILURE))
        observer.close()
    evaluated, failed = out.getvalue().splitlines()
    assert f"{TITLE} seed 1  20/100  loss 2.5000 val 2.2500" in evaluated
    assert failed == f"{TITLE} seed 1 failed: {FAILURE}; its log: {run.log}"
    assert "\x1b" not in out.getvalue()


@pytest.mark.slow
def test_ctrl_c_leaves_a_terminal_that_can_be_used(tmp_path) -> None:
    """A real comparison of two processes on a pseudo-terminal."""
    small = ("--steps", "5000", "--methods", "ddp,diloco", "--seeds", "0", "--jobs", "2")
    ours, theirs = pty.openpty()
    terminal = dict.fromkeys(("stdin", "stdout", "stderr"), theirs) | {"start_new_session": True}
    process = start(tmp_path, "compare", "--out", "runs", *small, **terminal)
    os.close(theirs)
    seen = b""
    while b"loss " not in seen:  # a run is under way
        seen += os.read(ours, 65536)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of its processes
    with contextlib.suppress(OSError):  # all that had it open are gone
        while read := os.read(ours, 65536):
            seen += read
    assert process.wait(60) == 130
    os.close(ours)
    assert b"\x1b[?25l" in seen
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
    assert b"stopped; to continue" in seen
    assert b"Traceback" not in seen
    assert b"leaked" not in seen
