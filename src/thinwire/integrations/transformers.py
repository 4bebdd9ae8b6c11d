"""Hugging Face's Trainer as a worker: `pip install thinwire[transformers]`."""

from contextlib import ExitStack
from typing import Any, Self

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from thinwire.errors import check
from thinwire.fragments import Whole
from thinwire.integrations.launch import begin_evaluation, check_apart, check_same_step, logged
from thinwire.integrations.schedule import FollowedSchedule
from thinwire.live_weights import with_hooks
from thinwire.outer_loop import OuterLoop

# Names that accelerate uses.
_OWN_CHECKPOINTS = ("DEEPSPEED", "FSDP", "MEGATRON_LM")


class TransformersCallback(TrainerCallback):
    """Makes a Trainer one worker of several: `TransformersCallback(outer).add_to(trainer)`.

    It steps the outer loop after every optimizer step (not after every micro-batch), evaluates the
    outer parameters, saves the outer state in the Trainer's checkpoints, and logs `outer/rounds`,
    `outer/sent_bytes`, `outer/received_bytes`, `outer/wait_s` and `outer/workers`. `thinwire
    status` shows the logged loss of an elastic run. At the end it exchanges what was trained since
    the last round, and leaves the outer parameters in the model.

    In an elastic run (`tw.transport.Elastic`) the Trainer's step and schedule are those of the run:
    a worker that joins late, or catches up, continues at the step of the others. Use a
    `ShareDataset`, so that no rows are read twice.

    Args:
        outer: loop over the Trainer's model and optimizer; pass the same optimizer to the Trainer
            (`optimizers=(optimizer, None)`).

    Raises:
        ConfigurationError: the outer loop has no optimizer.
    """

    def __init__(self, outer: OuterLoop) -> None:
        self.outer = outer
        self._optimizer = outer.save_with_optimizer()
        self._evaluation = ExitStack()
        self._log = _Log(outer)
        self._schedule: FollowedSchedule | None = None

    def add_to(self, trainer: Trainer) -> Self:
        """Add this to the callbacks of `trainer`; the others see what this one logs.

        Raises:
            ConfigurationError: the Trainer steps another optimizer, averages gradients over the
                workers, shards by DeepSpeed or FSDP, would load as its best model one that it did
                not evaluate, or skips data in an elastic run.
        """
        self._check(trainer.args, trainer.optimizer)
        # The log comes first, before the loggers; this comes last, after callbacks that set flags.
        trainer.callback_handler.callbacks.insert(0, self._log)
        trainer.add_callback(self)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Check that Trainer and outer loop are at the same step, and join the other workers."""
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
            # Trainer takes one step even if the run was over when this worker joined it.
            state.global_step -= 1
            self._log.moved_steps -= 1
            return
        self.outer.step()
        # Trainer is about to count this step.
        self._follow(state, self.outer.inner_step - 1)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Prepare for an evaluation, or for the end of training."""
        # Flush now: Trainer may load its best model next, which must not count as training.
        if control.should_training_stop:
            self.outer.flush()
            self._follow(state, self.outer.inner_step)
        if control.should_evaluate:
            begin_evaluation(self._evaluation, self.outer)

    on_epoch_end = on_step_end

    def on_evaluate(self, *_: Any, **given: Any) -> None:
        """Put the local weights back."""
        self._evaluation.close()

    def on_train_end(self, args: TrainingArguments, *_: Any, **given: Any) -> None:
        """Leave the outer parameters in the model, unless Trainer has loaded its best model."""
        if not args.load_best_model_at_end:
            # A worker that went back to an earlier step, with no epoch left, must not end the run.
            if not self.outer.is_elastic:
                self.outer.flush()
            begin_evaluation(self._evaluation, self.outer)

    def _follow(self, state: TrainerState, step: int) -> None:
        moved = step - state.global_step
        if moved and self._schedule is not None:
            self._schedule.move(moved)
            self._log.moved_steps += moved
            state.global_step = step

    def _check(self, args: TrainingArguments, optimizer: Any) -> None:
        # Accelerate wraps the optimizer once training has begun.
        check(
            with_hooks(optimizer) is self._optimizer,
            "train with this Trainer",
            because="it steps another optimizer than the outer loop's",
            do="pass Trainer(optimizers=(optimizer, None)) the one that OuterLoop has",
        )
        # `accelerate launch` sets this, and no other argument.
        launched = args.distributed_state
        sharding = "" if launched is None else launched.distributed_type.value
        check(
            sharding not in _OWN_CHECKPOINTS,
            f"train a worker with {sharding} inside Trainer",
            because="it stores weights and optimizer state in another form, and outer steps "
            "or the outer state in checkpoints would be lost",
            do="leave it out, or shard with fully_shard() in your own loop",
        )
        check_apart(self.outer, args.world_size)
        check(
            not self.outer.is_elastic or args.ignore_data_skip,
            "resume a worker of an elastic run",
            because="Trainer would skip as many rows as it had read, and its share is new",
            do="pass TrainingArguments(ignore_data_skip=True), and a ShareDataset as the data",
        )
        check(
            not (self.outer.is_elastic and args.load_best_model_at_end),
            "load the best model at the end of an elastic run",
            because="a late worker does not have the earlier best model, so workers would end with "
            "different models",
            do="leave it out, and choose a checkpoint yourself",
        )
        check(
            not args.load_best_model_at_end or self._evaluates_what_it_saves(args),
            "load the best model at the end",
            because="evaluations use the outer parameters, and checkpoints hold the local weights, "
            "which equal them only after a round of the whole model",
            do=f"set eval_steps and save_steps to multiples of {self.outer.method.sync_every} "
            "with a method that neither streams nor overlaps, or choose a checkpoint yourself",
        )

    def _evaluates_what_it_saves(self, args: TrainingArguments) -> bool:
        method = self.outer.method
        is_late = method.overlap.steps(sync_every=method.sync_every) > 0
        is_plain = isinstance(method.fragments, Whole) and not is_late
        by_steps = args.eval_strategy == "steps" and args.eval_steps is not None
        return is_plain and by_steps and int(args.eval_steps or 1) % method.sync_every == 0


class _Log(TrainerCallback):
    """Adds numbers of the outer loop, and corrects losses of a worker that caught up.

    Attributes:
        moved_steps: steps that the Trainer was moved by without training them.
    """

    def __init__(self, outer: OuterLoop) -> None:
        self._outer = outer
        self.begin(0)

    def begin(self, step: int) -> None:
        """Note that training begins at `step`."""
        self.moved_steps = self._moved_at_log = 0
        self._first_step = self._step_at_log = step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        found, logs = logged(self._outer), given.get("logs")
        if logs is not None:
            found |= self._own_losses(state, logs)
            logs.update(found)
            self._outer.report(loss=logs.get("loss"))
        # Trainer has copied `logs` already.
        if state.log_history:
            state.log_history[-1].update(found)

    def _own_losses(self, state: TrainerState, logs: dict[str, Any]) -> dict[str, float]:
        """Mean losses over this worker's own steps; Trainer divides by the steps of the run."""
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
