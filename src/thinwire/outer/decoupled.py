"""Nesterov momentum on a worker's own displacement, where only the momentum is partly shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from thinwire.blocks import ComputedVector, LazyVector, StreamedVector, VectorPart
from thinwire.errors import ConfigurationError
from thinwire.outer.base import OuterOptimizer
from thinwire.outer.overlap import Delay, Overlap
from thinwire.outer.state import FragmentContext, OuterState
from thinwire.outer.torch_optimizers import SGD


class _OwnDeltaState(OuterState):
    """Steps with this worker's own Delta, and with the momentum that feedback returned."""

    def __init__(self, inner: OuterState) -> None:
        self._inner = inner

    def prefetch(self, *, for_step: bool) -> None:
        self._inner.prefetch(for_step=for_step)

    def measure(self) -> AbstractContextManager[LazyVector]:
        return self._inner.measure()

    def on_sent(self, delta: LazyVector) -> None:
        self._inner.on_sent(delta)

    def apply(self, mean: StreamedVector) -> None:
        # Nothing was trained since Delta_k was sent, so the local weights still say what it is.
        blocks = partial(self._with_own, mean)
        self._inner.apply(ComputedVector(mean.numel, mean.device, blocks))

    def _with_own(self, mean: StreamedVector) -> Iterator[tuple[VectorPart, Tensor]]:
        with self._inner.measure() as delta:
            for part, values in mean.blocks():
                yield part, values.add_(delta.read(part))

    def reset_live(self, local_delta: Tensor | None) -> None:
        self._inner.reset_live(local_delta)

    def flat_anchor(self) -> Tensor:
        return self._inner.flat_anchor()

    def digest(self) -> bytes:
        return self._inner.digest()

    def state_dict(self) -> dict[str, Tensor]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._inner.load_state_dict(state)


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

    def check(self, *, sync_every: int, overlap: Overlap) -> None:
        """Refuse any overlap.

        Raises:
            ConfigurationError: an overlap.
        """
        del sync_every
        if overlap != Delay():
            raise ConfigurationError(
                f"apply a worker's own displacement with {overlap}",
                because="what it trains while the answer travels would be counted twice",
                do="leave overlap out, or take an outer optimizer such as tw.outer.SGD",
            )

    def check_elastic(self) -> None:
        """Refuse.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "let workers come and go with anchors of their own",
            because="a newcomer takes over the outer parameters and the momentum of all, and here "
            "they differ from worker to worker",
            do="take a method whose workers share an anchor, such as sparseloco with a DCT",
        )

    def bind(self, context: FragmentContext, overlap: Overlap) -> OuterState:
        """A state whose anchor is the local weights as they are now."""
        return _OwnDeltaState(SGD(lr=self.lr).bind(context, overlap))
