"""Training by workers that come and go, checkpoints across worlds, and folders that stay whole.

A fake plays the network: a world of one whose rounds begin as a script says.
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import os
import resource
import shutil
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import thinwire as tw
from elastic_twin import ElasticHub, HubTransport
from thinwire.address import Address
from thinwire.elastic.events import EventLog
from thinwire.handshake import check_same
from thinwire.membership import Phase, RoundPlan
from thinwire.runs.folder import RunFolder
from thinwire.train import launch
from thinwire.train.checkpoints import Checkpoints, locked
from thinwire.train.data.batches import Windows
from thinwire.train.launch import ElasticConfig
from thinwire.train.observers import Observer
from thinwire.train.trainer import resume, train
from thinwire.train.workers import group
from toy import feedback_of
from training import records, run_ranked, stop_after

ELASTIC = ElasticConfig(at=Address("memory://", "r"), identity="me")
EVERY = 5  # H of `make`


class FakeElastic(HubTransport):
    """A world of one, whose rounds begin as `says` has it."""

    made: ClassVar[list["FakeElastic"]] = []

    def __init__(self, store, *, run, token, identity, options, keep, **numbers) -> None:
        assert (store, run, token) == ("memory://", "r", None)
        assert numbers.pop("cache").name == "snapshot"
        assert numbers == {"workers": None, "worker": None, "group": None}
        super().__init__(ElasticHub(), identity)
        self.identity, self.options = identity, options
        self.events, self.closed, self.cards, self.left = EventLog(), 0, [], 0
        self.made.append(self)

    @staticmethod
    def says(step, phase) -> dict:
        """Fields of the plan that differ from a lone worker's."""
        return {}

    def announce(self, card, tag):
        self.cards.append(json.loads(card))
        return {0: card}

    def join(self, state) -> None:
        super().join(state)
        self.events.note("joined", round=0, who=(self.identity,))

    def begin_round(self, phase):
        now = self.state.progress()
        own = {"names": (self.identity,), "dealt": now.step // EVERY, **self.says(now.step, phase)}
        fields = {"phase": phase, "changed": False, "joins": False, "step": now.step}
        yield RoundPlan(**fields | own)

    def leave_when(self, asked) -> None:
        self.asked = asked

    def log_round(self, record) -> None:
        self.events.note("committed", round=record.version)

    def leave(self) -> None:
        self.left += 1

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def scripted(monkeypatch):
    """Changes how rounds begin: takes a function of (step, phase) that returns fields."""
    return lambda fields: monkeypatch.setattr(FakeElastic, "says", staticmethod(fields))


@pytest.fixture
def elastic(monkeypatch):
    """Plays an elastic network; returns what was connected."""
    for module in (launch, group):
        monkeypatch.setattr(module, "Elastic", FakeElastic)
    monkeypatch.setattr(FakeElastic, "made", [])
    return FakeElastic.made


@pytest.fixture
def make(tiny):
    """One of two workers, H = 5."""
    return functools.partial(tiny, steps=20)


def test_an_elastic_worker_leaves_what_a_run_leaves_and_its_events(make, tmp_path, elastic) -> None:
    out = tmp_path / "run"
    summary = train(make(), out, elastic=ELASTIC)
    assert summary == json.loads((out / "summary.json").read_text())
    assert summary["events"]["counts"] == {"joined": 1, "committed": 4}
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["joined", *["committed"] * 4]
    # global_batch / workers sequences a step, whoever is there, and only those it read itself
    tokens = 20 * (4 // 2) * 16
    assert (summary["steps"], summary["workers"], summary["tokens"]) == (20, 1, tokens)
    last = records(out)[-1]
    assert {record["workers"] for record in records(out)} == {1}
    assert last["tokens"] == tokens
    assert [(transport.closed, transport.left) for transport in elastic] == [(1, 1)]
    assert not (out / "lock").exists()
    # What it records is what others may see.
    metrics = elastic[0].metrics.describe()
    assert set(metrics) == {"loss", "tokens_per_s", "sent_bytes", "received_bytes", "wait_s"}
    assert all(metrics[name] == last[name] for name in set(metrics) - {"wait_s"})


def test_steps_that_the_run_went_on_without_are_trained_again(
    make, tmp_path, elastic, scripted
) -> None:
    left = [True]

    def put_back_once(step, phase) -> dict:
        is_first_end = phase is Phase.LAST and left and left.pop()
        return {"phase": Phase.ROUND, "step": 15, "changed": True} if is_first_end else {}

    scripted(put_back_once)
    summary = train(make(steps=18), tmp_path / "run", elastic=ELASTIC)
    assert not left
    assert summary["steps"] == 18
    assert summary["tokens"] == (18 + 3) * (4 // 2) * 16
    assert summary["events"]["counts"]["committed"] == 5


def test_it_reads_the_shares_that_it_is_dealt(
    make, tmp_path, elastic, scripted, monkeypatch
) -> None:
    read, original = [], Windows.samples

    def samples(self, start, count, seed):
        read.append((start, count))
        return original(self, start, count, seed)

    monkeypatch.setattr(Windows, "samples", samples)
    scripted(lambda step, _: {"dealt": 7 + 2 * (step // 5)})
    train(make(steps=7), tmp_path / "run", elastic=ELASTIC)
    # Two rows a step: shares 7 and 9 begin with samples 70 and 90. The first asks for none.
    assert read[1:] == [(start, 2) for start in (70, 72, 74, 76, 78, 90, 92)]


def test_it_says_who_it_is_and_what_it_trains(make, tmp_path, elastic) -> None:
    membership = ElasticConfig(at=Address("memory://", "r"), patience=0.25, min_workers=2)
    train(make(steps=5), tmp_path / "run-a", elastic=membership)
    (transport,) = elastic
    assert transport.identity.startswith("run-a@")
    assert transport.options == tw.transport.ElasticOptions(patience=0.25, min_workers=2)
    card = transport.cards[0]
    assert {"steps", "seed", "corpus", "global_batch", "workers"} <= card.keys()
    assert not [f for f in card if f.startswith(("machine", "periods"))]
    # A file of one name may say something else on another machine.
    assert card["model.configuration.hidden_size"] == "16"


def test_one_that_is_asked_to_stop_in_a_round_saves_leaves_and_goes_on(make, tmp_path, elastic):
    class Asks(Observer):
        def record(self, record) -> None:
            asked.extend([15] * (record["step"] >= 6))

    asked, out = [], tmp_path / "run"
    stop = contextlib.nullcontext(asked)
    with pytest.raises(tw.errors.RunStopped, match="after inner step 6 with a checkpoint"):
        train(make(), out, lambda *_: [Asks()], elastic=ELASTIC, stop=stop)
    assert (elastic[0].left, elastic[0].closed) == (1, 1)
    assert Checkpoints(out / "checkpoints", worker=0, ranks=1, keep=2).steps() == [5, 6]
    summary = resume(make(), out, elastic=ELASTIC)
    assert (summary["steps"], summary["tokens"]) == (20, 20 * (4 // 2) * 16)


@pytest.mark.parametrize("kind", [tw.ExchangeError, tw.errors.RunStopped])
def test_a_wait_that_ends_once_a_stop_was_asked_for_ends_as_a_stop(
    make, tmp_path, elastic, scripted, kind
) -> None:
    asked: list[int] = []

    def fail(step, _) -> dict:
        if step < 15:
            return {}
        asked.append(15)
        assert elastic[-1].asked()
        raise kind("reach the store", because="it is gone", do="start it")

    out = tmp_path / "run"
    scripted(fail)
    with pytest.raises(tw.errors.RunStopped, match="after inner step 15 with a checkpoint"):
        train(make(), out, elastic=ELASTIC, stop=contextlib.nullcontext(asked))
    assert Checkpoints(out / "checkpoints", worker=0, ranks=1, keep=9).steps()[-1] == 15


def test_ranks_that_lose_each_other_once_a_stop_was_asked_for_write_nothing(
    make, tmp_path, monkeypatch
) -> None:
    """They have no step in common."""
    asked: list[int] = []

    def lose(_) -> None:
        asked.append(15)
        raise tw.ExchangeError("exchange", because="a peer is gone", do="restart")

    out = tmp_path / "run"
    monkeypatch.setattr("thinwire.train.trainer._Trainer._one_step", lose)
    with pytest.raises(tw.errors.RunStopped, match=r"waited for the others: a peer is gone.*now"):
        train(make(), out, stop=contextlib.nullcontext(asked))
    assert not list((out / "checkpoints").glob("*"))


def test_the_schedule_of_a_worker_that_is_healed_jumps(make, tmp_path, elastic, scripted):
    scripted(lambda step, _: {"step": 15} if step == 5 else {})
    out = tmp_path / "run"
    summary = train(make(), out, elastic=ELASTIC)
    assert [record["step"] for record in records(out)] == [3, 15, 18, 20]
    assert summary["tokens"] == 10 * 2 * 16
    config, lrs = make(), {r["step"]: r["lr"] for r in records(out)}
    for step in (15, 18):
        assert lrs[step] == config.method.inner.lr * config.schedule.factor(step, steps=20)
    # of what the jump passed over, the last evaluation and checkpoint are made up for
    assert [r["step"] for r in records(out) if "val_loss" in r] == [15, 18, 20]
    assert Checkpoints(out / "checkpoints", worker=0, ranks=1, keep=2).steps() == [15]


def test_a_newcomer_may_find_that_the_run_is_over(make, tmp_path, elastic, scripted) -> None:
    scripted(lambda step, _: {"step": 20, "phase": Phase.DONE, "changed": True})
    summary = train(make(), tmp_path / "run", elastic=ELASTIC)
    assert summary["tokens"] == 0
    assert summary["steps"] == 20
    assert np.isfinite(summary["val_loss"])
    assert (tmp_path / "run" / "model").is_dir()


def aggregate_of(out: Path) -> dict:
    return json.loads((out / "config.json").read_text())["method"]["aggregate"]


def dropping(config, limit: float):
    """`config` with a limit of its user's choice."""
    aggregate = tw.DropOutliers(limit=limit, aggregate=config.method.aggregate)
    method = dataclasses.replace(config.method, aggregate=aggregate)
    return dataclasses.replace(config, method=method)


def test_a_run_that_began_without_a_limit_goes_on_without_it(
    make, tmp_path, elastic, monkeypatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(launch, "_drops_outliers", lambda _: True)
        stop_after(make(), out, monkeypatch, 13, elastic=ELASTIC)
    assert resume(make(), out, elastic=ELASTIC)["steps"] == 20
    assert aggregate_of(out) == {"kind": "MeanOverWorkers"}
    assert {c["method.aggregate.kind"] for t in elastic for c in t.cards[:1]} == {"MeanOverWorkers"}
    with pytest.raises(tw.MismatchError, match="aggregate"):
        resume(dropping(make(), 10.0), out, elastic=ELASTIC)


def test_a_limit_that_was_chosen_is_kept_and_another_one_refused(make, tmp_path, elastic) -> None:
    plain, out = make("sparseloco", steps=5), tmp_path / "a"
    inner = tw.method.describe(plain.method.aggregate)
    train(plain, out, elastic=ELASTIC)
    resume(dropping(plain, 3.0), tmp_path / "b", elastic=ELASTIC)
    for name, limit in (("a", 10.0), ("b", 3.0)):
        expected = {"kind": "DropOutliers", "limit": limit, "aggregate": inner}
        assert aggregate_of(tmp_path / name) == expected
    # A finished run is found by thinwire train, too, which sets no limit of itself.
    assert resume(plain, out)["steps"] == 5
    train(make(steps=5), tmp_path / "fixed")
    assert aggregate_of(tmp_path / "fixed")["kind"] == "MeanOverWorkers"
    first, other = ({k: v for card in t.cards for k, v in card.items()} for t in elastic)
    with pytest.raises(tw.MismatchError, match=r"aggregate\.limit.*3\.0"):
        check_same(first, other, cannot="take part", whose="the run", do="start alike")


def test_a_worker_resumes_at_a_round_boundary_as_if_it_had_not_been_stopped(
    make, tmp_path, elastic, monkeypatch
) -> None:
    undisturbed = train(make("sparseloco"), tmp_path / "a", elastic=ELASTIC)
    out = tmp_path / "run"
    stop_after(make("sparseloco"), out, monkeypatch, 13, elastic=ELASTIC)
    files = Checkpoints(out / "checkpoints", worker=0, ranks=1, keep=9)
    assert files.steps() == [5, 10]  # periods of 4 steps, rounds of 5
    # As version 0.2 wrote it.
    ten_steps = stop_after(make("sparseloco"), tmp_path / "old", monkeypatch, 10, elastic=ELASTIC)
    (worker,) = ten_steps.workers
    old = Checkpoints(tmp_path / "old" / "checkpoints", worker=0, ranks=1, keep=9)
    state, snapshot = old.load(10)[0], worker.outer._state.capture()
    own = {name: state["worker"][name] for name in ("model", "optimizer", "random", "steps_taken")}
    own["feedback"] = feedback_of(worker.outer)
    shared = {"facts": dict(snapshot.facts), "tensors": dict(snapshot.tensors)}
    old.save(10, {"run": state["run"], "shared": shared, "own": own})
    for folder in (out, tmp_path / "old"):
        summary = resume(make("sparseloco"), folder, elastic=ELASTIC)
        assert summary["outer_digest"] == undisturbed["outer_digest"]
        assert summary["tokens"] == undisturbed["tokens"]
    assert [t.closed for t in elastic] == [1] * 5


@pytest.mark.parametrize(
    ("kind", "at_step", "told"),
    [
        (tw.ExchangeError, 15, "--resume --out .*run$"),
        (tw.MismatchError, 15, "--resume --out .*run$"),
        (tw.ExchangeError, 0, "do: start it$"),
        (tw.ExchangeError, None, "do: start it$"),
    ],
)
def test_a_store_that_is_gone_leaves_a_checkpoint_or_no_run_in_the_way(
    make, tmp_path, elastic, monkeypatch, kind, at_step: int | None, told: str
) -> None:
    out = tmp_path / "run"

    def fail(step, *_) -> dict:
        if at_step in (None, step):
            raise kind("reach the store", because="it is gone", do="start it")
        return {}

    with monkeypatch.context() as patch:
        if at_step is None:
            patch.setattr(FakeElastic, "join", fail)
        patch.setattr(FakeElastic, "says", staticmethod(fail))
        with pytest.raises(kind, match=f"it is gone.*{told}"):
            train(make(), out, elastic=ELASTIC)
    assert elastic[-1].closed == 1
    saved = Checkpoints(out / "checkpoints", worker=0, ranks=1, keep=9).steps()[-1:]
    assert saved == ([15] if at_step else [])
    begin = resume if at_step else train
    assert begin(make(), out, elastic=ELASTIC)["steps"] == 20


def test_a_full_disk_does_not_end_an_elastic_run(make, tmp_path, elastic, monkeypatch) -> None:
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    def no_record(self, record, name="metrics.jsonl") -> None:
        raise tw.CheckpointError("write", because="No space left", do="free some")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(tw.errors.RunStopped, match="no checkpoint, which could not be written"):
        train(make(), tmp_path / "stopped", elastic=ELASTIC, stop=contextlib.nullcontext([15]))
    monkeypatch.setattr(RunFolder, "append", no_record)
    summary = train(make(), tmp_path / "run", elastic=ELASTIC)
    assert summary["steps"] == 20
    unsaved = [event for event in elastic[-1].events.events if event.kind == "unsaved"]
    # Three checkpoints and seven records.
    assert len(unsaved) == summary["events"]["counts"]["unsaved"] == 3 + 7
    assert all("No space left" in event.why for event in unsaved)


def test_an_elastic_run_takes_the_checkpoint_of_a_fixed_one_and_not_the_reverse(
    make, tmp_path, elastic, monkeypatch
) -> None:
    stop_after(make(), tmp_path / "e", monkeypatch, 7, elastic=ELASTIC)
    with pytest.raises(tw.MismatchError, match="workers differs"):  # the size of a share
        resume(make(workers=4), tmp_path / "e", elastic=ELASTIC)
    with pytest.raises(tw.CheckpointError, match="thinwire join its address"):
        resume(make(), tmp_path / "e")
    stop_after(make(), tmp_path / "s", monkeypatch, 7)
    summary = resume(make(), tmp_path / "s", elastic=ELASTIC)
    # Two workers had taken 4 steps of the first round; of the others it reads its own share.
    assert (summary["steps"], summary["events"]["counts"]["committed"]) == (20, 4)


METHODS = ["ddp", "diloco", "muloco:bits=2", "sparseloco", "streaming_diloco:tau=3"]


@pytest.mark.slow_cases("ddp", "muloco:bits=2", "sparseloco-1")
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_goes_on_with_another_number_of_workers(
    make, tmp_path, monkeypatch, caplog, method: str, workers: int
) -> None:
    out = tmp_path / "run"
    stop_after(make(method), out, monkeypatch, 9)
    files = [out / "checkpoints" / f"step-00000008.worker-{k}.pt" for k in range(2)]
    saved = [torch.load(file, weights_only=True)["worker"] for file in files]
    group = stop_after(make(method, workers=workers), out, monkeypatch, None)
    assert "was left with K=2 and goes on with K=" in caplog.text
    assert group.step == 8
    anchors = [f["outer"].get("anchor") for f in saved[0]["outer"]["fragments"]]
    for k, worker in enumerate(group.workers):
        state = worker.state_dict()
        old = saved[k % 2]
        assert all(torch.equal(v, old["model"][n]) for n, v in state["model"].items())
        assert state["batches"] == group.workers[0].batches.state_dict()
        for fragment, anchor in zip(state["outer"]["fragments"], anchors, strict=True):
            assert anchor is None or torch.equal(fragment["outer"]["anchor"], anchor)
            assert not any(flight["round"] for flight in fragment["in_flight"])
            # Feedback stays with those who have it.
            held = any(bool(value.any()) for value in fragment["exchange"].values())
            assert held == (k < 2 and method in ("muloco:bits=2", "sparseloco"))
    assert len({worker.outer_digest() for worker in group.workers}) == 1
    assert RunFolder(out).config()["workers"] == workers
    summary = resume(make(method, workers=workers), out)
    assert summary["workers"] == workers
    assert summary["steps"] == 20


def test_eager_workers_go_on_in_their_own_number_only(make, tmp_path, monkeypatch) -> None:
    """What such a worker has in flight is in its weights, and cannot be taken out of them."""
    method = dataclasses.replace(make("diloco").method, overlap=tw.Eager())
    out = tmp_path / "run"
    stop_after(make(method=method), out, monkeypatch, 9)
    with pytest.raises(tw.ConfigurationError, match=r"Eager.*another number of workers"):
        resume(make(method=method, workers=4), out)


def test_there_and_back_leaves_no_checkpoints_of_workers_that_are_gone(
    make, tmp_path, monkeypatch
) -> None:
    out = tmp_path / "run"
    stop_after(make(workers=4), out, monkeypatch, 9)
    stop_after(make(workers=2), out, monkeypatch, 17)
    names = sorted(p.name for p in (out / "checkpoints").glob("*.pt"))
    assert names == [f"step-{s:08}.worker-{k}.pt" for s in (12, 16) for k in (0, 1)]
    assert resume(make(workers=4), out)["steps"] == 20


@pytest.mark.parametrize("begin", [train, resume])
@pytest.mark.parametrize("membership", [None, ELASTIC])
def test_a_second_process_in_a_folder_is_refused(
    make, tmp_path, elastic, monkeypatch, begin, membership
) -> None:
    out = tmp_path / "run"
    with locked(out):
        with pytest.raises(tw.ConfigurationError, match=f"{out}.*another process"):
            begin(make(), out, elastic=membership)
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)  # the first rank of torchrun, before it joins another
        with pytest.raises(tw.ConfigurationError, match="another process is writing a run there"):
            begin(make(), out)
    monkeypatch.undo()


def test_a_lock_leaves_what_is_there(tmp_path) -> None:
    """And a killed process holds none: one that is killed is resumed in test_trainer.py."""
    with locked(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()  # nobody left anything in it
    (tmp_path / "mine").write_text("x")
    with locked(tmp_path):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_file_system_without_locks_is_trained_on(tmp_path, monkeypatch, caplog) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "run"):
        (tmp_path / "run" / "mine").write_text("x")
    assert "nothing keeps a second process out" in caplog.text
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["mine"]


def test_a_full_disk_leaves_the_last_checkpoint(make, tmp_path, monkeypatch) -> None:
    """The kernel refuses what goes beyond a size, as it does where no block is free."""
    out = tmp_path / "run"
    stop_after(make(), out, monkeypatch, 5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(tw.CheckpointError, match=r"write checkpoint.*older ones are intact"):
            resume(make(), out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(out.rglob("*.partial"))
    assert Checkpoints(out / "checkpoints", worker=0, ranks=2, keep=2).steps() == [4]
    assert resume(make(), out)["outer_digest"] == train(make(), tmp_path / "b")["outer_digest"]


def test_what_a_power_loss_leaves_does_not_count(make, tmp_path, monkeypatch) -> None:
    stop_after(make(), tmp_path / "run", monkeypatch, 9)
    for left in ("partial data", "data without seal", "partial seal"):
        out = shutil.copytree(tmp_path / "run", tmp_path / left)
        for worker in (0, 1):
            data = out / "checkpoints" / f"step-00000008.worker-{worker}.pt"
            seal = data.with_suffix(".json")
            if left == "partial seal":
                seal.rename(seal.with_name(seal.name + ".partial"))
            elif worker == 1:
                seal.unlink()
                if left == "partial data":
                    data.with_name(data.name + ".partial").write_bytes(data.read_bytes()[:-9])
                    data.unlink()
        assert stop_after(make(), out, monkeypatch, None).step == 4
    undisturbed = train(make(), tmp_path / "b")
    assert resume(make(), out)["outer_digest"] == undisturbed["outer_digest"]


@pytest.mark.slow
def test_torchrun_goes_on_with_what_simulated_workers_left(make, tmp_path, monkeypatch) -> None:
    out = tmp_path / "run"
    stop_after(make(workers=4), out, monkeypatch, 9)
    shutil.copytree(out, tmp_path / "copy")
    simulated = resume(make(workers=2), tmp_path / "copy")
    assert run_ranked(make(workers=2), out, "resume")["outer_digest"] == simulated["outer_digest"]
