"""Workers of two ranks each, in four real processes."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import thinwire as tw
from thinwire.exchange.message import HEADER_NBYTES
from thinwire.train import recipes
from thinwire.train.config import Intervals, Runtime, TrainConfig, WarmupCosine
from thinwire.train.data import Data
from thinwire.train.models import Model
from thinwire.train.trainer import train
from thinwire.train.workers.ranks import load_model
from training import LLAMA, records, run_ranked, summary

pytestmark = pytest.mark.slow

WORKER_SIZE, STEPS = 2, 12
MODEL = LLAMA | {
    **{"vocab_size": 257, "hidden_size": 20, "num_hidden_layers": 3},
    **{"num_key_value_heads": 1, "intermediate_size": 33},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory, corpus) -> TrainConfig:
    """Of two whole workers.

    With an eps far above any gradient AdamW is linear in them: rounding stays rounding, and a wrong
    norm of the gradient, which AdamW otherwise hides, shows.
    """
    file = tmp_path_factory.mktemp("worker_size") / "model.json"
    file.write_text(json.dumps(MODEL))
    slow = tw.inner.AdamW(lr=2.0, eps=1.0, betas=(0.8, 0.9), weight_decay=0.01)
    outside = tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)
    return dataclasses.replace(
        recipes.laptop("diloco"),
        method=tw.presets.diloco(inner=slow, outer=outside, sync_every=3),
        model=Model(size=str(file)),
        data=Data(corpus=str(corpus), sequence_length=11, validation_sequences=73),
        workers=2,
        steps=STEPS,
        global_batch=8,
        accumulate=2,
        clip_norm=0.25,
        schedule=WarmupCosine(warmup_steps=1),
        periods=Intervals(log_steps=1, evaluate_steps=6, checkpoint_steps=4),
        machine=Runtime(device="cpu", threads=1),
    )


@pytest.fixture(scope="module")
def sharded(config, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sharded") / "run"
    machine = dataclasses.replace(config.machine, worker_size=WORKER_SIZE)
    run_ranked(dataclasses.replace(config, machine=machine), out)
    return out


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    train(config, out)
    return out


def outer_parameters(out: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    return {name: p.detach() for name, p in model.named_parameters()}


def initial(config: TrainConfig) -> dict[str, torch.Tensor]:
    model = config.model.build(vocab_size=256, sequence_length=11, seed=0)
    return {name: p.detach() for name, p in model.named_parameters()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return sum(float((a[name].double() - b[name]).square().sum()) for name in a) ** 0.5


def test_a_sharded_worker_computes_what_a_whole_one_does(config, sharded, whole) -> None:
    """Sums are taken in another order, and nothing else differs.

    A sum of n terms is off by about sqrt(n) 2^-24 of them in fp32; here n is 257 at most, and what
    is summed twice adds up to 2e-6. Losses of 3 to 6 have four times that, and are means.
    """
    mine, other = outer_parameters(sharded), outer_parameters(whole)
    assert distance(mine, other) < 2e-6 * distance(other, initial(config))
    for ours, theirs in zip(records(sharded), records(whole), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
        assert ours.get("val_loss") == pytest.approx(theirs.get("val_loss"), abs=2e-6)


def test_the_figures_of_a_worker_are_those_of_all_its_ranks(sharded, whole) -> None:
    ours, theirs = (summary(out) for out in (sharded, whole))
    for same in ("workers", "parameters", "steps", "tokens"):
        assert ours[same] == theirs[same]
    # Every shard travels in a message of its own.
    rounds = STEPS // 3
    for field, headers in (
        ("sent_bytes_per_worker", rounds),
        ("received_bytes_per_worker", rounds),
        ("peak_sent_bytes_per_step", 1),
    ):
        assert ours[field] == theirs[field] + headers * (WORKER_SIZE - 1) * HEADER_NBYTES
    last, other = records(sharded)[-1], records(whole)[-1]
    assert last["sent_bytes"] == ours["sent_bytes_per_worker"]
    for state in ("live_weights", "anchor", "outer_state"):
        assert last[f"{state}_bytes"] == other[f"{state}_bytes"] == 4 * ours["parameters"]
    assert tw.digest(outer_parameters(sharded)) == ours["outer_digest"] != theirs["outer_digest"]
    saved = json.loads((sharded / "model" / "config.json").read_text())
    assert saved["architectures"] == ["LlamaForCausalLM"]


def test_a_shard_does_not_go_into_a_whole_tensor() -> None:
    model = torch.nn.Linear(3, 2)
    state = model.state_dict() | {"bias": {"shard": torch.ones(1)}}
    with pytest.raises(tw.CheckpointError, match=r"shape \[1\] and here it is \[2\]"):
        load_model(model, state)
