"""Overlap: how long an answer may travel while the worker trains on, and how it is merged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from thinwire.blocks import (
    ChangedVector,
    DenseVector,
    LazyVector,
    StreamedVector,
    VectorPart,
    block_numel,
    spans,
)
from thinwire.errors import ConfigurationError, check, check_range, check_whole
from thinwire.live_vector import LiveVector, OpenWeights
from thinwire.outer.flat_anchor import FlatAnchor, StepRule
from thinwire.outer.state import FragmentContext, OuterState
from thinwire.storage import StoredTensor


class Overlap(ABC):
    """Description of what happens between sending a pseudo-gradient and training on.

    Args of its methods: `sync_every` is H.
    """

    @abstractmethod
    def check(self, *, sync_every: int) -> None:
        """Raise `ConfigurationError` if rounds of that length cannot hold the overlap."""

    @abstractmethod
    def steps(self, *, sync_every: int) -> int:
        """tau: inner steps from sending a pseudo-gradient to applying the mean."""

    @property
    @abstractmethod
    def at_once(self) -> int:
        """Exchanges of one fragment that may be in flight together."""

    def check_cancellable(self) -> None:
        """Raise `ConfigurationError` if a round in flight cannot be cancelled.

        Rounds are cancelled where workers come and go, or resume with another number of them. By
        default they can be.
        """
        return

    @abstractmethod
    def join(
        self, rule: StepRule, context: FragmentContext, *, averages_weights: bool = False
    ) -> OuterState:
        """Join the local weights of `context` with outer parameters that `rule` moves.

        Args:
            rule: of the outer optimizer.
            context: the worker and its fragment.
            averages_weights: as in `OuterOptimizer`.
        """


class DelayState(OuterState):
    """Delta = anchor - local; anchor = OuterOpt(anchor, mean); local = mix(local, anchor).

    Live weights of 16 bits start a round from the rounded anchor, and Delta is what they moved from
    there: rounding is not movement. Weights of 64 bits are rounded to fp32 once a round.

    A lone worker without a delay shares its origin with no other and takes its own weights for it:
    with outer learning rate 1 the position then returns to exactly zero, and nothing of the weights
    is rounded away.
    """

    def __init__(
        self,
        overlap: Delay,
        rule: StepRule,
        context: FragmentContext,
        *,
        averages_weights: bool = False,
    ) -> None:
        self._live, self._mixing = LiveVector(context.live, context.names), overlap.mixing
        self._alone = context.alone and overlap.tau == 0
        self._is_measured = False
        self._vector = FlatAnchor(rule, context, averages_weights=averages_weights)

    def prefetch(self, *, for_step: bool) -> None:
        """Begin to copy the anchor, or anchor and buffers, to the device."""
        if for_step:
            self._vector.prefetch_stepping()
        else:
            self._vector.prefetch_reading()

    @contextmanager
    def measure(self) -> Generator[LazyVector]:
        """Anchor minus local weights."""
        self._is_measured = True
        with self._vector.reading() as anchor:
            yield _Movement(self._live.open(), anchor, is_rounded=not self._alone)

    def on_sent(self, delta: LazyVector) -> None:
        """Do nothing: the local weights stay as they are until the mean is applied."""

    def contribution(self, delta: LazyVector) -> LazyVector:
        """`delta`, or the local weights."""
        if not self._vector.averages_weights:
            return delta
        return _unrounded(self._live.open(), self._vector.stored())

    @torch.no_grad()
    def apply(self, mean: StreamedVector) -> None:
        """Step the anchor, and mix it into the local weights."""
        weights = self._live.open()
        origin = weights if self._alone and self._is_measured else None
        self._is_measured = False
        try:
            self._vector.step(mean, partial(weights.mix, alpha=self._mixing), origin)
        finally:
            weights.close()

    @torch.no_grad()
    def reset_live(self, local_delta: Tensor | None) -> None:
        """Reset the local weights to `anchor - local_delta`."""
        self._is_measured = False
        weights = self._live.open()
        with self._vector.reading() as anchor:
            for part in spans(0, weights.numel, block_numel(weights.device)):
                at = part.read(anchor)
                # From the rounded anchor, so that the next pseudo-gradient is `local_delta` again.
                if local_delta is not None:
                    moved = part.read(local_delta).to(at.device)
                    at = weights.as_written(part, at) - moved
                weights.mix(part, at, 0.0)
        weights.close()

    def flat_anchor(self) -> Tensor:
        """The anchor where it is stored."""
        return self._vector.stored()

    def digest(self) -> bytes:
        """The digest of the anchor."""
        return self._vector.digest()

    def state_dict(self) -> dict[str, Tensor]:
        """The anchor and the buffers of the rule."""
        return self._vector.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`."""
        self._is_measured = False
        self._vector.load_state_dict(state)


class _Movement(LazyVector):
    """anchor - local, from the anchor as the local weights had it."""

    def __init__(self, weights: OpenWeights, anchor: Tensor, *, is_rounded: bool) -> None:
        super().__init__(weights.numel, weights.device)
        self._weights, self._anchor, self._is_rounded = weights, anchor, is_rounded

    def read(self, part: VectorPart, out: Tensor | None = None) -> Tensor:
        anchor = part.read(self._anchor)
        if self._is_rounded:
            anchor = self._weights.as_written(part, anchor)
        return self._weights.subtract_from(part, anchor, out)

    def is_finite(self) -> bool:
        # The anchor is: nothing else is let into it.
        return self._weights.is_finite()


def _unrounded(weights: OpenWeights, anchor: Tensor) -> LazyVector:
    """The local weights, with what rounding to 16 bits took from them: that is no movement."""

    def change(part: VectorPart, values: Tensor) -> Tensor:
        there = part.read(anchor).to(values.device)
        written = weights.as_written(part, there)
        return values if written is there else values.add_(there - written)

    return ChangedVector(weights, change)


@dataclass(frozen=True, kw_only=True, slots=True)
class Delay(Overlap):
    """The mean of what was sent after step t is applied after step t + tau.

        theta   = OuterOpt(theta, mean_k Delta_k)
        theta_k = alpha theta_k + (1 - alpha) theta

    The next Delta is taken from theta as it is, not as it was mixed. tau 0 and alpha 0 are DiLoCo:
    the worker waits, and trains on from theta.

    Args:
        tau: inner steps that the exchange may take; training goes on meanwhile.
        mixing: alpha in [0, 1], the share of a worker's own weights that it keeps.

    Raises:
        ConfigurationError: a tau that is not a whole number or is below 0, an alpha outside [0, 1].

    Source: Streaming DiLoCo (arXiv 2501.18512), Algorithm 2.

    >>> Delay(tau=2, mixing=0.5).steps(sync_every=30)
    2
    """

    tau: int = 0
    mixing: float = 0.0

    def __post_init__(self) -> None:
        # A checkpoint holds whole steps: half a step would be another one after resuming.
        check_whole("tau, the inner steps of an exchange,", self.tau, least=0)
        check_range("mixing", self.mixing, most=1)

    def check(self, *, sync_every: int) -> None:
        """An answer must be there before its fragment is sent again."""
        check(
            self.tau < max(1, sync_every),
            f"apply a mean tau={self.tau} steps late with sync_every={sync_every}",
            because="the fragment would be sent again before that, and with it the same inner "
            "steps a second time",
            do=f"pass a tau below {sync_every}, a longer H, or tw.Eager() for a whole round",
        )

    def steps(self, *, sync_every: int) -> int:
        """tau, whatever the interval."""
        del sync_every
        return self.tau

    @property
    def at_once(self) -> int:
        """One: the anchor must have moved before the next Delta is taken from it."""
        return 1

    def join(
        self, rule: StepRule, context: FragmentContext, *, averages_weights: bool = False
    ) -> OuterState:
        """An outer state with one vector, the anchor."""
        return DelayState(self, rule, context, averages_weights=averages_weights)


class _EagerState(OuterState):
    """Two vectors: theta, which all workers share, and theta_k, which runs a round ahead of it."""

    def __init__(self, rule: StepRule, context: FragmentContext) -> None:
        self._context, self._live = context, LiveVector(context.live, context.names)
        self._shared, self._own = FlatAnchor(rule, context), FlatAnchor(rule, context)
        # Pseudo-gradients of rounds under way, the oldest first.
        self._sent: deque[StoredTensor] = deque()

    def prefetch(self, *, for_step: bool) -> None:
        if for_step:
            self._shared.prefetch_stepping()
        else:
            self._own.prefetch_reading()

    @contextmanager
    def measure(self) -> Generator[LazyVector]:
        with self._own.reading() as own:
            moved = _Movement(self._live.open(), own, is_rounded=True).whole()
        # Whole, because `on_sent` moves the local weights before it is encoded.
        yield DenseVector(moved)

    @torch.no_grad()
    def on_sent(self, delta: LazyVector) -> None:
        self._sent.append(self._context.storage.keep(delta.whole().clone()))
        if len(self._sent) == 1:
            # No earlier round is on its way: take the own part of the step at once.
            self._move_own(lambda: self._shares(delta))

    def _shares(self, delta: LazyVector) -> Iterator[tuple[VectorPart, Tensor]]:
        for part in spans(0, delta.numel, block_numel(delta.device)):
            yield part, delta.read(part).div_(self._context.workers)

    @torch.no_grad()
    def apply(self, mean: StreamedVector) -> None:
        self._shared.step(mean, _ignore)
        answered = self._sent.popleft()
        latest = self._sent[-1] if self._sent else None
        self._move_own(lambda: self._corrected(mean, answered, latest))
        answered.discard()

    def _corrected(
        self, mean: StreamedVector, answered: StoredTensor, latest: StoredTensor | None
    ) -> Iterator[tuple[VectorPart, Tensor]]:
        """The mean, less this worker's part of it, plus its part of the latest round."""
        share = 1 / self._context.workers
        for part, values in mean.blocks():
            # From where they rest: whole, they would take room on the device.
            values.sub_(part.read(answered.stored()).to(values.device), alpha=share)
            if latest is not None:
                values.add_(part.read(latest.stored()).to(values.device), alpha=share)
            yield part, values

    def _move_own(self, blocks: Callable[[], Iterator[tuple[VectorPart, Tensor]]]) -> None:
        weights = self._live.open()
        delta = StreamedVector(weights.numel, weights.device, blocks)
        try:
            self._own.step(delta, partial(weights.mix, alpha=0.0))
        finally:
            weights.close()

    def flat_anchor(self) -> Tensor:
        return self._shared.stored()

    def digest(self) -> bytes:
        return self._shared.digest()

    def state_dict(self) -> dict[str, Tensor]:
        own = {f"own.{key}": value for key, value in self._own.state_dict().items()}
        blanks = (torch.zeros_like(self._shared.stored()) for _ in range(2))
        sent = [*(kept.stored() for kept in self._sent), *blanks][:2]
        places = {f"sent.{place}": delta for place, delta in enumerate(sent)}
        count = {"sent.count": torch.tensor(len(self._sent))}
        return self._shared.state_dict() | own | count | places

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = {k.removeprefix("own."): v for k, v in state.items() if k.startswith("own.")}
        shared = {k: v for k, v in state.items() if not k.startswith(("own.", "sent."))}
        self._own.load_state_dict(own)  # first: it refuses the state of another overlap
        self._shared.load_state_dict(shared)
        for kept in self._sent:
            kept.discard()
        sent = [state[f"sent.{place}"] for place in range(int(state["sent.count"]))]
        self._sent = deque(self._context.storage.keep(delta.clone()) for delta in sent)

    def memory(self) -> dict[str, int]:
        held = super().memory()
        blanks = 2 - len(self._sent)
        held["outer state"] -= blanks * self._shared.stored().nbytes
        return held


def _ignore(part: VectorPart, values: Tensor) -> None:
    del part, values


@dataclass(frozen=True, kw_only=True, slots=True)
class Eager(Overlap):
    """One whole round of overlap: others' last round, and of this one what the worker did itself.

        theta   = OuterOpt(theta, mean_j Delta_j^(t-H))
        theta_k = OuterOpt_k(theta_k, mean_j Delta_j^(t-H) + (Delta_k^t - Delta_k^(t-H)) / K)

    Every worker trains on from its own theta_k, from which its next Delta is taken; theta is what
    all workers share, what is evaluated and what is checked for drift. Twice the outer state.

    Source: Eager updates (arXiv 2502.12996). Differs: the paper keeps no theta apart; ours is the
    outer optimizer on the means as they come, and theta_k the paper's.

    >>> Eager().steps(sync_every=30)
    30
    """

    def check(self, *, sync_every: int) -> None:
        """A round of any length holds it: the mean is applied one round later."""
        del sync_every

    def check_cancellable(self) -> None:
        """Refuse: each worker has moved on by its own part of the rounds in flight.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "use Eager() where workers come and go, or resume it with another number of workers",
            because="every worker runs a round ahead on parameters of its own, and a round that is "
            "cancelled cannot be taken out of them",
            do="use tw.Delay(tau=...) with tau below sync_every, or the same workers to the end",
        )

    def steps(self, *, sync_every: int) -> int:
        """H: one whole round."""
        return sync_every

    @property
    def at_once(self) -> int:
        """Two: a round is sent just before the mean of the last one is applied."""
        return 2

    def join(
        self, rule: StepRule, context: FragmentContext, *, averages_weights: bool = False
    ) -> OuterState:
        """An outer state with two vectors, the shared one and the worker's own."""
        assert not averages_weights  # Gossip refuses it
        return _EagerState(rule, context)
