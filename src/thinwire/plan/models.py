"""Models by name: built-in sizes of Llama, and any configuration, without a weight or a network.

The built-in sizes are plain (RoPE, RMSNorm, SwiGLU, untied head), so that a result depends on the
method and not on the architecture. A name is the number of parameters with a certain vocabulary:
256 (bytes) up to 10m, 32,000 for 35m, 60m and 1.3b, and 128,256 for the rest. With another
vocabulary only embedding and head change.

150m, 416m, 914m, 1.76b, 3.1b and 15b are the sizes of the MuLoCo paper (arXiv:2505.23725): for
m = 1, 2, 3, 4, 5, 9 a width of 512m, 6m layers, 4m heads and a feed-forward of 2.75 widths.
Differs: the paper adds QK-norm and post-norms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from thinwire.errors import ConfigurationError, ThinwireError, check, unknown_name
from thinwire.plan.shape import Shape, Weight

if TYPE_CHECKING:  # transformers takes seconds to import: only building pays for it
    from transformers import PreTrainedConfig

HUB_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.json)")
"""The org/name of a model on the Hugging Face hub."""


@dataclass(frozen=True, slots=True)
class LlamaSize:
    """A size of Llama.

    Args:
        hidden: width of the residual stream.
        layers: blocks.
        heads: attention heads, each with its own keys and values.
        feed_forward: width of the feed-forward.
        counted_with: the vocabulary at which the parameters add up to the name.
    """

    hidden: int
    layers: int
    heads: int
    feed_forward: int
    counted_with: int

    def configuration(self, vocab_size: int, sequence_length: int) -> PreTrainedConfig:
        """The transformers configuration.

        Args:
            vocab_size: rows of the embedding, and of the head.
            sequence_length: positions; it changes no parameter.
        """
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=vocab_size,
            max_position_embeddings=sequence_length,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            intermediate_size=self.feed_forward,
            tie_word_embeddings=False,
            use_cache=False,
            # Llama's own ids 1 and 2 are ordinary bytes here, which would end generation.
            bos_token_id=None,
            eos_token_id=None,
        )

    def weights(self, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...], int | None, str]]:
        """(name, shape, layer, role) of each parameter of that model, in the model's order.

        The same as transformers builds from the configuration, without building it.

        Args:
            vocab_size: rows of the embedding, and of the head.
        """
        width, between = self.hidden, self.feed_forward
        yield "model.embed_tokens.weight", (vocab_size, width), None, "embedding"
        matrices = {f"self_attn.{name}_proj": (width, width) for name in "qkvo"} | {
            "mlp.gate_proj": (between, width),
            "mlp.up_proj": (between, width),
            "mlp.down_proj": (width, between),
        }
        for layer in range(self.layers):
            for name, shape in matrices.items():
                yield f"model.layers.{layer}.{name}.weight", shape, layer, "matrix"
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"model.layers.{layer}.{name}.weight", (width,), layer, "vector"
        yield "model.norm.weight", (width,), None, "vector"
        yield "lm_head.weight", (vocab_size, width), None, "head"


LLAMA_SIZES: Final = {
    "250k": LlamaSize(64, 4, 2, 192, 256),
    "1m": LlamaSize(128, 5, 4, 320, 256),
    "2m": LlamaSize(192, 5, 6, 416, 256),
    "4m": LlamaSize(256, 5, 4, 672, 256),
    "10m": LlamaSize(384, 6, 6, 896, 256),
    "35m": LlamaSize(384, 6, 6, 1024, 32_000),
    "60m": LlamaSize(512, 8, 8, 1536, 32_000),
    "150m": LlamaSize(512, 6, 4, 1_408, 128_256),
    "416m": LlamaSize(1024, 12, 8, 2_816, 128_256),
    "914m": LlamaSize(1536, 18, 12, 4_224, 128_256),
    "1.3b": LlamaSize(2048, 24, 16, 5504, 32_000),
    "1.76b": LlamaSize(2048, 24, 16, 5_632, 128_256),
    "3.1b": LlamaSize(2560, 30, 20, 7_040, 128_256),
    "15b": LlamaSize(4608, 54, 36, 12_672, 128_256),
}
"""Built-in sizes by name."""


def unknown_model(cannot: str, name: str) -> ThinwireError:
    """The error for a `name` that is neither a built-in size nor a path nor a name on the hub."""
    return unknown_name(
        cannot,
        name,
        LLAMA_SIZES,
        because="it is not a built-in size, an existing file or folder, or an org/name",
        do=f"pass one of {', '.join(LLAMA_SIZES)}, or the path of a config.json",
    )


def resolve(source: str) -> Shape:
    """The shape of the causal language model called `source`.

    Args:
        source: a built-in size of `thinwire train`, such as "150m", with the vocabulary that gives
            it its name; or the path of a `config.json`, or of a folder with one; or the `org/name`
            of a configuration in the local Hugging Face cache. The network is not used.

    Raises:
        ConfigurationError: `source` is not one of these, or transformers cannot build a causal
            language model from it.

    >>> resolve("250k").parameters, resolve("250k").layers
    (246336, 4)
    """
    what = f"plan for model {source!r}"
    if source in LLAMA_SIZES:
        size = LLAMA_SIZES[source]
        rows = size.weights(size.counted_with)
        weights = (Weight.of(name, shape, layer=at, role=role) for name, shape, at, role in rows)
        return Shape(name=source, weights=tuple(weights))
    path = Path(source)
    if not path.exists() and not HUB_NAME.fullmatch(source):
        raise unknown_model(what, source)
    because, do = "the folder has no config.json", "pass that of a saved model, such as RUN/model"
    check(not path.is_dir() or (path / "config.json").is_file(), what, because=because, do=do)
    do = "pass a built-in size, or the config.json of a causal language model that it knows"
    if not path.exists():
        do = f"run `hf download {source} config.json` once: a plan uses no network"
    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        # Never run code that comes with a configuration, and never prompt whether to run it.
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a foreign configuration fails in any way
        because = f"transformers: {' '.join(str(error).split())}"
        if isinstance(error, ImportError):
            do = "pip install 'thinwire[train]', or pass the numbers of parameters and layers"
        raise ConfigurationError(what, because=because, do=do) from error
    return Shape.of_model(model, name=source)
