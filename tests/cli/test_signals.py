"""SIGTERM, which schedulers and spot machines send: real processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_team import Program, Team
from forked import Forked
from processes import fork_ranks
from thinwire.cli import main
from training import corpus, tiny

__all__ = ["corpus", "tiny"]


def flags(tiny, corpus, out: Path, *, steps: int) -> list[str]:
    settings = {
        "out": out, "method": "streaming_diloco:tau=2", "model": tiny().model.size,
        "corpus": corpus, "global-batch": 4, "sequence-length": 16, "steps": steps,
        "sync-every": 5, "warmup-steps": 2, "threads": 1, "evaluate-steps": 0, "log-steps": 3,
        "checkpoint-steps": 0,
    }  # fmt: skip
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


def wait_for_lines(file: Path, lines: int, *processes) -> None:
    end_s = time.monotonic() + 60
    while not file.exists() or file.read_text().count("\n") < lines:
        assert time.monotonic() < end_s, f"{file} has no {lines} lines"
        assert [process.poll() for process in processes] == [None] * len(processes)
        time.sleep(0.005)


def check_said(error: str, out: Path) -> int:
    """The step of the one checkpoint there is, which the message names."""
    said = re.search(
        r"cannot finish the run in \S+; because it was asked to stop, and did so after inner step "
        rf"(\d+) with a checkpoint; do: the same command with --resume --out {out}",
        " ".join(error.split()),
    )
    assert said, error
    assert "Traceback" not in error
    step = int(said[1])
    kept = {file.name.split(".")[0] for file in (out / "checkpoints").glob("*.json")}
    assert kept == {f"step-{step:08}"}
    return step


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_saves_says_so_and_goes_on_later(tiny, corpus, tmp_path):
    whole = flags(tiny, corpus, tmp_path / "whole", steps=150)
    cut = flags(tiny, corpus, tmp_path / "cut", steps=150)
    process = Forked(["-m", "thinwire", "train", "--workers", "2", *cut], dict(os.environ))
    wait_for_lines(tmp_path / "cut" / "metrics.jsonl", 4, process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143, error
    assert check_said(error, tmp_path / "cut") < 150
    for arguments in ([*cut, "--resume"], whole):
        assert main(["train", "--workers", "2", *arguments]) == 0
    ends = [json.loads((tmp_path / n / "summary.json").read_text()) for n in ("cut", "whole")]
    assert ends[0]["outer_digest"] == ends[1]["outer_digest"]


def test_ranks_stop_after_the_same_step_though_one_is_asked(tiny, corpus, tmp_path) -> None:
    out = tmp_path / "run"
    # Far more steps than are taken, so that the end is not reached before the signal is.
    ranks = fork_ranks(2, "-m", "thinwire", "train", *flags(tiny, corpus, out, steps=30_000))
    try:
        wait_for_lines(out / "metrics.jsonl", 2, *ranks)
        ranks[1].send_signal(signal.SIGTERM)
        steps = set()
        for rank in ranks:
            _, error = rank.communicate(timeout=60)
            assert rank.returncode == 143, error
            steps.add(check_said(error, out))
        assert len(steps) == 1
        assert len(list((out / "checkpoints").glob("*.pt"))) == 2
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
def test_an_elastic_worker_that_is_asked_to_stop_leaves_the_others(tiny, corpus, tmp_path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    programs: list[Program] = []
    with Team(tmp_path) as team:
        try:
            for out in folders:
                given = flags(tiny, corpus, out, steps=30_000)
                given[given.index("--method") + 1] = "diloco"
                given += ["--elastic", team.address, "--workers", "2"]
                errors = tmp_path / f"{out.name}.txt"
                programs.append(Program("command", "train", *given, errors=errors))
            other, leaver = programs
            metrics = [out / "metrics.jsonl" for out in folders]
            team.until(lambda: all(m.exists() and '"workers": 2' in m.read_text() for m in metrics))
            leaver.send(signal.SIGTERM)
            assert leaver.wait(30) == 143, leaver.errors.read_text()
            check_said(leaver.errors.read_text(), folders[1])
            # It said so, and was not found out by its silence.
            team.until(lambda: re.search(r"^b@\S+ left", team.lighthouse_output(), re.MULTILINE))
            team.until(lambda: '"left"' in (folders[0] / "events.jsonl").read_text())
            wait_for_lines(metrics[0], metrics[0].read_text().count("\n") + 5)
            assert not other.gone
        finally:
            for program in programs:
                program.end()


@pytest.mark.slow
def test_an_elastic_worker_that_waits_for_others_stops_all_the_same(tiny, corpus, tmp_path) -> None:
    """Alone below --min-workers it would wait without a limit."""
    out = tmp_path / "a"
    with Team(tmp_path) as team:
        given = flags(tiny, corpus, out, steps=30_000)
        given[given.index("--method") + 1] = "diloco"
        given += ["--elastic", team.address, "--workers", "2", "--min-workers", "2"]
        program = Program("command", "train", *given, errors=tmp_path / "a.txt")
        try:
            team.until(lambda: re.search(r"^a@\S+ joined", team.lighthouse_output(), re.MULTILINE))
            time.sleep(1.0)
            program.send(signal.SIGTERM)
            assert program.wait(15) == 143, program.errors.read_text()
            assert "asked to stop" in " ".join(program.errors.read_text().split())
        finally:
            program.end()


@pytest.mark.slow
def test_an_elastic_worker_whose_partner_has_gone_saves_and_stops(tiny, corpus, tmp_path) -> None:
    """It waits for another one between two rounds, with work that no round has."""
    programs: list[Program] = []
    with Team(tmp_path) as team:
        try:
            for name in ("a", "b"):
                given = flags(tiny, corpus, tmp_path / name, steps=30_000)
                given[given.index("--method") + 1] = "diloco"
                given += ["--elastic", team.address, "--workers", "2", "--min-workers", "2"]
                programs.append(
                    Program("command", "train", *given, errors=tmp_path / f"{name}.txt")
                )
            stays, goes = programs
            metrics = tmp_path / "a" / "metrics.jsonl"
            team.until(lambda: metrics.exists() and '"workers": 2' in metrics.read_text())
            goes.kill()
            assert goes.wait(15) != 0
            time.sleep(4.0)
            stays.send(signal.SIGTERM)
            assert stays.wait(20) == 143, stays.errors.read_text()
            check_said(stays.errors.read_text(), tmp_path / "a")
        finally:
            for program in programs:
                program.end()


@pytest.mark.parametrize("times", [1, 2])
def test_a_second_signal_ends_the_process_at_once(times: int) -> None:
    code = (
        "import os, signal\nfrom thinwire.cli.output import noted_signals\n"
        "with noted_signals(signal.SIGTERM) as noted:\n"
        f"    for _ in range({times}):\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert noted == [signal.SIGTERM]\n"
        "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == (0 if times == 1 else -signal.SIGTERM), done.stderr
