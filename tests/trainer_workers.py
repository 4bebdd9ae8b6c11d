"""A worker under another library's trainer: `python trainer_workers.py LIBRARY METHOD MODE OUT`.

MODE is straight, kill (dies after inner step 15) or resume (from the checkpoint of step 8). It ends
with a line of JSON.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from language_models import llama

STEPS, KILLED_AT, SAVED_AT = 24, 15, 8
METHODS = {
    "diloco": lambda: tw.presets.diloco(sync_every=4),
    "streaming": lambda: tw.presets.streaming_diloco(sync_every=6, layers=2, tau=2),
    "sparse": lambda: tw.presets.sparse_muloco(sync_every=4, density=1 / 32),
}
WORKER = int(os.environ.get("THINWIRE_WORKER", "0"))


class Windows(torch.utils.data.Dataset):
    """Of one number of tokens each, drawn by worker and index."""

    def __init__(self, worker: int, count: int = 512) -> None:
        self.worker, self.count = worker, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draws = torch.Generator().manual_seed(1_000_003 * self.worker + index)
        start = torch.randint(32, (1,), generator=draws)
        tokens = (start + 3 * torch.arange(12)) % 32
        return {"input_ids": tokens, "labels": tokens}


def model() -> nn.Module:
    torch.manual_seed(0)
    return llama()


def adapted(net: nn.Module) -> nn.Module:
    """`net` with adapters of rank 2, which are all that is trained."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        # peft asks transformers for a property by its old name.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        return get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def train_by_hugging_face(
    method: tw.Method, mode: str, out: Path, net: nn.Module | None = None, **changes
) -> dict:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from thinwire.integrations.transformers import TransformersCallback

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if mode == "kill" and state.global_step == KILLED_AT:
                os._exit(9)

    net = model() if net is None else net
    optimizer = method.inner.build(net)
    arguments = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "warmup_steps": 4,
        "report_to": [],
        "use_cpu": True,
        **({"ddp_backend": "gloo"} if "RANK" in os.environ else {}),
        "logging_steps": 8,
        "save_strategy": "steps",
        "save_steps": SAVED_AT,
        "eval_strategy": "steps",
        "eval_steps": 8,
        "disable_tqdm": True,
    }
    args = TrainingArguments(output_dir=str(out), **(arguments | changes))
    # Trainer has joined the ranks of this worker by now, if there are several.
    ranks = dist.group.WORLD if dist.is_initialized() else None
    outer = tw.OuterLoop(net, optimizer, method, ddp_group=ranks)
    trainer = Trainer(
        model=net,
        args=args,
        train_dataset=Windows(WORKER),
        eval_dataset=Windows(99, 16),
        optimizers=(optimizer, None),
        callbacks=[Kill()],
    )
    TransformersCallback(outer).add_to(trainer)
    trainer.train(resume_from_checkpoint=True if mode == "resume" else None)
    return {
        "digest": outer.digest(),
        "rounds": outer.stats.rounds,
        "steps": outer.inner_step,
        "sent_bytes": outer.stats.sent_bytes,
        "losses": [
            (h["step"], h["eval_loss"]) for h in trainer.state.log_history if "eval_loss" in h
        ],
        "train_losses": [(h["step"], h["loss"]) for h in trainer.state.log_history if "loss" in h],
        "logged_rounds": [h["outer/rounds"] for h in trainer.state.log_history if "loss" in h],
        "model_is_anchor": is_anchor(net, outer),
        "trained": sum(p.numel() for p in net.parameters() if p.requires_grad),
        "is_ddp": type(trainer.model_wrapped).__name__ == "DistributedDataParallel",
    }


def train_by_lightning(method: tw.Method, mode: str, out: Path) -> dict:
    import logging

    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from torchdata.stateful_dataloader import StatefulDataLoader

    from thinwire.integrations.lightning import LightningCallback

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    losses: list[tuple[int, float]] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch, index):
            return self.net(**batch).loss

        def validation_step(self, batch, index):
            self.log("val_loss", self.net(**batch).loss)

        def on_validation_epoch_end(self):
            losses.append(
                (self.trainer.global_step, float(self.trainer.callback_metrics["val_loss"]))
            )

        def configure_optimizers(self):
            return method.inner.build(self.net)

    class Kill(Callback):
        def on_train_batch_end(self, trainer, *_):
            if mode == "kill" and trainer.global_step == KILLED_AT:
                os._exit(9)

    callback = LightningCallback(method)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            callback,
            Kill(),
            ModelCheckpoint(
                dirpath=out, every_n_train_steps=SAVED_AT, save_top_k=-1, filename="{step}"
            ),
        ],
        val_check_interval=16,
        num_sanity_val_steps=0,
        default_root_dir=out,
    )
    module = Module()
    trainer.fit(
        module,
        StatefulDataLoader(Windows(WORKER), batch_size=4),
        torch.utils.data.DataLoader(Windows(99, 16), batch_size=4),
        ckpt_path=str(out / f"step={SAVED_AT}.ckpt") if mode == "resume" else None,
    )
    outer = callback.outer
    return {
        "digest": outer.digest(),
        "rounds": outer.stats.rounds,
        "steps": outer.inner_step,
        "sent_bytes": outer.stats.sent_bytes,
        "losses": losses,
        "model_is_anchor": is_anchor(module, outer),
    }


def train_adapters(method: tw.Method, mode: str, out: Path) -> dict:
    return train_by_hugging_face(method, mode, out, adapted(model()))


def is_anchor(net: nn.Module, outer: tw.OuterLoop) -> bool:
    anchor = outer.anchor()
    return all(torch.equal(p, anchor[name]) for name, p in net.named_parameters())


LIBRARIES = {
    "transformers": train_by_hugging_face,
    "peft": train_adapters,
    "lightning": train_by_lightning,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    library, name, mode, out = sys.argv[1:]
    found = LIBRARIES[library](METHODS[name](), mode, Path(out) / str(WORKER))
    print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
