"""Lightning's Trainer as a worker that joins and leaves: start and kill any number of them.

Needs: pip install -e '.[train,elastic,lightning]'

export THINWIRE_TOKEN=...                     # everywhere: openssl rand -hex 16
export THINWIRE_AT=file:///tmp/elastic/first  # or s3://BUCKET/RUN, hub://HOST:PORT/RUN
python FILE                                   # any number of times
"""

import inspect
import tempfile
import textwrap

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import thinwire as tw
from thinwire.integrations.lightning import LightningCallback
from thinwire.integrations.shares import ShareDataset

text = torch.frombuffer(bytearray(inspect.getsource(textwrap).encode()), dtype=torch.uint8).long()
windows = text.unfold(0, 9, 1)  # all of them


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(256, 32),
            nn.Flatten(),
            nn.Linear(8 * 32, 128),
            nn.ReLU(),
            nn.Linear(128, 256),
        )

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(rows[:, :8]), rows[:, 8])

    def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        return self.loss(rows)

    def validation_step(self, rows: torch.Tensor, index: int) -> None:
        self.log("val_loss", self.loss(rows))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
        return [optimizer], [{"scheduler": decay, "interval": "step"}]


model = Model()  # a new worker takes the weights of the others
callback = LightningCallback(tw.presets.diloco(sync_every=10))
trainer = lightning.Trainer(
    max_steps=60,
    accelerator="cpu",
    devices=1,
    callbacks=[callback],
    check_val_every_n_epoch=1,  # an epoch is a round
    num_sanity_val_steps=0,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=tempfile.mkdtemp(),
)
shares = ShareDataset(windows, lambda: callback.outer, rows_per_step=16)
validation = DataLoader(windows[:512], batch_size=64)
trainer.fit(model, DataLoader(shares, batch_size=16), validation)
# A worker that joins after the end takes the final weights, and fit() evaluates nothing.
loss = trainer.validate(model, validation, verbose=False)[0]["val_loss"]
print(f"loss {loss:.4f} {callback.outer.stats} {callback.outer.digest()}")
callback.outer.close()  # waits until the others have finished, too
