"""The training loop."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

from thinwire.errors import (
    CheckpointError,
    ExchangeError,
    MismatchError,
    NonFiniteError,
    RunStopped,
)
from thinwire.outer import DelayedNesterov
from thinwire.runs.folder import WITH_WORKERS, RunFolder
from thinwire.train import launch
from thinwire.train.asynchronous import is_due, train_here
from thinwire.train.checkpoints import CheckpointManager, RunTimer, locked
from thinwire.train.config import TrainConfig
from thinwire.train.data import LoadedData
from thinwire.train.observers import FolderWriter, Observer, forward_events, versions
from thinwire.train.workers.elastic import ElasticConfig
from thinwire.train.workers.group import WorkerGroup
from thinwire.train.workers.ranks import is_lead, under_torchrun

_CONSENSUS = ("consensus_sent_bytes", "consensus_received_bytes")
_RECORDED = (
    *("sent_bytes", "received_bytes", "left_out", "clipped"),
    *("peak_outer_device_bytes", "peak_outer_host_bytes"),
)

# Called with the configuration and the step from which the run continues.
ObserverFactory: TypeAlias = Callable[[TrainConfig, int], Sequence[Observer]]

# Entered during training; returns a sequence that is empty until the run is to stop.
StopRequest: TypeAlias = AbstractContextManager[Sequence[int]]


def train(
    config: TrainConfig,
    out: Path,
    observers: ObserverFactory | None = None,
    *,
    elastic: ElasticConfig | None = None,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Train from the beginning and return the summary.

    Args:
        config: the run.
        out: folder for config.json, data.json, metrics.jsonl, summary.json, checkpoints and model.
            Each elastic worker has its own folder, with events.jsonl.
        observers: returns the observers of records and events; called by rank 0.
        elastic: address and settings of a run that this process joins as one worker. The worker's
            batch has global_batch / workers sequences, whatever the number of workers.
        stop: entered during training; returns a sequence that is empty until the run is to stop.
            Ranks of torchrun stop together, after the next record.

    Raises:
        RunStopped: `stop` asked for it. A checkpoint of the last step was written.
        ThinwireError: any other error that ends the run. Earlier checkpoints stay.
    """
    config = launch.resolve(config, elastic)
    folder = RunFolder(out)
    with _held(folder):
        if is_lead():
            folder.check_free()
        return _run(config, folder, observers, elastic, stop)


def resume(
    config: TrainConfig,
    out: Path,
    observers: ObserverFactory | None = None,
    *,
    elastic: ElasticConfig | None = None,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Continue the run in `out` from its newest checkpoint and return the summary.

    The result has the same bits as an uninterrupted run, unless `config` has another number of
    workers: then worker k continues from worker k modulo the old number. A folder without a run
    begins one, and a finished run is left as it is. A worker of an elastic run catches up with the
    others, and may resume from a checkpoint of a fixed run.

    Raises:
        MismatchError: the run was started with another configuration.
        CheckpointError: its newest checkpoint is damaged.
        ConfigurationError: the number of workers changed, and the method's overlap cannot drop
            rounds in flight.
    """
    folder = RunFolder(out)
    begun = folder if is_lead() and folder.has_run() else None
    config = launch.resolve(config, elastic, begun=begun)
    # The size of a share depends on it, so an elastic run cannot change it.
    is_fixed = elastic is None or elastic.is_fixed
    changed = begun is not None and is_fixed and begun.workers() != config.workers
    if begun is not None:
        begun.check_same(config.describe(), may_differ=WITH_WORKERS if changed else ())
    finished = folder.summary()
    if finished is not None:
        return finished
    if changed:
        # Loading would raise this, too, but only after everything was built.
        config.method.overlap.check_cancellable()
    with _held(folder):
        return _run(config, folder, observers, elastic, stop)


def _held(folder: RunFolder) -> AbstractContextManager[None]:
    return locked(folder.path) if is_lead() else nullcontext()


def _run(
    config: TrainConfig,
    folder: RunFolder,
    make_observers: ObserverFactory | None,
    member: ElasticConfig | None,
    stop: StopRequest | None,
) -> dict[str, Any]:
    if isinstance(config.method.outer, DelayedNesterov) and not (member or under_torchrun()):
        return train_here(config, folder, make_observers, stop or nullcontext(()))
    if under_torchrun():
        launch.join(config)
    data = config.data.load()
    group = launch.assemble(config, data, member, folder.path)
    observers: list[Observer] = []
    try:
        with stop or nullcontext(()) as asked_to_stop:
            # It may be asked to stop while it waits to join.
            group.leave_when(lambda: bool(asked_to_stop))
            trainer = _Trainer(config, folder, group, data, observers)
            trainer.begin(make_observers)
            summary = trainer.run(asked_to_stop)
    except BaseException:
        group.abandon()
        raise
    finally:
        for observer in observers:
            observer.close()
    group.close()
    return summary


class _Trainer:
    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        group: WorkerGroup,
        data: LoadedData,
        observers: list[Observer],
    ) -> None:
        self._config, self._folder, self._group, self._data = config, folder, group, data
        self._observers, self._timer = observers, RunTimer()
        self._checkpoints = CheckpointManager(config, folder, group, data.fingerprint, self._timer)
        self._asked_to_stop: Sequence[int] = ()
        self._all_stop = False

    def begin(self, make_observers: ObserverFactory | None) -> None:
        """Resume from a checkpoint in the folder, if any, and open the folder."""
        self._checkpoints.restore()
        if not self._group.leads:
            return
        made = make_observers(self._config, self._group.step) if make_observers else []
        self._observers.extend([FolderWriter(self._folder), *made])
        if self._group.events is not None:
            forward_events(self._group.events, self._observers)
        self._group.join_run()
        # Last, so that a start that fails leaves no folder in the way of the next one.
        self._folder.open(self._config.describe())
        # Elastic workers compare their data as they join, and must survive a full disk.
        if self._group.events is None:
            self._folder.note_data(self._data.fingerprint)

    # -- the loop ----------------------------------------------------------------------------------

    def run(self, asked_to_stop: Sequence[int]) -> dict[str, Any]:
        self._asked_to_stop = asked_to_stop
        try:
            val_loss = self._train()
        except RunStopped as stopped:
            # In a wait, before the first step or after one whose round has not begun.
            raise (self._stopped() if self._saves_alone else stopped) from stopped
        except (ExchangeError, MismatchError) as error:
            again = f"the same command with --resume --out {self._folder.path}"
            if asked_to_stop and self._saves_alone:
                raise self._stopped() from error
            if asked_to_stop:  # the others were lost while they were waited for, to stop together
                raise RunStopped(
                    f"finish the run in {self._folder.path}",
                    because=f"it was asked to stop while it waited for the others: {error.because}",
                    do=f"{again}, from the last checkpoint; none was written now",
                ) from error
            if not self._saves_alone:
                raise
            self._checkpoints.save()
            do = f"{error.do}; then {again}"
            raise type(error)(error.cannot, because=error.because, do=do) from error
        return self._finish(val_loss)

    def _train(self) -> float:
        group, config, val_loss = self._group, self._config, None
        while group.step < config.steps and group.join_run() < config.steps:
            before = group.step
            with self._timer.measuring("training_s"):
                losses = self._one_step()
            is_last = group.step >= config.steps
            # A worker that catches up may jump over a step at which something was due.
            evaluate = is_last or is_due(before, group.step, config.periods.evaluate_steps)
            extra: dict[str, float] = {}
            if evaluate:
                val_loss = extra["val_loss"] = self._evaluate()
                held = group.workers[0].memory()
                extra |= {f"{kind.replace(' ', '_')}_bytes": size for kind, size in held.items()}
            if evaluate or is_due(before, group.step, config.periods.log_steps):
                self._record(losses, extra)
            if not is_last:
                if self._all_stop or (group.stops_alone and self._asked_to_stop):
                    raise self._stopped()
                self._checkpoints.save_if_due()
        # A worker that joined in the last round may have made it fail.
        group.flush()
        # None if this worker joined a run that was over.
        return self._evaluate() if val_loss is None else val_loss

    @property
    def _saves_alone(self) -> bool:
        """Whether this process may write a checkpoint without the other ranks."""
        return self._group.events is not None and self._group.workers[0].steps_taken > 0

    def _stopped(self) -> RunStopped:
        saved = self._checkpoints.save()
        return RunStopped(
            f"finish the run in {self._folder.path}",
            because=f"it was asked to stop, and did so after inner step {self._group.step} with "
            + ("a checkpoint" if saved else "no checkpoint, which could not be written"),
            do=f"the same command with --resume --out {self._folder.path}",
        )

    def _one_step(self) -> list[float]:
        with self._timer.measuring("inner_s"):
            losses = self._group.inner_step()
        self._group.outer_step()
        if self._group.step >= self._config.steps:
            self._group.flush()
        return losses

    def _evaluate(self) -> float:
        """Mean validation loss of the outer parameters; every rank takes its part of it."""
        windows = self._data.validation
        self._group.begin_consensus()
        sums = self._group.each(lambda w: w.validation_loss_sum(windows))
        mean = sum(self._group.all_gather(sums)) / windows[:, 1:].numel()
        if not math.isfinite(mean):
            raise NonFiniteError(
                f"continue after step {self._group.step}",
                because=f"the validation loss of the outer parameters is {mean}",
                do="start again with a lower --inner-lr; earlier checkpoints are intact",
            )
        return mean

    def _record(self, losses: list[float], extra: dict[str, float]) -> None:
        # With its losses, each rank sends whether it was asked to stop.
        gathered = self._group.all_gather([*losses, float(bool(self._asked_to_stop))])
        each = len(losses) + 1
        self._all_stop = any(gathered[each - 1 :: each])
        losses = [value for index, value in enumerate(gathered, start=1) if index % each]
        worker = self._group.workers[0]
        stats, totals = worker.outer.stats, worker.totals()
        record = {
            "step": self._group.step,
            "tokens": self._group.tokens,
            "loss": sum(losses) / len(losses),
            "lr": worker.optimizer.param_groups[0]["lr"],
            "rounds": stats.rounds,
            "wait_s": stats.wait_s,
            "overlapped_s": stats.overlapped_s,
            "tokens_per_s": self._group.tokens / max(self._timer.training_s, 1e-9),
            **{name: totals[name] for name in _RECORDED},
            **self._timer.state_dict(),
        }
        worker.outer.report(loss=record["loss"], tokens_per_s=record["tokens_per_s"])
        try:
            for observer in self._observers:
                observer.record(record | self._group.record_fields() | extra)
        except CheckpointError as error:
            self._group.file_failed(error)

    # -- the end -----------------------------------------------------------------------------------

    def _finish(self, val_loss: float) -> dict[str, Any]:
        group, timer = self._group, self._timer
        group.begin_consensus()
        digests = [worker.outer_digest() for worker in group.workers]
        # Floats are gathered, which hold 48 bits of it exactly.
        if len(set(group.all_gather([float(int(d[:12], 16)) for d in digests]))) > 1:
            raise MismatchError(
                "finish the run",
                because="the workers' outer parameters differ, which must never happen",
                do="report this as a bug, with config.json",
            )
        worker, events = group.workers[0], group.events
        stats, totals = worker.outer.stats, worker.totals()
        added, requests = worker.outer.transport.added_nbytes, dict(stats.requests)
        summary = {
            "method": self._config.method.name,
            "workers": self._config.workers,
            "workers_here": len(group.workers),
            "parameters": sum(p.numel() for p in worker.model.parameters()),
            "steps": self._group.step,
            "tokens": group.tokens,
            "val_loss": val_loss,
            "sent_bytes_per_worker": totals["sent_bytes"],
            "received_bytes_per_worker": totals["received_bytes"],
            "peak_sent_bytes_per_step": totals["peak_sent_bytes_per_step"],
            "outer_digest": digests[0],
            "wall_s": timer.wall_s,
            "tokens_per_s": group.tokens / max(timer.training_s, 1e-9),
            "wait_s": stats.wait_s,
            **({"contributions": stats.contributions} if stats.contributions else {}),
            **{name: totals[name] for name in _CONSENSUS if totals[name]},
            **({"requests": requests} if requests else {}),
            **({"added_bytes_per_message": added} if added else {}),
            "versions": versions(),
            **group.record_fields(),
            **({} if events is None else {"events": dict(events.summary())}),
        }
        if worker.number == 0:
            worker.save_pretrained(self._folder.path / "model")
        if group.leads:
            self._data.tokenizer.save(self._folder.path / "model")
            self._folder.finish(summary)
        return summary
