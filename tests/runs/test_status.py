"""`thinwire compare` and `thinwire report` say the same of the same folder."""

import shutil
from pathlib import Path

import pytest

from run_folders import change, retell, write_run
from thinwire.cli import main
from thinwire.runs.status import note_failure
from thinwire.train.config import TrainConfig
from thinwire.train.recipes import laptop

METHODS = ("ddp", "diloco", "muloco")


def configs() -> dict[str, TrainConfig]:
    return {f"{name}-seed0": laptop(name) for name in METHODS}


def diverge(folder: Path) -> None:
    (folder / "summary.json").unlink()
    note_failure(folder, "NonFiniteError", "it broke")


def replace_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("x")


OTHER = "not of this comparison: "
NO_DATA = OTHER + "corpus fingerprint is not recorded (Python 3.11.7), not abc"


# test_schema.py has more damage, and test_comparable.py what else makes a run another one.
@pytest.mark.parametrize(
    ("spoil", "verdict"),
    [
        (replace_by_a_file, "corrupt: it is a file, not the folder of a run"),
        (diverge, "diverged: it broke (400 of 400 steps recorded)"),
        (lambda f: (f / "data.json").unlink(), NO_DATA),
        (lambda f: change(f / "summary.json", parameters=7), OTHER + "parameters is 7, not "),
    ],
    ids=["a file", "diverged", "other Python", "other size"],
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
