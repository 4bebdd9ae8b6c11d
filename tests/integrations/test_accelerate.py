from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

import thinwire as tw
from trainer_workers import Windows, model

H, STEPS, SAVED_AT = 4, 14, 5


def worker():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = model()
    method = tw.presets.muloco(bits=1, sync_every=H)
    loader = torch.utils.data.DataLoader(Windows(0), batch_size=4)
    net, optimizer, loader = accelerator.prepare(net, method.inner.build(net), loader)
    outer = tw.OuterLoop(net, optimizer, method)
    accelerator.register_for_checkpointing(outer)
    return accelerator, net, optimizer, loader, outer


def train(parts, first: int, last: int, save: Path | None = None) -> None:
    accelerator, net, optimizer, loader, outer = parts
    for index, batch in enumerate(loader):
        if not 2 * first <= index < 2 * last:
            continue
        with accelerator.accumulate(net):
            accelerator.backward(net(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                outer.step()
                if save is not None and outer.inner_step == SAVED_AT:
                    accelerator.save_state(str(save))


def test_its_wrapped_optimizer_is_followed_and_its_checkpoints_resume(tmp_path: Path) -> None:
    straight = worker()
    train(straight, 0, STEPS, tmp_path)
    assert straight[-1].inner_step == STEPS
    assert straight[-1].stats.rounds == STEPS // H

    resumed = worker()
    resumed[0].load_state(str(tmp_path))
    assert resumed[-1].inner_step == SAVED_AT
    train(resumed, SAVED_AT, STEPS)
    assert resumed[-1].digest() == straight[-1].digest()


def test_a_scaler_that_skips_a_step_counts_with_step_and_refuses_the_with_block() -> None:
    """Accelerate has no fp16 without an accelerator: its scaler is set here as it would set it."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    net = model()
    method = tw.presets.diloco(sync_every=H)
    net, optimizer = accelerator.prepare(net, method.inner.build(net))
    outer = tw.OuterLoop(net, optimizer, method)

    def step(number: int, scale: float) -> None:
        batch = {name: row[None] for name, row in Windows(0)[number].items()}
        accelerator.backward(net(**batch).loss * scale)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(H):
        step(number, float("inf") if number == 1 else 1.0)
        assert accelerator.optimizer_step_was_skipped == (number == 1)
        outer.step()
    assert (outer.inner_step, outer.stats.rounds) == (H, 1)
    outer.__enter__()
    with pytest.raises(tw.ConfigurationError, match="that a GradScaler steps"):
        step(H, 1.0)
