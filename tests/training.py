"""Runs of a tiny model that several test files train, resume, and start as ranks."""

import dataclasses
import json
import random
import sys
from pathlib import Path

import pytest

from forked import Forked
from processes import fork_ranks
from thinwire.train import recipes
from thinwire.train.config import Machine, Periods, TrainConfig
from thinwire.train.data import Data
from thinwire.train.models import Model
from thinwire.train.trainer import resume


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """40 kB of prose that is not random: words from a seeded chain."""
    draw = random.Random(0)
    words = ["thin", "wire", "worker", "anchor", "round", "step", "mean", "payload", "sends", "a"]
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        text = " ".join(draw.choice(words) for _ in range(180))
        (folder / f"{number:02}.txt").write_text(text)
    return folder


@pytest.fixture
def tiny(tmp_path, corpus):
    """A configuration of a model of a few thousand parameters."""
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 256,
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "intermediate_size": 32,
                "max_position_embeddings": 64,
                "tie_word_embeddings": True,
            }
        )
    )

    def make(preset: str = "diloco", **changes) -> TrainConfig:
        config = dataclasses.replace(
            recipes.laptop(preset),
            model=Model(size=str(file)),
            data=Data(corpus=str(corpus), sequence_length=16, validation_sequences=6),
            workers=2,
            steps=12,
            global_batch=4,
            periods=Periods(log_steps=3, evaluate_steps=6, checkpoint_steps=4),
            machine=Machine(device="cpu", threads=1),
        )
        if preset not in ("ddp", "demo"):
            config = dataclasses.replace(
                config, method=dataclasses.replace(config.method, sync_every=5)
            )
        return dataclasses.replace(config, **changes)

    return make


def records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def script(tiny_config: TrainConfig, out: Path, *, begin: str = "resume") -> list[str]:
    """A process that runs `tiny_config`, which travels as the recipe file of a user would."""
    file = out.parent / f"{out.name}.py"
    file.write_text(
        "from pathlib import Path\n"
        "from thinwire import *\nfrom thinwire import inner, outer, codecs\n"
        "from thinwire.fragments import Whole\nfrom thinwire.feedback import NoFeedback\n"
        "from thinwire.aggregate import MeanOverWorkers\n"
        "from thinwire.codecs import *\nfrom thinwire.outer import SGD, GradientAveraging, Gossip\n"
        "from thinwire.inner import AdamW, Muon, NewtonSchulz\n"
        "from thinwire.train.config import *\nfrom thinwire.train.data import Data\n"
        "from thinwire.train.models import Model\nfrom thinwire.train.config import *\n"
        "from thinwire.train import trainer\n"
        f"trainer.{begin}({tiny_config!r}, Path({str(out)!r}))\n"
    )
    return [sys.executable, str(file)]


def start_ranked(config: TrainConfig, out: Path, begin: str = "train") -> list[Forked]:
    _, file = script(config, out, begin=begin)
    return fork_ranks(config.workers, file)


def run_ranked(config: TrainConfig, out: Path, begin: str = "train") -> dict:
    processes = start_ranked(config, out, begin)
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert not any(process.returncode for process in processes), errors
    return json.loads((out / "summary.json").read_text())


def stop_after(config: TrainConfig, out: Path, monkeypatch, step: int) -> None:
    """Run until `step` and fail there, as a full disk or a user would."""
    from thinwire.train.trainer import _Trainer

    original = _Trainer._one_step

    def one_step(self):
        if self.step == step:
            raise KeyboardInterrupt
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(_Trainer, "_one_step", one_step)
        with pytest.raises(KeyboardInterrupt):
            resume(config, out)
