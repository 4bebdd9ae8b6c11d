"""Inner optimizers: what every worker does between two exchanges, described apart from its state.

A description is a value: it can be compared, printed, and sent to every worker. `build` makes the
torch optimizer for one model from it. A subclass needs only that method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import nn

from thinwire import optim
from thinwire.optim.checks import check_hyperparameters
from thinwire.optim.newton_schulz import NewtonSchulz


class InnerOptimizer(ABC):
    """Describes the optimizer of a worker's H inner steps between two exchanges.

    >>> class Adagrad(InnerOptimizer):
    ...     def build(self, model):
    ...         return torch.optim.Adagrad(model.parameters(), lr=0.01)
    >>> type(Adagrad().build(nn.Linear(2, 2))).__name__
    'Adagrad'
    """

    @abstractmethod
    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make a fresh optimizer for `model`'s parameters; it must be the same on all workers."""


class _Checked(InnerOptimizer):
    """An inner optimizer whose hyperparameters are checked at construction."""

    def __post_init__(self) -> None:
        check_hyperparameters(asdict(cast("Any", self)))


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW(_Checked):
    """Adam with decoupled weight decay of everything but vectors: DiLoCo's inner optimizer.

        m = beta1 m + (1 - beta1) G;   v = beta2 v + (1 - beta2) G^2
        W = (1 - lr weight_decay) W - lr m' / (sqrt(v') + eps)      with m', v' unbiased

    Args:
        lr: learning rate, per step.
        betas: decay of the two moments, each in [0, 1).
        eps: floor of the denominator.
        weight_decay: decay of matrices, embeddings and head; vectors (norms, biases) have none.

    Raises:
        ConfigurationError: a value is out of range.

    >>> model = nn.Linear(3, 2)
    >>> optimizer = AdamW(lr=1e-3).build(model)
    >>> [group["weight_decay"] for group in optimizer.param_groups]
    [0.1, 0.0]

    Source: DiLoCo, arXiv 2311.08105, for lr and decay; its scaling laws, arXiv 2503.09799, for the
    betas. Differs: neither says which parameters are decayed; leaving out vectors is our choice.
    """

    lr: float = 4e-4
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def build(self, model: nn.Module) -> torch.optim.AdamW:
        """Make a torch.optim.AdamW with two groups, the decayed and the not decayed."""
        groups = _decayed_groups(model, self.weight_decay)
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Muon(_Checked):
    """Orthogonalised momentum for hidden matrices, AdamW for the rest: MuLoCo's inner optimizer.

        M = momentum M + G;   X = NS(M)           or NS(G + momentum M) with `nesterov`
        W = (1 - lr weight_decay) W - lr scale X

    Args:
        lr: learning rate of the matrices, per step; 0.016 to 0.063 in the paper.
        adamw_lr: learning rate of embeddings, head and vectors; None means `lr`, as in the paper.
        momentum: in [0, 1).
        nesterov: whether to look ahead by one momentum step.
        weight_decay: decay of all but vectors; the paper scales 1e-4 to 1e-2 by 1 / (K steps).
        scale: "spectral", sqrt(fan_out / fan_in); "rms", 0.2 sqrt(max(fan_out, fan_in)); or
            "original", sqrt(max(1, fan_out / fan_in)).
        betas: AdamW's betas, each in [0, 1).
        eps: AdamW's eps.
        iteration: orthogonalises; `NewtonSchulz.turbo()` has a fifth fewer matrix products.

    Raises:
        ConfigurationError: a value is out of range, or the scale is unknown.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    >>> [group["rule"] for group in Muon(lr=0.02).build(model).param_groups]
    ['muon', 'adamw', 'adamw']

    Source: MuLoCo, arXiv 2505.23725; see `thinwire.optim.Muon` for the step.
    """

    lr: float = 0.02
    adamw_lr: float | None = None
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-3
    scale: str = "spectral"
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    # Workers of earlier versions have this default and do not describe it.
    iteration: NewtonSchulz = field(default=NewtonSchulz(), metadata={"describe_default": False})

    def build(self, model: nn.Module) -> optim.Muon:
        """Make a `thinwire.optim.Muon` over `muon_groups(model)`."""
        groups = optim.muon_groups(
            model,
            lr=self.lr,
            adamw_lr=self.adamw_lr,
            weight_decay=self.weight_decay,
            iteration=self.iteration,
        )
        return optim.Muon(
            groups,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            scale=self.scale,
            betas=self.betas,
            eps=self.eps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD(_Checked):
    """Gradient descent, for identities rather than for language models.

        m = momentum m + G;   W = W - lr m

    With H = 1, K workers and an outer SGD of learning rate 1, this is data-parallel training.

    Args:
        lr: learning rate, per step.
        momentum: heavy-ball momentum in [0, 1).

    Raises:
        ConfigurationError: a value is out of range.

    >>> SGD(lr=0.1).build(nn.Linear(2, 2)).param_groups[0]["lr"]
    0.1
    >>> SGD(lr=-0.1)
    Traceback (most recent call last):
    thinwire.errors.ConfigurationError: cannot set lr to -0.1; because it must lie in [0, inf); ...

    Source: B. T. Polyak, "Some methods of speeding up the convergence of iteration methods" (1964).
    """

    lr: float
    momentum: float = 0.0

    def build(self, model: nn.Module) -> torch.optim.SGD:
        """Make a torch.optim.SGD over all of the model's parameters."""
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)


@dataclass(frozen=True, kw_only=True, slots=True)
class SignSGD(_Checked):
    """Every weight moves by lr, whatever the size of its gradient: DeMo's optimizer.

        W = (1 - lr weight_decay) W - lr sign(G)

    Args:
        lr: learning rate, per step.
        weight_decay: decay of matrices, embeddings and head; vectors (norms, biases) have none.

    Raises:
        ConfigurationError: a value is out of range.

    >>> SignSGD(lr=1e-3).build(nn.Linear(2, 2)).param_groups[0]["lr"]
    0.001

    Source: DeMo (arXiv 2411.19870), its released code, for lr and decay. Differs: that code decays
    vectors, too; leaving them out is our choice.
    """

    lr: float = 4e-4
    weight_decay: float = 0.0

    def build(self, model: nn.Module) -> optim.SignSGD:
        """Make a `thinwire.optim.SignSGD` with two groups, the decayed and the not decayed."""
        return optim.SignSGD(_decayed_groups(model, self.weight_decay), lr=self.lr)


def _decayed_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Everything but vectors with `weight_decay`, then vectors without; no empty groups."""
    roles = optim.parameter_roles(model)
    vectors = [p for name, p in model.named_parameters() if roles[name] is optim.Role.VECTOR]
    others = [p for name, p in model.named_parameters() if roles[name] is not optim.Role.VECTOR]
    groups = ((others, weight_decay), (vectors, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]
