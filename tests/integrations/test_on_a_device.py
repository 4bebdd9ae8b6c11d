"""Trainers of other libraries move the model to a GPU, or to the device that is none."""

from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

import thinwire as tw
from fake_device import DEVICE, FakeDevice
from thinwire.integrations.transformers import TransformersCallback
from trainer_workers import (
    Windows,
    hugging_face_arguments,
    hugging_face_trainer,
    lightning_module,
    lightning_saves,
    lightning_trainer,
    model,
)

H, STEPS, SAVED_AT = 4, 12, 8
METHOD = tw.presets.muloco(bits=2, sync_every=H)
LOOK = "live_weights.py:LiveWeights.check_no_copies"


def hugging_face(
    out: Path, fake: FakeDevice | None, *, resume: bool, accelerator: str = "cpu"
) -> tw.OuterLoop:
    """Trainer moves the model once it is given it, and the outer loop is there before."""
    net = model() if fake is None else fake.hold_gradients(model())
    given = {"max_steps": STEPS, "per_device_train_batch_size": 2, "lr_scheduler_type": "constant"}
    given |= {"save_strategy": "steps", "save_steps": SAVED_AT, "logging_steps": H}
    given |= {"eval_strategy": "steps", "eval_steps": SAVED_AT}
    given |= {"use_cpu": accelerator == "cpu"}
    given |= {"max_grad_norm": 0.0}  # torch asks where the tensors really are
    optimizer = METHOD.inner.build(net)
    outer = tw.OuterLoop(net, optimizer, METHOD)
    args = hugging_face_arguments(out, **given)
    trainer = hugging_face_trainer(args, net, Windows(0), optimizer)
    trainer.accelerator.device_placement = fake is None  # it has moved the model
    TransformersCallback(outer).add_to(trainer)
    trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{SAVED_AT}") if resume else None)
    return outer


def lightning(
    out: Path, fake: FakeDevice | None, *, resume: bool, accelerator: str = "cpu"
) -> tw.OuterLoop:
    """Lightning moves the module after the callback's `setup`, in which the outer loop is built."""
    pytest.importorskip("lightning")
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from torchdata.stateful_dataloader import StatefulDataLoader

    from thinwire.integrations.lightning import LightningCallback

    class OnDevice(SingleDeviceStrategy):
        root_device = DEVICE

        def setup_environment(self) -> None:
            """Do not look whether it is there."""

    callback = LightningCallback(METHOD)
    saves = lightning_saves(out, SAVED_AT)
    given = {"max_steps": STEPS, "val_check_interval": SAVED_AT, "accelerator": accelerator}
    given |= {} if fake is None else {"strategy": OnDevice("cpu")}
    fits = lightning_trainer(out, callback, saves, **given)
    net = model() if fake is None else fake.hold_gradients(model())
    fits.fit(
        lightning_module(net, lambda: METHOD.inner.build(net)),
        StatefulDataLoader(Windows(0), batch_size=2),
        torch.utils.data.DataLoader(Windows(99, 8), batch_size=4),
        ckpt_path=str(out / f"step={SAVED_AT}.ckpt") if resume else None,
    )
    return callback.outer


@pytest.mark.parametrize("train", [hugging_face, lightning])
def test_rounds_follow_a_model_that_a_trainer_moves(train, tmp_path: Path, monkeypatch) -> None:
    """They have the bits of a CPU, and what else waits is the trainer's."""
    expected = train(tmp_path / "cpu", None, resume=False).digest()
    # Which Trainer moves the model to, and batches.
    placed = property(lambda args: DEVICE if args._setup_devices else None)
    monkeypatch.setattr(TrainingArguments, "device", placed)
    for resume in (False, True):
        with FakeDevice() as fake:
            outer = train(tmp_path / "there", fake, resume=resume)
        assert outer.digest() == expected
        own = {place: n for place, n in fake.waits.items() if place != "elsewhere"}
        assert own.pop("checksums.py:checksums") == (1 if resume else 3)  # one a round
        # When training begins, or before, and in its third step.
        assert own.keys() <= {"loop_state.py:LoopState.replaced", LOOK}
        assert own.get(LOOK, 0) <= 1
        assert sum(own.values()) <= 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("train", [hugging_face, lightning])
def test_a_trainer_on_a_gpu_resumes_bit_for_bit(train, tmp_path: Path) -> None:
    outer = train(tmp_path, None, resume=False, accelerator="gpu")
    assert {p.device.type for p in outer._live.parameters.values()} == {"cuda"}
    again = train(tmp_path, None, resume=True, accelerator="gpu")
    assert again.digest() == outer.digest()
