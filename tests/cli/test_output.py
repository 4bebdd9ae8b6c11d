"""What commands do when nothing can be written to the terminal any more: real processes."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.cli.output import lasting_output

RUN = [
    "--sequence-length", "16", "--threads", "1", "--global-batch", "4", "--workers", "2",
    "--warmup-steps", "2", "--sync-every", "2", "--corpus", "corpus.txt",
]  # fmt: skip
COMMANDS = {
    "train": ["train", "--steps", "8", "--evaluate-steps", "2", "--out", "run"],
    "compare": ["compare", "--methods", "ddp,diloco", "--steps", "4", "--out", "runs"],
}
FOLDERS = {"train": ["run"], "compare": ["runs/ddp-seed0", "runs/diloco-seed0"]}


def start(folder: Path, *arguments: str, **where) -> subprocess.Popen:
    (folder / "corpus.txt").write_text("thin wires carry little " * 600)
    return subprocess.Popen(
        [sys.executable, "-m", "thinwire", *arguments, *RUN],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | where,
    )


def test_what_cannot_be_written_is_dropped_and_the_rest_is_not(monkeypatch, capsys) -> None:
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr(sys, "stdout", gone)
    with lasting_output():
        sys.stdout.write("to no one")
        sys.stdout.flush()
        sys.stderr.write("to the reader")
    assert sys.stdout is gone
    assert capsys.readouterr().err == "to the reader"


def test_a_name_that_cannot_be_encoded_loses_no_output(tmp_path, monkeypatch) -> None:
    with (tmp_path / "out").open("w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with lasting_output():
            sys.stdout.write("runs/\udcff, ")
            sys.stdout.write("and more")
    assert (tmp_path / "out").read_text() == "runs/\\udcff, and more"


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_goes_away_ends_no_training(tmp_path, command: str) -> None:
    with start(tmp_path, *COMMANDS[command]) as process:
        assert process.stdout.readline()
        process.stdout.close()
        error = process.stderr.read()
    assert process.returncode == 0, error
    assert "Traceback" not in error
    assert "Broken pipe" not in error
    assert all((tmp_path / folder / "summary.json").exists() for folder in FOLDERS[command])


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_below_the_output_ends_no_training(tmp_path, command: str) -> None:
    with open("/dev/full", "w") as full:
        process = start(tmp_path, *COMMANDS[command], stdout=full, stderr=full)
        assert process.wait() == 0
    assert all((tmp_path / folder / "summary.json").exists() for folder in FOLDERS[command])


@pytest.mark.slow
def test_a_command_whose_output_is_its_result_fails_where_it_is_lost(tmp_path) -> None:
    with open("/dev/full", "w") as full:
        plan = ["plan", "--parameters", "1B", "--layers", "4", "--step-time", "1s", "--json"]
        plan += ["--bandwidth", "1Gbit/s", "--latency", "1ms", "--workers", "2"]
        done = subprocess.run(
            [sys.executable, "-m", "thinwire", *plan],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot finish the command; because [Errno 28]")
    assert done.stderr.count("\n") == 1
