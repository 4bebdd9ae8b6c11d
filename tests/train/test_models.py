"""Sizes are what they are called, weights come from the seed alone, saving loses nothing."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.train.models import Model, save_pretrained
from training import LLAMA

TINY = LLAMA | {"hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": None}


def write_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(TINY | changes))
    return path


def build(size: str = "250k", vocab_size: int = 256, seed: int = 0) -> PreTrainedModel:
    return Model(size=size).build(vocab_size=vocab_size, sequence_length=64, seed=seed)


def equal(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    one, other = first.state_dict(), second.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_weights_come_from_the_seed_alone_whose_state_stays() -> None:
    torch.manual_seed(1)
    first = build(seed=3)
    torch.manual_seed(2)
    torch.rand(5)
    before = torch.get_rng_state()
    with torch.device("meta"):  # also under someone's default device
        again = build(seed=3)
    assert torch.equal(before, torch.get_rng_state())
    assert equal(first, again)
    assert not equal(first, build(seed=4))


def test_a_path_is_a_config_file_or_its_folder_and_weights_are_fp32(tmp_path: Path) -> None:
    model = build(str(write_config(tmp_path, dtype="bfloat16")))
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float32, "cpu")}
    assert model.config.hidden_size == 32
    assert model.training
    assert not model.config.use_cache
    assert equal(model, build(str(tmp_path)))


def test_a_file_is_described_by_what_it_says(tmp_path: Path) -> None:
    def said(folder: str, **changes: Any) -> Any:
        path = write_config(tmp_path / folder, **changes)
        return Model(size=str(path)).describe()["configuration"]

    assert Model(size="1m").describe() == {"kind": "Model", "size": "1m"}
    plain = said("a")
    assert (plain["hidden_size"], plain["model_type"]) == (32, "llama")
    # Neither where it lies, nor a default that is written out, nor what is never read.
    assert said("b", rms_norm_eps=1e-6, use_cache=False, dtype="bfloat16") == plain
    assert Model(size=str(tmp_path / "a")).describe()["configuration"] == plain
    for change in ({"rope_theta": 5e5}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-5}):
        assert said("c", **change) != plain

    # What is trained is what was described.
    model = Model(size=str(write_config(tmp_path)))
    before = model.describe()
    write_config(tmp_path, hidden_size=64)
    assert model.build(vocab_size=256, sequence_length=64, seed=0).config.hidden_size == 32
    assert model.describe() == before


@pytest.mark.parametrize("text", ["{", '{"model_type": "t5"}'], ids=["no json", "not causal"])
def test_a_configuration_that_cannot_be_read_or_fetched_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigurationError, match="because transformers: "):
        build(str(tmp_path / "config.json"))

    offline = mock.Mock(side_effect=OSError("cannot reach it"))
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", offline)
    with pytest.raises(ConfigurationError, match=r"cannot reach it.*network"):
        build("org/model")


def test_what_does_not_fit_the_data_is_refused(tmp_path: Path) -> None:
    model = Model(size=str(write_config(tmp_path)))
    model.configuration(vocab_size=256, sequence_length=64)
    with pytest.raises(ConfigurationError, match="vocab_size is 256 and the data needs 257"):
        model.configuration(vocab_size=257, sequence_length=64)
    with pytest.raises(ConfigurationError, match="embeddings is 64 and the data needs 65"):
        model.configuration(vocab_size=256, sequence_length=65)


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_is_loaded_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    model = build(str(write_config(tmp_path / "config", tie_word_embeddings=tied)))
    folder = tmp_path / "new" / "model"
    save_pretrained(model, folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert equal(model, loaded)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    head, embedding = loaded.get_output_embeddings(), loaded.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied
    assert (folder / "model.safetensors").exists()
    assert sorted(p.name for p in folder.parent.iterdir()) == ["model"]


def test_saving_replaces_an_earlier_model_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run, later = tmp_path / "model", tmp_path / "run", build(seed=1)
    for model in (build(seed=0), later):
        save_pretrained(model, folder)
    write_config(run)
    (run / "metrics.jsonl").touch()
    for place in (run, run / "metrics.jsonl"):
        with pytest.raises(CheckpointError, match="not a saved model"):
            save_pretrained(later, place)
    assert (run / "metrics.jsonl").exists()

    full = mock.Mock(side_effect=OSError("no space left on device"))
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(CheckpointError, match="no space left"):
        save_pretrained(build(seed=2), folder)
    assert equal(later, AutoModelForCausalLM.from_pretrained(folder))
