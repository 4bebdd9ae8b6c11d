"""Lightning's Trainer as a worker: `pip install thinwire[lightning]`."""

from collections.abc import Mapping
from typing import Any, final

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.integrations.launch import check_apart, check_same_step
from thinwire.method import Method
from thinwire.outer_loop import OuterLoop
from thinwire.transport import Transport

__all__ = ["LightningCallback"]


@final
class LightningCallback(Callback):
    """Makes a Trainer one worker of several: `Trainer(callbacks=[LightningCallback(method)])`.

    It steps the outer loop after every optimizer step, validates the outer parameters, keeps the
    outer state in Lightning's checkpoints, logs `outer/rounds`, `outer/sent_bytes` and
    `outer/wait_s`, and sends at the end what was trained since the last round. The module then
    holds the outer parameters. All workers build the module from the same seed.

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
        """Build the outer loop, from the initial weights: checkpoints are restored later."""
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
        if self._saved is not None:
            self.outer.load_state_dict(self._saved)
            self._saved = None
        check_same_step(self.outer, trainer.global_step)
        self._seen_steps = trainer.global_step
        self.outer.join()

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
        self._seen_steps = trainer.global_step
        self.outer.step()
        stats = self.outer.stats
        pl_module.log_dict(
            {
                "outer/rounds": float(stats.rounds),
                "outer/sent_bytes": float(stats.sent_bytes),
                "outer/wait_s": stats.wait_s,
            }
        )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hold the outer parameters in the module."""
        if self._outer is not None and not trainer.sanity_checking:
            self._outer.begin_evaluation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train on from the live weights."""
        if self._outer is not None:
            self._outer.end_evaluation()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Send what was trained since the last round; the module holds the outer parameters."""
        self.outer.flush()
        self.outer.begin_evaluation()

    def state_dict(self) -> dict[str, Any]:
        """The outer state, for Lightning's checkpoints."""
        return {} if self._outer is None else self._outer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until training starts: weights are restored in between."""
        self._saved = state_dict or None
