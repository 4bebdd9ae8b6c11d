"""Asynchronous training of a language model, by a virtual clock."""

import contextlib
import dataclasses
from pathlib import Path

import pytest

import thinwire as tw
from thinwire.errors import RunStopped
from thinwire.plan.shape import Shape
from thinwire.plan.traffic import traffic
from thinwire.runs.folder import RunFolder
from thinwire.runs.status import RunState, read_run
from thinwire.train.asynchronous import train_here
from thinwire.train.config import Intervals, Runtime, TrainConfig
from thinwire.train.observers import Observer
from thinwire.train.trainer import resume, train
from training import records

NESTEROV = tw.outer.SGD(lr=0.8, momentum=0.6, nesterov=True)


def asynchronous(config: TrainConfig, **method) -> TrainConfig:
    outer = tw.outer.DelayedNesterov(lr=0.8, momentum=0.6, every=config.workers)
    return dataclasses.replace(
        config, method=dataclasses.replace(config.method, **{"outer": outer, **method})
    )


def run(config: TrainConfig, folder: Path, *speeds: float, stop=(), observers=None) -> dict:
    """The summary of a run by a virtual clock, which goes on with what is in `folder`."""
    stopping = contextlib.nullcontext(stop)
    return train_here(config, RunFolder(folder), observers, stopping, speeds=speeds)


def test_equal_workers_are_a_run_in_rounds(tiny, tmp_path) -> None:
    """Batches, clipping, schedule and evaluation are those of the trainer, and so is the loss."""
    config = tiny("diloco", steps=20, periods=Intervals(evaluate_steps=10))
    rounds = dataclasses.replace(config, method=dataclasses.replace(config.method, outer=NESTEROV))
    expected = train(rounds, tmp_path / "rounds")
    found = run(asynchronous(config), tmp_path / "equal", 3.0, 3.0)
    evaluated = [r for r in records(tmp_path / "equal") if "val_loss" in r]
    assert [record["step"] for record in evaluated] == [10, 20]
    assert found["val_loss"] == pytest.approx(expected["val_loss"], abs=2e-5)
    # Four arrivals of each worker, one message of 4 bytes a number each.
    assert found["sent_bytes_per_worker"] == expected["sent_bytes_per_worker"]
    assert evaluated[-1]["virtual_s"] == pytest.approx(20 / 3)
    slower = run(asynchronous(config), tmp_path / "slower", 3.0, 1.0)
    assert abs(slower["val_loss"] - expected["val_loss"]) > 1e-3
    assert slower["tokens"] == found["tokens"] == expected["tokens"]
    # A faster worker does more of the run.
    fast, slow = slower["asynchronous"]["steps_of"].values()
    assert fast + slow == 40
    assert fast > 2 * slow
    assert records(tmp_path / "slower")[-1]["virtual_s"] < 20 / 1.0 * 0.7


def test_theta_is_validated_as_in_rounds_in_the_precision_of_the_run(tiny, tmp_path) -> None:
    losses = []
    for precision in ("fp32", "bf16"):
        machine = Runtime(device="cpu", threads=1, precision=precision)
        config = tiny("diloco", workers=1, steps=5, machine=machine)
        still = dataclasses.replace(config.method, inner=tw.inner.SGD(lr=0.0), outer=NESTEROV)
        config = dataclasses.replace(config, method=still)
        losses.append(train(config, tmp_path / f"rounds-{precision}")["val_loss"])
        assert run(asynchronous(config), tmp_path / precision, 1.0)["val_loss"] == losses[-1]
    assert losses[0] != losses[1]


def test_a_run_stops_and_resumes_bit_for_bit(tiny, tmp_path) -> None:
    compressed = {"codec": tw.codecs.Quantise(bits=2), "feedback": tw.ErrorFeedback()}
    config = asynchronous(tiny("diloco", steps=15, periods=Intervals(log_steps=2)), **compressed)
    whole = run(config, tmp_path / "whole", 2.0, 1.0)
    asked: list[int] = []

    class Watch(Observer):
        def record(self, record) -> None:
            asked.extend([15] * (record["step"] >= 8))

    with pytest.raises(RunStopped, match="asked to stop"):
        run(config, tmp_path / "a", 2.0, 1.0, stop=asked, observers=lambda *_: [Watch()])
    assert read_run(tmp_path / "a").state is RunState.UNFINISHED
    found = run(config, tmp_path / "a", 2.0, 1.0)
    assert found["outer_digest"] == whole["outer_digest"]
    assert found["asynchronous"] == whole["asynchronous"]
    one, other = (
        [{**record, "wall_s": 0, "tokens_per_s": 0} for record in records(tmp_path / name)]
        for name in ("whole", "a")
    )
    assert one == other


def test_a_run_resumes_with_its_own_number_of_workers_only(tiny, tmp_path) -> None:
    config = asynchronous(tiny("diloco", steps=15, global_batch=12))
    asked = [15]
    with pytest.raises(RunStopped, match="asked to stop"):
        run(config, tmp_path / "a", 2.0, 1.0, stop=asked)
    more = dataclasses.replace(config, workers=3)
    with pytest.raises(tw.ConfigurationError, match=r"5 parts.*has 4.*as many workers as before"):
        run(more, tmp_path / "a", 2.0, 1.0, 1.0)


def test_a_loss_that_is_not_finite_stops_the_run(tiny, tmp_path) -> None:
    config = asynchronous(tiny("diloco", steps=5), inner=tw.inner.SGD(lr=1e30))
    with pytest.raises(tw.NonFiniteError, match=r"do: (start again|lower the inner)"):
        run(dataclasses.replace(config, clip_norm=0.0), tmp_path / "a", 1.0, 1.0)


def test_what_only_rounds_have_is_refused(tiny, tmp_path) -> None:
    config = asynchronous(tiny("diloco"))
    machine = Runtime(device="cpu", threads=1, worker_size=2)
    with pytest.raises(tw.ConfigurationError, match="workers of 2 ranks"):
        run(dataclasses.replace(config, machine=machine), tmp_path / "a", 1.0, 1.0)
    with pytest.raises(tw.ConfigurationError, match="one speed for each"):
        run(config, tmp_path / "b", 1.0, 1.0, 1.0)


def test_the_trainer_trains_asynchronous_methods_as_planned(tiny, tmp_path) -> None:
    periods = Intervals(log_steps=2, checkpoint_steps=5)
    config = asynchronous(tiny("diloco", steps=20, periods=periods))
    summary = train(config, tmp_path / "a")
    assert summary["outer_digest"] == run(config, tmp_path / "b", 1.0, 1.0)["outer_digest"]
    planned = traffic(config.method, Shape.of_model(config.model.build(256, 16, 0)), workers=2)
    assert read_run(tmp_path / "a").run.summary.sent_bytes_per_worker == planned.sent_nbytes(20)
    # From the checkpoint of step 15 on.
    (tmp_path / "a" / "summary.json").unlink()
    assert resume(config, tmp_path / "a")["outer_digest"] == summary["outer_digest"]
