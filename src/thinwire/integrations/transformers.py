"""Hugging Face's Trainer as a worker: `pip install thinwire[transformers]`."""

from typing import Any, Self

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
from thinwire.integrations.schedule import FollowedSchedule
from thinwire.live_weights import with_hooks
from thinwire.outer_loop import OuterLoop

# As accelerate calls them.
_OWN_CHECKPOINTS = ("DEEPSPEED", "FSDP", "MEGATRON_LM")


class TransformersCallback(TrainerCallback):
    """Makes a Trainer one worker of several: `TransformersCallback(outer).add_to(trainer)`.

    It steps the outer loop after every optimizer step (not after every micro-batch), evaluates the
    outer parameters, keeps the outer state in the Trainer's checkpoints, logs `outer/rounds`,
    `outer/sent_bytes`, `outer/wait_s` and `outer/workers`, reports the logged loss to those that
    watch an elastic run, and sends at the end what was trained since the last round. The model then
    holds the outer parameters.

    Where workers come and go (`tw.transport.Elastic`) the Trainer's step and schedule are those of
    the run: a worker that joins late or was healed goes on at the step of the others. Give it a
    `ShareDataset`, so that no rows are read twice.

    Args:
        outer: over the Trainer's model and optimizer, which the Trainer must be given
            (`optimizers=(optimizer, None)`).

    Raises:
        ConfigurationError: the outer loop has no optimizer.
    """

    def __init__(self, outer: OuterLoop) -> None:
        self.outer = outer
        outer.save_with_optimizer()
        self._log = _Log(outer)
        self._schedule: FollowedSchedule | None = None

    def add_to(self, trainer: Trainer) -> Self:
        """Have `trainer` call this; its other callbacks see what this one logs.

        Raises:
            ConfigurationError: the Trainer steps another optimizer, averages gradients over the
                workers, shards by DeepSpeed or FSDP, keeps a best model that would not be the one
                that was evaluated, or skips data where workers come and go.
        """
        self._check(trainer.args, trainer.optimizer)
        # Numbers go to the loggers in the order of the callbacks, and flags come from others.
        trainer.callback_handler.callbacks.insert(0, self._log)
        trainer.add_callback(self)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Check that Trainer and outer loop go together, and join the others."""
        self._check(args, given.get("optimizer"))
        check_same_step(self.outer, state.global_step)
        self._log.begin(state.global_step)
        if self.outer.is_elastic:
            self._schedule = FollowedSchedule(given.get("lr_scheduler"))
        self.outer.join()
        self._follow(state, self.outer.inner_step)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Exchange what is due."""
        if state.global_step >= state.max_steps:
            # Trainer takes one step even where the run was over when this worker joined it.
            state.global_step -= 1
            self._log.moved_steps -= 1
            return
        self.outer.step()
        # Trainer is about to count this step.
        self._follow(state, self.outer.inner_step - 1)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Prepare what Trainer does between two steps or epochs, or after the last one."""
        # Trainer may load its best model next, which must not be taken for training.
        if control.should_training_stop:
            self.outer.flush()
        if control.should_evaluate:
            self.outer.begin_evaluation()

    on_epoch_end = on_step_end

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Train on from the local weights."""
        self.outer.end_evaluation()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Leave the outer parameters in the model, unless Trainer has put its best model there."""
        if not args.load_best_model_at_end:
            self.outer.flush()
            self.outer.begin_evaluation()

    def _follow(self, state: TrainerState, step: int) -> None:
        moved = step - state.global_step
        if moved and self._schedule is not None:
            self._schedule.move(moved)
            self._log.moved_steps += moved
            state.global_step = step

    def _check(self, args: TrainingArguments, optimizer: Any) -> None:
        # Accelerate wraps it once training has begun.
        stepped = with_hooks(optimizer)
        if all(stepped is not mine for mine in self.outer.optimizers):
            raise ConfigurationError(
                "follow this Trainer",
                because="it steps an optimizer of its own, not the outer loop's",
                do="pass Trainer(optimizers=(optimizer, None)) the one that OuterLoop has",
            )
        # Other arguments do not say what `accelerate launch` has asked for.
        launched = args.distributed_state
        sharding = "" if launched is None else launched.distributed_type.value
        if sharding in _OWN_CHECKPOINTS:
            raise ConfigurationError(
                f"train a worker with {sharding} inside Trainer",
                because="it keeps weights and the optimizer's state in its own way, and outer "
                "steps or the outer state in checkpoints would be lost",
                do="leave it out, or shard by fully_shard() in a loop of your own",
            )
        check_apart(self.outer, args.world_size)
        if self.outer.is_elastic:
            _check_elastic(args)
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


def _check_elastic(args: TrainingArguments) -> None:
    if not args.ignore_data_skip:
        raise ConfigurationError(
            "resume a worker of a run whose workers come and go",
            because="Trainer would skip as much data as it had read, and what is dealt to this "
            "worker is new",
            do="pass TrainingArguments(ignore_data_skip=True), and a ShareDataset as the data",
        )
    if args.load_best_model_at_end:
        raise ConfigurationError(
            "load the best model at the end where workers come and go",
            because="a worker that came later never had the best one, so workers would end with "
            "different models",
            do="leave it out, and choose among checkpoints yourself",
        )


class _Log(TrainerCallback):
    """Adds numbers of the outer loop; corrects losses where the step was that of others.

    Attributes:
        moved_steps: steps by which the Trainer was moved and which it did not train.
    """

    def __init__(self, outer: OuterLoop) -> None:
        self._outer = outer
        self.begin(0)

    def begin(self, step: int) -> None:
        """Training begins at `step`."""
        self.moved_steps = self._moved_at_log = 0
        self._first_step = self._step_at_log = step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        stats, logs = self._outer.stats, given.get("logs")
        found: dict[str, Any] = {
            "outer/rounds": stats.rounds,
            "outer/sent_bytes": stats.sent_bytes,
            "outer/wait_s": round(stats.wait_s, 3),
            "outer/workers": self._outer.workers,
        }
        if logs is not None:
            found |= self._own_losses(state, logs)
            logs.update(found)
            self._outer.report(loss=logs.get("loss"))
        # Trainer has copied it already.
        if state.log_history:
            state.log_history[-1].update(found)

    def _own_losses(self, state: TrainerState, logs: dict[str, Any]) -> dict[str, float]:
        """Means over the steps that this worker trained: Trainer divides by those of the run."""
        found: dict[str, float] = {}
        step, moved = state.global_step, self.moved_steps
        if "loss" in logs:
            steps = step - self._step_at_log
            own_steps = steps - (moved - self._moved_at_log)
            if own_steps != steps:
                found["loss"] = logs["loss"] * steps / own_steps
            self._step_at_log, self._moved_at_log = step, moved
        if "train_loss" in logs and moved:
            steps = step - self._first_step
            found["train_loss"] = logs["train_loss"] * steps / max(1, steps - moved)
        return found
