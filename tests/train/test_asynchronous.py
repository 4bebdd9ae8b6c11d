"""Asynchronous training of a language model, by a virtual clock."""

import dataclasses
import io

import pytest
import torch

import thinwire as tw
from thinwire.asynchronous import AsyncOptions, WorkerSpeeds
from thinwire.train.asynchronous import AsyncTraining
from thinwire.train.config import Intervals, Runtime, TrainConfig
from thinwire.train.trainer import train

NESTEROV = tw.outer.SGD(lr=0.8, momentum=0.6, nesterov=True)


def asynchronous(config: TrainConfig, **method) -> TrainConfig:
    outer = tw.outer.DelayedNesterov(lr=0.8, momentum=0.6, every=config.workers)
    return dataclasses.replace(
        config, method=dataclasses.replace(config.method, **{"outer": outer, **method})
    )


def run(config: TrainConfig, *speeds: float, stop: int | None = None, **options) -> AsyncTraining:
    training = AsyncTraining(
        config, config.data.load(), WorkerSpeeds(steps_per_s=speeds), AsyncOptions(**options)
    )
    if stop is None:
        training.records = []
        training.run(training.records.append)
    else:
        for _ in range(stop):
            training.simulation.advance()
    return training


def test_equal_workers_are_a_run_in_rounds(tiny, tmp_path) -> None:
    """Batches, clipping, schedule and evaluation are those of the trainer, and so is the loss."""
    config = tiny("diloco", steps=20, periods=Intervals(evaluate_steps=10))
    rounds = dataclasses.replace(config, method=dataclasses.replace(config.method, outer=NESTEROV))
    expected = train(rounds, tmp_path / "rounds")
    found = run(asynchronous(config), 3.0, 3.0)
    last = found.records[-1]
    assert [record["step"] for record in found.records] == [10, 20]
    assert last["tokens"] == expected["tokens"]
    assert last["val_loss"] == pytest.approx(expected["val_loss"], abs=2e-5)
    # Two arrivals a round, four rounds, one message of 4 bytes a number each.
    assert last["sent_bytes"] == 2 * expected["sent_bytes_per_worker"]
    assert last["virtual_s"] == pytest.approx(20 / 3)
    slower = run(asynchronous(config), 3.0, 1.0).records[-1]
    assert abs(slower["val_loss"] - expected["val_loss"]) > 1e-3
    assert slower["tokens"] == expected["tokens"]


def test_a_faster_worker_does_more_of_the_run(tiny) -> None:
    training = run(asynchronous(tiny("diloco", steps=20)), 3.0, 1.0)
    fast, slow = (trainee.steps for trainee in training.trainees)
    assert fast + slow == 40
    assert fast > 2 * slow
    assert training.records[-1]["virtual_s"] < 20 / 1.0 * 0.7


def test_a_run_resumes_bit_for_bit(tiny) -> None:
    compressed = {"codec": tw.codecs.Quantise(bits=2), "feedback": tw.ErrorFeedback()}
    config = asynchronous(tiny("diloco", steps=15), **compressed)
    whole = run(config, 2.0, 1.0)
    begun = run(config, 2.0, 1.0, stop=3)
    file = io.BytesIO()
    torch.save(begun.state_dict(), file)
    file.seek(0)
    resumed = AsyncTraining(config, config.data.load(), WorkerSpeeds(steps_per_s=(2.0, 1.0)))
    resumed.load_state_dict(torch.load(file))
    records: list = []
    resumed.run(records.append)
    assert resumed.server.digest() == whole.server.digest()
    wanted = {**whole.records[-1], "loss": records[-1]["loss"]}
    assert records[-1] == wanted


def test_a_loss_that_is_not_finite_stops_the_run(tiny) -> None:
    config = asynchronous(tiny("diloco", steps=5), inner=tw.inner.SGD(lr=1e30))
    with pytest.raises(tw.NonFiniteError, match=r"do: (start anew|lower the inner)"):
        run(dataclasses.replace(config, clip_norm=0.0), 1.0, 1.0)


def test_what_only_rounds_have_is_refused(tiny) -> None:
    config = asynchronous(tiny("diloco"))
    machine = Runtime(device="cpu", threads=1, compile=True)
    with pytest.raises(tw.ConfigurationError, match="compiled model"):
        run(dataclasses.replace(config, machine=machine), 1.0, 1.0)
    with pytest.raises(tw.ConfigurationError, match="as many"):
        run(config, 1.0, 1.0, 1.0)
