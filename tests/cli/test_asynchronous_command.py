"""`thinwire serve` and `thinwire join --asynchronous`: an asynchronous run by processes."""

import json
from pathlib import Path

import pytest

import thinwire as tw
from forked import Forked
from processes import until
from thinwire.cli import main
from thinwire.runs.status import RunState, read_run
from thinwire.train.asynchronous import without_rounds
from thinwire.train.config import TrainConfig
from training import Team, corpus, records, summary, tiny

__all__ = ["corpus", "tiny"]

TOKEN = "a token for the tests"


class AsyncTeam(Team):
    """Server and workers of one run over a folder."""

    def __init__(self, folder: Path, config: TrainConfig, workers: int) -> None:
        self.count, self.out = workers, folder / "out"
        own = ("--workers", str(workers), "--sync-every", "3", "--log-steps", "2")
        super().__init__(folder, config, f"file://{folder}/store/a", *own, THINWIRE_TOKEN=TOKEN)

    def serve(self) -> Forked:
        return self.start("out", command="serve")

    def work(self, number: int, *more: str) -> Forked:
        name = f"worker-{number}{more}"
        return self.start(name, "--asynchronous", *more, worker=number, workers=self.count)

    def step(self) -> int:
        file = self.out / "metrics.jsonl"
        whole = file.read_text().split("\n")[:-1] if file.exists() else []
        return json.loads(whole[-1])["step"] if whole else 0


def finished(*processes: Forked) -> list[str]:
    outputs = []
    for process in processes:
        told, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
        outputs.append(told)
    return outputs


@pytest.mark.slow
def test_a_run_is_served_shown_and_reported_and_another_one_is_refused(
    tiny, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("THINWIRE_TOKEN", TOKEN)
    with AsyncTeam(tmp_path, tiny(), workers=2) as team:
        server = team.serve()
        for other, why in (
            (team.work(0, "--inner-lr", "0.1"), "inner.lr differs"),
            (team.work(0, "--seed", "3"), "seed differs"),
            (team.work(7), "worker 7 is none of 2"),
        ):
            _, errors = other.communicate(timeout=60)
            assert other.returncode == 1
            assert why in errors
        told, *of_workers = finished(server, team.work(0), team.work(1))
        assert all("the run is finished" in text for text in of_workers)
        again = finished(team.serve())
    found = summary(team.out)
    assert f"validation loss {found['val_loss']:.4f} after 768 tokens" in told
    assert told.endswith(again[0])
    assert found["asynchronous"]["steps_done"] == 24
    assert read_run(team.out).state is RunState.FINISHED
    assert [r["step"] for r in records(team.out) if "val_loss" in r][-1] == 12
    assert found["sent_bytes_per_worker"] == found["asynchronous"]["received_bytes"] // 2
    assert (team.out / "model" / "model.safetensors").exists()
    assert main(["status", team.address, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["run"]["version"] == found["asynchronous"]["arrivals"] >= 8
    steps = [worker["position"]["step"] for worker in status["workers"]]
    assert steps == [found["asynchronous"]["steps_of"][k] for k in ("0", "1")]
    assert main(["status", team.address]) == 0
    page = capsys.readouterr().out
    assert "asynchronous, written" in page
    assert "worker 1" in page


@pytest.mark.slow
def test_a_server_and_a_worker_that_are_killed_go_on_bit_for_bit(tiny, tmp_path) -> None:
    """One worker, whose order of arrivals no clock decides: the digest is that without a death."""
    ends = []
    for name, kills in ("whole", ()), ("killed", (6, 12, 20)):
        (folder := tmp_path / name).mkdir()
        with AsyncTeam(folder, tiny("muloco:bits=2", steps=30), workers=1) as team:
            server, worker = team.serve(), team.work(0)
            for step in kills:
                until(lambda step=step: team.step() >= step)
                worker.kill()
                if step > 6:
                    server.kill()
                    server = team.serve()
                worker = team.work(0)
            finished(server, worker)
        found = summary(team.out)
        assert found["asynchronous"]["refused"] == {}
        ends.append((found["outer_digest"], found["val_loss"], found["asynchronous"]["arrivals"]))
    assert ends[0] == ends[1]


def test_a_method_in_rounds_becomes_one_for_arrivals_if_its_outer_optimizer_can() -> None:
    found = without_rounds(tw.presets.muloco(bits=2), 16)
    assert found.outer == tw.outer.DelayedNesterov(lr=1, momentum=0.9, every=16)
    assert found.codec == tw.presets.muloco(bits=2).codec
    plain = without_rounds(tw.presets.sparseloco(), 3)
    assert plain.outer == tw.outer.DelayedNesterov(lr=1.0, momentum=0.0, every=3)
    assert without_rounds(found, 4) == found
    for method in (
        tw.presets.ddp(),
        tw.presets.diloco(outer=tw.outer.AdamW()),
        tw.presets.diloco(outer=tw.outer.SGD(lr=0.7, momentum=0.9)),
    ):
        with pytest.raises(tw.ConfigurationError, match="arrive one by one"):
            without_rounds(method, 4)
