"""Fixtures: finished runs of a tiny model, whose folders the planner reads."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thinwire.train import recipes
from thinwire.train.config import Intervals, Runtime, TrainConfig
from thinwire.train.data import Data
from thinwire.train.models import Model
from thinwire.train.trainer import train


@pytest.fixture(scope="session", name="make_config")
def make_config_fixture(tmp_path_factory) -> Callable[..., TrainConfig]:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("thin wires carry little " * 400)
    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    model |= {"tie_word_embeddings": True, "vocab_size": 257}  # a prime, of which 256 are needed
    model |= {"hidden_size": 12, "intermediate_size": 31, "max_position_embeddings": 16}
    model |= {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(model))

    def make(text: str, **changes: Any) -> TrainConfig:
        config = recipes.laptop(text)
        given = {
            "model": Model(size=str(folder / "config.json")),
            "data": Data(corpus=str(folder / "corpus"), sequence_length=8, validation_sequences=2),
            "periods": Intervals(log_steps=3),
            "machine": Runtime(device="cpu", threads=1),
        } | {"workers": 2, "steps": 13, "global_batch": 4}
        if text not in ("ddp", "demo"):
            given["method"] = dataclasses.replace(config.method, sync_every=5)
        return dataclasses.replace(config, **given | changes)

    return make


@pytest.fixture(scope="session", name="simulated")
def simulated_fixture(make_config, tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a run of two workers in one process; no test may write to it."""
    made: dict[str, Path] = {}

    def run(text: str) -> Path:
        if text not in made:
            made[text] = tmp_path_factory.mktemp("run") / "out"
            train(make_config(text), made[text])
        return made[text]

    return run
