"""Digests, bytes, files and names of earlier versions, which may not change.

The numbers are in `frozen/`. A failure means that old runs do not resume as they were, or that two
versions cannot train together.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import frozen_runs as runs
import thinwire as tw
from elastic_twin import ElasticHub
from thinwire.cli import main
from thinwire.elastic.snapshot import unpack
from thinwire.method import migrate_names

FROZEN = json.loads((runs.FOLDER / "digests.json").read_text())


@pytest.mark.parametrize("name", runs.METHODS)
def test_a_run_ends_with_the_digest_and_bytes_it_had(name: str) -> None:
    assert runs.finished(runs.build(name)) == FROZEN[name]


@pytest.mark.parametrize("heal", ["records", "snapshot"])
@pytest.mark.parametrize("name", runs.ELASTIC)
def test_workers_that_come_and_go_end_with_the_digest_they_had(name: str, heal: str) -> None:
    assert runs.elastic(name, heal) == FROZEN[name]


@pytest.mark.parametrize("name", runs.IN_FLIGHT)
def test_a_run_resumed_in_mid_flight_ends_with_the_digest_it_had(name: str) -> None:
    states = runs.build(name).train(runs.STOP).states()
    flights = [f for _, outer in states for part in outer["fragments"] for f in part["in_flight"]]
    assert any(int(flight["round"]) for flight in flights), "nothing is in flight: the test is void"
    assert runs.finished(runs.build(name).load(states, runs.STOP)) == FROZEN[name]


@pytest.mark.parametrize("version", [".", "0.2"])
@pytest.mark.parametrize("name", runs.FILES)
def test_a_committed_state_goes_on_to_the_digest_it_had(name: str, version: str) -> None:
    states = torch.load(runs.FOLDER / version / runs.FILES[name], weights_only=True)
    assert runs.finished(runs.small(name).load(states, runs.STOP)) == FROZEN[runs.FILES[name]]


def test_a_committed_snapshot_is_taken_over() -> None:
    (player,) = runs.team(ElasticHub(), runs.HEALED, 1, rows=23)
    snapshot = unpack(bytearray((runs.FOLDER / "snapshot.bin").read_bytes()))
    player.state.load(snapshot)
    assert player.loop.digest() == FROZEN["snapshot.bin"]
    assert player.loop.stats.rounds == 2


@pytest.mark.parametrize("name", runs.DEMO)
def test_a_method_describes_itself_as_it_did(name: str) -> None:
    frozen = migrate_names(json.loads((runs.FOLDER / "methods.json").read_text())[name])
    if "sparse" in name:
        # On purpose: the presets follow SparseLoCo's released code since.
        frozen["aggregate"] = {"kind": "MeanOverSenders"}
    if "sparseloco" in name:
        frozen["inner"]["betas"] = [0.9, 0.95]
    assert json.loads(json.dumps(tw.presets.from_text(name).describe())) == frozen


STREAMING = "streaming_diloco-tau-2-seed0"
TRAIN = ["train", "--resume", "--method", "streaming_diloco:tau=2", "--out", f"out/{STREAMING}"]
COMMANDS = {"train": TRAIN + runs.COMPARE[7:], "compare": runs.COMPARE}


@pytest.fixture(params=["compare", "0.2/compare"])
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A copy of committed runs: one that is finished, and one stopped after step 7."""
    shutil.copytree(runs.FOLDER / request.param, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_committed_run_goes_on_from_its_checkpoint(folder: Path, command: str, capsys) -> None:
    run = folder / STREAMING
    before = (run / "metrics.jsonl").read_text().splitlines()
    assert (len(before), (run / "summary.json").exists()) == (7, False)
    assert main(COMMANDS[command]) == 0
    assert ("continues from step 5" in capsys.readouterr().out) == (command == "train")
    after = (run / "metrics.jsonl").read_text().splitlines()
    assert after[:5] == before[:5]
    # Matrices are multiplied from here on: the last bits are those of the machine.
    losses, more = ([json.loads(line)["loss"] for line in lines] for lines in (before, after))
    assert (more[:7], len(more)) == (pytest.approx(losses, abs=2e-4), 12)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["val_loss"] == pytest.approx(5.4987, abs=1e-3)
    assert (summary["steps"], summary["sent_bytes_per_worker"]) == (12, 2154)
    assert json.loads(after[-1])["rounds"] == 6, "what was in flight was lost"


def test_committed_runs_are_compared_and_shown_in_a_report(folder: Path, capsys) -> None:
    finished = (folder / "ddp-seed0" / "summary.json").read_text()
    assert main(runs.COMPARE) == 0
    assert "left out" not in capsys.readouterr().out
    assert (folder / "ddp-seed0" / "summary.json").read_text() == finished, "it was run again"
    rows = json.loads((folder / "statistics.json").read_text())["rows"]
    losses = {name: row["val_loss"]["mean"] for name, row in rows.items()}
    frozen = {"ddp": json.loads(finished)["val_loss"], "streaming_diloco:tau=2": 5.4987}
    assert losses == pytest.approx(frozen, abs=1e-3)
    assert main(["report", "out"]) == 0
    assert "2 methods, 2 runs" in capsys.readouterr().out
