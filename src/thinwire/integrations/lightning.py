"""Lightning's Trainer as a worker: `pip install thinwire[lightning]`."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.integrations.launch import check_apart, check_same_step
from thinwire.integrations.schedule import FollowedSchedule
from thinwire.method import Method
from thinwire.outer_loop import OuterLoop
from thinwire.transport import Transport


class LightningCallback(Callback):
    """Makes a Trainer one worker of several: `Trainer(callbacks=[LightningCallback(method)])`.

    It steps the outer loop after every optimizer step, validates the outer parameters, keeps the
    outer state in Lightning's checkpoints, logs `outer/rounds`, `outer/sent_bytes`, `outer/wait_s`
    and `outer/workers`, and sends at the end what was trained since the last round. The module then
    holds the outer parameters. All workers build the module from the same seed.

    Where workers come and go (`tw.transport.Elastic`) the Trainer's step and schedules are those of
    the run: a worker that joins late or was healed goes on at the step of the others. Give it a
    `ShareDataset`, so that no rows are read twice.

    Args:
        method: how the workers exchange.
        transport: the connection, as `OuterLoop` takes it.
    """

    def __init__(self, method: Method, *, transport: Transport | None = None) -> None:
        self.method = method
        self._transport = transport
        self._outer: OuterLoop | None = None
        self._saved: Mapping[str, Any] | None = None
        self._seen_steps = 0
        self._schedules: list[FollowedSchedule] = []

    @property
    def outer(self) -> OuterLoop:
        """The outer loop, once `fit` has begun.

        Raises:
            ConfigurationError: it has not.
        """
        if self._outer is None:
            raise ConfigurationError(
                "use the outer loop",
                because="Trainer.fit has not begun",
                do="ask for it from a later callback, or after fit",
            )
        return self._outer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Build the outer loop, from the initial weights: checkpoints are restored later.

        Raises:
            ConfigurationError: the Trainer shards by DeepSpeed or FSDP, or averages gradients over
                the workers.
        """
        if isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy):
            raise ConfigurationError(
                f"train a worker with {type(trainer.strategy).__name__}",
                because="it keeps weights and the optimizer's state in its own way, and outer "
                "steps would be lost",
                do="leave it out, or shard by fully_shard() in a loop of your own",
            )
        if stage == "fit" and self._outer is None:
            # There are no optimizers yet.
            self._outer = OuterLoop(pl_module, [], self.method, transport=self._transport)
            check_apart(self._outer, trainer.world_size)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse a checkpoint without outer state, which Lightning would only warn of."""
        if self.state_key not in checkpoint.get("callbacks", {}):
            raise CheckpointError(
                "go on from this checkpoint",
                because="it has no outer state: it was written without this callback",
                do="load one that was written with it, or begin a new run from its weights",
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on where the checkpoint was, and join the others."""
        ahead = 0
        if self._saved is not None:
            self.outer.load_state_dict(self._saved["outer"])
            # With manual optimization Lightning counts the steps of every optimizer.
            ahead = self._saved["trainer_step"] - self.outer.inner_step
            self._saved = None
        check_same_step(self.outer, trainer.global_step - ahead)
        if self.outer.is_elastic:
            self._schedules = _followed_schedules(trainer)
        self.outer.join()
        self._follow(trainer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Exchange what is due, if the optimizer has stepped after this batch."""
        if trainer.global_step == self._seen_steps:
            return
        self.outer.step()
        self._follow(trainer)
        stats = self.outer.stats
        numbers = {
            "outer/rounds": float(stats.rounds),
            "outer/sent_bytes": float(stats.sent_bytes),
            "outer/wait_s": stats.wait_s,
            "outer/workers": float(self.outer.workers),
        }
        if self.outer.is_elastic:
            # Loggers take this one for their x-axis, and would else count this worker's batches.
            numbers["step"] = float(trainer.global_step)
        pl_module.log_dict(numbers)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hold the outer parameters in the module."""
        if self._outer is not None and not trainer.sanity_checking:
            self._outer.begin_evaluation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train on from the local weights."""
        if self._outer is not None:
            self._outer.end_evaluation()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Send what was trained since the last round; the module holds the outer parameters."""
        self.outer.flush()
        self.outer.begin_evaluation()

    def _follow(self, trainer: Trainer) -> None:
        moved = self.outer.inner_step - trainer.global_step
        if moved and self.outer.is_elastic:
            for schedule in self._schedules:
                schedule.move(moved)
            loop = trainer.fit_loop.epoch_loop.automatic_optimization
            loop.optim_progress.optimizer.step.total.completed += moved
        self._seen_steps = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        """The outer state, for Lightning's checkpoints."""
        if self._outer is None:
            return {}
        return {"outer": self._outer.state_dict(), "trainer_step": self._seen_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until training starts: weights are restored in between."""
        self._saved = state_dict or None


def _followed_schedules(trainer: Trainer) -> list[FollowedSchedule]:
    if trainer.lightning_module.automatic_optimization is False:
        raise ConfigurationError(
            "train with manual optimization where workers come and go",
            because="Lightning then counts the steps of every optimizer, and its step cannot be "
            "that of the run",
            do="leave optimization to Lightning, or write a loop of your own",
        )
    configs = trainer.lr_scheduler_configs
    for config in configs:
        if (config.interval, config.frequency) != ("step", 1):
            raise ConfigurationError(
                f"step a scheduler every {config.frequency} {config.interval}s where workers come "
                "and go",
                because="a worker that is healed goes on at the inner step of the others",
                do="return it with interval='step' and frequency=1 from configure_optimizers()",
            )
    return [FollowedSchedule(config.scheduler) for config in configs]
