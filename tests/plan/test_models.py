"""Shapes of models by name: built-in sizes, and configurations of others."""

import json
from pathlib import Path

import pytest
import torch

import thinwire as tw
from thinwire.plan.models import LLAMA_SIZES, resolve
from thinwire.plan.shape import Shape
from thinwire.train.models import Model


@pytest.mark.parametrize("name", LLAMA_SIZES)
@pytest.mark.parametrize("vocabulary", [None, 97])
def test_a_built_in_size_has_the_parameters_of_its_model(name: str, vocabulary: int | None) -> None:
    """Written down, and as transformers makes them: names, shapes, layers, roles and order."""
    from transformers import AutoModelForCausalLM

    size = LLAMA_SIZES[name]
    config = size.configuration(vocabulary or size.counted_with, 1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert resolve(name, vocabulary=vocabulary) == Shape.of_model(model, name=name)


TINY = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "pad_token_id": None,
}


def write_config(folder: Path, text: str = json.dumps(TINY)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text)
    return folder / "config.json"


def test_a_config_is_found_by_its_path_and_its_folder(tmp_path: Path) -> None:
    path = write_config(tmp_path / "model")
    by_file, by_folder = resolve(str(path)), resolve(str(path.parent))
    assert by_file.weights == by_folder.weights
    built = Model(size=str(path)).build(vocab_size=97, sequence_length=16, seed=0)
    assert by_file.weights == Shape.of_model(built).weights
    assert by_file.name == str(path)


def test_a_name_is_found_in_the_local_cache(tmp_path: Path, monkeypatch) -> None:
    path = write_config(tmp_path / "models--org--tiny" / "snapshots" / "abc")
    refs = tmp_path / "models--org--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert resolve("org/tiny").weights == resolve(str(path)).weights
    with pytest.raises(tw.ConfigurationError, match="not in the local Hugging Face cache"):
        resolve("org/small")
    # The hub has said that there is none.
    (refs.parent / ".no_exist" / "abc").mkdir(parents=True)
    (refs.parent / ".no_exist" / "abc" / "config.json").touch()
    path.unlink()
    with pytest.raises(tw.ConfigurationError, match="not in the local Hugging Face cache"):
        resolve("org/tiny")


@pytest.mark.parametrize(
    ("source", "vocabulary", "message"),
    [
        ("150M", None, "did you mean '150m'"),
        ("7q", None, "no built-in size, no file or folder that exists, and no org/name"),
        ("no/such/config.json", None, "no file or folder that exists"),
        ("org/absent", None, "not in the local Hugging Face cache.*hf download org/absent"),
        ("250k", 0, "pass vocabulary >= 1"),
    ],
)
def test_what_is_not_there_says_so_in_one_line(source, vocabulary, message) -> None:
    with pytest.raises(tw.ConfigurationError, match=message) as caught:
        resolve(source, vocabulary=vocabulary)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["{", "{}", '{"model_type": "nobody"}', '{"model_type": "t5"}'],
    ids=["no json", "no type", "unknown type", "not causal"],
)
def test_an_unreadable_configuration_says_why_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(tw.ConfigurationError, match="transformers says") as caught:
        resolve(str(write_config(tmp_path, text)))
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_config_and_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(tw.ConfigurationError, match=r"has no config\.json"):
        resolve(str(tmp_path))
    with pytest.raises(tw.ConfigurationError, match="says how many tokens it has"):
        resolve(str(write_config(tmp_path)), vocabulary=5)
