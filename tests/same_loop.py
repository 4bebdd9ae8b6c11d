"""A worker of `thinwire train`'s loop under a trainer: `python same_loop.py LIBRARY`.

CONFIG names the file of a pickled `TrainConfig`, OUT a folder. It ends with a line of JSON, and the
outer parameters are in a file.
"""

import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import thinwire as tw
from thinwire.train.config import TrainConfig
from trainer_workers import hugging_face_arguments, lightning_module, lightning_trainer


class Rows(torch.utils.data.IterableDataset):
    """The rows that worker k of `thinwire train` reads, in its order."""

    def __init__(self, config: TrainConfig, data) -> None:
        self._config, self._data = config, data

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        config = self._config
        batches = self._data.training.batches(
            worker=int(os.environ["WORKER"]),
            workers=config.workers,
            global_batch=config.global_batch,
            seed=config.seed,
        )
        for batch in batches:
            for row in batch:
                yield {"input_ids": row, "labels": row}


def parts(config: TrainConfig):
    """Data, model, optimizer and schedule, as `thinwire train` has them."""
    data = config.data.load()
    model = config.model.build(
        vocab_size=data.vocab_size,
        sequence_length=config.data.sequence_length,
        seed=config.seed,
    )
    optimizer = config.method.inner.build(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: config.schedule.factor(step, steps=config.steps)
    )
    return Rows(config, data), model, optimizer, schedule


def by_hugging_face(config: TrainConfig, out: Path) -> tuple[list[float], tw.OuterLoop]:
    from transformers import Trainer

    from thinwire.integrations.transformers import TransformersCallback

    rows, model, optimizer, schedule = parts(config)
    outer = tw.OuterLoop(model, optimizer, config.method)
    args = hugging_face_arguments(
        out,
        max_steps=config.steps,
        per_device_train_batch_size=config.global_batch // config.workers,
        max_grad_norm=config.clip_norm,
        logging_steps=1,
        save_strategy="no",
    )
    trainer = Trainer(model=model, args=args, train_dataset=rows, optimizers=(optimizer, schedule))
    TransformersCallback(outer).add_to(trainer)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], outer


def by_lightning(config: TrainConfig, out: Path) -> tuple[list[float], tw.OuterLoop]:
    from thinwire.integrations.lightning import LightningCallback

    losses: list[float] = []
    rows, model, optimizer, schedule = parts(config)
    how = [optimizer], [{"scheduler": schedule, "interval": "step"}]
    callback = LightningCallback(config.method)
    given = {"gradient_clip_val": config.clip_norm, "enable_checkpointing": False}
    trainer = lightning_trainer(out, callback, max_steps=config.steps, **given)
    batch_size = config.global_batch // config.workers
    loader = torch.utils.data.DataLoader(rows, batch_size=batch_size)
    trainer.fit(lightning_module(model, lambda: how, losses), loader)
    return losses, callback.outer


LIBRARIES = {"transformers": by_hugging_face, "lightning": by_lightning}


if __name__ == "__main__":
    torch.set_num_threads(1)
    file, out = os.environ["CONFIG"], os.environ["OUT"]
    losses, outer = LIBRARIES[sys.argv[1]](pickle.loads(Path(file).read_bytes()), Path(out))
    anchor = {name.removeprefix("net."): value for name, value in outer.consensus().items()}
    torch.save(anchor, Path(out) / f"anchor{os.environ['WORKER']}.pt")
    print(json.dumps({"losses": losses, "digest": outer.digest()}), flush=True)
