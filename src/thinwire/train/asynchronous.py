"""Asynchronous training of a language model: one worker's part, and a whole run by a virtual clock.

The inner learning rate follows the whole run, not the worker: inner step j of an assignment takes
the factor of step floor(n / K) + j, where n counts the inner steps of all workers in the theta that
it starts from. For equal workers that is the schedule of a synchronous run. A worker slower or
faster than the mean deviates from it by less than H steps.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from thinwire.asynchronous import Assignment, AsyncOptions, AsyncServer, AsyncWorker, Simulation
from thinwire.asynchronous.objects import AsyncStoreServer, AsyncStoreWorker
from thinwire.errors import ConfigurationError, check
from thinwire.handshake import check_same_run
from thinwire.method import Method
from thinwire.outer import SGD, ByWorkerCount, DelayedNesterov
from thinwire.runs.folder import RunFolder
from thinwire.train import launch
from thinwire.train.checkpoints import Checkpoints, locked, stopped
from thinwire.train.config import TrainConfig
from thinwire.train.data import LoadedData
from thinwire.train.models import save_pretrained
from thinwire.train.observers import FolderWriter, Observer, versions
from thinwire.train.workers.ranks import Ranks
from thinwire.train.workers.worker import Worker, WorkerIdentity, checked_loss, token_loss_sum


def without_rounds(method: Method, workers: int) -> Method:
    """`method` adapted to arrivals: delayed Nesterov with the same rate and momentum, N = K.

    Raises:
        ConfigurationError: its outer optimizer is neither plain SGD nor Nesterov.

    >>> import thinwire as tw
    >>> without_rounds(tw.presets.diloco(), 4).outer
    DelayedNesterov(lr=0.7, momentum=0.9, every=4, c=0.0)
    """
    step = method.outer.at(workers) if isinstance(method.outer, ByWorkerCount) else method.outer
    if isinstance(step, DelayedNesterov):
        return method
    if not isinstance(step, SGD) or (step.momentum and not step.nesterov):
        raise ConfigurationError(
            f"train method {method.name!r} asynchronously",
            because=f"{step} has no form for pseudo-gradients that arrive one by one",
            do="use a method with outer SGD or Nesterov momentum, such as diloco or muloco",
        )
    return replace(method, outer=DelayedNesterov(lr=step.lr, momentum=step.momentum, every=workers))


def async_worker(config: TrainConfig, data: LoadedData, number: int) -> Worker:
    """Worker `number` of an asynchronous run, with a model, optimizer and data of its own.

    It reads block k of every global batch at its own pace, so a fast worker gets further in the
    order of the data than a slow one.

    Raises:
        ConfigurationError: the run's workers have several ranks, as only runs in rounds may.
    """
    check(
        config.machine.worker_size == 1,
        f"train asynchronously with workers of {config.machine.worker_size} ranks",
        because="a worker is one process here",
        do="leave out worker_size",
    )
    torch.set_num_threads(max(1, config.machine.threads))
    identity = WorkerIdentity(number=number, block=number)
    connect = partial(AsyncWorker, rank=number, facts=launch.common_fields(config, data))
    return Worker(config, data, connect, identity, Ranks())


class AsyncRun:
    """The server of a run, and its folder: records, summary, model.

    Args:
        config: the run's configuration, resolved.
        folder: folder for the files.
        options: how the server treats workers.
    """

    def __init__(
        self, config: TrainConfig, folder: RunFolder, options: AsyncOptions | None
    ) -> None:
        self._config, self.data, self._folder = config, config.data.load(), folder
        length = config.data.sequence_length
        model: Any = config.model.build(self.data.tokenizer.vocab_size, length, config.seed)
        self.observers: list[Observer] = [FolderWriter(folder)]
        self.server = AsyncServer(
            model.to(config.machine.device),
            config.method,
            workers=config.workers,
            total_steps=config.steps * config.workers,
            options=options,
            facts=launch.common_fields(config, self.data),
            outer_device=config.machine.outer_device,
        )
        self._last: dict[str, Any] = {"step": 0, "wall_s": 0.0, "wait_s": 0.0, "loss": 0.0}

    @property
    def step(self) -> int:
        """Inner steps in theta over K: the step where a run in rounds has read as much."""
        return min(self._config.steps, self.server.stats.steps_done // self._config.workers)

    def open(self, parts: Sequence[Any]) -> Callable[[], None]:
        """Create the files of the run, or continue those of a killed process.

        Args:
            parts: objects whose states make up a checkpoint.

        Returns:
            A function that writes a checkpoint.
        """
        save = _resume(self._folder.path, parts, self.server.describe(), self._config)
        self._folder.open(self._config.describe())
        self._folder.note_data(self.data.fingerprint)
        self._folder.cut_metrics(self.step)
        lines = (self._folder.path / "metrics.jsonl").read_bytes().splitlines()
        self._last |= msgspec.json.decode(lines[-1]) if lines else {}
        self._began_s = time.perf_counter() - self._last["wall_s"]
        return save

    def record(self, losses: list[float], **fields: float) -> None:
        """Write a record of `losses` and clear them, if one is due; called after arrivals.

        Args:
            losses: the workers' losses, as far as they are known.
            fields: further fields of the record, or replacements for its own.

        Raises:
            NonFiniteError: the validation loss of theta is not finite.
        """
        config, stats, periods = self._config, self.server.stats, self._config.periods
        before, step, workers = self._last["step"], self.step, self._config.workers
        evaluates = self.server.is_finished or is_due(before, step, periods.evaluate_steps)
        if step <= before or not (evaluates or is_due(before, step, periods.log_steps)):
            return
        wall_s = time.perf_counter() - self._began_s
        tokens = stats.steps_done * config.tokens_per_step // workers
        self._last = {
            "step": step,
            "tokens": tokens,
            "loss": sum(losses) / max(1, len(losses)),
            "rounds": stats.arrivals / workers,
            "arrivals": stats.arrivals,
            "mean_staleness": stats.mean_staleness,
            "largest_staleness": stats.largest_staleness,
            "sent_bytes": stats.received_bytes // workers,
            "received_bytes": stats.sent_bytes // workers,
            **({"val_loss": self._validation_loss()} if evaluates else {}),
            "wait_s": 0.0,
            "overlapped_s": 0.0,
            "wall_s": wall_s,
            "tokens_per_s": tokens / max(wall_s, 1e-9),
            **fields,
        }
        losses.clear()
        for observer in self.observers:
            observer.record(self._last)

    def _validation_loss(self) -> float:
        """Mean loss of every next token, in nats."""
        windows, machine = self.data.validation, self._config.machine
        total = token_loss_sum(self.server.model, windows, machine, count=len(windows))
        return checked_loss(total / windows[:, 1:].numel(), self.step)

    def finish(self) -> dict[str, Any]:
        """Write summary and model; returns the summary."""
        server, last, model = self.server, self._last, self._folder.path / "model"
        summary = {
            "method": self._config.method.name,
            "workers": self._config.workers,
            "parameters": sum(p.numel() for p in server.model.parameters()),
            "steps": last["step"],
            **{n: last[n] for n in ("tokens", "val_loss", "wall_s", "wait_s", "tokens_per_s")},
            "sent_bytes_per_worker": last["sent_bytes"],
            "received_bytes_per_worker": last["received_bytes"],
            "peak_sent_bytes_per_step": server.message_nbytes,
            "outer_digest": server.digest(),
            "asynchronous": asdict(server.stats),
            "versions": versions(),
        }
        trained: Any = server.model
        save_pretrained(trained, model)
        self.data.tokenizer.save(model)
        self._folder.finish(summary)
        return summary


def is_due(before: int, now: int, every: int) -> bool:
    """Whether a step from `before` + 1 to `now` is a multiple of `every`; false if that is 0."""
    return every > 0 and now // every > before // every


def _resume(
    out: Path, parts: Sequence[Any], described: Mapping[str, str], config: TrainConfig
) -> Callable[[], None]:
    """Load the newest checkpoint in `out` into `parts`; returns a function that writes the next.

    Raises:
        MismatchError: it is from another run. CheckpointError: it is damaged.
    """
    keep = config.periods.keep_checkpoints
    files = Checkpoints(out / "checkpoints", worker=0, ranks=1, keep=keep)
    newest = max(files.steps(), default=0)
    if newest:
        state, _ = files.load(newest)
        check_same_run(state["run"]["config"], described)
        check(
            len(state["parts"]) == len(parts),
            f"resume {out} with {len(parts)} parts of a run",
            because=f"its checkpoint has {len(state['parts'])}, one for each worker among them",
            do="resume with as many workers as before",
        )
        for part, its in zip(parts, state["parts"], strict=True):
            part.load_state_dict(its)
    numbers = itertools.count(newest + 1)

    def save() -> None:
        its = [part.state_dict() for part in parts]
        files.save(next(numbers), {"run": {"config": described}, "parts": its})
        files.prune()

    return save


# -- in this process -------------------------------------------------------------------------------


def train_here(
    config: TrainConfig,
    folder: RunFolder,
    make_observers: Callable[[TrainConfig, int], Sequence[Observer]] | None,
    stop: AbstractContextManager[Sequence[int]],
    *,
    speeds: Sequence[float] | None = None,
    options: AsyncOptions | None = None,
) -> dict[str, Any]:
    """Run in this process by a virtual clock, and return the summary.

    It reads as many tokens as a run of `config` in rounds: `config.steps` inner steps times K
    workers, however they share them.

    Args:
        config: the run's configuration, resolved; `folder` may have begun it.
        folder: the run's folder, locked by the caller.
        make_observers: as in `trainer.train`.
        stop: as in `trainer.train`.
        speeds: virtual inner steps per second of each worker; equal by default.
        options: how workers of different speeds are treated.

    Raises:
        RunStopped: `stop` asked for it, and a checkpoint was written.
        ThinwireError: any other error that ends the run.
    """
    run, periods, losses = AsyncRun(config, folder, options), config.periods, list[float]()
    trainees = [async_worker(config, run.data, k) for k in range(config.workers)]
    simulation = Simulation(
        run.server,
        [trainee.outer for trainee in trainees],
        speeds or (1.0,) * config.workers,
        lambda rank, assignment: losses.append(trainees[rank].train(assignment)),
    )
    save = run.open((run.server, simulation, *trainees))
    run.observers += make_observers(config, run.step) if make_observers else []
    try:
        with stop as asked_to_stop:
            before = run.step
            while simulation.advance():
                run.record(losses, virtual_s=simulation.now_s)
                if asked_to_stop or is_due(before, run.step, periods.checkpoint_steps):
                    save()
                before = run.step
                if asked_to_stop:
                    raise stopped(folder.path, before, is_saved=True)
    finally:
        for observer in run.observers:
            observer.close()
    return run.finish()


# -- processes -------------------------------------------------------------------------------------


def serve(
    config: TrainConfig,
    out: Path,
    options: AsyncOptions,
    connect: Callable[[AsyncServer], AsyncStoreServer],
) -> dict[str, Any]:
    """Serve a run in an object store until its workers have taken all steps; returns the summary.

    A run in `out` resumes from its checkpoint.

    Args:
        config: the run's configuration.
        out: folder for the files of a run, as in `trainer.train`.
        options: how workers are treated; `lost_after_s` must be finite.
        connect: connects the server to the store.

    Raises:
        ThinwireError: what stopped the server.
    """
    folder = RunFolder(out)
    if folder.has_run():
        folder.check_same(config.describe())
        if (finished := folder.summary()) is not None:
            return finished
    torch.set_num_threads(max(1, config.machine.threads))
    its = AsyncRun(config, folder, options)
    serving = connect(its.server)
    with locked(out):
        write = its.open([serving])

        def save() -> None:
            workers = serving.status.workers.values()
            losses = [state.loss for state in workers if state.loss is not None]
            wait_s = sum(state.wait_s for state in workers) / max(1, len(workers))
            its.record(losses, wait_s=wait_s)
            write()

        serving.run(save)
        return its.finish()


def work(
    config: TrainConfig,
    number: int,
    out: Path | None,
    connect: Callable[[AsyncWorker], AsyncStoreWorker],
    log: Callable[[str], None],
) -> None:
    """Train as worker `number` until the run is finished.

    Args:
        config: the server's configuration.
        number: this worker's number, from 0.
        out: folder of the worker's checkpoints, one for each exchange, from which it resumes bit
            for bit. Without it, a restarted worker has a new inner optimizer.
        connect: connects the worker to the store.
        log: called with a line for each assignment.

    Raises:
        ThinwireError: what stopped the worker.
    """
    trainee = async_worker(config, config.data.load(), number)
    client = connect(trainee.outer)

    def train(assignment: Assignment) -> float:
        loss = trainee.train(assignment)
        log(f"exchange {assignment.round}: {assignment.steps} steps, loss {loss:.4f}")
        return loss

    if out is None:
        client.run(train)
        return
    with locked(out):
        described = trainee.outer.describe() | {"worker": str(number)}
        client.run(train, _resume(out, [trainee, client], described, config))
