"""One worker: a model, its optimizer, its share of the data, and its outer loop."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.errors import CorpusError, NonFiniteError
from thinwire.outer_loop import OuterLoop
from thinwire.train.config import TrainConfig
from thinwire.train.data import LoadedData
from thinwire.train.random_stream import RandomStream
from thinwire.transport import Transport

__all__ = ["Worker", "token_losses"]


def token_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """Cross-entropy of every next token, in nats: fp32 [batch * time].

    Args:
        model: a causal language model that takes `input_ids` and returns an object with `logits`.
        windows: int64 [batch, time + 1].
    """
    logits: Tensor = model(input_ids=windows[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten(), reduction="none")


@final
class Worker:
    """Worker `transport.rank` of a run.

    Args:
        config: the run.
        data: the loaded corpus.
        transport: the connection to the other workers.
        device: where the model lives.
    """

    def __init__(
        self, config: TrainConfig, data: LoadedData, transport: Transport, device: torch.device
    ) -> None:
        self.config, self.rank, self.device = config, transport.rank, device
        self._vocab_size = data.vocab_size
        self.model = config.model.build(
            vocab_size=data.vocab_size,
            sequence_length=config.data.sequence_length,
            seed=config.seed,
        )
        nn.Module.to(self.model, device)
        self.optimizer = config.method.inner.build(self.model)
        self.outer = OuterLoop(self.model, self.optimizer, config.method, transport=transport)
        # After the outer loop's own hook: what is clipped is what the optimizer is about to use.
        self.optimizer.register_step_pre_hook(lambda *_: self._clip())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda t: config.schedule.factor(t, steps=config.steps)
        )
        self.batches = data.batches(
            worker=self.rank,
            workers=config.workers,
            global_batch=config.global_batch,
            seed=config.seed,
        )
        self.stream = RandomStream(seed=config.seed, worker=self.rank, device=device)
        self._forward = _compiled(self.model) if config.machine.compile == "yes" else self.model

    def inner_step(self) -> float:
        """Read a batch, take one step of the inner optimizer; returns the batch's mean loss.

        Raises:
            NonFiniteError: the loss is not finite.
        """
        windows = self._checked(next(self.batches)).to(self.device)
        loss = 0.0
        for part in windows.chunk(self.config.accumulate):
            with self._autocast():
                part_loss = token_losses(self._forward, part).mean() / self.config.accumulate
            part_loss.backward()
            loss += part_loss.item()
        self._check_finite_loss(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    @torch.no_grad()
    def validation_loss_sum(self, windows: Tensor, *, batch: int = 16) -> float:
        """Sum of the token losses of the outer parameters over `windows` int64 [n, time + 1]."""
        total = 0.0
        self.model.eval()
        with self.outer.evaluating(), self._autocast():
            for part in windows.split(batch):
                total += token_losses(self.model, part.to(self.device)).double().sum().item()
        self.model.train()
        return total

    def state_dict(self) -> dict[str, Any]:
        """Everything this worker needs to continue bit for bit."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "outer": self.outer.state_dict(),
            "batches": self.batches.state_dict(),
            "random": self.stream.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.outer.load_state_dict(state["outer"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.batches.load_state_dict(state["batches"])
        self.stream.load_state_dict(state["random"])

    def _clip(self) -> None:
        if self.config.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.machine.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def check_finite(self) -> None:
        """Raise `NonFiniteError` naming the first live parameter that is not finite."""
        for name, parameter in self.model.named_parameters():
            if not _is_finite(parameter):
                raise self._not_finite("write a checkpoint", f"parameter {name} is not finite")

    def _checked(self, windows: Tensor) -> Tensor:
        largest = int(windows.max())
        if largest >= self._vocab_size:
            raise CorpusError(
                f"read a batch of corpus {self.config.data.corpus!r}",
                because=f"it holds token {largest} and the vocabulary has {self._vocab_size}",
                do="name the tokenizer that made the tokens, or ids:N for a vocabulary of N",
            )
        return windows

    def _check_finite_loss(self, loss: float) -> None:
        if math.isfinite(loss):
            return
        bad = (n for n, p in self.model.named_parameters() if not _is_finite(p.grad))
        because = (
            f"the loss is {loss} and the gradient of {next(bad, 'no parameter')} is not finite"
        )
        raise self._not_finite("take the step", because)

    def _not_finite(self, cannot: str, because: str) -> NonFiniteError:
        return NonFiniteError(
            f"{cannot}: worker {self.rank}, inner step {self.scheduler.last_epoch + 1}",
            because=because,
            do="start anew with a lower --inner-lr or --clip-norm; checkpoints written before are "
            "intact",
        )


def _is_finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(torch.isfinite(tensor).all())


def _compiled(model: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(model)  # pyright: ignore[reportAssignmentType]
    return compiled
