"""Nesterov momentum on a worker's own displacement, where only the momentum is partly shared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from thinwire.blocks import StreamedVector, VectorPart
from thinwire.errors import check
from thinwire.outer.base import OuterOptimizer
from thinwire.outer.overlap import Delay, DelayState, Overlap
from thinwire.outer.state import FragmentContext, OuterState
from thinwire.outer.torch_optimizers import SGD


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

    Every worker applies its own Delta_k in full: none is averaged, and workers have anchors of
    their own, which only the shared part of the momentum holds together.

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

    elastic_refusal = "every worker has its own outer parameters and momentum"

    def check(self, *, sync_every: int, overlap: Overlap) -> None:
        """Refuse any overlap.

        Raises:
            ConfigurationError: an overlap.
        """
        del sync_every
        check(
            overlap == Delay(),
            f"apply a worker's own displacement with {overlap}",
            because="what it trains while the answer travels would be counted twice",
            do="leave overlap out, or take an outer optimizer such as tw.outer.SGD",
        )

    def bind(self, context: FragmentContext, overlap: Overlap) -> OuterState:
        """A state whose anchor is the local weights as they are now."""
        del overlap
        return _OwnDeltaState(Delay(), SGD(lr=self.lr), context)
