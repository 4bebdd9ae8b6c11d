from pathlib import Path

import pytest
import torch

import thinwire as tw
from thinwire.integrations.lightning import LightningCallback
from trainer_teams import check_a_killed_team_resumes


@pytest.mark.parametrize("method", ["diloco", "streaming", "sparse"])
def test_two_workers_killed_and_resumed_end_as_if_left_alone(method: str, tmp_path: Path) -> None:
    check_a_killed_team_resumes("lightning", method, tmp_path)


def trainer(callback, out: Path, **fields):
    import lightning

    return lightning.Trainer(
        max_steps=6,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if callback is None else [callback],
        num_sanity_val_steps=0,
        default_root_dir=out,
        **fields,
    )


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


def data():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(24, 3)))


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_without_outer_state_is_refused(tmp_path: Path) -> None:
    plain = trainer(None, tmp_path / "plain")
    plain.fit(module(), data())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    callback = LightningCallback(tw.presets.diloco(sync_every=2))
    with pytest.raises(tw.errors.CheckpointError, match="no outer state"):
        trainer(callback, tmp_path).fit(module(), data(), ckpt_path=str(tmp_path / "plain.ckpt"))


@pytest.mark.filterwarnings("ignore")
def test_a_lone_worker_trains(tmp_path: Path) -> None:
    callback = LightningCallback(tw.presets.diloco(sync_every=2))
    with pytest.raises(tw.ConfigurationError, match="fit has not begun"):
        _ = callback.outer
    trainer(callback, tmp_path).fit(module(), data())
    assert (callback.outer.stats.rounds, callback.outer.inner_step) == (3, 6)
