"""The training loop."""

import importlib.metadata
import math
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias, final

import torch

from thinwire.errors import CheckpointError, ExchangeError, MismatchError, NonFiniteError
from thinwire.train import launch
from thinwire.train.config import TrainConfig
from thinwire.train.crew import Crew
from thinwire.train.data import LoadedData
from thinwire.train.elastic import Membership
from thinwire.train.folder_lock import locked
from thinwire.train.observers import EventsFile, MetricsFile, Observer, Relay
from thinwire.train.run_folder import WITH_WORKERS, RunFolder
from thinwire.train.saves import Saves, Spent

__all__ = ["ObserverFactory", "resume", "train"]

# Given the configuration and the step from which the run goes on.
ObserverFactory: TypeAlias = Callable[[TrainConfig, int], Sequence[Observer]]


def train(
    config: TrainConfig,
    out: Path,
    observers: ObserverFactory | None = None,
    *,
    membership: Membership | None = None,
) -> dict[str, Any]:
    """Train from the beginning and return the summary.

    Args:
        config: the run.
        out: folder for config.json, data.json, metrics.jsonl, summary.json, checkpoints and model;
            with events.jsonl of a worker that may come and go, which has a folder of its own.
        observers: makes those who are told of the progress, on the process that leads.
        membership: makes this process one worker of an elastic run; global_batch / workers
            sequences are its batch, whoever else is there.

    Raises:
        ThinwireError: whatever stops the run; checkpoints written before stay.
    """
    config = launch.resolve(config, membership)
    folder = RunFolder(out)
    with _held(folder):
        if launch.is_lead():
            folder.check_free()
        return _run(config, folder, observers, membership)


def resume(
    config: TrainConfig,
    out: Path,
    observers: ObserverFactory | None = None,
    *,
    membership: Membership | None = None,
) -> dict[str, Any]:
    """Continue the run in `out` from its newest checkpoint and return the summary.

    Bit for bit, unless `config` has another number of workers: worker k of those goes on from
    worker k modulo the old number. A folder without a run begins one; a finished run is not
    touched. An elastic worker starts from the state its checkpoint shares with the others.

    Raises:
        MismatchError: the run there was started with another configuration.
        CheckpointError: its newest checkpoint is damaged.
    """
    config = launch.resolve(config, membership)
    folder = RunFolder(out)
    if launch.is_lead() and folder.has_run():
        # How many samples a share has depends on it, so elastic workers cannot change it.
        changed = membership is None and folder.workers() != config.workers
        folder.check_same(config.describe(), may_differ=WITH_WORKERS if changed else ())
    finished = folder.summary()
    if finished is not None:
        return finished
    with _held(folder):
        return _run(config, folder, observers, membership)


def _held(folder: RunFolder) -> AbstractContextManager[None]:
    return locked(folder.path) if launch.is_lead() else nullcontext()


def _run(
    config: TrainConfig,
    folder: RunFolder,
    observers: ObserverFactory | None,
    membership: Membership | None,
) -> dict[str, Any]:
    if launch.under_torchrun():
        launch.join(config)
    data = config.data.load()
    if membership is None:
        crew = launch.assemble(config, data)
    else:
        crew = launch.assemble_elastic(config, data, membership, folder.path)
    told: list[Observer] = []
    try:
        trainer = _Trainer(config, folder, crew, data, told)
        trainer.begin(observers)
        summary = trainer.run()
    except BaseException:
        crew.abandon()
        raise
    finally:
        for observer in told:
            observer.close()
    crew.close()
    return summary


@final
class _Clock:
    """Seconds of this run, including those before it was interrupted."""

    def __init__(self) -> None:
        self._before_s = self.training_s = self.inner_s = 0.0
        self._started_s = time.perf_counter()

    def go_on(self, spent: Spent) -> None:
        self._before_s, self.training_s = spent.wall_s, spent.training_s
        self.inner_s = spent.inner_s

    @property
    def spent(self) -> Spent:
        return Spent(wall_s=self.wall_s, training_s=self.training_s, inner_s=self.inner_s)

    @property
    def wall_s(self) -> float:
        return self._before_s + time.perf_counter() - self._started_s

    def timed(self, work: Callable[[], Any]) -> Any:
        started_s = time.perf_counter()
        result = work()
        self.training_s += time.perf_counter() - started_s
        return result

    def timed_inner(self, work: Callable[[], Any]) -> Any:
        started_s = time.perf_counter()
        result = work()
        self.inner_s += time.perf_counter() - started_s
        return result


@final
class _Trainer:
    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        crew: Crew,
        data: LoadedData,
        told: list[Observer],
    ) -> None:
        self._config, self._folder, self._crew, self._data = config, folder, crew, data
        self._told, self._clock = told, _Clock()
        self._saves = Saves(config, folder, crew, data.fingerprint)
        self._witness = crew.witness(every=config.periods.statistics_steps)

    @property
    def step(self) -> int:
        """Inner steps by the schedule."""
        return self._crew.step

    def begin(self, observers: ObserverFactory | None) -> None:
        """Go on from what the folder holds, if anything, and open it."""
        self._clock.go_on(self._saves.restore())
        if not self._crew.leads:
            return
        made = observers(self._config, self.step) if observers else []
        self._told.extend([MetricsFile(self._folder), *made])
        if self._crew.events is not None:
            Relay(self._crew.events, [EventsFile(self._folder), *made])
        self._crew.arrive()
        # Last, so that a start that fails leaves no folder in the way of the next one.
        self._folder.open(self._config.describe())
        # Elastic workers are compared with each other as they meet, and outlive a full disk.
        if self._crew.events is None:
            self._folder.note_data(self._data.fingerprint)

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        try:
            val_loss = self._train()
        except ExchangeError as error:
            raise self._stranded(error) from error
        return self._finish(val_loss)

    def _train(self) -> float:
        val_loss, steps, periods = None, self._config.steps, self._config.periods
        while self.step < steps and self._crew.arrive() < steps:
            before = self.step
            losses = self._clock.timed(self._one_step)
            if self._witness is not None:
                self._witness.measure()
            # Those of a worker that was healed jump, perhaps over what was due.
            evaluate = self.step >= steps or _due(before, self.step, periods.evaluate_steps)
            extra: dict[str, float] = {}
            if evaluate:
                val_loss = extra["val_loss"] = self._evaluate()
                extra |= self._memory()
            if evaluate or _due(before, self.step, periods.log_steps):
                self._record(losses, extra)
            if self.step < steps:
                self._saves.save_if_due(self._clock.spent)
        # A newcomer may have come to the last round, which may have to be repeated.
        self._crew.settle()
        # Or it may find that everything is done.
        return self._evaluate() if val_loss is None else val_loss

    def _stranded(self, error: ExchangeError) -> ExchangeError:
        """What to raise where the others are lost; an elastic worker first keeps what it has."""
        if self._crew.events is None or not self._crew.steps_taken:
            return error
        self._saves.save(self._clock.spent)
        return type(error)(
            error.cannot,
            because=error.because,
            do=f"{error.do}; then the same command with --resume --out {self._folder.path}",
        )

    def _one_step(self) -> list[float]:
        losses = self._clock.timed_inner(self._crew.inner_step)
        if self._witness is not None:
            self._witness.at(self.step + 1)
        self._crew.outer_step()
        if self.step >= self._config.steps:
            self._crew.flush()
        return losses

    def _evaluate(self) -> float:
        """Mean validation loss of the outer parameters; every rank takes its part of it."""
        windows = self._data.validation
        sums = self._crew.each(lambda w: w.validation_loss_sum(windows))
        mean = sum(self._crew.everywhere(sums)) / windows[:, 1:].numel()
        if not math.isfinite(mean):
            raise NonFiniteError(
                f"go on after step {self.step}",
                because=f"the validation loss of the outer parameters is {mean}",
                do="start anew with a lower --inner-lr; checkpoints written before are intact",
            )
        return mean

    def _record(self, losses: list[float], extra: dict[str, float]) -> None:
        losses = self._crew.everywhere(losses)
        worker = self._crew.workers[0]
        stats, totals = worker.outer.stats, worker.totals()
        record = {
            "step": self.step,
            "tokens": self._crew.tokens,
            "loss": sum(losses) / len(losses),
            "lr": worker.optimizer.param_groups[0]["lr"],
            "rounds": stats.rounds,
            "sent_bytes": totals["sent_bytes"],
            "received_bytes": totals["received_bytes"],
            "wait_s": stats.wait_s,
            "overlapped_s": stats.overlapped_s,
            "inner_s": self._clock.inner_s,
            "training_s": self._clock.training_s,
            "left_out": totals["left_out"],
            "peak_outer_device_bytes": totals["peak_outer_device_bytes"],
            "peak_outer_host_bytes": totals["peak_outer_host_bytes"],
            "tokens_per_s": self._tokens_per_s(),
            "wall_s": self._clock.wall_s,
        }
        statistics = {} if self._witness is None else self._witness.take()
        try:
            for observer in self._told:
                observer.record(record | self._crew.present() | statistics | extra)
        except CheckpointError as error:
            self._saves.failed(error)

    def _memory(self) -> dict[str, int]:
        """Bytes of the states that a worker holds, as fields of a record."""
        held = self._crew.workers[0].memory()
        return {f"{state.replace(' ', '_')}_bytes": count for state, count in held.items()}

    def _tokens_per_s(self) -> float:
        return self._crew.tokens / max(self._clock.training_s, 1e-9)

    # -- the end -----------------------------------------------------------------------------------

    def _finish(self, val_loss: float) -> dict[str, Any]:
        digest = self._common_digest()
        worker = self._crew.workers[0]
        summary = self._summary(val_loss, digest)
        if worker.number == 0:
            worker.save_pretrained(self._folder.path / "model")
        if self._crew.leads:
            self._data.tokenizer.save(self._folder.path / "model")
            self._folder.finish(summary)
        return summary

    def _common_digest(self) -> str:
        """The digest of the outer parameters, which must be the same on all workers."""
        digests = [worker.outer_digest() for worker in self._crew.workers]
        # 48 bits of it fit a float exactly, which is what the crew carries.
        everyone = self._crew.everywhere([float(int(d[:12], 16)) for d in digests])
        if len(set(everyone)) > 1:
            raise MismatchError(
                "finish the run",
                because="the workers' outer parameters differ: replicas have drifted",
                do="report this with config.json: it must not happen",
            )
        return digests[0]

    def _summary(self, val_loss: float, digest: str) -> dict[str, Any]:
        worker, events = self._crew.workers[0], self._crew.events
        totals = worker.totals()
        return {
            "method": self._config.method.name,
            "workers": self._config.workers,
            "workers_here": len(self._crew.workers),
            "parameters": sum(p.numel() for p in worker.model.parameters()),
            "steps": self.step,
            "tokens": self._crew.tokens,
            "val_loss": val_loss,
            "sent_bytes_per_worker": totals["sent_bytes"],
            "received_bytes_per_worker": totals["received_bytes"],
            "peak_sent_bytes_per_step": totals["peak_sent_bytes_per_step"],
            "outer_digest": digest,
            "wall_s": self._clock.wall_s,
            "tokens_per_s": self._tokens_per_s(),
            "wait_s": worker.outer.stats.wait_s,
            "versions": _versions(),
            **self._crew.present(),
            **({} if events is None else {"events": dict(events.summary())}),
        }


def _due(before: int, now: int, every: int) -> bool:
    return every > 0 and now // every > before // every


def _versions() -> dict[str, str]:
    packages = ("thinwire", "torch", "transformers", "datasets", "numpy")
    return {
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {torch.get_num_threads()} threads",
    } | {name: importlib.metadata.version(name) for name in packages}
