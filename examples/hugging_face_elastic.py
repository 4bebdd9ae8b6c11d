"""transformers' Trainer as a worker that joins and leaves: start and kill any number of them.

Needs: pip install -e '.[train,elastic,transformers]'

export THINWIRE_TOKEN=...                     # everywhere: openssl rand -hex 16
export THINWIRE_AT=file:///tmp/elastic/first  # or s3://BUCKET/RUN, hub://HOST:PORT/RUN
python FILE                                   # any number of times
"""

import inspect
import tempfile
import textwrap

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import thinwire as tw
from thinwire.integrations.shares import ShareDataset
from thinwire.integrations.transformers import TransformersCallback

batch_size, accumulation = 4, 2
text = torch.frombuffer(bytearray(inspect.getsource(textwrap).encode()), dtype=torch.uint8).long()
windows = [{"input_ids": row, "labels": row} for row in text.unfold(0, 64, 16)]  # all of them

config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip
model = LlamaForCausalLM(config)  # a new worker takes the weights of the others
method = tw.presets.diloco(sync_every=10)
optimizer = method.inner.build(model)
outer = tw.OuterLoop(model, optimizer, method)

trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),  # to resume, a folder that stays
        max_steps=60,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        ignore_data_skip=True,  # a restarted worker reads new data
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),  # on CPUs it only warns
    ),
    train_dataset=ShareDataset(windows, lambda: outer, rows_per_step=batch_size * accumulation),
    eval_dataset=windows[::10],
    optimizers=(optimizer, None),
)
TransformersCallback(outer).add_to(trainer)
trainer.train()
loss = trainer.evaluate()["eval_loss"]
print(f"loss {loss:.4f} {outer.stats} {outer.digest()}")
outer.close()  # waits until the others have finished, too
