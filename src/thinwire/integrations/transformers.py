"""Hugging Face's Trainer as a worker: `pip install thinwire[transformers]`."""

from typing import Any, Self, final

from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from thinwire.errors import ConfigurationError
from thinwire.fragments import Whole
from thinwire.integrations.launch import check_apart, check_same_step
from thinwire.live_weights import with_hooks
from thinwire.outer_loop import OuterLoop

__all__ = ["TransformersCallback"]


@final
class TransformersCallback(TrainerCallback):
    """Makes a Trainer one worker of several: `TransformersCallback(outer).add_to(trainer)`.

    It steps the outer loop after every optimizer step (not after every micro-batch), evaluates the
    outer parameters, keeps the outer state in the Trainer's checkpoints, logs `outer/rounds`,
    `outer/sent_bytes`, `outer/wait_s` and `outer/workers`, reports the logged loss to those that
    watch an elastic run, and sends at the end what was trained since the last round. The model then
    holds the outer parameters.

    Args:
        outer: over the Trainer's model and optimizer, which the Trainer must be given
            (`optimizers=(optimizer, None)`).

    Raises:
        ConfigurationError: the outer loop has no optimizer.
    """

    def __init__(self, outer: OuterLoop) -> None:
        self.outer = outer
        outer.save_with_optimizer()

    def add_to(self, trainer: Trainer) -> Self:
        """Have `trainer` call this; its other callbacks see what this one logs.

        Raises:
            ConfigurationError: the Trainer steps another optimizer, averages gradients over the
                workers, or keeps a best model that would not be the one that was evaluated.
        """
        self._check(trainer.args, trainer.optimizer)
        # Numbers go to the loggers in the order of the callbacks, and flags come from others.
        trainer.callback_handler.callbacks.insert(0, _Log(self.outer))
        trainer.add_callback(self)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Check that Trainer and outer loop go together, and join the others."""
        self._check(args, given.get("optimizer"))
        check_same_step(self.outer, state.global_step)
        self.outer.join()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Exchange what is due."""
        self.outer.step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Prepare what Trainer does between two steps."""
        self._before_evaluation(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Prepare what Trainer does between two epochs, or after the last one."""
        self._before_evaluation(control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Train on from the live weights."""
        self.outer.end_evaluation()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Leave the outer parameters in the model, unless Trainer has put its best model there."""
        if not args.load_best_model_at_end:
            self.outer.flush()
            self.outer.begin_evaluation()

    def _before_evaluation(self, control: TrainerControl) -> None:
        # Trainer may load its best model next, which must not be taken for training.
        if control.should_training_stop:
            self.outer.flush()
        if control.should_evaluate:
            self.outer.begin_evaluation()

    def _check(self, args: TrainingArguments, optimizer: Any) -> None:
        # Accelerate wraps it once training has begun.
        stepped = with_hooks(optimizer)
        if all(stepped is not mine for mine in self.outer.optimizers):
            raise ConfigurationError(
                "follow this Trainer",
                because="it steps an optimizer of its own, not the outer loop's",
                do="pass Trainer(optimizers=(optimizer, None)) the one that OuterLoop has",
            )
        for setting in ("deepspeed", "fsdp"):
            if getattr(args, setting, None):
                raise ConfigurationError(
                    f"train a worker with {setting} inside Trainer",
                    because="its checkpoints gather the optimizer's state in their own way and "
                    "would lose the outer state",
                    do="leave it out, or shard by fully_shard() in a loop of your own",
                )
        check_apart(self.outer, args.world_size)
        if args.load_best_model_at_end and not self._evaluates_what_it_saves(args):
            raise ConfigurationError(
                "load the best model at the end",
                because="what is evaluated are the outer parameters, and checkpoints hold the live "
                "weights, which equal them only after a round of the whole model",
                do=f"set eval_steps and save_steps to multiples of {self.outer.method.sync_every} "
                "with a method that neither streams nor overlaps, or choose among checkpoints "
                "yourself",
            )

    def _evaluates_what_it_saves(self, args: TrainingArguments) -> bool:
        method = self.outer.method
        is_plain = method.overlap.steps(sync_every=method.sync_every) == 0 and isinstance(
            method.fragments, Whole
        )
        by_steps = args.eval_strategy == "steps" and args.eval_steps is not None
        return is_plain and by_steps and int(args.eval_steps or 1) % method.sync_every == 0


@final
class _Log(TrainerCallback):
    def __init__(self, outer: OuterLoop) -> None:
        self._outer = outer

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        stats, logs = self._outer.stats, given.get("logs")
        found = {
            "outer/rounds": stats.rounds,
            "outer/sent_bytes": stats.sent_bytes,
            "outer/wait_s": round(stats.wait_s, 3),
            "outer/workers": self._outer.workers,
        }
        if logs is not None:
            self._outer.report(loss=logs.get("loss"))
            logs.update(found)
        # Trainer has copied it already.
        if state.log_history:
            state.log_history[-1].update(found)
