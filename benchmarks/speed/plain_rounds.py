"""Rounds of DiLoCo as usually written, as baselines for the outer loop.

They check nothing: neither that numbers are finite, nor that messages are whole or anchors equal.
The method's outer optimizer is Nesterov SGD, and all else DiLoCo's.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from speed.workers import Rounds
from thinwire import Method

BLOCK = 1 << 18
TORCH: Any = torch  # its _foreach operations are private only by name


class TorchForeach(Rounds):
    """torch._foreach over the tensors of the model, with nothing allocated in a round."""

    name = "torch._foreach"

    def __init__(self, build: Callable[[], nn.Module], method: Method, workers: int) -> None:
        super().__init__([build() for _ in range(workers)])
        self._lr, self._momentum = _settings(method, workers)
        self._live = [[p.detach() for p in model.parameters()] for model in self.models]
        self._anchors = [[p.clone() for p in live] for live in self._live]
        self._momenta, self._deltas = (
            [[torch.zeros_like(p) for p in live] for live in self._live] for _ in range(2)
        )
        self._means = [torch.zeros_like(p) for p in self._live[0]]

    def begin(self) -> None:
        """delta = anchor - local."""
        for anchor, live, delta in zip(self._anchors, self._live, self._deltas, strict=True):
            TORCH._foreach_copy_(delta, anchor)
            TORCH._foreach_sub_(delta, live)

    def finish(self) -> None:
        """m = mu m + mean; anchor = anchor - lr (mean + mu m)."""
        weight, mean = 1.0 / len(self.models), self._means
        for anchor, live, m in zip(self._anchors, self._live, self._momenta, strict=True):
            TORCH._foreach_copy_(mean, self._deltas[0])
            TORCH._foreach_mul_(mean, weight)
            for delta in self._deltas[1:]:
                TORCH._foreach_add_(mean, delta, alpha=weight)
            TORCH._foreach_mul_(m, self._momentum)
            TORCH._foreach_add_(m, mean)
            TORCH._foreach_add_(mean, m, alpha=self._momentum)
            TORCH._foreach_mul_(mean, -self._lr)
            TORCH._foreach_add_(anchor, mean)
            TORCH._foreach_copy_(live, anchor)


class TorchBlocks(Rounds):
    """Preallocated vectors; each block goes through all operations while it is in the cache."""

    name = "torch in blocks"

    def __init__(self, build: Callable[[], nn.Module], method: Method, workers: int) -> None:
        super().__init__([build() for _ in range(workers)])
        self._lr, self._momentum = _settings(method, workers)
        self._live = [[p.detach().view(-1) for p in model.parameters()] for model in self.models]
        self._anchors = [torch.cat(live) for live in self._live]
        self._momenta, self._deltas = (
            [torch.zeros_like(anchor) for anchor in self._anchors] for _ in range(2)
        )
        self._mean = torch.zeros(BLOCK)

    def begin(self) -> None:
        """delta = anchor - local."""
        for anchor, live, delta in zip(self._anchors, self._live, self._deltas, strict=True):
            for p, a, d in _pieces(live, anchor, delta):
                torch.sub(a, p, out=d)

    def finish(self) -> None:
        """m = mu m + mean; anchor = anchor - lr (mean + mu m)."""
        weight = 1.0 / len(self.models)
        for anchors, live, momenta in zip(self._anchors, self._live, self._momenta, strict=True):
            for p, a, m, *deltas in _pieces(live, anchors, momenta, *self._deltas):
                mean = torch.mul(deltas[0], weight, out=self._mean[: len(p)])
                for delta in deltas[1:]:
                    mean.add_(delta, alpha=weight)
                m.mul_(self._momentum).add_(mean)
                a.add_(mean.add_(m, alpha=self._momentum).mul_(-self._lr))
                p.copy_(a)


def _pieces(live: list[Tensor], *flats: Tensor) -> list[tuple[Tensor, ...]]:
    """Blocks of every tensor, with the same places of the vectors."""
    shares = zip(live, *(flat.split([len(p) for p in live]) for flat in flats), strict=True)
    return [
        block
        for share in shares
        for block in zip(*(part.split(BLOCK) for part in share), strict=True)
    ]


class TorchFT(Rounds):
    """torchft's fragment of DiLoCo that holds the whole model, K=1.

    Raises:
        ImportError: torchft is not installed.

    Source: torchft 0.2, `torchft.local_sgd`.
    """

    name = "torchft"

    def __init__(self, build: Callable[[], nn.Module], method: Method) -> None:
        super().__init__([build()])
        # Read on import; otherwise torchft logs every request.
        os.environ.setdefault("RUST_LOG", "error")
        torchft: Any = importlib.import_module("torchft.local_sgd")
        lr, momentum = _settings(method, 1)
        (model,) = self.models
        outer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=True)
        self._fragment = torchft._StreamingDiLoCoFragment(
            _Manager(), model, 0, 0, self.optimizers[0], outer, 1
        )
        self._fragment.save_parameters()

    def begin(self) -> None:
        """The pseudo-gradient, and the start of its all-reduce."""
        self._fragment.prepare_sync()

    def finish(self) -> None:
        """The outer step."""
        self._fragment.perform_sync()


class _Manager:
    """The part of a manager that torchft's fragment uses, for one worker without a network."""

    def allreduce(self, tensor: Tensor, **_: object) -> "_Manager":
        return self

    def wait(self) -> None:
        return

    def should_commit(self) -> bool:
        return True


def _settings(method: Method, workers: int) -> tuple[float, float]:
    outer: Any = method.outer
    outer = outer.at(workers)
    assert outer.nesterov
    return outer.lr, outer.momentum
