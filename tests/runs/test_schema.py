"""A run folder of version 0.1 still reads, and under the names that its classes have today."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from run_folders import change, config_of, write_run
from thinwire.errors import CheckpointError, MismatchError
from thinwire.method import RENAMED_SLOTS, Method, with_present_names
from thinwire.runs.folder import RunFolder
from thinwire.runs.schema import identity_fields, read_finished, read_object
from thinwire.runs.status import RunState, read_run, status_of
from thinwire.runs.variants import variants_of

OLD = Path(__file__).parents[1] / "golden" / "run-folder"


def test_a_committed_run_folder_reads_as_what_it_was() -> None:
    run = read_run(OLD).run
    assert run is not None
    config, summary = run.config, run.summary
    assert (config.method, config.sync_every, config.workers) == ("streaming_diloco", 10, 2)
    assert (config.steps, config.tokens_per_step, config.threads, config.seed) == (20, 2048, 1, 0)
    assert (config.model_size, config.corpus, config.tokenizer) == (
        "250k",
        "python-stdlib",
        "bytes",
    )
    assert (summary.tokens, summary.sent_bytes_per_worker, summary.workers_here) == (
        40_960,
        247_236,
        2,
    )
    assert summary.val_loss == run.records[-1].val_loss == 3.178047518375024
    assert not summary.is_elastic
    assert [record.step for record in run.records] == [5, 10, 15, 20]
    assert [record.rounds for record in run.records] == [0, 0, 3, 10]
    assert sum(run.memory_bytes.values()) / run.memory_bytes["live_weights"] == pytest.approx(
        5, rel=1e-3
    )
    assert Method.from_dict(config.described["method"]).sync_every == 10


def test_what_makes_a_run_another_one_has_not_changed() -> None:
    described = json.loads((OLD / "config.json").read_text())
    fields = identity_fields(described)
    assert "machine.simulation" not in fields  # it was "threads", as all runs are today
    described["machine"]["simulation"] = "stacked"
    assert identity_fields(described) == fields | {"machine.simulation": "stacked"}
    fields["machine.simulation"] = "threads"
    kept = {name: value for name, value in fields.items() if not name.endswith("kind")}
    text = json.dumps(kept, sort_keys=True)
    assert (
        hashlib.sha256(text.encode()).hexdigest()
        == "c3f0d014a07b3ec525688114291a6f1eed489309e1a769b8031f6ae37fb61485"
    )
    del fields["machine.simulation"]
    assert identity_fields(fields) == fields  # as a checkpoint holds them


def test_a_class_that_was_renamed_makes_no_other_run(tmp_path, monkeypatch) -> None:
    config = config_of("diloco")
    folder = write_run(tmp_path / "old", config)
    write_run(tmp_path / "new", config_of("diloco", seed=1))
    change(folder / "config.json", method__outer__kind="NesterovOfOld")

    def variants() -> int:
        return len(variants_of([run for name in ("old", "new") if (run := run_in(name))]))

    def run_in(name: str):
        return read_run(tmp_path / name).run

    assert status_of(folder, config.describe()).state is RunState.MISMATCH
    assert variants() == 2
    with pytest.raises(MismatchError, match="NesterovOfOld"):
        RunFolder(folder).check_same(config.describe())
    monkeypatch.setitem(RENAMED_SLOTS, "NesterovOfOld", "SGD")
    assert status_of(folder, config.describe()).state is RunState.FINISHED
    assert variants() == 1
    RunFolder(folder).check_same(config.describe())
    assert identity_fields({"method.outer.kind": "NesterovOfOld"}) == {"method.outer.kind": "SGD"}


def test_only_kinds_are_renamed(monkeypatch) -> None:
    monkeypatch.setitem(RENAMED_SLOTS, "old", "new")
    description = {"name": "old", "kind": "old", "parts": [{"kind": "old", "kinds": "old"}]}
    assert with_present_names(description) == {
        "name": "old",
        "kind": "new",
        "parts": [{"kind": "new", "kinds": "old"}],
    }


def test_a_damaged_folder_is_refused_when_a_run_is_resumed(tmp_path) -> None:
    shutil.copytree(OLD, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(Exception, match=r"cannot read .*config\.json; because .*; do: restore"):
        RunFolder(tmp_path / "run").workers()


def test_a_run_that_noted_what_runs_no_longer_note_reads(tmp_path) -> None:
    noted = {"cosine/0": 1.0, "pseudo_gradient_norm/12": 2.0, "x": 3.0}
    assert read_run(write_run(tmp_path / "run", config_of("diloco"), **noted)).run is not None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a":' * 5000 + "1" + "}" * 5000, "cannot be read"),
        ('{"a":' * 200 + "1" + "}" * 200, "cannot be read"),
        ('{"name": "\\ud800"}', "cannot be read"),
    ],
    ids=["too deep to be parsed", "deep", "half a character"],
)
def test_what_no_run_writes_is_refused(tmp_path, text: str, why: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=why):
        read_object(tmp_path / "config.json")


def test_counts_of_contributions_are_read_by_member_whatever_its_name(tmp_path) -> None:
    told = {"a.b@host": {"outlier": 2, "clipped": 1}, "": {}}
    folder = write_run(tmp_path / "run", config_of("diloco"))
    assert read_finished(folder).summary.contributions == {}  # as in earlier versions
    change(folder / "summary.json", contributions=told)
    assert read_finished(folder).summary.contributions == told
