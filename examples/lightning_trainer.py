"""Lightning's Trainer as one of several workers that start by themselves.

Needs: pip install -e '.[lightning]' torchdata

Alone: python FILE. Two workers, in two terminals, or on two machines with the address of the first:

THINWIRE_AT="tcp://127.0.0.1:29400?workers=2&worker=0" python FILE
THINWIRE_AT="tcp://127.0.0.1:29400?workers=2&worker=1" python FILE
"""

import inspect
import tempfile
import textwrap

import lightning
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import thinwire as tw
from thinwire.integrations.lightning import LightningCallback

text = torch.frombuffer(bytearray(inspect.getsource(textwrap).encode()), dtype=torch.uint8).long()
transport = tw.connect()
worker, workers = transport.rank, transport.world_size


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

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(windows[:, :8]), windows[:, 8])

    def training_step(self, windows: torch.Tensor, index: int) -> torch.Tensor:
        return self.loss(windows)

    def validation_step(self, windows: torch.Tensor, index: int) -> None:
        self.log("val_loss", self.loss(windows))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


lightning.seed_everything(0, verbose=False)  # the same initial weights everywhere
model = Model()
callback = LightningCallback(tw.presets.diloco(sync_every=10), transport=transport)
trainer = lightning.Trainer(
    max_steps=30,
    accelerator="cpu",
    devices=1,
    callbacks=[callback],
    val_check_interval=10,
    num_sanity_val_steps=0,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=tempfile.mkdtemp(),
)
windows = text.unfold(0, 9, 1)
# A DataLoader of torch's begins its epoch anew when a run is resumed; this one goes on.
own = StatefulDataLoader(windows[worker::workers], batch_size=16, shuffle=True)
trainer.fit(model, own, torch.utils.data.DataLoader(windows[:512], batch_size=64))
loss = trainer.callback_metrics["val_loss"]
print(f"worker {worker}: loss {loss:.4f} {callback.outer.stats} {callback.outer.digest()}")
