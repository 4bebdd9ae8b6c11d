"""A worker: a model, its optimizer, its part of the data, and its outer loop."""

import hashlib
import itertools
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.asynchronous import Assignment
from thinwire.errors import CheckpointError, CorpusError, NonFiniteError, check
from thinwire.following import is_nested_step
from thinwire.handshake import digest
from thinwire.live_weights import local_shard, whole_tensor
from thinwire.rejection import CLIPPED
from thinwire.train.config import Runtime, TrainConfig
from thinwire.train.data import LoadedData
from thinwire.train.models import save_pretrained
from thinwire.train.workers.ranks import Ranks, load_model, load_optimizer, plain

_SUMMED = (
    *("sent_bytes", "received_bytes", "peak_sent_bytes_per_step"),
    *("peak_outer_device_bytes", "peak_outer_host_bytes"),
    *("consensus_sent_bytes", "consensus_received_bytes"),
)
_VALIDATED_AT_ONCE = 16  # windows


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerIdentity:
    """The place of a worker in a run: which data it reads, and which random numbers it draws.

    Args:
        number: the worker's number, from 0; worker 0 writes the files that exist once.
        evaluators: number of workers that divide the validation windows among them.
        block: part of every global batch that it reads; None reads the data shares that a worker
            of an elastic run is assigned.
        first_stream: random stream of rank 0; rank r has the r-th after it.
    """

    number: int = 0
    evaluators: int = 1
    block: int | None = None
    first_stream: int = 0


class RandomStream:
    """A random stream per worker, although torch has one per process.

    Args:
        seed: the run's seed.
        worker: number of the stream; different streams are independent.
        device: its generator is used besides the CPU's.

    Attributes:
        states: states of the generators; saved and loaded with the worker.
    """

    def __init__(self, *, seed: int, worker: int, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        mixed = hashlib.sha256(f"thinwire {seed} {worker}".encode()).digest()
        with torch.random.fork_rng(devices=self._devices):
            torch.manual_seed(int.from_bytes(mixed[:7], "little"))
            self.states = self._current()

    @contextmanager
    def active(self) -> Generator[None]:
        """Draw from this worker's stream within a block."""
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(self.states["cpu"])
            for device in self._devices:
                torch.cuda.set_rng_state(self.states["cuda"], device)
            try:
                yield
            finally:
                self.states = self._current()

    def _current(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        for device in self._devices:
            states["cuda"] = torch.cuda.get_rng_state(device)
        return states


def autocast(machine: Runtime) -> torch.autocast:
    """The precision of forward passes."""
    device, is_bf16 = torch.device(machine.device), machine.precision == "bf16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_bf16)


def token_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """Cross-entropy of every next token, in nats: fp32 [batch * time].

    Args:
        model: a causal language model that takes `input_ids` and returns an object with `logits`.
        windows: int64 [batch, time + 1].
    """
    logits: Tensor = model(input_ids=windows[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def token_loss_sum(model: nn.Module, windows: Tensor, machine: Runtime, *, count: int) -> float:
    """The sum of `token_losses` over the first `count` of `windows`, in the precision of a run.

    Args:
        model: in training mode, and left in it.
        windows: int64 [n, time + 1]; the model also reads those that do not count.
        machine: device and precision.
        count: number of windows that count, up to n.
    """
    device, time = torch.device(machine.device), windows.shape[1] - 1
    total = torch.zeros((), dtype=torch.float64, device=device)
    model.eval()
    with autocast(machine):
        for start in range(0, len(windows), _VALIDATED_AT_ONCE):
            part = windows[start : start + _VALIDATED_AT_ONCE].to(device)
            total += token_losses(model, part)[: (count - start) * time].double().sum()
    model.train()
    return total.item()


def checked_loss(loss: float, step: int) -> float:
    """`loss`, or raise `NonFiniteError`.

    Args:
        loss: validation loss of the outer parameters.
        step: inner step of the run.
    """
    check(
        math.isfinite(loss),
        f"continue after step {step}",
        because=f"the validation loss of the outer parameters is {loss}",
        do="start again with a lower --inner-lr; earlier checkpoints are intact",
        kind=NonFiniteError,
    )
    return loss


class Worker:
    """One worker of a run, or one of its ranks.

    The ranks of a worker make the same calls in the same order. Each reads the worker's batch and
    takes its own rows, so that the worker sees the same data as a worker of one rank.

    Args:
        config: the run's configuration.
        data: the loaded corpus.
        connect: makes the outer loop, or the `AsyncWorker`, from model, optimizer and method.
        identity: which worker of the run it is.
        ranks: the ranks of this worker.

    Attributes:
        outer: the outer loop; in an asynchronous run an `AsyncWorker`, whose state is saved and
            loaded alike.
        step: inner step of the schedule, which sets the learning rate.
        steps_taken: inner steps that this worker itself has taken.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: LoadedData,
        connect: Callable[..., Any],
        identity: WorkerIdentity,
        ranks: Ranks,
    ) -> None:
        machine, device = config.machine, torch.device(config.machine.device)
        self.config, self.device, self.ranks = config, device, ranks
        self._identity, self.number = identity, identity.number
        self.rank = identity.number * ranks.size + ranks.index
        self._vocab_size = data.tokenizer.vocab_size
        self.model = self._build()
        ranks.place(self.model, device)
        self.optimizer = config.method.inner.build(self.model)
        parts = (self.model, self.optimizer, config.method)
        self.outer: Any = connect(*parts, outer_device=machine.outer_device)
        # After the outer loop's own hook, to clip what the optimizer is about to use.
        self.optimizer.register_step_pre_hook(lambda *_: self._clip())
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.steps_taken = 0
        self.reschedule(0)
        self.batches = self._batches(data)
        stream = identity.first_stream + self.rank
        self.stream = RandomStream(seed=config.seed, worker=stream, device=device)
        self._forward: Any = torch.compile(self.model) if machine.compile else self.model

    def _batches(self, data: LoadedData) -> Any:
        """Endless batches of this worker: int64, [global_batch / K, sequence_length + 1] each."""
        config, block = self.config, self._identity.block
        if block is not None:
            return data.training.batches(block, config.workers, config.global_batch, config.seed)
        every, rows = config.method.sync_every, config.global_batch // config.workers
        # These batches have no state: the outer loop has the position.
        batch = lambda: self.outer.share * every + self.outer.inner_step % every  # noqa: E731
        samples = data.training.samples
        return (samples(batch() * rows, rows, config.seed) for _ in itertools.count())

    def train(self, assignment: Assignment) -> float:
        """Take the inner steps of an asynchronous assignment; returns their mean loss.

        Raises:
            NonFiniteError: a loss is not finite.
        """
        losses: list[float] = []
        with self.stream.active():
            for j in range(assignment.steps):
                step = assignment.steps_done // self.config.workers + j
                self.reschedule(min(step, self.config.steps - 1))
                losses.append(self.inner_step())
        return sum(losses) / len(losses)

    def inner_step(self) -> float:
        """Read a batch, and take a step of the inner optimizer; returns the batch's mean loss.

        Raises:
            CorpusError: a token is outside the vocabulary. NonFiniteError: the loss is not finite.
        """
        self.steps_taken += 1
        windows = next(self.batches)
        if (largest := int(windows.max())) >= self._vocab_size:
            raise CorpusError(
                f"read a batch of corpus {self.config.data.corpus!r}",
                because=f"it holds token {largest} and the vocabulary has {self._vocab_size}",
                do="name the tokenizer that made the tokens, or ids:N for a vocabulary of N",
            )
        mine = windows.chunk(self.ranks.size)[self.ranks.index].to(self.device)
        with self.ranks.naming_failures():
            losses = [self._backward(part) for part in mine.chunk(self.config.accumulate)]
            loss = torch.stack(losses).sum().item()  # once a step: it waits for the device
        # The same on every rank: if one stopped alone, the others would wait for it.
        loss = self.ranks.total([loss])[0] / self.ranks.size
        if not math.isfinite(loss):
            bad = (n for n, p in self.model.named_parameters() if not _is_finite(p.grad))
            because = f"the loss is {loss} and the gradient of {next(bad, 'no parameter')} is not"
            raise self._not_finite("take the step", f"{because} finite")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def _backward(self, windows: Tensor) -> Tensor:
        with autocast(self.config.machine):
            loss = token_losses(self._forward, windows).mean() / self.config.accumulate
        loss.backward()
        return loss.detach().double()

    def validation_loss_sum(self, windows: Tensor) -> float:
        """Sum of the token losses of the outer parameters over this rank's part of the windows.

        Args:
            windows: int64 [n, time + 1]; each of the run's R ranks takes every R-th.
        """
        every = self._identity.evaluators * self.ranks.size
        mine = windows[self.rank :: every]
        # Ranks of a worker gather its weights together, so they need equally many forward passes.
        most = len(windows[self.number * self.ranks.size :: every])
        padded = torch.cat([mine, windows[: most - len(mine)]])
        with self.outer.evaluating(), self.ranks.naming_failures():
            return token_loss_sum(self.model, padded, self.config.machine, count=len(mine))

    # -- the worker as a whole: all of its ranks take part -----------------------------------------

    def totals(self) -> dict[str, int]:
        """Counts of the whole worker: the sums of what its ranks sent, received and held."""
        stats = self.outer.stats
        counts = {
            "left_out": sum(stats.left_out.values()),
            "clipped": sum(of.get(CLIPPED, 0) for of in stats.contributions.values()),
        }
        return self._over_ranks(counts | {name: getattr(stats, name) for name in _SUMMED})

    def memory(self) -> dict[str, int]:
        """Bytes of every state that the whole worker holds, as `OuterLoop.memory` names them."""
        return self._over_ranks(self.outer.memory())

    def outer_digest(self) -> str:
        """SHA-256 of the consensus of all workers, the same however many ranks hold it."""
        with self.outer.evaluating():
            return digest({n: p for n, p in self.model.named_parameters() if p.requires_grad})

    def save_pretrained(self, folder: Path) -> None:
        """Write the workers' consensus so that transformers loads it; the first rank writes."""
        first = self.ranks.index == 0
        with self.outer.evaluating():
            # A new model: FSDP changed the class and tensors of ours, which no file can hold.
            model = self._build() if first and self.ranks.size > 1 else self.model
            if self.ranks.size > 1:
                target = model.state_dict() if first else {}
                for name, tensor in self.model.state_dict().items():
                    whole = whole_tensor(tensor)
                    if name in target:
                        target[name].copy_(whole)
            if first:
                save_pretrained(model, folder)

    def _over_ranks(self, counts: Mapping[str, int]) -> dict[str, int]:
        totals = self.ranks.total([float(count) for count in counts.values()])
        return {name: int(total) for name, total in zip(counts, totals, strict=True)}

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank of the worker needs to resume, as plain tensors and numbers."""
        # An elastic worker reads the shares that it is assigned, and has no position.
        has_block = self._identity.block is not None
        return {
            "model": plain(self.model.state_dict()),
            "optimizer": plain(self.optimizer.state_dict()),
            "outer": self.outer.state_dict(),
            **({"batches": self.batches.state_dict()} if has_block else {}),
            "random": dict(self.stream.states),
            "steps_taken": self.steps_taken,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, sources: int | None = None) -> None:
        """Resume from `state`.

        Args:
            state: state of a rank of this run, or of a run with another number of workers.
            sources: ranks of that run; None if it had as many workers.

        Raises:
            MismatchError: the number of workers changed, and with it the shares of a stream.
            CheckpointError: `state` is from an elastic run, and this run is not elastic.
        """
        has_block = self._identity.block is not None
        check(
            "batches" in state or not has_block,
            "resume a fixed run from this checkpoint",
            because="it is of a worker of an elastic run, and has no position in the data",
            do="thinwire join its address, or pass another --out",
            kind=CheckpointError,
        )
        # If there are more workers than before, several resume from one state. The first of them
        # continues its random numbers and error feedback; the others draw numbers of their own, and
        # have sent nothing whose error they would owe.
        if sources is None or self.rank < sources:
            self.stream.states = {name: its.clone() for name, its in state["random"].items()}
            self.outer.load_state_dict(state["outer"])
        else:
            self.outer.load_state_dict(state["outer"], with_feedback=False)
        load_model(self.model, state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        # Fixed runs of version 0.2 saved a learning-rate scheduler instead.
        self.steps_taken = state.get("steps_taken", 0)
        if has_block:
            self.batches.load_state_dict(state["batches"])

    def reschedule(self, step: int) -> None:
        """Set the learning rate to that of inner step `step`, counted from 0."""
        self.step = step
        factor = self.config.schedule.factor(step, steps=self.config.steps)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def _build(self) -> Any:
        config, vocab_size = self.config, self._vocab_size
        return config.model.build(vocab_size, config.data.sequence_length, config.seed)

    def _clip(self) -> None:
        if not self.config.clip_norm or is_nested_step(self.optimizer):
            return
        with self.ranks.naming_failures():  # the norm covers the shards of all ranks
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)

    def check_finite(self) -> None:
        """Raise `NonFiniteError` naming the first live parameter that is not finite."""
        for name, parameter in self.model.named_parameters():
            if not _is_finite(parameter):
                raise self._not_finite("write a checkpoint", f"parameter {name} is not finite")

    def _not_finite(self, cannot: str, because: str) -> NonFiniteError:
        return NonFiniteError(
            f"{cannot}: worker {self.number}, inner step {self.step + 1}",
            because=because,
            do="start again with a lower --inner-lr or --clip-norm; checkpoints are intact",
        )


def _is_finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(torch.isfinite(local_shard(tensor)).all())


def worker_state(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """A worker's state in a checkpoint of any version; 0.2 had another form for elastic runs."""
    if "shared" not in checkpoint:
        return checkpoint["worker"]
    own = checkpoint["own"]
    return own | {"outer": {"shared": checkpoint["shared"], "feedback": own["feedback"]}}
