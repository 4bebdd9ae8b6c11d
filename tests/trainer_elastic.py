"""Elastic workers under another library's trainer, which report in JSON lines on standard output.

What `elastic_team.Team(work="trainer_elastic.FUNCTION")` starts.
"""

import os
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from elastic_worker import tell
from language_models import llama
from thinwire.integrations.shares import ShareDataset
from thinwire.transport.address import split_address
from trainer_workers import Windows, is_anchor

STEPS, H, BATCH, ACCUMULATED = 60, 5, 2, 2
ROWS = BATCH * ACCUMULATED
RATE = 0.002


class Rows(Windows):
    """Windows that say when they are read."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tell(row=index)
        return super().__getitem__(index)


def factor(step: int) -> float:
    """Of the learning rate: it goes down in a straight line."""
    return 1 - step / STEPS


def model(identity: str) -> nn.Module:
    """A newcomer takes the others' weights, whatever its own were."""
    torch.manual_seed(sum(identity.encode()))
    return llama()


def act_as_torchrun(index: int, ranks: int, meeting: str) -> None:
    """The variables by which a trainer joins the ranks of this worker."""
    host, port = split_address(meeting)
    names = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


def connect(lighthouse: str, identity: str, options: dict) -> tw.transport.Elastic:
    torch.set_num_threads(1)
    transport = tw.transport.Elastic(
        lighthouse,
        identity=identity,
        options=tw.transport.ElasticOptions(**options.get("terms", {})),
        group=dist.group.WORLD if "ranks" in options else None,
    )
    transport.events.listen(lambda event: tell(event=event.describe()))
    return transport


def finish(outer: tw.OuterLoop, net: nn.Module, logs: list[dict], steps: int) -> None:
    tell(
        digest=outer.digest(),
        version=outer.stats.rounds,
        last_step=outer.inner_step,
        trainer_steps=steps,
        logs=logs,
        model_is_anchor=is_anchor(net, outer),
    )
    outer.close()
    os._exit(0)


def say_step(outer: tw.OuterLoop, step: int, rate: float) -> None:
    # Of the step that has just been trained: in `share`, which is another one after a round.
    tell(step=step, share=outer.share, workers=outer.workers, version=outer.stats.rounds, rate=rate)


def under_hugging_face(lighthouse: str, identity: str, options: dict) -> None:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from thinwire.integrations.transformers import TransformersCallback

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **given):
            say_step(outer, state.global_step, given["optimizer"].param_groups[0]["lr"])
            time.sleep(options.get("step_s", 0.05))

    if "ranks" in options:
        act_as_torchrun(*options["ranks"])
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    args = TrainingArguments(
        output_dir=f"{options['out']}/{identity}",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // ranks,
        gradient_accumulation_steps=ACCUMULATED,
        ignore_data_skip=True,
        logging_steps=H,
        eval_strategy="steps",
        eval_steps=4 * H,
        save_strategy="steps",
        save_steps=4,
        save_total_limit=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **({"ddp_backend": "gloo"} if ranks > 1 else {}),
    )
    net = model(identity)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    method = tw.presets.from_text(options.get("method", "diloco"), sync_every=H)
    outer = tw.OuterLoop(net, optimizer, method, transport=connect(lighthouse, identity, options))
    trainer = Trainer(
        model=net,
        args=args,
        train_dataset=ShareDataset(Rows(0, 100_000), lambda: outer, rows_per_step=ROWS),
        eval_dataset=Windows(99, 8),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)),
        callbacks=[Watch()],
    )
    trainer.remove_callback(PrinterCallback)  # which is no JSON
    TransformersCallback(outer).add_to(trainer)
    trainer.train(resume_from_checkpoint=options.get("resume"))
    finish(outer, net, trainer.state.log_history, trainer.state.global_step)


def under_lightning(lighthouse: str, identity: str, options: dict) -> None:
    import logging

    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from thinwire.integrations.lightning import LightningCallback

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logs: list[dict] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model(identity)

        def training_step(self, batch, index):
            return self.net(**batch).loss

        def validation_step(self, batch, index):
            self.log("val_loss", self.net(**batch).loss)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=RATE)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    class Watch(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if index % ACCUMULATED == 0:
                rate = trainer.optimizers[0].param_groups[0]["lr"]
                say_step(callback.outer, trainer.global_step, rate)
                time.sleep(options.get("step_s", 0.05))

        def on_validation_end(self, trainer, module):
            found = {name: float(value) for name, value in trainer.callback_metrics.items()}
            logs.append({"step": trainer.global_step, **found})

    method = tw.presets.from_text(options.get("method", "diloco"), sync_every=H)
    callback = LightningCallback(method, transport=connect(lighthouse, identity, options))
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=ACCUMULATED,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        check_val_every_n_epoch=1,  # which is a round
        num_sanity_val_steps=0,
        callbacks=[
            callback,
            Watch(),
            ModelCheckpoint(
                dirpath=f"{options['out']}/{identity}",
                every_n_train_steps=4,
                save_top_k=-1,
                filename="{step}",
            ),
        ],
        default_root_dir=options["out"],
    )
    module = Module()
    shares = ShareDataset(Rows(0, 100_000), lambda: callback.outer, rows_per_step=ROWS)
    trainer.fit(
        module,
        torch.utils.data.DataLoader(shares, batch_size=BATCH),
        torch.utils.data.DataLoader(Windows(99, 8), batch_size=4),
        ckpt_path=options.get("resume"),
    )
    finish(callback.outer, module, logs, trainer.global_step)
