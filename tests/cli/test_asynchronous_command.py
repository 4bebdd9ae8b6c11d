"""`thinwire serve` and `thinwire join --asynchronous`: an asynchronous run by processes."""

import json
import os
from pathlib import Path

import pytest

import thinwire as tw
from forked import Forked
from processes import until
from thinwire.runs.status import RunState, read_run
from thinwire.train.asynchronous import without_rounds
from training import corpus, records, summary, tiny

__all__ = ["corpus", "tiny"]


def command(*arguments: str) -> Forked:
    told = {
        "THINWIRE_TOKEN": "a token for the tests",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Forked(["-m", "thinwire", *arguments], os.environ | told)


class Team:
    """Server and workers of one run over a folder."""

    def __init__(self, folder: Path, model: str, corpus: Path, *more: str, workers: int) -> None:
        self.at, self.out, self.folder = f"file://{folder}/store/a", folder / "out", folder
        self.workers = workers
        self.flags = (
            *("--steps", "12", "--sync-every", "3"),
            *("--model", model, "--corpus", str(corpus), "--sequence-length", "16"),
            *("--global-batch", "4", "--device", "cpu", "--threads", "1"),
            *("--log-steps", "2", "--evaluate-steps", "6", *more),
        )
        self.started: list[Forked] = []

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            process.kill()

    def start(self, *arguments: str) -> Forked:
        self.started.append(command(*arguments))
        return self.started[-1]

    def serve(self) -> Forked:
        own = ("--workers", str(self.workers), "--out", str(self.out))
        return self.start("serve", self.at, *own, *self.flags)

    def work(self, number: int, *more: str) -> Forked:
        at = f"{self.at}?workers={self.workers}&worker={number}"
        own = ("--asynchronous", "--out", str(self.folder / f"worker-{number}{more}"))
        return self.start("join", at, *own, *self.flags, *more)

    def step(self) -> int:
        file = self.out / "metrics.jsonl"
        whole = file.read_text().split("\n")[:-1] if file.exists() else []
        return json.loads(whole[-1])["step"] if whole else 0

    def status(self) -> dict:
        told, errors = self.start("status", self.at, "--json").communicate(timeout=60)
        assert told, errors
        return json.loads(told)


def finished(*processes: Forked) -> list[str]:
    outputs = []
    for process in processes:
        told, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
        outputs.append(told)
    return outputs


@pytest.mark.slow
def test_a_run_is_served_shown_and_reported_and_another_one_is_refused(
    tiny, corpus, tmp_path
) -> None:
    with Team(tmp_path, tiny().model.size, corpus, workers=2) as team:
        server = team.serve()
        others = [team.work(0, "--inner-lr", "0.1"), team.work(0, "--seed", "3"), team.work(7)]
        for other, why in zip(
            others, ("inner.lr differs", "seed differs", "worker 7 is none of 2"), strict=True
        ):
            _, errors = other.communicate(timeout=60)
            assert other.returncode == 1
            assert why in errors
        told, *of_workers = finished(server, team.work(0), team.work(1))
        assert all("the run is finished" in text for text in of_workers)
        status = team.status()
        page = team.start("status", team.at).communicate(timeout=60)[0]
        again = finished(team.serve())
    found, numbers = summary(team.out), records(team.out)
    assert f"validation loss {found['val_loss']:.4f} after 768 tokens" in told
    assert told.endswith(again[0])
    assert found["asynchronous"]["steps_done"] == 24
    assert read_run(team.out).state is RunState.FINISHED
    assert numbers[-1]["step"] == 12
    assert [r["step"] for r in numbers if "val_loss" in r][-1] == 12
    assert found["sent_bytes_per_worker"] == found["asynchronous"]["received_bytes"] // 2
    assert status["run"]["version"] == found["asynchronous"]["arrivals"] >= 8
    assert [w["position"]["step"] for w in status["workers"]] == [
        found["asynchronous"]["steps_of"][k] for k in ("0", "1")
    ]
    assert "asynchronous, written" in page
    assert "worker 1" in page
    assert (team.out / "model" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["diloco", "muloco:bits=2"])
def test_a_server_and_a_worker_that_are_killed_go_on_bit_for_bit(
    tiny, corpus, tmp_path, method
) -> None:
    """One worker, whose order of arrivals no clock decides: the digest is that without a death."""
    digests = []
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        more = ("--method", method, "--steps", "30")
        with Team(folder, tiny().model.size, corpus, *more, workers=1) as team:
            server, worker = team.serve(), team.work(0)
            if name == "killed":
                for step in (6, 12, 20):
                    until(lambda step=step: team.step() >= step)
                    worker.kill()
                    if step > 6:
                        server.kill()
                        server = team.serve()
                    worker = team.work(0)
            finished(server, worker)
        found = summary(team.out)
        assert found["asynchronous"]["refused"] == {}
        digests.append(
            (found["outer_digest"], found["val_loss"], found["asynchronous"]["arrivals"])
        )
    assert digests[0] == digests[1]


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
