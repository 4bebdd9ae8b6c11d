"""Shapes of models by name: built-in sizes, and configurations of others."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import thinwire as tw
from thinwire.plan.models import LLAMA_SIZES, resolve
from thinwire.plan.shape import Shape
from thinwire.plan.units import parse_count
from thinwire.train.models import Model
from training import LLAMA


@pytest.mark.parametrize("name", LLAMA_SIZES)
def test_a_built_in_size_has_the_parameters_of_its_model_and_its_name(name: str) -> None:
    """Written down, and as transformers makes them: names, shapes, layers, roles and order."""
    size = LLAMA_SIZES[name]
    config = size.configuration(size.counted_with, 1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert resolve(name) == Shape.of_model(model, name=name)
    assert model.num_parameters() == pytest.approx(parse_count(name), rel=0.05)
    assert not config.use_cache


def test_vocabularies_and_widths_of_heads_of_built_in_sizes_are_frozen() -> None:
    """A run of that name would be of another model."""
    widths = [(size.counted_with, size.hidden // size.heads) for size in LLAMA_SIZES.values()]
    small, paper = [(256, 32)] * 3 + [(256, 64)] * 2 + [(32_000, 64)] * 2, [(128_256, 128)] * 3
    assert widths == [*small, *paper, (32_000, 128), *paper]


TINY = LLAMA | {"hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": None}


def write_config(folder: Path, text: str = json.dumps(TINY)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text)
    return folder / "config.json"


def test_a_config_is_found_by_its_path_its_folder_and_its_name_in_the_cache(
    tmp_path: Path, monkeypatch
) -> None:
    model = tmp_path / "models--org--tiny"
    path = write_config(model / "snapshots" / "abc")
    by_file, by_folder = resolve(str(path)), resolve(str(path.parent))
    assert by_file.weights == by_folder.weights
    built = Model(size=str(path)).build(vocab_size=256, sequence_length=16, seed=0)
    assert by_file.weights == Shape.of_model(built).weights
    assert by_file.name == str(path)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert resolve("org/tiny").weights == by_file.weights
    # The hub has said that there is none.
    (model / ".no_exist" / "abc").mkdir(parents=True)
    (model / ".no_exist" / "abc" / "config.json").touch()
    path.unlink()
    for name in ("org/small", "org/tiny"):
        with pytest.raises(tw.ConfigurationError, match=f"hf download {name} config.json"):
            resolve(name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("150M", "did you mean '150m'"),
        ("7q", "not a built-in size, an existing file or folder, or an org/name"),
        ("no/such/config.json", "an existing file or folder"),
        ("{", "because transformers: "),  # no JSON
        ('{"model_type": "t5"}', "because transformers: "),  # not causal
        ("", r"has no config\.json"),
    ],
)
def test_what_is_not_there_says_so_in_one_line(tmp_path, source, message) -> None:
    if not source:
        source = str(tmp_path)
    elif source.startswith("{"):
        source = str(write_config(tmp_path, source))
    # What is there is read when a model is built.
    for use in (resolve,) if Path(source).exists() else (resolve, lambda name: Model(size=name)):
        with pytest.raises(tw.ConfigurationError, match=message) as caught:
            use(source)
        assert "\n" not in str(caught.value)
