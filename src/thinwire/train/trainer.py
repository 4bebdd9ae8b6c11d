"""The training loop."""

import importlib.metadata
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

import torch

from thinwire.agreement import check_same
from thinwire.errors import MismatchError, NonFiniteError
from thinwire.train import launch
from thinwire.train.checkpoint import Checkpoints
from thinwire.train.config import TrainConfig
from thinwire.train.crew import Crew
from thinwire.train.data import LoadedData
from thinwire.train.observers import MetricsFile, Observer
from thinwire.train.run_folder import RunFolder, what_counts

__all__ = ["ObserverFactory", "resume", "train"]

# Given the configuration and the step from which the run goes on.
ObserverFactory: TypeAlias = Callable[[TrainConfig, int], Sequence[Observer]]


def train(
    config: TrainConfig, out: Path, observers: ObserverFactory | None = None
) -> dict[str, Any]:
    """Train from the beginning and return the summary.

    Args:
        config: the run.
        out: folder for config.json, metrics.jsonl, summary.json, checkpoints and the final model.
        observers: makes those who are told of the progress, on the process that leads.

    Raises:
        ThinwireError: whatever stops the run; checkpoints written before stay.
    """
    config = launch.resolve(config)
    folder = RunFolder(out)
    if launch.is_lead():
        folder.check_free()
    return _run(config, folder, observers)


def resume(
    config: TrainConfig, out: Path, observers: ObserverFactory | None = None
) -> dict[str, Any]:
    """Continue the run in `out` from its newest checkpoint, bit for bit, and return the summary.

    A folder without a run begins one; a finished run is not touched.

    Raises:
        MismatchError: the run there was started with another configuration.
        CheckpointError: its newest checkpoint is damaged.
    """
    config = launch.resolve(config)
    folder = RunFolder(out)
    if launch.is_lead() and folder.has_run():
        folder.check_same(config.describe())
    finished = folder.summary()
    if finished is not None:
        return finished
    return _run(config, folder, observers)


def _run(
    config: TrainConfig,
    folder: RunFolder,
    observers: ObserverFactory | None,
) -> dict[str, Any]:
    if launch.under_torchrun():
        launch.join(config)
    data = config.data.load()
    crew = launch.assemble(config, data)
    told: list[Observer] = [MetricsFile(folder)] if crew.leads else []
    trainer = _Trainer(config, folder, crew, data, told)
    trainer.restore()
    if crew.leads:
        told.extend(observers(config, trainer.step) if observers else [])
        # Last, so that a start that fails leaves no folder in the way of the next one.
        folder.open(config.describe())
    try:
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
        self.before_s = self.training_s = 0.0
        self._started_s = time.perf_counter()

    @property
    def wall_s(self) -> float:
        return self.before_s + time.perf_counter() - self._started_s

    def timed(self, work: Callable[[], Any]) -> Any:
        started_s = time.perf_counter()
        result = work()
        self.training_s += time.perf_counter() - started_s
        return result


@final
class _Trainer:
    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        crew: Crew,
        data: LoadedData,
        observers: Sequence[Observer],
    ) -> None:
        self._config, self._folder, self._crew, self._data = config, folder, crew, data
        self._observers = observers
        self._clock = _Clock()
        self.step = 0
        self._checkpoints = [
            Checkpoints(folder.checkpoints, worker=w.rank, keep=config.periods.keep_checkpoints)
            for w in crew.workers
        ]

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        val_loss = float("nan")
        while self.step < self._config.steps:
            losses = self._clock.timed(self._one_step)
            last = self.step == self._config.steps
            evaluate = last or _due(self.step, self._config.periods.evaluate_steps)
            extra: dict[str, float] = {}
            if evaluate:
                val_loss = extra["val_loss"] = self._evaluate()
                extra |= self._memory()
            if evaluate or _due(self.step, self._config.periods.log_steps):
                self._record(losses, extra)
            if _due(self.step, self._config.periods.checkpoint_steps) and not last:
                self._save()
        return self._finish(val_loss)

    def _one_step(self) -> list[float]:
        losses = self._crew.inner_step()
        self._crew.outer_step()
        self.step += 1
        if self.step == self._config.steps:
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
            "tokens": self.step * self._config.tokens_per_step,
            "loss": sum(losses) / len(losses),
            "lr": worker.optimizer.param_groups[0]["lr"],
            "rounds": stats.rounds,
            "sent_bytes": totals["sent_bytes"],
            "received_bytes": totals["received_bytes"],
            "wait_s": stats.wait_s,
            "overlapped_s": stats.overlapped_s,
            "left_out": totals["left_out"],
            "peak_outer_device_bytes": totals["peak_outer_device_bytes"],
            "peak_outer_host_bytes": totals["peak_outer_host_bytes"],
            "tokens_per_s": self._tokens_per_s(),
            "wall_s": self._clock.wall_s,
        }
        for observer in self._observers:
            observer.record(record | extra)

    def _memory(self) -> dict[str, int]:
        """Bytes of the states that a worker holds, as fields of a record."""
        held = self._crew.workers[0].memory()
        return {f"{state.replace(' ', '_')}_bytes": count for state, count in held.items()}

    def _tokens_per_s(self) -> float:
        return self.step * self._config.tokens_per_step / self._clock.training_s

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
        worker = self._crew.workers[0]
        totals = worker.totals()
        return {
            "method": self._config.method.name,
            "workers": self._config.workers,
            "parameters": sum(p.numel() for p in worker.model.parameters()),
            "steps": self.step,
            "tokens": self.step * self._config.tokens_per_step,
            "val_loss": val_loss,
            "sent_bytes_per_worker": totals["sent_bytes"],
            "received_bytes_per_worker": totals["received_bytes"],
            "peak_sent_bytes_per_step": totals["peak_sent_bytes_per_step"],
            "outer_digest": digest,
            "wall_s": self._clock.wall_s,
            "tokens_per_s": self._tokens_per_s(),
            "wait_s": worker.outer.stats.wait_s,
            "versions": _versions(),
        }

    # -- checkpoints -------------------------------------------------------------------------------

    def _save(self) -> None:
        for worker in self._crew.workers:
            worker.check_finite()
        # Nobody replaces a good checkpoint before everybody was found to be well.
        self._crew.everywhere([0.0] * len(self._crew.workers))
        shared = {
            "config": what_counts(self._config.describe()),
            "step": self.step,
            "wall_s": self._clock.wall_s,
            "training_s": self._clock.training_s,
            "corpus": self._data.fingerprint,
        }
        for worker, checkpoints in zip(self._crew.workers, self._checkpoints, strict=True):
            checkpoints.save(self.step, {"run": shared, "worker": worker.state_dict()})
        # Nobody forgets an old checkpoint before everybody has the new one.
        self._crew.everywhere([0.0] * len(self._crew.workers))
        for checkpoints in self._checkpoints:
            checkpoints.prune()

    def restore(self) -> None:
        """Load the newest step of which every worker has a checkpoint; without one, step 0."""
        step = self._newest_common_step()
        if step:
            for worker, checkpoints in zip(self._crew.workers, self._checkpoints, strict=True):
                self._load(worker, checkpoints.load(step))
        if self._crew.leads and self._folder.has_run():
            self._folder.cut_metrics(self.step)

    def _load(self, worker: Any, state: dict[str, Any]) -> None:
        shared = state["run"]
        check_same(
            shared["config"],
            what_counts(self._config.describe()),
            cannot=f"resume {self._folder.path} from its checkpoint",
            whose="the checkpoint",
            do="put back the checkpoints of this run",
        )
        if shared["corpus"] != self._data.fingerprint:
            raise MismatchError(
                f"resume {self._folder.path}: the corpus differs",
                because=f"it was {shared['corpus'][:12]} and is {self._data.fingerprint[:12]}",
                do="restore the text the run was started with, or start anew with another --out",
            )
        worker.load_state_dict(state["worker"])
        self.step = int(shared["step"])
        self._clock.before_s, self._clock.training_s = shared["wall_s"], shared["training_s"]

    def _newest_common_step(self) -> int:
        common = set.intersection(*(set(c.steps()) for c in self._checkpoints))
        limit = max(common, default=0)
        while True:
            mine = max((step for step in common if step <= limit), default=0)
            newest = self._crew.everywhere([float(mine)] * len(self._crew.workers))
            if len(set(newest)) == 1:
                return mine
            limit = int(min(newest))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _versions() -> dict[str, str]:
    packages = ("thinwire", "torch", "transformers", "datasets", "numpy")
    return {
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {torch.get_num_threads()} threads",
    } | {name: importlib.metadata.version(name) for name in packages}
