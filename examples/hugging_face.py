"""A Hugging Face model and MuLoCo in a plain loop; `outer` follows the optimizer.

Needs: pip install -e '.[transformers]'

Alone: python FILE. Two workers: torchrun --nproc-per-node 2 FILE

This is not transformers' Trainer, which would average gradients over torchrun's ranks at every step
(docs/how-to/trainers.md).
"""

import inspect
import textwrap

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import thinwire as tw

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip
model = LlamaForCausalLM(config)
method = tw.presets.muloco(sync_every=10, inner=tw.inner.Muon(lr=0.02, adamw_lr=0.005))
optimizer = method.inner.build(model)  # one optimizer: Muon for matrices, AdamW for the rest

text = torch.frombuffer(bytearray(inspect.getsource(textwrap).encode()), dtype=torch.uint8).long()
outer = tw.OuterLoop(model, optimizer, method)
own = torch.Generator().manual_seed(outer.transport.rank)
with outer:
    for _ in range(30):
        starts = torch.randint(len(text) - 64, (8,), generator=own)
        tokens = torch.stack([text[start : start + 64] for start in starts])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

with outer.evaluating(), torch.no_grad():
    validation = model(input_ids=text[None, :64], labels=text[None, :64]).loss
print(f"worker {outer.transport.rank}: loss {validation:.4f} {outer.stats} {outer.digest()}")
