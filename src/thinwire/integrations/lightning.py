"""Lightning's Trainer as a worker: `pip install thinwire[lightning]`."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

from thinwire.errors import CheckpointError, ConfigurationError, check
from thinwire.integrations.launch import begin_evaluation, check_apart, check_same_step, logged
from thinwire.integrations.schedule import FollowedSchedule
from thinwire.method import Method
from thinwire.outer_loop import OuterLoop
from thinwire.transport import Transport


class LightningCallback(Callback):
    """Makes a Trainer one worker of several: `Trainer(callbacks=[LightningCallback(method)])`.

    It steps the outer loop after every optimizer step, validates the outer parameters, saves the
    outer state in Lightning's checkpoints, and logs `outer/rounds`, `outer/sent_bytes`,
    `outer/received_bytes`, `outer/wait_s` and `outer/workers`. At the end it exchanges what was
    trained since the last round, and leaves the outer parameters in the module. All workers build
    the module from the same seed.

    In an elastic run (`tw.transport.Elastic`) the Trainer's step and schedules are those of the
    run: a worker that joins late, or catches up, continues at the step of the others. Use a
    `ShareDataset`, so that no rows are read twice.

    Args:
        method: how the workers train together.
        transport: the connection to the other workers, as `OuterLoop` takes it.
    """

    def __init__(self, method: Method, *, transport: Transport | None = None) -> None:
        self.method = method
        self._transport = transport
        self._outer: OuterLoop | None = None
        self._saved: Mapping[str, Any] | None = None
        self._evaluation = ExitStack()
        self._seen_steps = 0
        self._schedules: list[FollowedSchedule] = []

    @property
    def outer(self) -> OuterLoop:
        """The outer loop.

        Raises:
            ConfigurationError: `fit` has not begun.
        """
        if self._outer is None:
            raise ConfigurationError(
                "use the outer loop",
                because="Trainer.fit has not begun",
                do="use it in a later callback, or after fit",
            )
        return self._outer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Build the outer loop, from the initial weights: checkpoints are restored later.

        Raises:
            ConfigurationError: the Trainer shards by DeepSpeed or FSDP, or averages gradients over
                the workers.
        """
        check(
            not isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy),
            f"train a worker with {type(trainer.strategy).__name__}",
            because="it stores weights and optimizer state in another form, and outer steps "
            "would be lost",
            do="leave it out, or shard with fully_shard() in your own loop",
        )
        if stage == "fit" and self._outer is None:
            # The optimizers do not exist yet.
            self._outer = OuterLoop(pl_module, [], self.method, transport=self._transport)
            check_apart(self._outer, trainer.world_size)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse a checkpoint without outer state, for which Lightning only warns."""
        check(
            self.state_key in checkpoint.get("callbacks", {}),
            "resume from this checkpoint",
            because="it has no outer state: it was written without this callback",
            do="load one that was written with it, or begin a new run from its weights",
            kind=CheckpointError,
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resume from the checkpoint, if any, and join the other workers."""
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
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Exchange what is due, if the optimizer stepped after this batch."""
        if trainer.global_step == self._seen_steps:
            return
        self.outer.step()
        self._follow(trainer)
        if self.outer.is_elastic and 0 < trainer.max_steps <= trainer.global_step:
            # If the run went on without this worker's last steps, train it to its end again.
            self.outer.flush()
            self._follow(trainer)
        numbers = {name: float(value) for name, value in logged(self.outer).items()}
        if self.outer.is_elastic:
            # The x-axis of loggers, which would otherwise count this worker's batches.
            numbers["step"] = float(trainer.global_step)
        pl_module.log_dict(numbers)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the outer parameters into the module."""
        if self._outer is not None and not trainer.sanity_checking:
            begin_evaluation(self._evaluation, self.outer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the local weights back."""
        self._evaluation.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exchange what was trained since the last round; leave the outer parameters in place."""
        self.outer.flush()
        begin_evaluation(self._evaluation, self.outer)

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
        """Keep the state until training starts: Lightning restores the weights in between."""
        self._saved = state_dict or None


def _followed_schedules(trainer: Trainer) -> list[FollowedSchedule]:
    check(
        trainer.lightning_module.automatic_optimization is not False,
        "train with manual optimization in an elastic run",
        because="Lightning then counts the steps of every optimizer, and its step cannot be that "
        "of the run",
        do="use automatic optimization, or write your own loop",
    )
    for config in trainer.lr_scheduler_configs:
        check(
            (config.interval, config.frequency) == ("step", 1),
            f"step a scheduler every {config.frequency} {config.interval}s in an elastic run",
            because="a worker that catches up continues at the inner step of the others",
            do="return it with interval='step' and frequency=1 from configure_optimizers()",
        )
    return [FollowedSchedule(config.scheduler) for config in trainer.lr_scheduler_configs]
