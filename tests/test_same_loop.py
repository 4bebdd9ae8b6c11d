"""A worker under another library's trainer computes what `thinwire train` computes."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import thinwire as tw
from thinwire.train.config import Intervals, TrainConfig, WarmupCosine
from thinwire.train.trainer import train
from trainer_workers import hugging_face_arguments, lightning_module, lightning_trainer
from training import corpus, records, tiny

__all__ = ["corpus", "tiny"]


class Rows(torch.utils.data.IterableDataset):
    """The rows that `thinwire train` reads, in its order."""

    def __init__(self, config: TrainConfig, data) -> None:
        how = {"workers": 1, "global_batch": config.global_batch, "seed": config.seed}
        self._batches = data.training.batches(worker=0, **how)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self._batches:
            for row in batch:
                yield {"input_ids": row, "labels": row}


def parts(config: TrainConfig):
    """Data, model, optimizer and schedule, as `thinwire train` has them."""
    data, length = config.data.load(), config.data.sequence_length
    model = config.model.build(vocab_size=data.vocab_size, sequence_length=length, seed=config.seed)
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
        per_device_train_batch_size=config.global_batch,
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
    loader = torch.utils.data.DataLoader(rows, batch_size=config.global_batch)
    trainer.fit(lightning_module(model, lambda: how, losses), loader)
    return losses, callback.outer


def by_thinwire(config: TrainConfig, out: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    train(config, out)
    (file,) = (out / "model").glob("*.safetensors")
    return [line["loss"] for line in records(out)], load_file(file)


@pytest.mark.slow_cases(but=("by_hugging_face-diloco",))
@pytest.mark.parametrize(
    ("by", "method", "largest_difference"),
    [
        (by_hugging_face, "diloco", 0),
        (by_hugging_face, "muloco", 0),
        (by_lightning, "diloco", 0),
        # Newton-Schulz, in bf16, makes much of a difference in the last bit.
        (by_lightning, "muloco", 5e-4),
    ],
)
def test_it_is_the_loop_of_thinwire_train(
    tiny, by, method: str, largest_difference: float, tmp_path: Path
) -> None:
    config = tiny(
        method,
        workers=1,
        schedule=WarmupCosine(warmup_steps=3),
        periods=Intervals(log_steps=1, evaluate_steps=12, checkpoint_steps=12),
    )
    wanted, mine = by_thinwire(config, tmp_path / "run")
    losses, outer = by(config, tmp_path / "out")
    assert len(wanted) == 12
    assert losses == pytest.approx(wanted, rel=2e-6)
    assert outer.stats.rounds == 3
    theirs = {name.removeprefix("net."): value for name, value in outer.consensus().items()}
    for name, value in mine.items():
        assert (theirs[name] - value).abs().max() <= largest_difference, name
    # The control: what the tolerances must tell apart.
    other = dataclasses.replace(config, schedule=WarmupCosine(warmup_steps=21))
    assert by_thinwire(other, tmp_path / "other")[0] != pytest.approx(wanted, rel=2e-5)
