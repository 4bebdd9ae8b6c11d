"""The training loop."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

from thinwire.errors import CheckpointError, ExchangeError, MismatchError, RunStopped, check
from thinwire.outer import DelayedNesterov
from thinwire.runs.folder import RunFolder
from thinwire.runs.schema import identity_fields
from thinwire.train import launch
from thinwire.train.asynchronous import is_due, train_here
from thinwire.train.checkpoints import Checkpoints, locked, stopped
from thinwire.train.config import TrainConfig
from thinwire.train.data import LoadedData
from thinwire.train.launch import ElasticConfig
from thinwire.train.observers import FolderWriter, Observer, forward_events, versions
from thinwire.train.workers.group import WorkerGroup
from thinwire.train.workers.ranks import is_lead, under_torchrun
from thinwire.train.workers.worker import Worker, checked_loss, worker_state

_LOG = logging.getLogger(__name__)

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
        observers: called by rank 0; returns the observers of records and events.
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
    workers: then worker k continues from worker k modulo the old number; an asynchronous run needs
    the old number. In a folder without a run this begins one, and it leaves a finished run as it
    is. A worker of an elastic run catches up with the others, and may resume from a checkpoint of a
    fixed run.

    Raises:
        MismatchError: the run was started with another configuration.
        CheckpointError: its newest checkpoint is damaged.
        ConfigurationError: the number of workers changed, and the method's overlap cannot drop
            rounds in flight.
    """
    folder = RunFolder(out)
    begun = folder if is_lead() and folder.has_run() else None
    config = launch.resolve(config, elastic, begun=begun)
    # The size of a share depends on K, so an elastic run cannot change it.
    is_fixed = elastic is None or elastic.is_fixed
    changed = begun is not None and is_fixed and begun.config()["workers"] != config.workers
    if begun is not None:
        begun.check_same(config.describe(), other_workers=changed)
    finished = folder.summary()
    if finished is not None:
        return finished
    if changed:
        # Loading would raise this, too, but only after everything is built.
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
    trainer = _Trainer(config, folder, group, data)
    try:
        with stop or nullcontext(()) as asked_to_stop:
            # The run may be asked to stop while it waits to join.
            group.leave_when(lambda: bool(asked_to_stop))
            summary = trainer.run(make_observers, asked_to_stop)
    except BaseException:
        group.abandon()
        raise
    finally:
        for observer in trainer.observers:
            observer.close()
    group.close()
    return summary


class _Trainer:
    def __init__(
        self, config: TrainConfig, folder: RunFolder, group: WorkerGroup, data: LoadedData
    ) -> None:
        self._config, self._folder, self._group, self._data = config, folder, group, data
        self.observers: list[Observer] = []
        self._asked_to_stop: Sequence[int] = ()
        self._all_stop = False
        # Seconds in inner and outer steps, and in inner steps alone, of all workers that share a
        # process; including the time before an interruption.
        self._training_s = self._inner_s = 0.0
        self._began_s = time.perf_counter()
        self._saved_step = 0
        ranks, keep = group.checkpoint_ranks, config.periods.keep_checkpoints
        self._files = [
            Checkpoints(folder.checkpoints, worker=worker.rank, ranks=ranks, keep=keep)
            for worker in group.workers
        ]

    def _begin(self, make_observers: ObserverFactory | None) -> None:
        """Resume from a checkpoint in the folder, if any, and open the folder."""
        self._restore()
        if not is_lead():
            return
        made = make_observers(self._config, self._group.step) if make_observers else []
        self.observers.extend([FolderWriter(self._folder), *made])
        if self._group.events is not None:
            forward_events(self._group.events, self.observers)
        self._group.join_run()
        # Last, so that a failed start leaves no folder in the way of the next one.
        self._folder.open(self._config.describe())
        # Elastic workers compare their data as they join, and must survive a full disk.
        if self._group.events is None:
            self._folder.note_data(self._data.fingerprint)

    # -- the loop ----------------------------------------------------------------------------------

    def run(
        self, make_observers: ObserverFactory | None, asked_to_stop: Sequence[int]
    ) -> dict[str, Any]:
        self._asked_to_stop = asked_to_stop
        self._begin(make_observers)
        try:
            val_loss = self._train()
        except RunStopped as error:
            # Stopped in a wait, before the first step or after a step whose round has not begun.
            raise (self._stopped() if self._saves_alone else error) from error
        except (ExchangeError, MismatchError) as error:
            is_asked = bool(self._asked_to_stop)
            if is_asked and self._saves_alone:
                raise self._stopped() from error
            again = f"the same command with --resume --out {self._folder.path}"
            if is_asked:
                # The others were lost while this process waited to stop together with them.
                raise RunStopped(
                    f"finish the run in {self._folder.path}",
                    because=f"it was asked to stop while it waited for the others: {error.because}",
                    do=f"{again}, from the last checkpoint; none was written now",
                ) from error
            if not self._saves_alone:
                raise
            self._save()
            do = f"{error.do}; then {again}"
            raise type(error)(error.cannot, because=error.because, do=do) from error
        return self._finish(val_loss)

    def _train(self) -> float:
        group, config, val_loss = self._group, self._config, None
        # A worker that joined in the last round may have made that round fail.
        while group.join_run() < config.steps or not group.flush():
            before = group.step
            began_s = time.perf_counter()
            losses = self._one_step()
            self._training_s += time.perf_counter() - began_s
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
                # A process that has all ranks need not wait for others.
                is_alone = group.checkpoint_ranks == len(group.workers)
                if self._all_stop or (is_alone and self._asked_to_stop):
                    raise self._stopped()
                self._save_if_due()
        # Still None if the run was over when this worker joined.
        return self._evaluate() if val_loss is None else val_loss

    @property
    def _saves_alone(self) -> bool:
        """Whether this process may write a checkpoint without the other ranks."""
        return self._group.events is not None and self._group.workers[0].steps_taken > 0

    def _stopped(self) -> RunStopped:
        return stopped(self._folder.path, self._group.step, is_saved=self._save())

    def _one_step(self) -> list[float]:
        began_s = time.perf_counter()
        losses = self._group.inner_step()
        self._inner_s += time.perf_counter() - began_s
        self._group.outer_step()
        if self._group.step >= self._config.steps:
            self._group.flush()
        return losses

    def _evaluate(self) -> float:
        """Mean validation loss of the outer parameters; each rank evaluates its part."""
        windows = self._data.validation
        # All workers begin before any of them waits for the others.
        self._group.each(lambda worker: worker.outer.evaluating())
        sums = self._group.each(lambda w: w.validation_loss_sum(windows))
        mean = sum(self._group.all_gather(sums)) / windows[:, 1:].numel()
        return checked_loss(mean, self._group.step)

    def _record(self, losses: list[float], extra: dict[str, float]) -> None:
        self._all_stop = any(self._group.all_gather([float(bool(self._asked_to_stop))]))
        losses = self._group.all_gather(losses)
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
            "tokens_per_s": self._group.tokens / max(self._training_s, 1e-9),
            **{name: totals[name] for name in _RECORDED},
            **self._seconds(),
        }
        worker.outer.report(loss=record["loss"], tokens_per_s=record["tokens_per_s"])
        try:
            for observer in self.observers:
                observer.record(record | self._group.record_fields() | extra)
        except CheckpointError as error:
            self._group.file_failed(error)

    def _seconds(self) -> dict[str, float]:
        wall_s = time.perf_counter() - self._began_s
        return {"wall_s": wall_s, "training_s": self._training_s, "inner_s": self._inner_s}

    # -- checkpoints -------------------------------------------------------------------------------

    def _save_if_due(self) -> None:
        group, step = self._group, self._group.step
        # An elastic run writes checkpoints between rounds only.
        may = group.events is None or step % self._config.method.sync_every == 0
        if may and is_due(self._saved_step, step, self._config.periods.checkpoint_steps):
            self._save()

    def _save(self) -> bool:
        """Write a checkpoint of every worker; false if an elastic run could not."""
        group = self._group
        for worker in group.workers:
            worker.check_finite()
        step = self._saved_step = group.step
        # No rank writes before all ranks have found their weights finite.
        group.barrier()
        run = {
            "config": identity_fields(self._config.describe()),
            "step": step,
            "corpus": self._data.fingerprint,
            **self._seconds(),
        }
        try:
            for worker, files in zip(group.workers, self._files, strict=True):
                files.save(step, {"run": run, "worker": worker.state_dict()})
            # No rank removes an old checkpoint before all ranks have written the new one.
            group.barrier()
            for files in self._files:
                files.prune()
        except CheckpointError as error:
            group.file_failed(error)
            return False
        return True

    def _restore(self) -> None:
        """Load the newest step of which every worker has a checkpoint; without one, step 0."""
        step = self._newest_common_step()
        if step:
            for worker, files in zip(self._group.workers, self._files, strict=True):
                state, ranks = files.load(step)
                try:
                    self._load(worker, state, ranks)
                except (AttributeError, IndexError, KeyError, TypeError) as error:
                    why = f"it lacks a part, or one is of another kind: {error}"
                    raise files.damaged(step, why) from error
        self._group.follow()
        self._saved_step = self._group.step
        if is_lead() and self._folder.has_run():
            self._folder.cut_metrics(self._group.step)

    def _load(self, worker: Worker, state: dict[str, Any], ranks: int) -> None:
        run: Mapping[str, Any] = state["run"]
        changed = ranks != self._group.checkpoint_ranks
        self._folder.check_same(
            self._config.describe() | {"corpus": self._data.fingerprint},
            saved={**run["config"], "corpus": run["corpus"]},
            other_workers=changed,
        )
        worker.load_state_dict(worker_state(state), sources=ranks if changed else None)
        if changed and worker.rank == 0:
            before, now = ranks // self._config.machine.worker_size, self._config.workers
            _LOG.warning(
                "%s was left with K=%d and goes on with K=%d", self._folder.path, before, now
            )
        # Checkpoints of older versions lack some of these times.
        self._began_s = time.perf_counter() - run.get("wall_s", 0.0)
        self._training_s, self._inner_s = run.get("training_s", 0.0), run.get("inner_s", 0.0)

    def _newest_common_step(self) -> int:
        common = set.intersection(*(set(files.steps()) for files in self._files))
        limit = max(common, default=0)
        while True:
            mine = max((step for step in common if step <= limit), default=0)
            newest = self._group.gather_from_all([float(mine)] * len(self._files))
            if len(set(newest)) == 1:
                break
            limit = int(min(newest))
        has_some = self._group.gather_from_all([float(bool(f.steps())) for f in self._files])
        # In a shared folder, whose ranks stop together, a first checkpoint may be incomplete.
        is_lost = any(has_some) if self._group.is_apart else all(has_some)
        check(
            bool(mine) or not is_lost,
            f"resume the run in {self._folder.path}",
            because="workers have checkpoints, and none of a step that all have",
            do="give each worker its own --out of before; or start all of them in new folders",
            kind=CheckpointError,
        )
        return mine

    # -- the end -----------------------------------------------------------------------------------

    def _finish(self, val_loss: float) -> dict[str, Any]:
        group = self._group
        group.each(lambda worker: worker.outer.evaluating())
        digests = [worker.outer_digest() for worker in group.workers]
        # Only floats are gathered, which hold 48 bits of the digest exactly.
        if len(set(group.all_gather([float(int(d[:12], 16)) for d in digests]))) > 1:
            raise MismatchError(
                "finish the run",
                because="the workers' outer parameters differ, which must never happen",
                do="report this as a bug, with config.json",
            )
        worker, events = group.workers[0], group.events
        stats, totals = worker.outer.stats, worker.totals()
        # Values that are 0 or empty in most runs.
        rare = {
            "contributions": stats.contributions,
            "requests": dict(stats.requests),
            "added_bytes_per_message": worker.outer.transport.added_nbytes,
            **{name: totals[name] for name in _CONSENSUS},
        }
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
            "wall_s": self._seconds()["wall_s"],
            "tokens_per_s": group.tokens / max(self._training_s, 1e-9),
            "wait_s": stats.wait_s,
            **{name: value for name, value in rare.items() if value},
            "versions": versions(),
            **group.record_fields(),
            **({} if events is None else {"events": dict(events.summary())}),
        }
        if worker.number == 0:
            worker.save_pretrained(self._folder.path / "model")
        if is_lead():
            self._data.tokenizer.save(self._folder.path / "model")
            self._folder.finish(summary)
        return summary
