"""Run folders that are found, and what is wrong with those that cannot be used."""

import math
from pathlib import Path

import pytest

from run_folders import change, config_of, write_run
from thinwire.runs.find import find_runs
from thinwire.runs.status import note_failure, read_run


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


def file(name: str, text: str | bytes, *, mode: str = "w"):
    def write(folder: Path) -> None:
        with (folder / name).open(f"{mode}b") as file:
            file.write(text if isinstance(text, bytes) else text.encode())

    return write


def without(name: str):
    return lambda folder: (folder / name).unlink()


def config(**fields):
    return lambda folder: change(folder / "config.json", **fields)


def summary(**fields):
    return lambda folder: change(folder / "summary.json", **fields)


def metrics(old: str, new: str):
    def retell(folder: Path) -> None:
        file = folder / "metrics.jsonl"
        file.write_text(file.read_text().replace(old, new))

    return retell


def diverge(folder: Path) -> None:
    (folder / "summary.json").unlink()
    note_failure(folder, "NonFiniteError", "x")


DAMAGE = [
    (without("summary.json"), "unfinished: it has no summary, 23 of 23 steps"),
    (without("config.json"), "corrupt: config.json is missing"),
    (without("metrics.jsonl"), "corrupt: metrics.jsonl cannot be read"),
    (file("metrics.jsonl", ""), "corrupt: metrics.jsonl is empty"),
    (file("metrics.jsonl", b"\xff\xfe"), "line 1 of metrics.jsonl cannot be read"),
    (file("metrics.jsonl", '{"step": 24, "lo', mode="a"), "line 4 of metrics.jsonl cannot be read"),
    (metrics('"sent_bytes": ', '"sent_bytes": NaN, "x": '), "line 1 of metrics.jsonl cannot be"),
    (metrics('"wait_s": ', '"wait_s": true, "x": '), "line 1 of metrics.jsonl cannot be read"),
    (metrics("anchor_bytes", "bytes"), "the last record has anchor_bytes missing"),
    (
        metrics('"live_weights_bytes": 8', '"live_weights_bytes": 0'),
        "the last record has live_weights_bytes 0",
    ),
    (file("config.json", '{"kind": "Tr'), "corrupt: config.json cannot be read"),
    (file("config.json", '{"hidden_size": 64}'), "config.json is not that of a run of thinwire"),
    (config(method=None), "config.json has method missing"),
    (config(machine=None), "config.json has machine missing"),
    (config(method__name=3), "config.json cannot be used: Expected `str`, got `int` - at `$.met"),
    (config(seed=True), "config.json cannot be used: Expected `int`, got `bool` - at `$.seed`"),
    (file("summary.json", "[]"), "summary.json cannot be read: Expected `object`, got `array`"),
    (summary(val_loss=math.nan), "corrupt: summary.json cannot be read"),
    (summary(val_loss=math.inf), "corrupt: summary.json cannot be read"),
    (summary(val_loss=-1.0), "summary.json cannot be used: Expected `float` >= 0.0 - at `$.val_"),
    (summary(val_loss=True), "summary.json cannot be used: Expected `float`, got `bool`"),
    (summary(wait_s=None), "summary.json cannot be used: Object missing required field `wait_s`"),
    (summary(wait_s=10**400), "summary.json cannot be used"),
    (summary(versions=3), "summary.json cannot be used: Expected `object"),
    (summary(steps=7), "steps 7, which config.json makes 23"),
    (summary(workers=2), "workers 2, which config.json makes 4"),
    (summary(tokens=9), "tokens 9, which config.json makes 2944"),
    (summary(method="ddp"), "summary.json has method 'ddp', which config.json makes diloco"),
    (summary(val_loss=1.0), "the last record has val_loss 2.0"),
    (summary(sent_bytes_per_worker=1), "the last record has sent_bytes"),
    *(
        (summary(contributions=told), "summary.json cannot be used: Expected `")
        for told in ([], 3, {"a": 3}, {"a": {"outlier": -1}}, {"a": {"outlier": "1"}}, {"a": [1]})
    ),
    (file("data.json", "{}"), "data.json cannot be used: Object missing required field `fingerpr"),
    (diverge, "diverged: x (23 of 23 steps recorded)"),
]


@pytest.mark.parametrize(("spoil", "reason"), DAMAGE, ids=[reason for _, reason in DAMAGE])
def test_a_damaged_folder_says_what_is_wrong_with_it(tmp_path, spoil, reason: str) -> None:
    folder = write_run(tmp_path / "run", config_of("diloco"))
    assert read_run(folder).run is not None
    spoil(folder)
    (left,) = left_out(tmp_path)
    assert reason in left


def test_records_out_of_order_are_corrupt(tmp_path) -> None:
    folder = write_run(tmp_path / "run", config_of("diloco"))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([lines[1], lines[0], lines[2]]))
    assert "step 7 after 20" in left_out(folder)[0]
