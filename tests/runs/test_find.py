"""Run folders that are found, and what is wrong with those that cannot be used."""

import math
from pathlib import Path

import pytest

from run_folders import change, config_of, write_run
from thinwire.runs.find import find_runs
from thinwire.runs.status import read_run


def left_out(*paths: Path) -> list[str]:
    return [str(status) for status in find_runs(paths).values() if status.run is None]


def test_runs_are_found_at_any_depth_once_each(tmp_path) -> None:
    for name in ("a", "deep/er/b"):
        write_run(tmp_path / name, config_of("diloco"))
    (tmp_path / "notes.txt").write_text("x")
    found = find_runs([tmp_path, tmp_path / "a", tmp_path / "missing", tmp_path / "notes.txt"])
    assert [folder.name for folder, status in found.items() if status.run] == ["a", "b"]
    assert {folder.name: str(status) for folder, status in found.items() if not status.run} == {
        "missing": "not begun: there is no such folder",
        "notes.txt": "corrupt: it is a file, not the folder of a run",
    }
    (tmp_path / "empty").mkdir()
    assert left_out(tmp_path / "empty") == ["not begun: no run was begun in it"]


def spoil_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"kind": "Tr')


def spoil_line(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 24, "lo')


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda f: (f / "summary.json").unlink(), "unfinished: it has no summary, 23 of 23 steps"),
        (lambda f: (f / "config.json").unlink(), "corrupt: config.json is missing"),
        (lambda f: (f / "metrics.jsonl").unlink(), "corrupt: metrics.jsonl cannot be read"),
        (lambda f: (f / "metrics.jsonl").write_text(""), "corrupt: metrics.jsonl is empty"),
        (lambda f: (f / "metrics.jsonl").write_bytes(b"\xff\xfe"), "metrics.jsonl cannot be read"),
        (spoil_config, "corrupt: config.json cannot be read"),
        (spoil_line, "corrupt: line 4 of metrics.jsonl cannot be read"),
        (lambda f: (f / "config.json").write_text('{"hidden_size": 64}'), "not that of a run"),
        (lambda f: (f / "summary.json").write_text("[]"), "summary.json holds no object"),
        (lambda f: change(f / "config.json", method=None), "config.json has method missing"),
        (lambda f: change(f / "config.json", method__name=3), "config.json has method.name 3"),
        (lambda f: change(f / "summary.json", val_loss=math.nan), "summary.json has val_loss nan"),
        (lambda f: change(f / "summary.json", steps=7), "steps 7, which config.json makes 23"),
        (lambda f: change(f / "summary.json", workers=2), "workers 2, which config.json makes 4"),
        (lambda f: change(f / "summary.json", tokens=9), "tokens 9, which config.json makes 2944"),
        (lambda f: change(f / "summary.json", method="ddp"), "which config.json makes diloco"),
        (lambda f: change(f / "summary.json", val_loss=1.0), "the last record has val_loss 2.0"),
        (lambda f: change(f / "summary.json", sent_bytes_per_worker=1), "has sent_bytes"),
        (lambda f: (f / "data.json").write_text("{}"), "data.json has fingerprint missing"),
    ],
)
def test_a_damaged_folder_says_what_is_wrong_with_it(tmp_path, spoil, reason: str) -> None:
    folder = write_run(tmp_path / "run", config_of("diloco"))
    assert read_run(folder).run is not None
    spoil(folder)
    (left,) = left_out(tmp_path)
    assert reason in left


def test_records_out_of_order_or_not_finite_are_corrupt(tmp_path) -> None:
    folder = write_run(tmp_path / "run", config_of("diloco"))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([lines[1], lines[0], lines[2]]))
    assert "step 7 after 20" in left_out(folder)[0]
    bad = lines[0].replace('"val_loss": ', '"val_loss": NaN, "x": ')
    (folder / "metrics.jsonl").write_text("".join([bad, *lines[1:]]))
    assert "line 1 of metrics.jsonl has val_loss nan" in left_out(folder)[0]


def test_why_a_run_failed_is_told(tmp_path) -> None:
    folder = write_run(tmp_path / "run", config_of("diloco"))
    (folder / "summary.json").unlink()
    (folder / "failed.json").write_text('{"kind": "NonFiniteError", "why": "the loss is nan"}')
    (left,) = left_out(folder)
    assert left == "diverged: the loss is nan (23 of 23 steps recorded)"
