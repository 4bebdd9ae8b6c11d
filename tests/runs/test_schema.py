"""A run folder of version 0.1 still reads, and under the names that its classes have today."""

import hashlib
import json
import math
from pathlib import Path

import pytest

from run_folders import change, config_of, retell, runs_in, write_run
from thinwire.errors import CheckpointError, MismatchError
from thinwire.method import RENAMED_SLOTS, Method, migrate_names
from thinwire.runs.find import find_runs
from thinwire.runs.folder import RunFolder
from thinwire.runs.schema import identity_fields, read_finished, read_object
from thinwire.runs.status import RunState, note_failure, read_run, status_of
from thinwire.runs.variants import variants_of

OLD = Path(__file__).parents[1] / "golden" / "run-folder"


def test_a_committed_run_folder_reads_as_what_it_was() -> None:
    run = read_run(OLD).run
    assert run is not None
    config, summary, records = run.config, run.summary, run.records
    assert (config.method, config.sync_every, config.workers) == ("streaming_diloco", 10, 2)
    assert (config.steps, config.tokens_per_step, config.threads, config.seed) == (20, 2048, 1, 0)
    data = (config.model_size, config.corpus, config.tokenizer)
    assert data == ("250k", "python-stdlib", "bytes")
    sent = (summary.tokens, summary.sent_bytes_per_worker, summary.workers_here)
    assert sent == (40_960, 247_236, 2)
    assert summary.val_loss == records[-1].val_loss == 3.178047518375024
    assert not summary.is_elastic
    assert [(r.step, r.rounds) for r in records] == [(5, 0), (10, 0), (15, 3), (20, 10)]
    held = records[-1].state_bytes
    copies = sum(held.values()) / held["live_weights"]
    assert copies == pytest.approx(5, rel=1e-3)
    assert Method.from_dict(config.described["method"]).sync_every == 10


def test_what_makes_a_run_another_one_has_not_changed() -> None:
    described = json.loads((OLD / "config.json").read_text())
    fields = identity_fields(described)
    assert "machine.simulation" not in fields  # it was "threads", as all runs are today
    described["machine"]["simulation"] = "stacked"
    assert identity_fields(described) == fields | {"machine.simulation": "stacked"}
    kept = {name: value for name, value in fields.items() if not name.endswith("kind")}
    text = json.dumps(kept | {"machine.simulation": "threads"}, sort_keys=True)
    digest = "c3f0d014a07b3ec525688114291a6f1eed489309e1a769b8031f6ae37fb61485"
    assert hashlib.sha256(text.encode()).hexdigest() == digest
    assert identity_fields(fields) == fields  # as a checkpoint holds them


def test_a_class_that_was_renamed_makes_no_other_run(tmp_path, monkeypatch) -> None:
    config = config_of("diloco")
    folder = write_run(tmp_path / "old", config)
    write_run(tmp_path / "new", config_of("diloco", seed=1))
    change(folder / "config.json", method__outer__kind="NesterovOfOld")
    assert status_of(folder, config.describe()).state is RunState.MISMATCH
    assert len(variants_of(runs_in(tmp_path))) == 2
    with pytest.raises(MismatchError, match="NesterovOfOld"):
        RunFolder(folder).check_same(config.describe())
    monkeypatch.setitem(RENAMED_SLOTS, "NesterovOfOld", "SGD")
    assert status_of(folder, config.describe()).state is RunState.FINISHED
    assert len(variants_of(runs_in(tmp_path))) == 1
    RunFolder(folder).check_same(config.describe())
    assert identity_fields({"method.outer.kind": "NesterovOfOld"}) == {"method.outer.kind": "SGD"}
    # Only kinds are renamed.
    monkeypatch.setitem(RENAMED_SLOTS, "old", "new")
    old = {"name": "old", "kind": "old", "parts": [{"kind": "old", "kinds": "old"}]}
    new = {"name": "old", "kind": "new", "parts": [{"kind": "new", "kinds": "old"}]}
    assert migrate_names(old) == new


@pytest.mark.parametrize(
    "text",
    ['{"a":' * 5000 + "1" + "}" * 5000, '{"name": "\\ud800"}'],
    ids=["too deep to be parsed", "half a character"],
)
def test_what_no_run_writes_is_refused(tmp_path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_object(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Exception, match=r"cannot read .*config\.json; because .*; do: restore"):
        RunFolder(tmp_path).config()


def test_counts_of_contributions_are_read_by_member_whatever_its_name(tmp_path) -> None:
    # It noted what runs no longer note.
    noted = {"cosine/0": 1.0, "pseudo_gradient_norm/12": 2.0, "x": 3.0}
    folder = write_run(tmp_path / "run", config_of("diloco"), **noted)
    assert read_finished(folder).summary.contributions == {}  # as in earlier versions
    told = {"a.b@host": {"outlier": 2, "clipped": 1}, "": {}}
    change(folder / "summary.json", contributions=told)
    assert read_finished(folder).summary.contributions == told


# Run folders that are found, and what is wrong with those that cannot be used.
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


def rewrite(name: str):
    return lambda **fields: lambda folder: change(folder / name, **fields)


def metrics(old: str, new: str):
    return lambda folder: retell(folder, old, new)


config, summary = rewrite("config.json"), rewrite("summary.json")


def disorder(folder: Path) -> None:
    first, second, third = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(second + first + third)


def fail(folder: Path) -> None:
    (folder / "summary.json").unlink()
    note_failure(folder, "OSError", "it broke")


DAMAGE = [
    (fail, "failed: OSError: it broke (23 of 23 steps recorded)"),
    (without("summary.json"), "unfinished: it has no summary, 23 of 23 steps"),
    (without("config.json"), "corrupt: config.json is missing"),
    (without("metrics.jsonl"), "corrupt: metrics.jsonl cannot be read"),
    (file("metrics.jsonl", ""), "corrupt: metrics.jsonl is empty"),
    (file("metrics.jsonl", b"\xff\xfe"), "line 1 of metrics.jsonl cannot be read"),
    (file("metrics.jsonl", '{"step": 24, "lo', mode="a"), "line 4 of metrics.jsonl cannot be read"),
    (metrics('"sent_bytes": ', '"sent_bytes": NaN, "x": '), "line 1 of metrics.jsonl cannot be"),
    (metrics('"wait_s": ', '"wait_s": true, "x": '), "line 1 of metrics.jsonl cannot be read"),
    (metrics("anchor_bytes", "bytes"), "the last record has anchor_bytes missing"),
    (metrics('live_weights_bytes": 8', 'live_weights_bytes": 0'), "has live_weights_bytes 0"),
    (file("config.json", '{"hidden_size": 64}'), "config.json is not that of a run of thinwire"),
    (config(method=3), "config.json has method 3"),
    (config(method__name=3), "config.json cannot be used: Expected `str`, got `int` - at `$.met"),
    (config(seed=True), "config.json cannot be used: Expected `int`, got `bool` - at `$.seed`"),
    (file("summary.json", "[]"), "summary.json cannot be read: Expected `object`, got `array`"),
    (summary(val_loss=math.nan), "summary.json cannot be read"),
    (summary(val_loss=-1.0), "Expected `float` >= 0.0 - at `$.val_loss`"),
    (summary(wall_s=None), "summary.json cannot be used: Object missing required field `wall_s`"),
    (summary(workers=0), "summary.json cannot be used: Expected `int` >= 1 - at `$.workers`"),
    (summary(steps=7), "the last record has step 23, and summary.json 7"),
    (summary(tokens=9), "the last record has tokens 2944, and summary.json 9"),
    (summary(val_loss=1.0), "the last record has val_loss 2.0"),
    (summary(sent_bytes_per_worker=1), "the last record has sent_bytes"),
    (summary(contributions={"a": {"outlier": -1}}), "summary.json cannot be used: Expected `int`"),
    (file("data.json", "{}"), "data.json has fingerprint missing"),
    (disorder, "step 7 after 20"),
]


@pytest.mark.parametrize(("spoil", "reason"), DAMAGE, ids=[reason for _, reason in DAMAGE])
def test_a_damaged_folder_says_what_is_wrong_with_it(tmp_path, spoil, reason: str) -> None:
    folder = write_run(tmp_path / "run", config_of("diloco"))
    assert read_run(folder).run is not None
    spoil(folder)
    (left,) = left_out(tmp_path)
    assert reason in left
