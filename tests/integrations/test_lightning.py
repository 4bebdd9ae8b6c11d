from pathlib import Path

import pytest
import torch

import thinwire as tw
from thinwire.integrations.shares import ShareDataset
from trainer_workers import (
    METHODS,
    SAVED_AT,
    STEPS,
    Companion,
    Windows,
    check_a_plain_worker,
    facts,
    is_anchor,
    is_put_back,
    lightning_module,
    lightning_saves,
    lightning_trainer,
    lone_end,
    model,
)

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import Callback

from thinwire.integrations.lightning import LightningCallback


def train(net, method: tw.Method, out: Path, resume: bool) -> tuple[dict, tw.OuterLoop]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    callback, losses = LightningCallback(method), []

    class Watch(Callback):
        def on_validation_end(self, trainer, module):
            losses.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))

    given = {"accumulate_grad_batches": 2, "val_check_interval": 16, "max_steps": STEPS}
    fits = lightning_trainer(out, callback, Watch(), lightning_saves(out, SAVED_AT), **given)
    trained = lightning_module(net, lambda: method.inner.build(net))
    fits.fit(
        trained,
        StatefulDataLoader(Windows(0), batch_size=4),
        torch.utils.data.DataLoader(Windows(99, 16), batch_size=4),
        ckpt_path=str(out / f"step={SAVED_AT}.ckpt") if resume else None,
    )
    return facts(trained, callback.outer) | {"losses": losses}, callback.outer


@pytest.mark.slow_cases("streaming", "sparse")
@pytest.mark.parametrize("method", METHODS)
def test_a_trainer_is_a_plain_loop_also_when_resumed(method: str, tmp_path: Path) -> None:
    check_a_plain_worker(train, method, tmp_path)


def trainer(callback, out: Path, **fields):
    callbacks = [] if callback is None else [callback]
    return lightning_trainer(out, *callbacks, max_steps=6, **fields)


def module():
    net = model()
    return lightning_module(net, lambda: torch.optim.SGD(net.parameters(), lr=0.1))


def data():
    return torch.utils.data.DataLoader(Windows(0))


@pytest.mark.parametrize("kind", ["DeepSpeedStrategy", "FSDPStrategy"])
def test_a_strategy_that_trains_copies_of_the_weights_is_refused(kind: str, tmp_path: Path) -> None:
    """Neither runs here: the strategy is Lightning's, but nothing of it was set up."""
    from lightning.pytorch import strategies

    fits = trainer(None, tmp_path)
    fits.strategy.__class__ = type(kind, (getattr(strategies, kind),), {})
    with pytest.raises(tw.ConfigurationError, match=f"train a worker with {kind}"):
        LightningCallback(tw.presets.diloco()).setup(fits, module(), "fit")


def test_steps_that_a_scaler_skips_count(tmp_path: Path) -> None:
    """Of `precision="16-mixed"`: on a CPU Lightning takes its plugin, but not the name."""
    from lightning.pytorch.plugins import MixedPrecision

    callback = LightningCallback(tw.presets.diloco(sync_every=2))
    with pytest.raises(tw.ConfigurationError, match="fit has not begun"):
        _ = callback.outer
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    overflows = iter([False, True, True, False, False, False])
    net = module()
    next(net.parameters()).register_hook(
        lambda grad: grad * float("inf") if next(overflows) else grad
    )
    trainer(callback, tmp_path, plugins=[plugin]).fit(net, data())
    assert plugin.scaler.get_scale() == 2.0
    assert (callback.outer.inner_step, callback.outer.stats.rounds) == (6, 3)


def two_optimizers():
    """A module that steps two optimizers after each batch, of which Lightning counts both."""

    class Manual(type(module())):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            parameters = [*self.parameters()]
            return [torch.optim.SGD(parameters[at::2], lr=0.1) for at in (0, 1)]

        def training_step(self, batch, index):
            self.net(**batch).loss.backward()
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    return Manual()


def test_manual_optimization_with_two_optimizers_resumes(tmp_path: Path) -> None:
    """Three batches are six steps by Lightning's count, and three inner steps."""
    method = tw.presets.diloco(sync_every=2)
    straight, resumed = LightningCallback(method), LightningCallback(method)
    rows = torch.utils.data.DataLoader([Windows(0)[0]] * 3)
    fits = trainer(straight, tmp_path)
    fits.callbacks.append(lightning_saves(tmp_path, 2))
    fits.fit(two_optimizers(), rows)
    again = trainer(resumed, tmp_path)
    again.fit(two_optimizers(), rows, ckpt_path=tmp_path / "step=2.ckpt")
    assert again.global_step == fits.global_step == 6
    assert resumed.outer.inner_step == straight.outer.inner_step == 3
    assert resumed.outer.digest() == straight.outer.digest()


def test_a_checkpoint_without_outer_state_is_refused(tmp_path: Path) -> None:
    plain = trainer(None, tmp_path / "plain")
    plain.fit(module(), data())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    callback = LightningCallback(tw.presets.diloco(sync_every=2))
    with pytest.raises(tw.errors.CheckpointError, match="no outer state"):
        trainer(callback, tmp_path).fit(module(), data(), ckpt_path=str(tmp_path / "plain.ckpt"))


def shares(callback: LightningCallback):
    dataset = ShareDataset(Windows(0), lambda: callback.outer, rows_per_step=3)
    return torch.utils.data.DataLoader(dataset, batch_size=3)


@pytest.mark.parametrize("at", [4, 8])
def test_a_worker_that_comes_late_is_at_the_others_step(at: int, tmp_path: Path) -> None:
    """If the run is over it trains no step of it."""
    method = tw.presets.diloco(sync_every=2)
    there = Companion(method, at, 8, lambda net: lightning_module(net, lambda: None))
    late = LightningCallback(method, transport=there.late)

    class Lockstep(Callback):
        def on_train_batch_start(self, *_) -> None:
            there.begin()

        def on_train_batch_end(self, trainer, *_) -> None:
            there.finish()
            numbers.append({name: float(x) for name, x in trainer.callback_metrics.items()})

    net, numbers = model(), []
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5), "interval": "step"}
    own = lightning_module(net, lambda: ([sgd], [scheduler]))
    rows = ShareDataset(Windows(0), lambda: late.outer, rows_per_step=3)
    fits = lightning_trainer(tmp_path, late, Lockstep(), max_steps=8)
    fits.fit(own, torch.utils.data.DataLoader(rows, batch_size=3))
    there.outer.finish()
    assert (fits.global_step, late.outer.inner_step, len(numbers)) == (8, 8, 8 - at)
    assert late.outer.digest() == there.outer.digest()
    assert is_anchor(own, late.outer)
    assert sgd.param_groups[0]["lr"] == 0.1 * 0.5**8
    # The x-axis of loggers.
    assert [line["step"] for line in numbers] == list(range(at + 1, 9))
    assert all(line["outer/workers"] == 2 for line in numbers)


def test_steps_that_the_run_went_on_without_are_taken_again(tmp_path: Path) -> None:
    callback = LightningCallback(tw.presets.diloco(sync_every=2), transport=lone_end())
    batches = []

    class Watch(Callback):
        def on_train_start(self, *_) -> None:
            is_put_back(callback.outer, 2)

        def on_train_batch_start(self, *_) -> None:
            batches.append(callback.outer.inner_step)

    fits = lightning_trainer(tmp_path, callback, Watch(), max_steps=5)
    fits.fit(module(), shares(callback))
    assert batches == [0, 1, 2, 3, 4, 3, 4]
    assert (fits.global_step, callback.outer.inner_step) == (5, 5)
    assert callback.outer._state.fully_synced()


def with_scheduler(interval: str, frequency: int):
    net = module()
    optimizer = net.configure_optimizers()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    how = {"scheduler": scheduler, "interval": interval, "frequency": frequency}
    net.configure_optimizers = lambda: ([optimizer], [how])
    return net


@pytest.mark.parametrize(
    ("net", "told"),
    [
        (lambda: with_scheduler("epoch", 1), "every 1 epochs.*interval="),
        (lambda: with_scheduler("step", 2), "every 2 steps.*interval="),
        (two_optimizers, "manual optimization"),
    ],
)
def test_what_elastic_workers_cannot_do_is_refused(net, told: str, tmp_path: Path) -> None:
    callback = LightningCallback(tw.presets.diloco(sync_every=2), transport=lone_end())
    with pytest.raises(tw.ConfigurationError, match=told):
        trainer(callback, tmp_path).fit(net(), shares(callback))
