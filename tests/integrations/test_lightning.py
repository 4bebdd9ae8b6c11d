from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from elastic_twin import ElasticHub
from thinwire.integrations.shares import ShareDataset
from trainer_workers import (
    check_a_killed_team_resumes,
    check_an_elastic_worker_comes_back,
    is_anchor,
    lightning_saves,
    lightning_trainer,
)

pytest.importorskip("lightning")

from thinwire.integrations.lightning import LightningCallback


@pytest.mark.slow
@pytest.mark.parametrize("method", ["diloco", "streaming", "sparse"])
def test_two_workers_killed_and_resumed_end_as_if_left_alone(method: str, tmp_path: Path) -> None:
    check_a_killed_team_resumes("lightning", method, tmp_path)


def last_checkpoint(folder: Path) -> str:
    return str(max(folder.glob("*.ckpt"), key=lambda file: int(file.stem.partition("=")[2])))


@pytest.mark.slow
@pytest.mark.parametrize("resume", [None, last_checkpoint], ids=["with nothing", "checkpoint"])
def test_an_elastic_worker_that_was_killed_comes_back(resume, tmp_path: Path) -> None:
    logs = check_an_elastic_worker_comes_back("trainer_workers.elastic_lightning", tmp_path, resume)
    # Every round, the outer parameters, which are the same.
    evaluated = [{line["step"]: line["val_loss"] for line in history} for history in logs]
    # Lightning ends the epoch first in which the checkpoint was written.
    rounds = [step for step in evaluated[-1] if step % 5 == 0]
    assert rounds[-1] == 60
    assert all(evaluated[0][step] == evaluated[-1][step] for step in rounds)
    assert len({history[-1]["outer/rounds"] for history in logs}) == 1
    for history in logs:
        assert max(line["outer/workers"] for line in history) == 3
        # The x-axis of loggers.
        assert history[-1]["step"] == 60


def trainer(callback, out: Path, **fields):
    callbacks = [] if callback is None else [callback]
    return lightning_trainer(out, *callbacks, max_steps=6, **fields)


def module():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Linear(3, 1)

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


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
    net.net.weight.register_hook(lambda grad: grad * float("inf") if next(overflows) else grad)
    trainer(callback, tmp_path, plugins=[plugin]).fit(net, data())
    assert plugin.scaler.get_scale() == 2.0
    assert (callback.outer.inner_step, callback.outer.stats.rounds) == (6, 3)


def data():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(24, 3)))


def two_optimizers():
    """A module that steps two optimizers after each batch, of which Lightning counts both."""

    class Manual(type(module())):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD([p], lr=0.1) for p in self.parameters()]

        def training_step(self, batch, index):
            self.net(batch[0]).square().mean().backward()
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    return Manual()


def test_manual_optimization_with_two_optimizers_resumes(tmp_path: Path) -> None:
    """Three batches are six steps by Lightning's count, and three inner steps."""
    method = tw.presets.diloco(sync_every=2)
    straight, resumed = LightningCallback(method), LightningCallback(method)
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(3, 3)))
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
    rows = torch.utils.data.TensorDataset(torch.randn(24, 3))
    dataset = ShareDataset(rows, lambda: callback.outer, rows_per_step=3)
    return torch.utils.data.DataLoader(dataset, batch_size=3)


def test_a_worker_that_comes_when_the_run_is_over_trains_no_step_of_it(tmp_path: Path) -> None:
    hub = ElasticHub()
    method = tw.presets.diloco(sync_every=2)
    here, there = hub.connect("late"), hub.connect("there")
    hub.set_members(there)
    net = module()
    optimizer = net.configure_optimizers()
    other = tw.OuterLoop(net, optimizer, method, transport=there)
    for (rows,) in list(data())[:6]:
        net.training_step([rows], 0).backward()
        optimizer.step()
        other.step()
    hub.set_members(there, here)
    other.begin(last=True)
    late, own = LightningCallback(method, transport=here), module()
    fitted = trainer(late, tmp_path)
    fitted.fit(own, shares(late))
    other.finish()
    assert (fitted.global_step, late.outer.inner_step) == (6, 6)
    assert late.outer.digest() == other.digest()
    assert is_anchor(own, late.outer)


def with_scheduler(interval: str, frequency: int):
    net = module()
    optimizer = net.configure_optimizers()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    how = {"scheduler": scheduler, "interval": interval, "frequency": frequency}
    net.configure_optimizers = lambda: ([optimizer], [how])
    return net


def by_hand() -> Any:
    net = module()
    net.automatic_optimization = False
    return net


@pytest.mark.parametrize(
    ("net", "told"),
    [
        (lambda: with_scheduler("epoch", 1), "every 1 epochs.*interval="),
        (lambda: with_scheduler("step", 2), "every 2 steps.*interval="),
        (by_hand, "manual optimization"),
    ],
)
def test_what_elastic_workers_cannot_do_is_refused(net, told: str, tmp_path: Path) -> None:
    hub = ElasticHub()
    end = hub.connect("a")
    hub.set_members(end)
    callback = LightningCallback(tw.presets.diloco(sync_every=2), transport=end)
    with pytest.raises(tw.ConfigurationError, match=told):
        trainer(callback, tmp_path).fit(net(), shares(callback))
