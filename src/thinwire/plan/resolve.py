"""From the name of a model to its shape, without a weight of it and without a network."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from thinwire.errors import ConfigurationError
from thinwire.plan.llama_sizes import HUB_NAME, LLAMA_SIZES, unknown_model
from thinwire.plan.shape import Shape, Weight

if TYPE_CHECKING:  # transformers takes seconds to import: only resolving pays for it
    from transformers import PreTrainedConfig


def resolve(source: str, *, vocabulary: int | None = None) -> Shape:
    """The shape of the causal language model called `source`.

    Args:
        source: a built-in size of `thinwire train`, such as "150m"; or the path of a `config.json`,
            or of a folder with one; or the `org/name` of a configuration in the local Hugging Face
            cache. The network is not used.
        vocabulary: tokens of a built-in size; default the number that its name is counted with. A
            run trains as many as its tokenizer has.

    Raises:
        ConfigurationError: it is not one of these, or transformers cannot build a causal language
            model of it; a vocabulary below 1, or for what has its own.

    >>> resolve("250k").parameters, resolve("250k", vocabulary=97).layers
    (246336, 4)
    """
    if source in LLAMA_SIZES:
        return _built_in(source, vocabulary)
    config = _configuration(source, vocabulary)
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a foreign configuration fails in any way it likes
        raise _unreadable(source, error) from error
    return Shape.of_model(model, name=source)


def _configuration(source: str, vocabulary: int | None) -> PreTrainedConfig:
    _check_installed(source)
    path = _path(source)
    if vocabulary is not None:
        raise ConfigurationError(
            f"plan for model {source!r} with a vocabulary of {vocabulary}",
            because="its configuration says how many tokens it has",
            do="leave the vocabulary out, or change vocab_size in a copy of its config.json",
        )
    from transformers import AutoConfig

    try:
        # Code that comes with a configuration is never run, and no prompt asks whether it may be.
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        raise _unreadable(source, error) from error


def _built_in(source: str, vocabulary: int | None) -> Shape:
    size = LLAMA_SIZES[source]
    tokens = size.counted_with if vocabulary is None else vocabulary
    if tokens < 1:
        raise ConfigurationError(
            f"plan for model {source!r} with a vocabulary of {tokens}",
            because="a language model has at least one token",
            do="pass vocabulary >= 1",
        )
    return Shape(
        name=source,
        weights=tuple(
            Weight.of(name, shape, layer=layer, role=role)
            for name, shape, layer, role in size.weights(tokens)
        ),
    )


def _path(source: str) -> Path:
    """The configuration file of `source`, which is no built-in size."""
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return file
    if path.is_dir():
        raise ConfigurationError(
            f"plan for model {source!r}",
            because="the folder has no config.json",
            do="pass the folder of a saved model, such as RUN/model",
        )
    if not HUB_NAME.fullmatch(source):
        raise unknown_model(f"plan for model {source!r}", source)
    return _cached(source)


def _cached(source: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source, "config.json")
    if isinstance(found, str):
        return Path(found)
    raise ConfigurationError(
        f"plan for model {source!r}",
        because="its config.json is not in the local Hugging Face cache, and a plan uses no "
        "network",
        do=f"run `hf download {source} config.json` once, or pass the path of a config.json",
    )


def _check_installed(source: str) -> None:
    try:
        importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigurationError(
            f"plan for model {source!r}",
            because=str(error),
            do="pip install 'thinwire[train]', or give the numbers of parameters and layers",
        ) from error


def _unreadable(source: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"plan for model {source!r}",
        because=f"transformers says: {' '.join(str(error).split())}",
        do="pass a built-in size, or the config.json of a causal language model that transformers "
        "knows",
    )
