"""Outer optimizers: what workers average, and how the mean moves the outer parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from thinwire.blocks import StreamedVector, VectorPart
from thinwire.errors import ConfigurationError, check, check_range, check_whole
from thinwire.outer.overlap import Delay, DelayState, FragmentContext, OuterState, Overlap

LARGEST_RATE = torch.finfo(torch.float32).max
"""The largest learning rate: steps are taken in fp32."""


class OuterOptimizer(ABC):
    """Description of an outer optimizer: what workers average, and how the mean is applied."""

    def check(self, *, sync_every: int, overlap: Overlap) -> None:
        """Raise `ConfigurationError` if this optimizer does not work with rounds like these."""

    def check_rounds(self) -> None:
        """Raise `ConfigurationError` if this optimizer does not suit rounds that all workers share.

        By default it does.
        """

    def at(self, workers: int) -> OuterOptimizer:
        """The optimizer for `workers` workers: by default this one, whatever their number."""
        return self

    elastic_refusal: str | None = None
    """Why workers that come and go cannot use this optimizer even though all share one anchor."""

    has_own_anchors: bool = False
    """True if each worker has outer parameters of its own; digests and checkpoints then differ."""

    averages_weights: bool = False
    """True if workers send their weights; by default they send pseudo-gradients."""

    takes_momentum: bool = False
    """True if `OuterState.apply` takes the momentum that `Feedback.gives_momentum` provides."""

    @abstractmethod
    def bind(self, context: FragmentContext, overlap: Overlap) -> OuterState:
        """A fresh state for one fragment; `overlap` says when and how its means are merged."""


class ElementwiseOptimizer(OuterOptimizer):
    """An optimizer that moves each number of the anchor independently; subclasses say how.

    `step` gets a fragment part by part, never all of it.

    >>> SGD(lr=0.5).step(torch.tensor([1.0]), torch.tensor([2.0]), {})
    tensor([0.])
    """

    @abstractmethod
    def buffers(self, like: Tensor) -> dict[str, Tensor]:
        """The state before the first step, for a vector like `like`; `step` counts the steps."""

    @abstractmethod
    def step(
        self, position: Tensor | None, gradient: Tensor, state: Mapping[str, Tensor]
    ) -> Tensor:
        """Move a part of the vector, [numel], and the same part of the buffers in place.

        Args:
            position: fp32 [numel], which may be overwritten; None stands for zeros.
            gradient: fp32 [numel], which may be overwritten.
            state: parts of the buffers, and the number of earlier steps, which is not changed.

        Returns:
            The new position.
        """

    def bind(self, context: FragmentContext, overlap: Overlap) -> OuterState:
        """A state whose anchor is the local weights as they are now."""
        return overlap.join(self, context)


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD(ElementwiseOptimizer):
    """m = mu m + Delta; theta = theta - eta (Delta + mu m) with Nesterov, else theta - eta m.

    Args:
        lr: eta, applied here and nowhere else.
        momentum: mu in [0, 1); 0 keeps no buffer.
        nesterov: look ahead by mu m, as DiLoCo does.

    Raises:
        ConfigurationError: a negative rate, a momentum outside [0, 1), Nesterov without momentum.

    Source: DiLoCo (arXiv 2311.08105), Algorithm 1; `torch.optim.SGD`.

    >>> SGD(lr=0.7, momentum=0.9, nesterov=True)
    SGD(lr=0.7, momentum=0.9, nesterov=True)
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_range("the outer lr", self.lr, most=LARGEST_RATE)
        check_range("the outer momentum", self.momentum, below=1)
        check(
            not self.nesterov or self.momentum > 0,
            "use outer SGD with nesterov=True and momentum=0",
            because="there is no momentum to look ahead with",
            do="pass nesterov=False or momentum > 0",
        )

    def step(
        self, position: Tensor | None, gradient: Tensor, state: Mapping[str, Tensor]
    ) -> Tensor:
        """As `torch.optim.SGD` steps, with the same bits."""
        if self.momentum:
            momentum = state["momentum_buffer"].mul_(self.momentum).add_(gradient)
            if self.nesterov:
                gradient.add_(momentum, alpha=self.momentum)
            else:
                gradient.copy_(momentum)
        # 0 + (-lr) g is the product, rounded once either way.
        return (
            gradient.mul_(-self.lr) if position is None else position.add_(gradient, alpha=-self.lr)
        )

    def buffers(self, like: Tensor) -> dict[str, Tensor]:
        """A momentum buffer of zeros; no buffer without momentum."""
        return {"momentum_buffer": torch.zeros_like(like)} if self.momentum else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW(ElementwiseOptimizer):
    """Adam on the mean pseudo-gradient; no weight decay, which belongs to the inner optimizer.

    Args:
        lr: eta.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.

    Raises:
        ConfigurationError: a negative rate, or betas outside [0, 1).

    Source: the outer-optimizer ablation of DiLoCo (arXiv 2311.08105); `torch.optim.AdamW`.

    >>> AdamW(lr=0.1).betas
    (0.9, 0.95)
    """

    lr: float = 0.3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 0.1

    def __post_init__(self) -> None:
        check_range("the outer lr", self.lr, most=LARGEST_RATE)
        for beta in self.betas:
            check_range("an outer beta", beta, below=1)

    def step(
        self, position: Tensor | None, gradient: Tensor, state: Mapping[str, Tensor]
    ) -> Tensor:
        """Step by `torch.optim.AdamW`."""
        position = torch.zeros_like(gradient) if position is None else position
        parameter = nn.Parameter(position, requires_grad=False)
        parameter.grad = gradient
        optimizer = torch.optim.AdamW(
            [parameter], lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=0.0
        )
        # The step is counted once for all parts of the anchor.
        optimizer.state[parameter] = {**state, "step": state["step"].clone()}
        optimizer.step()
        return position

    def buffers(self, like: Tensor) -> dict[str, Tensor]:
        """A step count of 0 and two moments of zeros."""
        moments = {name: torch.zeros_like(like) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu"), **moments}


@dataclass(frozen=True, kw_only=True, slots=True)
class ByWorkerCount(OuterOptimizer):
    """Chooses the row with the largest K that is not above the number of workers.

    Args:
        table: (K, optimizer) rows with K ascending from 1, of elementwise optimizers.

    Raises:
        ConfigurationError: the rows do not ascend from 1, or are not elementwise and of one kind.

    >>> from thinwire.outer import SGD
    >>> table = ByWorkerCount(table=((1, SGD(lr=0.7)), (8, SGD(lr=0.9))))
    >>> table.at(4).lr, table.at(16).lr
    (0.7, 0.9)
    """

    table: tuple[tuple[int, ElementwiseOptimizer], ...]

    def __post_init__(self) -> None:
        counts = [workers for workers, _ in self.table]
        check(
            counts[:1] == [1] and counts == sorted(set(counts)),
            f"use outer settings for {counts} workers",
            because="each number of workers must have exactly one row",
            do="start the table at 1 worker and list the numbers in ascending order",
        )
        optimizers: list[object] = [optimizer for _, optimizer in self.table]
        check(
            all(isinstance(each, ElementwiseOptimizer) for each in optimizers)
            and len(set(map(type, optimizers))) == 1,
            f"choose among {optimizers} by the number of workers",
            because="state goes on from row to row, so they must be of one kind, and one that "
            "moves each number of a shared anchor by itself",
            do="take tw.outer.SGD in all rows, or another elementwise optimizer",
        )

    def at(self, workers: int) -> ElementwiseOptimizer:
        """The optimizer for `workers` workers."""
        return [optimizer for least, optimizer in self.table if least <= workers][-1]

    def check(self, *, sync_every: int, overlap: Overlap) -> None:
        """Check every row of the table."""
        for _, optimizer in self.table:
            optimizer.check(sync_every=sync_every, overlap=overlap)

    def check_rounds(self) -> None:
        """Every row must be one for rounds."""
        for _, optimizer in self.table:
            optimizer.check_rounds()

    def rule(self, workers: int) -> ElementwiseOptimizer:
        """As `at`, with the buffers of all rows, so that K may change later."""
        buffers = {
            tuple(optimizer.buffers(torch.empty(0, device="cpu"))) for _, optimizer in self.table
        }
        row = self.at(workers)
        return row if len(buffers) == 1 else _RowOfTable(table=self, row=row)

    def bind(self, context: FragmentContext, overlap: Overlap) -> OuterState:
        """An outer state of the row for the workers of `context`."""
        return self.rule(context.workers).bind(context, overlap)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowOfTable(ElementwiseOptimizer):
    table: ByWorkerCount
    row: ElementwiseOptimizer

    def buffers(self, like: Tensor) -> dict[str, Tensor]:
        # All rows are of one kind, so the one with the most buffers has all of them.
        rows = (optimizer for _, optimizer in self.table.table)
        return max(rows, key=lambda row: len(row.buffers(like[:0]))).buffers(like)

    def step(
        self, position: Tensor | None, gradient: Tensor, state: Mapping[str, Tensor]
    ) -> Tensor:
        # A row without a momentum resets it.
        for key in state.keys() - self.row.buffers(gradient[:0]).keys():
            state[key].zero_()
        return self.row.step(position, gradient, state)


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayedNesterov(ElementwiseOptimizer):
    """Nesterov momentum for pseudo-gradients that arrive one by one; it moves every N arrivals.

        S = S + g
        every N-th arrival:  m = beta m + S/N;  theta = theta - eps ((1 - c N + c) beta m + g/N)
                             S = 0
        every other:         theta = theta - eps (c beta m + g/N)

    With c = 0, N arrivals at one theta equal one step of `SGD(lr=eps, momentum=beta,
    nesterov=True)` on their mean. An arrival counts 1/N, so N should match the number of workers
    that take turns: N = K is natural.

    Args:
        lr: eps, for a whole mean; an arrival moves theta by eps/N.
        momentum: beta in [0, 1); with 0 an arrival is a step of SGD with eps/N.
        every: N, the arrivals per step of the momentum.
        c: share of the momentum that each arrival takes in advance, in [0, 1/N].

    Raises:
        ConfigurationError: a negative rate, a momentum outside [0, 1), N below 1, or c outside
            [0, 1/N].

    Source: Asynchronous Local-SGD (arXiv 2401.09135), delayed Nesterov. Differs:
    with c > 0 its footnote calls N arrivals at one theta equal to a Nesterov step, which they are
    not: the N - 1 steps between take the old m.

    >>> DelayedNesterov(lr=0.7, momentum=0.9, every=4).c
    0.0
    """

    lr: float = 0.7
    momentum: float = 0.9
    every: int = 4
    c: float = 0.0

    def __post_init__(self) -> None:
        SGD(lr=self.lr, momentum=self.momentum)  # refuses what is out of range
        check_whole("every, the arrivals per step of the momentum,", self.every)
        # N arrivals take at most the whole momentum.
        check_range(f"c with every={self.every}", self.c, most=1 / self.every)

    def check(self, *, sync_every: int, overlap: Overlap) -> None:
        """Refuse an overlap that steps one of a fragment's vectors more often than the other."""
        if overlap.at_once > 1:
            raise ConfigurationError(
                f"use delayed Nesterov with {type(overlap).__name__}",
                because="it steps a worker's own vector more often than the shared one, so every "
                "N-th arrival would be another one in each",
                do="leave overlap out",
            )

    def check_rounds(self) -> None:
        """Refuse rounds that all workers take together, except where N is 1.

        Raises:
            ConfigurationError: N > 1.
        """
        if self.every > 1:
            raise ConfigurationError(
                f"take outer steps in rounds with delayed Nesterov over {self.every} arrivals",
                because="a round has one mean of all workers, which would count as one arrival "
                f"and move by 1/{self.every} of the learning rate",
                do="train with thinwire.asynchronous; for rounds, pass outer.SGD(nesterov=True)",
            )

    def step(
        self, position: Tensor | None, gradient: Tensor, state: Mapping[str, Tensor]
    ) -> Tensor:
        """Step by one arrival."""
        m, s = state["momentum_buffer"], state["arrived_sum"].add_(gradient)
        weight = self.c
        if (int(state["step"]) + 1) % self.every == 0:
            m.mul_(self.momentum).add_(s, alpha=1 / self.every)
            s.zero_()
            weight = 1 - self.c * self.every + self.c
        direction = gradient / self.every
        if weight:
            direction.add_(m, alpha=weight * self.momentum)
        position = torch.zeros_like(gradient) if position is None else position
        return position.sub_(direction, alpha=self.lr)

    def buffers(self, like: Tensor) -> dict[str, Tensor]:
        """m and S of zeros, and a count of 0 arrivals."""
        vectors = {name: torch.zeros_like(like) for name in ("momentum_buffer", "arrived_sum")}
        return {"step": torch.tensor(0, device="cpu"), **vectors}


class _OwnDeltaState(DelayState):
    """Steps with this worker's own Delta, and with the momentum that feedback returned."""

    def apply(self, mean: StreamedVector) -> None:
        # Nothing was trained since Delta_k was sent, so the local weights still determine it.
        super().apply(StreamedVector(mean.numel, mean.device, partial(self._with_own, mean)))

    def _with_own(self, mean: StreamedVector) -> Iterator[tuple[VectorPart, Tensor]]:
        with self.measure() as delta:
            for part, values in mean.blocks():
                yield part, values.add_(delta.read(part))


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoupledNesterov(OuterOptimizer):
    """theta_k = theta_k - eta (Delta_k + beta m_k), with the momentum of `DecoupledMomentum`.

    Every worker applies its own Delta_k in full, and none is averaged. Each has an anchor of its
    own; only the shared part of the momentum holds the anchors together.

    Args:
        lr: eta.

    Raises:
        ConfigurationError: a rate that is negative or not finite.

    Source: the released code of arXiv 2510.03371.

    >>> DecoupledNesterov(lr=0.7).has_own_anchors
    True
    """

    lr: float = 0.7

    def __post_init__(self) -> None:
        SGD(lr=self.lr)  # refuses what is out of range

    has_own_anchors = True

    takes_momentum = True

    def check(self, *, sync_every: int, overlap: Overlap) -> None:
        """Refuse any overlap.

        Raises:
            ConfigurationError: an overlap.
        """
        check(
            overlap == Delay(),
            f"apply a worker's own displacement with {overlap}",
            because="what it trains while the answer travels would be counted twice",
            do="leave overlap out, or take an outer optimizer such as tw.outer.SGD",
        )

    def bind(self, context: FragmentContext, overlap: Overlap) -> OuterState:
        """A state whose anchor is the local weights as they are now."""
        return _OwnDeltaState(Delay(), SGD(lr=self.lr), context)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gossip(OuterOptimizer):
    """m_k = mu m_k + eta (phi_k - mean_g theta); phi_k = phi_k - m_k; theta_k = phi_k.

    phi_k is the anchor of worker k, and g is the group whose weights theta it averages: itself and
    its peer under `Pairs`, all workers under `Gather`, where this is outer SGD with heavy-ball
    momentum. The weights themselves travel: from a pseudo-gradient alone, no worker could pull its
    anchor towards that of a peer.

    Between rounds of training the anchors draw together if 0 < eta < 2 (1 - mu^2): for pairs among
    many workers, the second moments of d_k = phi_k - mean phi and m_k, where
    E[(phi_k - mean_g phi)^2] = E[d^2] / 2, then have a spectral radius below 1.

    Args:
        lr: eta, both the step along the mean pseudo-gradient and the pull towards the peer.
        momentum: mu in [0, 1); 0 keeps no buffer.

    Raises:
        ConfigurationError: a momentum outside [0, 1), or a rate at which the anchors drift apart.

    Source: NoLoCo (arXiv 2506.10911), eq. 1 and 2, with gamma = eta as in its released code.

    Differs: the paper's eq. 1 has the pseudo-gradient of the other sign, with which eq. 2 climbs.
    Its range, mu < gamma < sqrt(2 + mu^2), has our upper end at mu = 0.5; above mu = 0.5 it lets
    anchors drift apart, and its lower end is not needed.

    >>> Gossip()
    Gossip(lr=0.7, momentum=0.5)
    """

    lr: float = 0.7
    momentum: float = 0.5

    def __post_init__(self) -> None:
        limit = 2 * (1 - self.momentum**2)
        check(
            0 <= self.momentum < 1 and 0 < self.lr < limit,
            f"use Gossip with lr={self.lr} and momentum={self.momentum}",
            because="the anchors of workers that meet in pairs draw together if 0 < lr < "
            "2 (1 - momentum^2), with a momentum from 0 to 1; else they drift apart",
            do="pass the published lr=0.7 and momentum=0.5, or a lower momentum",
        )

    has_own_anchors = True

    averages_weights = True

    def check(self, *, sync_every: int, overlap: Overlap) -> None:
        """Refuse an overlap that needs an anchor that all workers share."""
        check(
            isinstance(overlap, Delay),
            f"use Gossip with {overlap}",
            because="it works out of the mean what the worker itself had sent, as a "
            "pseudo-gradient from an anchor that all workers share",
            do="take tw.Delay(tau=...), or leave overlap out",
        )

    def bind(self, context: FragmentContext, overlap: Overlap) -> OuterState:
        """A state whose anchor is the local weights as they are now."""
        assert isinstance(overlap, Delay)  # `check` refuses others
        heavy_ball = SGD(lr=self.lr, momentum=self.momentum)
        return DelayState(overlap, heavy_ball, context, averages_weights=True)
