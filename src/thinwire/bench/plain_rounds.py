"""A round of DiLoCo as it is usually written: what the outer loop is timed against.

They check nothing: neither that numbers are finite, nor that messages are whole or anchors equal.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.bench.workers import Rounds
from thinwire.elastic.torchft import load
from thinwire.method import Method
from thinwire.outer import SGD

_BLOCK = 1 << 18
_TORCH: Any = torch  # whose _foreach operations are private by name alone


class TorchForeach(Rounds):
    """torch._foreach over the tensors of the model, with nothing allocated in a round.

    Args:
        build: makes the same model at each call.
        method: whose outer optimizer is Nesterov SGD; all else is DiLoCo's.
        workers: K, one after the other.
    """

    name = "torch._foreach"

    def __init__(self, build: Callable[[], nn.Module], method: Method, workers: int) -> None:
        super().__init__([build() for _ in range(workers)])
        self._lr, self._momentum = _settings(method, workers)
        self._live = [[p.detach() for p in model.parameters()] for model in self.models]
        self._anchors = [[p.clone() for p in live] for live in self._live]
        self._momenta = [[torch.zeros_like(p) for p in live] for live in self._live]
        self._deltas = [[torch.zeros_like(p) for p in live] for live in self._live]
        self._means = [torch.zeros_like(p) for p in self._live[0]]

    def begin(self) -> None:
        """delta = anchor - local."""
        for anchor, live, delta in zip(self._anchors, self._live, self._deltas, strict=True):
            _TORCH._foreach_copy_(delta, anchor)
            _TORCH._foreach_sub_(delta, live)

    def finish(self) -> None:
        """m = mu m + mean; anchor = anchor - lr (mean + mu m)."""
        weight = 1.0 / len(self.models)
        mean = self._means
        for anchor, live, m in zip(self._anchors, self._live, self._momenta, strict=True):
            _TORCH._foreach_copy_(mean, self._deltas[0])
            _TORCH._foreach_mul_(mean, weight)
            for delta in self._deltas[1:]:
                _TORCH._foreach_add_(mean, delta, alpha=weight)
            _TORCH._foreach_mul_(m, self._momentum)
            _TORCH._foreach_add_(m, mean)
            _TORCH._foreach_add_(mean, m, alpha=self._momentum)
            _TORCH._foreach_mul_(mean, -self._lr)
            _TORCH._foreach_add_(anchor, mean)
            _TORCH._foreach_copy_(live, anchor)


class TorchBlocks(Rounds):
    """Vectors that are kept, a block at a time through all operations while it is in the cache.

    Args:
        build: makes the same model at each call.
        method: whose outer optimizer is Nesterov SGD; all else is DiLoCo's.
        workers: K, one after the other.
    """

    name = "torch in blocks"

    def __init__(self, build: Callable[[], nn.Module], method: Method, workers: int) -> None:
        super().__init__([build() for _ in range(workers)])
        self._lr, self._momentum = _settings(method, workers)
        self._live = [[p.detach().view(-1) for p in model.parameters()] for model in self.models]
        self._anchors = [torch.cat(live) for live in self._live]
        self._momenta = [torch.zeros_like(anchor) for anchor in self._anchors]
        self._deltas = [torch.zeros_like(anchor) for anchor in self._anchors]
        self._mean = torch.zeros(_BLOCK)

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
    """TorchBlocks of every tensor, with the same places of the vectors."""
    shares = zip(live, *(flat.split([len(p) for p in live]) for flat in flats), strict=True)
    return [
        block
        for share in shares
        for block in zip(*(part.split(_BLOCK) for part in share), strict=True)
    ]


class TorchFT(Rounds):
    """torchft's fragment of DiLoCo that holds the whole model, K=1.

    Args:
        build: makes the same model at each call.
        method: whose outer optimizer is Nesterov SGD; all else is DiLoCo's.

    Raises:
        ConfigurationError: torchft is not installed.

    Source: torchft 0.2, `torchft.local_sgd`.
    """

    name = "torchft"

    def __init__(self, build: Callable[[], nn.Module], method: Method) -> None:
        super().__init__([build()])
        lr, momentum = _settings(method, 1)
        (model,) = self.models
        outer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=True)
        fragment: Any = load("local_sgd")._StreamingDiLoCoFragment
        self._fragment = fragment(_Manager(), model, 0, 0, self.optimizers[0], outer, 1)
        self._fragment.save_parameters()

    def begin(self) -> None:
        """The pseudo-gradient, and what would start its all-reduce."""
        self._fragment.prepare_sync()

    def finish(self) -> None:
        """The outer step."""
        self._fragment.perform_sync()


class _Manager:
    """What torchft's fragment asks of its manager, for one worker without a network."""

    def allreduce(self, tensor: Tensor, **_: object) -> "_Manager":
        del tensor
        return self

    def wait(self) -> None:
        return

    def should_commit(self) -> bool:
        return True


def _settings(method: Method, workers: int) -> tuple[float, float]:
    outer = method.outer.at(workers)  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(outer, SGD)
    assert outer.nesterov
    return outer.lr, outer.momentum
