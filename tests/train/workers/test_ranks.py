"""Workers of two ranks each, in four real processes."""

import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import thinwire as tw
from forked import Forked
from processes import fork_ranks
from thinwire.cli import main
from thinwire.cli.flags import TrainFlags
from thinwire.exchange.message import HEADER_NBYTES
from thinwire.train import recipes
from thinwire.train.launch import resolve
from thinwire.train.trainer import train
from thinwire.train.workers.ranks import load_model, load_optimizer, plain

pytestmark = pytest.mark.slow

RANKS, WORKER_SIZE, STEPS = 4, 2, 12

# Sizes that two ranks cannot share evenly. With an eps far above any gradient AdamW is linear in
# them: rounding stays rounding, and a wrong norm of the gradient, which AdamW otherwise hides,
# shows.
RECIPE = """
import dataclasses
from thinwire import inner, outer, presets
from thinwire.train import recipes
from thinwire.train.config import Intervals, Runtime
from thinwire.train.data import Data
from thinwire.train.models import Model
from thinwire.train.config import WarmupCosine

def tiny(method):
    slow = inner.AdamW(lr=2.0, eps=1.0, betas=(0.8, 0.9), weight_decay=0.01)
    outside = outer.SGD(lr=0.7, momentum=0.9, nesterov=True)
    return dataclasses.replace(
        recipes.laptop(method),
        method=presets.diloco(inner=slow, outer=outside, sync_every=3),
        model=Model(size={model!r}),
        data=Data(corpus={corpus!r}, sequence_length=11, validation_sequences=73),
        workers=2,
        steps={steps},
        global_batch=8,
        accumulate=2,
        clip_norm=0.25,
        schedule=WarmupCosine(warmup_steps=1),
        periods=Intervals(log_steps=1, evaluate_steps=6, checkpoint_steps=4),
        machine=Runtime(device="cpu", threads=1),
    )
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("worker_size")
    draw = random.Random(0)
    words = ["thin", "wire", "worker", "anchor", "round", "step", "mean", "payload", "sends", "a"]
    (folder / "corpus").mkdir()
    for number in range(20):
        text = " ".join(draw.choice(words) for _ in range(180))
        (folder / "corpus" / f"{number:02}.txt").write_text(text)
    model = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 257,
        "hidden_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 33,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    (folder / "model.json").write_text(json.dumps(model))
    file = folder / "recipe.py"
    file.write_text(
        RECIPE.format(model=str(folder / "model.json"), corpus=str(folder / "corpus"), steps=STEPS)
    )
    return f"{file}:tiny"


def start(recipe: str, out: Path, *flags: str) -> list[Forked]:
    command = ["-m", "thinwire", "train", "--recipe", recipe, "--out", str(out)]
    return fork_ranks(RANKS, *command, "--worker-size", str(WORKER_SIZE), *flags)


def finish(processes: list[Forked], out: Path) -> dict:
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS, errors
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def sharded(recipe, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sharded") / "run"
    finish(start(recipe, out), out)
    return out


def records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory) -> Path:
    """The same run by two workers that are not sharded."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(recipes.find(recipe)("diloco"), out)
    return out


def outer_parameters(out: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    return {name: p.detach() for name, p in model.named_parameters()}


def initial(recipe: str) -> dict[str, torch.Tensor]:
    config = recipes.find(recipe)("diloco")
    model = config.model.build(vocab_size=256, sequence_length=11, seed=0)
    return {name: p.detach() for name, p in model.named_parameters()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return sum(float((a[name].double() - b[name]).square().sum()) for name in a) ** 0.5


def test_a_sharded_worker_computes_what_a_whole_one_does(recipe, sharded, whole) -> None:
    """Sums are taken in another order, and nothing else differs.

    A sum of n terms is off by about sqrt(n) 2^-24 of them in fp32; here n is 257 at most, and what
    is summed twice adds up to 2e-6. Losses of 3 to 6 have four times that, and are means.
    """
    mine, other = outer_parameters(sharded), outer_parameters(whole)
    assert distance(mine, other) < 2e-6 * distance(other, initial(recipe))
    for ours, theirs in zip(records(sharded), records(whole), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
        assert ours.get("val_loss") == pytest.approx(theirs.get("val_loss"), abs=2e-6)


def test_the_figures_of_a_worker_are_those_of_all_its_ranks(sharded, whole) -> None:
    ours, theirs = (json.loads((out / "summary.json").read_text()) for out in (sharded, whole))
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


def test_a_killed_rank_ends_the_others_and_all_resume_bit_for_bit(
    recipe, sharded, tmp_path
) -> None:
    out = tmp_path / "killed"
    processes = start(recipe, out)
    seals = [out / "checkpoints" / f"step-00000004.worker-{rank}.json" for rank in range(RANKS)]
    while not all(seal.exists() for seal in seals):
        assert processes[-1].poll() is None, processes[-1].communicate()
        time.sleep(0.002)
    processes[-1].send_signal(signal.SIGKILL)
    for process in processes[:-1]:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 1, error
        assert "error: cannot exchange" in error
    processes[-1].communicate()
    assert not (out / "summary.json").exists()
    newest = max(int(seal.name[5:13]) for seal in (out / "checkpoints").glob("*.worker-0.json"))
    assert newest in (4, 8)
    resumed = finish(start(recipe, out, "--resume"), out)
    undisturbed = json.loads((sharded / "summary.json").read_text())
    for field in ("outer_digest", "val_loss", "sent_bytes_per_worker"):
        assert resumed[field] == undisturbed[field]
    assert [r["loss"] for r in records(out)] == [r["loss"] for r in records(sharded)]


# -- what cannot be -------------------------------------------------------------------------------


def test_simulated_workers_are_not_sharded(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--worker-size", "2"]) == 1
    assert "with torchrun" in capsys.readouterr().err
    assert main(["train", "--worker-size", "0"]) == 1
    assert "worker_size=0" in capsys.readouterr().err


def test_ranks_that_are_no_whole_workers_are_refused(monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert main(["train", "--worker-size", "2"]) == 1
    assert "torchrun started 5 ranks" in capsys.readouterr().err


def test_a_batch_that_the_ranks_cannot_share_is_refused(monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert main(["train", "--worker-size", "2", "--global-batch", "9"]) == 1
    error = capsys.readouterr().err
    assert "global batch of 9" in error
    assert "3 workers of 2 ranks" in error


@pytest.mark.parametrize(("ranks", "size", "workers"), [(4, 2, 2), (3, 3, 1), (7, 1, 7)])
def test_the_batch_has_to_fit_the_workers_there_are(
    monkeypatch, recipe, ranks: int, size: int, workers: int
) -> None:
    """And not those that the recipe was written for."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    flags = TrainFlags(recipe=recipe, worker_size=size, global_batch=2 * ranks)
    config = resolve(flags.train_config())
    assert (config.workers, config.machine.worker_size) == (workers, size)


# -- states ---------------------------------------------------------------------------------------


def test_states_that_are_not_sharded_are_left_as_they_are() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    other = torch.optim.AdamW(model.parameters())
    load_optimizer(other, plain(state))
    assert plain(state) == state
    assert str(other.state_dict()) == str(state)


def test_a_shard_does_not_go_into_a_whole_tensor() -> None:
    model = torch.nn.Linear(3, 2)
    state = model.state_dict() | {"bias": {"shard": torch.ones(1)}}
    with pytest.raises(tw.CheckpointError, match=r"shape \[1\] and here it is \[2\]"):
        load_model(model, state)
