"""transformers' Trainer as one of several workers that start by themselves.

Needs: pip install -e '.[transformers]'

Alone: python FILE. Two workers, in two terminals, or on two machines with the address of the first:

THINWIRE_AT="tcp://127.0.0.1:29400?workers=2&worker=0" python FILE
THINWIRE_AT="tcp://127.0.0.1:29400?workers=2&worker=1" python FILE
"""

import inspect
import tempfile
import textwrap

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import thinwire as tw
from thinwire.integrations.transformers import TransformersCallback

text = torch.frombuffer(bytearray(inspect.getsource(textwrap).encode()), dtype=torch.uint8).long()


def windows(first: int, step: int) -> list[dict[str, torch.Tensor]]:
    starts = range(16 * first, len(text) - 64, 16 * step)
    return [{"input_ids": text[s : s + 64], "labels": text[s : s + 64]} for s in starts]


torch.manual_seed(0)  # the same initial weights everywhere
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip
model = LlamaForCausalLM(config)
method = tw.presets.diloco(sync_every=10)
optimizer = method.inner.build(model)
outer = tw.OuterLoop(model, optimizer, method)
worker, workers = outer.transport.rank, outer.transport.world_size

trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=30,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),  # on CPUs it only warns
    ),
    train_dataset=windows(worker, workers),  # its own data
    eval_dataset=windows(0, 50),
    optimizers=(optimizer, None),
)
TransformersCallback(outer).add_to(trainer)
trainer.train()
loss = trainer.evaluate()["eval_loss"]
print(f"worker {worker}: loss {loss:.4f} {outer.stats} {outer.digest()}")
