"""Causal language models of well-known shapes, a few hundred parameters each."""

import transformers
from torch import nn

TINY = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "pad_token_id": 0,
}
LAYERS = TINY["num_hidden_layers"]


def llama(**changes) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY | changes))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=8,
        n_layer=LAYERS,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def qwen2() -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TINY))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TINY, tie_word_embeddings=True))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**TINY, num_local_experts=3, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def gpt_oss() -> nn.Module:
    config = transformers.GptOssConfig(**TINY, num_local_experts=3, num_experts_per_tok=2)
    return transformers.GptOssForCausalLM(config)


def gemma3() -> nn.Module:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**TINY))
