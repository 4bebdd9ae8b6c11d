"""Models by size, config file or hub name; and how they are saved."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.files import replace_folder
from thinwire.plan.models import HUB_NAME, LLAMA_SIZES, unknown_model

if TYPE_CHECKING:  # transformers takes seconds to import: only building and saving pay for it
    from transformers import PreTrainedConfig, PreTrainedModel

# Origin of a configuration, and fields that training sets.
_NOT_OF_THE_MODEL: Final = ("_name_or_path", "transformers_version", "use_cache", "dtype")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A causal language model, trained from scratch.

    Args:
        size: a built-in size such as `"250k"` or `"1.3b"`; or the path of a `config.json` or of a
            folder that holds one; or the `org/name` of a configuration on the hub, which needs a
            network. Only the configuration is read from there, never the weights.

    Raises:
        ConfigurationError: `size` is not one of these.

    >>> Model(size="250k").build(vocab_size=256, sequence_length=128, seed=0).num_parameters()
    246336
    """

    size: str = "250k"

    def __post_init__(self) -> None:
        known = self.size in LLAMA_SIZES or HUB_NAME.fullmatch(self.size)
        if not known and not Path(self.size).exists():
            raise unknown_model(f"build model '{self.size}'", self.size)

    def describe(self) -> dict[str, Any]:
        """The model as JSON-able data, with the contents of its file unless its size is built in.

        Defaults of the model's type are left out, so that another version of transformers, which
        may have more fields, describes the same file equally.

        Raises:
            ConfigurationError: the file cannot be read.
        """
        named = {"kind": type(self).__name__, "size": self.size}
        return named if self.size in LLAMA_SIZES else named | {"configuration": self._changed}

    @cached_property
    def _changed(self) -> dict[str, Any]:
        described = self._read.to_dict()
        try:
            usual = type(self._read)().to_dict()
        except Exception:  # a foreign type may need arguments
            usual = {}
        changed = {
            name: value
            for name, value in described.items()
            if name == "model_type" or name not in usual or usual[name] != value
        }
        kept = {name: changed[name] for name in changed if name not in _NOT_OF_THE_MODEL}
        return json.loads(json.dumps(kept, default=str), parse_constant=str)

    @cached_property
    def _read(self) -> PreTrainedConfig:
        # Read once, so that the built model is the described one even if the file changes.
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.size)
        except Exception as error:  # a foreign configuration may raise anything
            raise _unreadable(self.size, error) from error

    def configuration(self, vocab_size: int, sequence_length: int) -> PreTrainedConfig:
        """The transformers configuration, checked against the data; builds no weights.

        Args:
            vocab_size: the tokenizer's vocabulary size.
            sequence_length: tokens per training sequence.

        Raises:
            ConfigurationError: it cannot be read, or has too few tokens or positions.
        """
        if self.size in LLAMA_SIZES:
            return LLAMA_SIZES[self.size].configuration(vocab_size, sequence_length)
        config = copy.deepcopy(self._read)
        text = config.get_text_config()  # the language part of a model that also sees or hears
        for field, needed, remedy in (
            ("vocab_size", vocab_size, "a tokenizer with fewer tokens"),
            ("max_position_embeddings", sequence_length, "a shorter sequence length"),
        ):
            offered = getattr(text, field, None)
            if offered is not None and offered < needed:
                because = f"its {field} is {offered} and the data needs {needed}"
                do = f"choose {remedy}, or raise {field} in the configuration"
                raise ConfigurationError(f"build model '{self.size}'", because=because, do=do)
        config.use_cache = False  # training does not use keys and values of earlier tokens
        return config

    def build(self, vocab_size: int, sequence_length: int, seed: int) -> PreTrainedModel:
        """A new model in fp32 on the CPU, in training mode, with weights drawn from `seed` alone.

        The weights are the same for equal seeds, on every machine; the caller's random state is
        left alone. The initialization is that of transformers: normal with the
        `initializer_range` of the configuration (0.02).

        Args:
            vocab_size: the tokenizer's vocabulary size.
            sequence_length: tokens per training sequence.
            seed: seed of the initial weights.

        Raises:
            ConfigurationError: the configuration cannot be read, does not fit the data, or
                describes no causal language model.
        """
        from transformers import AutoModelForCausalLM

        config = self.configuration(vocab_size, sequence_length)
        # Seed the CPU's generator alone: `torch.manual_seed` would reseed accelerators, too.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            try:
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            except Exception as error:  # a foreign configuration may raise anything
                raise _unreadable(self.size, error) from error
        return model.train()


def save_pretrained(model: PreTrainedModel, folder: Path) -> None:
    """Write `model` as safetensors, so that `AutoModelForCausalLM.from_pretrained` loads it.

    The folder is replaced atomically: a run killed half-way leaves the earlier model.

    Args:
        model: the model to save, with its configuration.
        folder: the folder to write; its parent is created.

    Raises:
        CheckpointError: `folder` cannot be written, or has files other than a saved model.
    """
    # A wrong path must not delete a user's files: only an earlier saved model is replaced.
    holds = folder.is_file() or (folder.is_dir() and any(folder.iterdir()))
    if holds and (folder.is_file() or not any(folder.glob("*.safetensors"))):
        what = f"save the model to {folder}"
        do = "choose a folder that is new or empty, or holds an earlier saved model"
        raise CheckpointError(what, because="what is there is not a saved model", do=do)
    from transformers.utils import logging

    # A progress bar of transformers would be drawn across the run's display.
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        replace_folder(folder, model.save_pretrained)
    except OSError as error:
        do = "choose a folder that can be written, with enough room"
        raise CheckpointError(f"save the model to {folder}", because=str(error), do=do) from error
    finally:
        if shown:
            logging.enable_progress_bar()


def _unreadable(source: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"build model '{source}'",
        because=f"transformers: {error}",
        do="pass a built-in size, the config.json of a causal language model, or an org/name with "
        "the network on",
    )
