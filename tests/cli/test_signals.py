"""Real processes: SIGTERM, which schedulers and spot machines send, and output that is lost."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commands import start
from elastic_team import Program, Team
from forked import Forked
from processes import fork_ranks
from thinwire.cli import main
from thinwire.cli.output import lasting_output
from training import corpus, tiny

__all__ = ["corpus", "tiny"]


def flags(tiny, corpus, out: Path, *, steps: int, method="streaming_diloco:tau=2") -> list[str]:
    settings = {
        "out": out, "method": method, "model": tiny().model.size, "corpus": corpus,
        "global-batch": 4, "sequence-length": 16, "steps": steps, "sync-every": 5,
        "warmup-steps": 2, "threads": 1, "evaluate-steps": 0, "log-steps": 3, "checkpoint-steps": 0,
    }  # fmt: skip
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


@pytest.fixture
def elastic(tiny, corpus, tmp_path) -> Iterator[tuple[Team, Callable[..., Program]]]:
    """A team, and what starts one of its workers, which train for ever."""
    programs: list[Program] = []
    with Team(tmp_path) as team:

        def start(name: str, *more: str) -> Program:
            given = flags(tiny, corpus, tmp_path / name, steps=30_000, method="diloco")
            given = [f"{team.url}/r", *given, "--workers", "2", *more]
            programs.append(Program("command", "join", *given, errors=tmp_path / f"{name}.txt"))
            return programs[-1]

        try:
            yield team, start
        finally:
            for program in programs:
                program.end()


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
def test_an_elastic_worker_that_is_asked_to_stop_leaves_the_others(elastic, tmp_path) -> None:
    team, start = elastic
    other, leaver = start("a"), start("b")
    metrics = [tmp_path / name / "metrics.jsonl" for name in ("a", "b")]
    team.until(lambda: all(m.exists() and '"workers": 2' in m.read_text() for m in metrics))
    leaver.send(signal.SIGTERM)
    assert leaver.wait(30) == 143, leaver.errors.read_text()
    check_said(leaver.errors.read_text(), tmp_path / "b")
    # It said so, and was not found out by its silence.
    team.until(lambda: '"left"' in (tmp_path / "a" / "events.jsonl").read_text())
    wait_for_lines(metrics[0], metrics[0].read_text().count("\n") + 5)
    assert not other.gone


@pytest.mark.slow
def test_an_elastic_worker_that_waits_for_others_stops_all_the_same(elastic, tmp_path) -> None:
    """Alone below --min-workers it would wait without a limit."""
    team, start = elastic
    program = start("a", "--min-workers", "2")
    team.until(lambda: any(tmp_path.glob("store/r/call/*/*")))
    time.sleep(1.0)
    program.send(signal.SIGTERM)
    assert program.wait(15) == 143, program.errors.read_text()
    assert "asked to stop" in " ".join(program.errors.read_text().split())


@pytest.mark.slow
def test_an_elastic_worker_whose_partner_has_gone_saves_and_stops(elastic, tmp_path) -> None:
    """It waits for another one between two rounds, with work that no round has."""
    team, start = elastic
    stays, goes = (start(name, "--min-workers", "2") for name in ("a", "b"))
    metrics = tmp_path / "a" / "metrics.jsonl"
    team.until(lambda: metrics.exists() and '"workers": 2' in metrics.read_text())
    goes.kill()
    assert goes.wait(15) != 0
    time.sleep(4.0)
    stays.send(signal.SIGTERM)
    assert stays.wait(20) == 143, stays.errors.read_text()
    check_said(stays.errors.read_text(), tmp_path / "a")


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


# What commands do when nothing can be written to the terminal any more.
def test_what_cannot_be_written_is_dropped_and_the_rest_is_not(
    tmp_path, monkeypatch, capsys
) -> None:
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr(sys, "stdout", gone)
    with lasting_output():
        sys.stdout.write("to no one")
        sys.stdout.flush()
        sys.stderr.write("to the reader")
    assert sys.stdout is gone
    assert capsys.readouterr().err == "to the reader"
    # A name that cannot be encoded loses no output.
    with (tmp_path / "out").open("w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with lasting_output():
            sys.stdout.write("runs/\udcff, ")
            sys.stdout.write("and more")
    assert (tmp_path / "out").read_text() == "runs/\\udcff, and more"


@pytest.mark.parametrize(("typed", "status"), [("--help", 0), ("trian", 2)])
def test_streams_that_were_closed_before_are_no_error(typed: str, status: int) -> None:
    """Python then has None in their place."""
    command = f"{shlex.quote(sys.executable)} -m thinwire {typed} >&- 2>&-"
    assert subprocess.run(["sh", "-c", command]).returncode == status


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "folders"),
    [
        (("train", "--steps", "8", "--evaluate-steps", "2"), [""]),
        (("compare", "--methods", "ddp,diloco", "--steps", "4"), ["ddp-seed0", "diloco-seed0"]),
    ],
)
@pytest.mark.parametrize("is_full", [False, True], ids=["a reader that goes away", "a full disk"])
def test_output_that_is_lost_ends_no_training(tmp_path, command, folders, is_full: bool) -> None:
    with open("/dev/full", "w") as full:
        where = {"stdout": full, "stderr": full} if is_full else {}
        with start(tmp_path, *command, "--out", "out", **where) as process:
            if not is_full:
                assert process.stdout.readline()
                process.stdout.close()
                error = process.stderr.read()
                assert "Traceback" not in error
                assert "Broken pipe" not in error
    assert process.returncode == 0
    assert all((tmp_path / "out" / name / "summary.json").exists() for name in folders)


@pytest.mark.slow
def test_a_command_whose_output_is_its_result_fails_where_it_is_lost() -> None:
    plan = ["plan", "--parameters", "1B", "--layers", "4", "--step-time", "1s", "--json"]
    plan += ["--bandwidth", "1Gbit/s", "--latency", "1ms", "--workers", "2"]
    command = [sys.executable, "-m", "thinwire", *plan]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot finish the command; because [Errno 28]")
    assert done.stderr.count("\n") == 1
