"""Asynchronous training of a language model: one worker's part, and a whole run by a virtual clock.

The inner learning rate follows the whole run, not the worker: inner step j of an assignment takes
the factor of step floor(n / K) + j, n being the inner steps of all workers in the theta that it
starts from. For equal workers that is the schedule of a synchronous run. A worker that is slower
or faster than the mean is off it by less than H steps.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from thinwire.asynchronous import (
    Assignment,
    AsyncOptions,
    AsyncServer,
    AsyncWorker,
    Simulation,
    WorkerSpeeds,
)
from thinwire.asynchronous.http import AsyncClient, AsyncHttpServer
from thinwire.errors import ConfigurationError, NonFiniteError
from thinwire.method import Method
from thinwire.outer import SGD, ByWorkerCount, DelayedNesterov
from thinwire.runs.folder import write_json
from thinwire.security.token import Token
from thinwire.train import launch
from thinwire.train.checkpoints import locked
from thinwire.train.config import TrainConfig
from thinwire.train.data import LoadedData
from thinwire.train.models import save_pretrained
from thinwire.train.workers.worker import RandomStream, autocast, token_losses

ObserveRecord: TypeAlias = Callable[[Mapping[str, float]], None]


def without_rounds(method: Method, workers: int) -> Method:
    """`method` for arrivals: delayed Nesterov of the same rate and momentum, N = K.

    Raises:
        ConfigurationError: its outer optimizer is neither plain SGD nor Nesterov's.

    >>> import thinwire as tw
    >>> without_rounds(tw.presets.diloco(), 4).outer
    DelayedNesterov(lr=0.7, momentum=0.9, every=4, c=0.0)
    """
    step = method.outer
    if isinstance(step, ByWorkerCount):
        step = step.at(workers)
    if isinstance(step, DelayedNesterov):
        return method
    if not isinstance(step, SGD) or (step.momentum and not step.nesterov):
        raise ConfigurationError(
            f"train method {method.name!r} asynchronously",
            because=f"there is no form of {step} in which pseudo-gradients arrive one by one",
            do="use a method with outer SGD or Nesterov momentum, such as diloco or muloco",
        )
    arrivals = DelayedNesterov(lr=step.lr, momentum=step.momentum, every=workers)
    return replace(method, outer=arrivals)


def build_model(config: TrainConfig, data: LoadedData) -> Any:
    """The model that server and workers begin with, on the machine's device.

    Raises:
        ConfigurationError: the run asks for what only runs in rounds have.
    """
    machine = config.machine
    if machine.compile or machine.worker_size > 1:
        raise ConfigurationError(
            "train asynchronously with a compiled model or workers of several ranks",
            because="a worker is one process with a model that is not compiled here",
            do="leave out compile and worker_size",
        )
    model: Any = config.model.build(
        vocab_size=data.vocab_size,
        sequence_length=config.data.sequence_length,
        seed=config.seed,
    )
    return model.to("cpu" if machine.device == "auto" else machine.device)


@torch.no_grad()
def validation_loss(model: nn.Module, windows: Tensor, *, batch: int = 64) -> float:
    """Mean loss of every next token of `windows` (int64 [n, time + 1]), in nats."""
    device = next(model.parameters()).device
    model.eval()
    parts = (token_losses(model, part.to(device)) for part in windows.split(batch))
    total = sum(losses.double().sum().item() for losses in parts)
    model.train()
    return total / windows[:, 1:].numel()


class AsyncTrainee:
    """One worker of an asynchronous run: model, inner optimizer and data, all its own.

    It reads block k of every global batch at its own pace, so a fast worker comes further in the
    order of the data than a slow one.

    Args:
        config: of the run.
        data: loaded.
        number: k, from 0.

    Raises:
        ConfigurationError: the run asks for what only runs in rounds have.
    """

    def __init__(self, config: TrainConfig, data: LoadedData, number: int) -> None:
        self._config, self.number = config, number
        self.model = build_model(config, data)
        self._device = next(self.model.parameters()).device
        self.optimizer = config.method.inner.build(self.model)
        self.worker = AsyncWorker(
            self.model,
            self.optimizer,
            config.method,
            rank=number,
            facts=launch.common_fields(config, data),
            outer_device=config.machine.outer_device,
        )
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._batches = data.training.batches(
            worker=number,
            workers=config.workers,
            global_batch=config.global_batch,
            seed=config.seed,
        )
        self._stream = RandomStream(seed=config.seed, worker=number, device=self._device)
        self.steps = 0

    def train(self, assignment: Assignment) -> float:
        """Take the inner steps of `assignment`; returns their mean loss.

        Raises:
            NonFiniteError: a loss is not finite.
        """
        place = assignment.steps_done // self._config.workers
        with self._stream.active():
            losses = [self.inner_step(place + j) for j in range(assignment.steps)]
        return sum(losses) / len(losses)

    def inner_step(self, place: int) -> float:
        """One inner step with the learning rate of step `place` of the schedule."""
        config = self._config
        factor = config.schedule.factor(min(place, config.steps - 1), steps=config.steps)
        for group, lr in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = lr * factor
        windows = next(self._batches).to(self._device)
        loss = sum(self._backward(part) for part in windows.chunk(config.accumulate))
        self.steps += 1
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"take inner step {self.steps} of worker {self.number}",
                because=f"the loss is {loss}",
                do="start anew with a lower inner learning rate",
            )
        if config.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def _backward(self, windows: Tensor) -> float:
        with autocast(self._config.machine, self._device):
            loss = token_losses(self.model, windows).mean() / self._config.accumulate
        loss.backward()
        return loss.item()

    def state_dict(self) -> dict[str, Any]:
        """Everything this worker needs to go on bit for bit."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "worker": self.worker.state_dict(),
            "batches": self._batches.state_dict(),
            "random": self._stream.state_dict(),
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.worker.load_state_dict(state["worker"])
        self._batches.load_state_dict(state["batches"])
        self._stream.load_state_dict(state["random"])
        self.steps = int(state["steps"])


class AsyncTraining:
    """A whole asynchronous run in this process, by a virtual clock.

    It reads as many tokens as a run of `config` in rounds: `config.steps` inner steps times K
    workers, however they share them. Of its periods, only `evaluate_steps` counts.

    Args:
        config: of the run; `method.outer` steps for every arrival.
        data: loaded.
        speeds: of the K workers.
        options: how the server treats them.

    Raises:
        ConfigurationError: numbers do not fit, or the method cannot be run asynchronously.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: LoadedData,
        speeds: WorkerSpeeds,
        options: AsyncOptions | None = None,
    ) -> None:
        self._config, self._data = config, data
        self.server = AsyncServer(
            build_model(config, data),
            config.method,
            workers=config.workers,
            total_steps=config.steps * config.workers,
            options=options,
            facts=launch.common_fields(config, data),
        )
        self.trainees = [AsyncTrainee(config, data, k) for k in range(config.workers)]
        self._losses: list[float] = []
        workers = [trainee.worker for trainee in self.trainees]
        self.simulation = Simulation(self.server, workers, speeds, self._train)

    def _train(self, rank: int, assignment: Assignment) -> None:
        self._losses.append(self.trainees[rank].train(assignment))

    @property
    def step(self) -> int:
        """Inner steps in theta, divided by K: a run in rounds has read as much after so many."""
        return self.server.steps_done // self._config.workers

    def run(self, observe: ObserveRecord) -> None:
        """Train to the end; `observe` is given a record at every evaluation.

        Raises:
            NonFiniteError: a loss is not finite.
        """
        before, every = self.step, self._config.periods.evaluate_steps
        while self.simulation.advance():
            is_due = every and self.step // every > before // every
            if is_due or self.server.is_finished:
                observe(self.record())
            before = self.step

    def record(self) -> dict[str, float]:
        """Where the run stands: tokens, virtual seconds, losses, staleness and bytes."""
        config, stats = self._config, self.server.stats
        losses, self._losses = self._losses, []
        loss = validation_loss(self.server.model, self._data.validation)
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"go on after {stats.arrivals} arrivals",
                because=f"the validation loss of theta is {loss}",
                do="start anew with a lower learning rate",
            )
        return {
            "step": self.step,
            "tokens": stats.steps_done * config.tokens_per_step // config.workers,
            "virtual_s": self.simulation.now_s,
            "val_loss": loss,
            "loss": sum(losses) / max(1, len(losses)),
            "arrivals": stats.arrivals,
            "mean_staleness": stats.mean_staleness,
            "largest_staleness": stats.largest_staleness,
            "sent_bytes": stats.received_bytes,
            "received_bytes": stats.sent_bytes,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on bit for bit, between two arrivals."""
        return {
            "server": self.server.state_dict(),
            "simulation": self.simulation.state_dict(),
            "trainees": [trainee.state_dict() for trainee in self.trainees],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.server.load_state_dict(state["server"])
        self.simulation.load_state_dict(state["simulation"])
        for trainee, saved in zip(self.trainees, state["trainees"], strict=True):
            trainee.load_state_dict(saved)


# -- processes -------------------------------------------------------------------------------------


def serve(
    config: TrainConfig,
    out: Path,
    token: Token,
    *,
    host: str,
    port: int,
    options: AsyncOptions,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Hold theta until its workers have taken all steps; returns the summary.

    A run that is in `out` goes on from its checkpoint.

    Args:
        config: of the run.
        out: folder for server.pt, the checkpoint, the model, and summary of the server.
        token: of the run.
        host: address to listen on.
        port: 0 takes any that is free.
        options: how workers are treated; `lost_after_s` must be finite.
        log: called with a line for each event.

    Raises:
        ThinwireError: what stopped the server.
    """
    data = config.data.load()
    model = build_model(config, data)
    server = AsyncServer(
        model,
        config.method,
        workers=config.workers,
        total_steps=config.steps * config.workers,
        options=options,
        facts=launch.common_fields(config, data),
    )
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        file = out / "server.pt"
        http = AsyncHttpServer(server, token, host=host, port=port, checkpoint=file, log=log)
        try:
            log(f"ready on port {http.port}")
            http.wait()
            http.wait_until_told(options.lost_after_s)
        finally:
            http.close()
        summary = {
            "method": config.method.name,
            "val_loss": validation_loss(model, data.validation),
            "tokens": server.steps_done * config.tokens_per_step // config.workers,
            "outer_digest": server.digest(),
            **asdict(server.stats),
        }
        save_pretrained(model, out / "model")
        data.tokenizer.save(out / "model")
        write_json(out / "server.json", summary)
    return summary


def work(
    config: TrainConfig,
    number: int,
    token: Token,
    address: str,
    *,
    give_up_s: float,
    log: Callable[[str], None],
) -> None:
    """Train as worker `number` until the server at `address` says that the run is finished.

    Args:
        config: as the server has it.
        number: from 0.
        token: of the run.
        address: HOST:PORT.
        give_up_s: seconds without an answer after which the error is raised.
        log: called with a line for each assignment.

    Raises:
        ThinwireError: what stopped the worker.
    """
    torch.set_num_threads(max(1, config.machine.threads))
    trainee = AsyncTrainee(config, config.data.load(), number)

    def train(assignment: Assignment) -> None:
        loss = trainee.train(assignment)
        log(f"exchange {assignment.round}: {assignment.steps} steps, loss {loss:.4f}")

    AsyncClient(trainee.worker, token, address, give_up_s=give_up_s).work(train)
