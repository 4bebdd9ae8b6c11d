from pathlib import Path

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
