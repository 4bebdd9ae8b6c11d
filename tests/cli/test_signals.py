"""Real processes: SIGTERM, which schedulers and spot machines send, and output that is lost."""

import io
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commands import start
from forked import Forked
from processes import fork_ranks, until
from thinwire.cli import main
from thinwire.cli.output import lasting_output
from training import Team, corpus, flags, summary, tiny

__all__ = ["corpus", "tiny"]

# No checkpoint but that of a stop.
QUIET = ["--evaluate-steps", "0", "--checkpoint-steps", "0"]


def has(file: Path, text: str, times: int = 1) -> bool:
    return file.exists() and file.read_text().count(text) >= times


def check_said(process: Forked, out: Path) -> int:
    """The step of the one checkpoint there is, which the message of a stopped process names."""
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143, error
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


@pytest.mark.slow_cases("SIGTERM")
@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT], ids=lambda each: each.name)
def test_a_run_that_is_asked_to_stop_saves_says_so_and_goes_on_later(asked, tiny, tmp_path) -> None:
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    config = tiny("streaming_diloco:tau=2", steps=150)
    train = ["train", *flags(config, cut), *QUIET]
    process = Forked(["-m", "thinwire", *train], dict(os.environ))
    until(lambda: has(cut / "metrics.jsonl", "\n", 4))
    process.send_signal(asked)
    assert check_said(process, cut) < 150
    assert main([*train, "--resume"]) == 0
    assert main([*train, "--out", str(whole)]) == 0
    assert summary(cut)["outer_digest"] == summary(whole)["outer_digest"]


def test_ranks_stop_after_the_same_step_though_one_is_asked(tiny, tmp_path) -> None:
    out = tmp_path / "run"
    # Far more steps than are taken, so that the end is not reached before the signal is.
    ranks = fork_ranks(2, "-m", "thinwire", "train", *flags(tiny(steps=30_000), out), *QUIET)
    try:
        until(lambda: has(out / "metrics.jsonl", "\n", 2))
        ranks[1].send_signal(signal.SIGTERM)
        assert len({check_said(rank, out) for rank in ranks}) == 1
        assert len(list((out / "checkpoints").glob("*.pt"))) == 2
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
def test_an_elastic_worker_that_is_asked_to_stop_leaves_the_others(tiny, tmp_path) -> None:
    metrics = [tmp_path / name / "metrics.jsonl" for name in ("a", "b")]
    with Team(tmp_path, tiny(steps=30_000), f"file://{tmp_path}/store/r", *QUIET) as team:
        other, leaver = team.start("a"), team.start("b")
        team.until(lambda: all(has(file, '"workers": 2') for file in metrics))
        leaver.send_signal(signal.SIGTERM)
        check_said(leaver, tmp_path / "b")
        # It said so, and was not found out by its silence.
        until(lambda: has(tmp_path / "a" / "events.jsonl", '"left"'))
        lines = metrics[0].read_text().count("\n")
        until(lambda: has(metrics[0], "\n", lines + 5))
        assert other.poll() is None


@pytest.mark.parametrize(("pauses_s", "is_over"), [([0], False), ([0, 0], False), ([0, 1], True)])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_second_signal_ends_the_process_at_once_and_an_echo_does_not(
    name: str, pauses_s: list[float], *, is_over: bool
) -> None:
    code = (
        "import signal, time\nfrom thinwire.cli.output import noted_signals\n"
        f"signal.signal(signal.SIGINT, signal.SIG_DFL)\nwanted = [signal.{name}]\n"
        "with noted_signals(signal.SIGTERM, signal.SIGINT) as noted:\n"
        f"    for pause_s in {pauses_s}:\n        time.sleep(pause_s)\n"
        f"        signal.raise_signal(signal.{name})\n"
        f"assert noted == wanted * {len(pauses_s)}\n"
        f"assert signal.getsignal(signal.{name}) == signal.SIG_DFL\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == (-getattr(signal, name) if is_over else 0), done.stderr


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
    plan = "plan --model 250k --workers 2 --step-time 1s --bandwidth 1Gbit/s --json"
    command = [sys.executable, "-m", "thinwire", *plan.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot finish the command; because [Errno 28]")
    assert done.stderr.count("\n") == 1
