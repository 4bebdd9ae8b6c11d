"""The outer state of a fragment, and how long a mean may be in flight before it is merged.

`Delay` and `Eager` join the outer parameters with the local weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.blocks import DenseVector, LazyVector, StreamedVector, VectorPart, block_numel, spans
from thinwire.checksums import anchor_digest, column_sums, digest_of
from thinwire.errors import CheckpointError, ConfigurationError, check, check_range, check_whole
from thinwire.live_weights import LiveVector, LiveWeights, OpenWeights
from thinwire.storage import HostCopy, StatePlacement, StoredTensor

if TYPE_CHECKING:
    from thinwire.outer.optimizers import ElementwiseOptimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentContext:
    """The worker and the fragment that an outer state is made for.

    Args:
        live: the worker's weights.
        names: names of the fragment's parameters.
        workers: K.
        storage: where the state is kept.
        alone: whether this is the only worker, now and later.
    """

    live: LiveWeights
    names: tuple[str, ...]
    workers: int
    storage: StatePlacement
    alone: bool = False


class OuterState(ABC):
    """The outer parameters of one fragment: makes its pseudo-gradients and applies their means."""

    @abstractmethod
    def measure(self) -> AbstractContextManager[LazyVector]:
        """The pseudo-gradient, [numel]: computed as it is read, until the block ends."""

    def pseudo_gradient(self) -> Tensor:
        """The pseudo-gradient of `measure` as a new fp32 [numel]."""
        with self.measure() as delta:
            return delta.whole()

    def on_sent(self, delta: LazyVector) -> None:
        """Note that `delta`, from `measure`, is finite and is sent now; does nothing by default."""

    def contribution(self, delta: LazyVector) -> LazyVector:
        """The vector to send for `delta`, which comes from `measure`: by default `delta` itself.

        A state of an optimizer that `averages_weights` returns the weights.
        """
        return delta

    @abstractmethod
    def apply(self, mean: StreamedVector) -> None:
        """Move the outer parameters by the `mean` [numel] of contributions, then merge.

        Means come in the order in which their pseudo-gradients were taken.
        """

    def reset_live(self, local_delta: Tensor | None) -> None:
        """Reset the local weights to `anchor - local_delta` [numel]; to the anchor if None.

        Used only where rounds can be cancelled.
        """
        raise NotImplementedError

    @abstractmethod
    def flat_anchor(self) -> Tensor:
        """The outer parameters as one fp32 vector [numel], which must not be changed."""

    def digest(self) -> bytes:
        """Eight bytes that tell the outer parameters of two workers apart."""
        return anchor_digest(self.flat_anchor())

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Everything `load_state_dict` needs, as plain tensors; the same keys at any time."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`, bit for bit."""

    def memory(self) -> dict[str, int]:
        """Bytes held now: those of the `anchor`, and of everything else as `outer state`."""
        held = {name: tensor.nbytes for name, tensor in self.state_dict().items()}
        anchor = held.pop("anchor", 0)
        return {"anchor": anchor, "outer state": sum(held.values())}

    def prefetch(self, *, for_step: bool) -> None:
        """Begin to copy to the device what `apply` needs; if not `for_step`, what `measure` needs.

        Does nothing by default.
        """


class DelayState(OuterState):
    """Delta = anchor - local; anchor = OuterOpt(anchor, mean); local = mix(local, anchor).

    The anchor is stored between rounds, and moved part by part. Live weights of 16 bits start a
    round from the rounded anchor, and Delta is how far they moved from there: rounding is not
    movement. Weights of 64 bits are rounded to fp32 once a round.

    A rule steps a *position*: the anchor minus an origin. By default the origin is the anchor
    itself, so the position starts at zero and becomes the update. A lone worker without a delay
    takes its own weights as the origin, which no other worker needs to know: with outer learning
    rate 1, (anchor - local) - 1 * (anchor - local) is exactly zero, while the anchor minus the
    rounded difference would be its weights with a rounding error.

    Args:
        overlap: when a mean is applied, and how it is mixed in.
        rule: moves the anchor.
        context: the worker and its fragment; the anchor starts from its local weights.
        averages_weights: means are of weights, and the gradient is the anchor minus the mean.

    Attributes:
        rule: may be replaced between rounds by a rule with the same buffers.
    """

    def __init__(
        self,
        overlap: Delay,
        rule: ElementwiseOptimizer,
        context: FragmentContext,
        *,
        averages_weights: bool = False,
    ) -> None:
        self.averages_weights, self.rule = averages_weights, rule
        self._live, self._mixing = LiveVector(context.live, context.names), overlap.mixing
        self._alone = context.alone and overlap.tau == 0
        self._is_measured = False
        start, storage = context.live.read(context.names), context.storage
        # Made at once, so that the state of a fresh loop has every key for
        # torch.distributed.checkpoint to fill.
        buffers = rule.buffers(start)
        # AdamW counts its steps in a scalar tensor on the host, which stays there.
        self._scalars = {key: value for key, value in buffers.items() if value.ndim == 0}
        self._buffers = {k: storage.keep(v) for k, v in buffers.items() if v.ndim > 0}
        self._vector = storage.keep(start)
        # Column sums of the anchor, and its version when they were taken.
        self._sums: tuple[HostCopy, int] | None = None

    @contextmanager
    def measure(self) -> Generator[LazyVector]:
        """Anchor minus local weights."""
        self._is_measured = True
        with self.reading() as anchor:
            yield _movement(self._live.open(), anchor, is_rounded=not self._alone)

    def contribution(self, delta: LazyVector) -> LazyVector:
        """`delta`, or the local weights."""
        return _unrounded(self._live.open(), self.flat_anchor()) if self.averages_weights else delta

    @torch.no_grad()
    def apply(self, mean: StreamedVector) -> None:
        """Step the anchor, and mix it into the local weights."""
        weights = self._live.open()
        origin = weights if self._alone and self._is_measured else None
        self._is_measured = False
        try:
            self.step(mean, partial(weights.mix, alpha=self._mixing), origin)
        finally:
            weights.close()

    @torch.no_grad()
    def reset_live(self, local_delta: Tensor | None) -> None:
        """Reset the local weights to `anchor - local_delta`."""
        self._is_measured = False
        weights = self._live.open()
        with self.reading() as anchor:
            for part in spans(0, weights.numel, block_numel(weights.device)):
                at = part.read(anchor)
                # From the rounded anchor, so that the next pseudo-gradient is `local_delta` again.
                if local_delta is not None:
                    moved = part.read(local_delta).to(at.device)
                    at = weights.as_written(part, at) - moved
                weights.mix(part, at, 0.0)
        weights.close()

    def prefetch(self, *, for_step: bool) -> None:
        """Begin to copy the anchor to the device, and for a step the buffers as well."""
        for kept in (self._vector, *(self._buffers.values() if for_step else ())):
            kept.prefetch()

    @contextmanager
    def reading(self) -> Generator[Tensor]:
        """The anchor on the device, which must not be changed."""
        try:
            yield self._vector.fetch()
        finally:
            self._vector.release()

    def flat_anchor(self) -> Tensor:
        """The anchor where it is stored, which must not be changed."""
        return self._vector.stored()

    def step(
        self,
        mean: StreamedVector,
        then: Callable[[VectorPart, Tensor], None] | None = None,
        origin: LazyVector | None = None,
    ) -> None:
        """Take an outer step.

        Args:
            mean: mean of pseudo-gradients or of weights, [numel].
            then: called with every part of the new anchor, which it must not change.
            origin: subtracted from the anchor for the step; the anchor itself by default.
        """
        for kept in (self._vector, *self._buffers.values()):
            kept.unshared()  # a snapshot may be on its way
        vector = self._vector.fetch()
        buffers = {key: kept.fetch() for key, kept in self._buffers.items()}
        failure: BaseException | None = None
        self._sums = None
        try:
            for part, values in mean.blocks():
                self._step_part(part, values, vector, buffers, origin)
                # All parts take this step, even if writing the local weights is interrupted.
                if then is not None and failure is None:
                    try:
                        then(part, part.read(vector))
                    except BaseException as error:
                        failure = error
        finally:
            for key, kept in self._buffers.items():
                kept.store(buffers[key])
            self._vector.store(vector)
            self._scalars = {key: steps + 1 for key, steps in self._scalars.items()}
        if failure is not None:
            raise failure
        if not vector.is_cpu:
            # Copied while the worker trains on, so that no later round waits for it.
            self._sums = HostCopy(column_sums(vector)), self.flat_anchor()._version

    def _step_part(
        self,
        part: VectorPart,
        mean: Tensor,
        vector: Tensor,
        buffers: Mapping[str, Tensor],
        origin: LazyVector | None,
    ) -> None:
        anchor = part.read(vector)
        gradient = torch.sub(anchor, mean, out=mean) if self.averages_weights else mean
        parts = {key: part.read(buffer) for key, buffer in buffers.items()}
        state = {**parts, **self._scalars}
        if origin is None:
            anchor.add_(self.rule.step(None, gradient, state))
        else:
            start = origin.read(part)
            position = self.rule.step(anchor.sub_(start), gradient, state)
            torch.add(position, start, out=anchor)
        part.write(vector, anchor)
        for key, buffer in buffers.items():
            part.write(buffer, parts[key])

    def digest(self) -> bytes:
        """`anchor_digest` of the anchor; a step on a GPU has already taken the sums."""
        vector = self.flat_anchor()
        # torch counts changes in place, including those made through a view.
        if self._sums is None or self._sums[1] != vector._version:
            self._sums = HostCopy(column_sums(vector)), vector._version
        return digest_of(self._sums[0].read())

    def state_dict(self) -> dict[str, Tensor]:
        """`anchor` and the optimizer's buffers, where they are stored."""
        buffers = {key: kept.stored() for key, kept in self._buffers.items()} | self._scalars
        return {"anchor": self.flat_anchor()} | {f"optimizer.{k}": v for k, v in buffers.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`.

        Raises:
            CheckpointError: `state` has other keys or shapes.
        """
        mine, theirs = (
            {k: list(v.shape) for k, v in s.items()} for s in (DelayState.state_dict(self), state)
        )
        if theirs != mine:
            raise CheckpointError(
                "load the state of an outer optimizer",
                because=f"it has {theirs} and needs {mine}",
                do="pass what state_dict() of a loop with the same method returned",
            )
        self._sums, self._is_measured = None, False
        self._vector.load(state["anchor"])
        for key, kept in self._buffers.items():
            kept.load(state[f"optimizer.{key}"])
        self._scalars = {
            key: state[f"optimizer.{key}"].to("cpu", copy=True) for key in self._scalars
        }


class Overlap(ABC):
    """Description of how training goes on between sending a pseudo-gradient and merging its mean.

    In all methods `sync_every` is H.
    """

    @abstractmethod
    def check(self, *, sync_every: int) -> None:
        """Raise `ConfigurationError` if rounds of that length are too short for the overlap."""

    @abstractmethod
    def steps(self, *, sync_every: int) -> int:
        """tau: inner steps from sending a pseudo-gradient to applying the mean."""

    at_once: int
    """Exchanges of one fragment that may be in flight together."""

    def check_cancellable(self) -> None:
        """Raise `ConfigurationError` if a round in flight cannot be cancelled.

        Rounds are cancelled where workers come and go, or where their number changes on resuming.
        By default they can be.
        """

    @abstractmethod
    def join(self, rule: ElementwiseOptimizer, context: FragmentContext) -> OuterState:
        """Join the local weights of `context` with outer parameters that `rule` moves.

        Args:
            rule: moves the outer parameters.
            context: the worker and its fragment.
        """


def _movement(weights: OpenWeights, anchor: Tensor, *, is_rounded: bool) -> LazyVector:
    """anchor - local, with the anchor as rounded for the local weights if `is_rounded`."""

    def compute(part: VectorPart, out: Tensor | None) -> Tensor:
        at = part.read(anchor)
        at = weights.as_written(part, at) if is_rounded else at
        local = weights.read(part, out)
        return torch.sub(at, local, out=local)

    return LazyVector(weights.numel, weights.device, compute)


def _unrounded(weights: OpenWeights, anchor: Tensor) -> LazyVector:
    """The local weights plus what rounding took from the anchor: rounding is not movement."""

    def compute(part: VectorPart, out: Tensor | None) -> Tensor:
        values = weights.read(part, out)
        there = part.read(anchor).to(values.device)
        written = weights.as_written(part, there)
        return values if written is there else values.add_(there - written)

    return LazyVector(weights.numel, weights.device, compute)


@dataclass(frozen=True, kw_only=True, slots=True)
class Delay(Overlap):
    """Apply the mean of what was sent after step t after step t + tau.

        theta   = OuterOpt(theta, mean_k Delta_k)
        theta_k = alpha theta_k + (1 - alpha) theta

    The next Delta is measured from theta, not from the mixed weights. DiLoCo is tau 0 and alpha 0:
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

    at_once = 1  # the anchor must have moved before the next Delta is taken from it

    def __post_init__(self) -> None:
        # A checkpoint holds whole steps, so that half a step would change on resuming.
        check_whole("tau, the inner steps of an exchange,", self.tau, least=0)
        check_range("mixing", self.mixing, most=1)

    def check(self, *, sync_every: int) -> None:
        """The answer must arrive before its fragment is sent again."""
        check(
            self.tau < max(1, sync_every),
            f"apply a mean tau={self.tau} steps late with sync_every={sync_every}",
            because="the fragment would be sent again before that, and with it the same inner "
            "steps a second time",
            do=f"pass a tau below {sync_every}, a longer H, or tw.Eager() for a whole round",
        )

    def steps(self, *, sync_every: int) -> int:
        """tau, whatever the interval."""
        return self.tau

    def join(self, rule: ElementwiseOptimizer, context: FragmentContext) -> OuterState:
        """An outer state with one vector, the anchor."""
        return DelayState(self, rule, context)


class _EagerState(DelayState):
    """Theta, which all workers share, and a second vector theta_k, which runs a round ahead."""

    def __init__(self, rule: ElementwiseOptimizer, context: FragmentContext) -> None:
        super().__init__(Delay(), rule, context)
        self._context, self._own = context, DelayState(Delay(), rule, context)
        # Pseudo-gradients of rounds in flight, the oldest first.
        self._sent: deque[StoredTensor] = deque()

    def prefetch(self, *, for_step: bool) -> None:
        if for_step:
            super().prefetch(for_step=True)
        else:
            self._own.prefetch(for_step=False)

    @contextmanager
    def measure(self) -> Generator[LazyVector]:
        with self._own.reading() as own:
            moved = _movement(self._live.open(), own, is_rounded=True).whole()
        # Whole, because `on_sent` moves the local weights before the pseudo-gradient is encoded.
        yield DenseVector(moved)

    @torch.no_grad()
    def on_sent(self, delta: LazyVector) -> None:
        self._sent.append(self._context.storage.keep(delta.whole().clone()))
        if len(self._sent) == 1:
            # No earlier round is in flight: take this worker's part of the step at once.
            self._move_own(lambda: self._shares(delta))

    def _shares(self, delta: LazyVector) -> Iterator[tuple[VectorPart, Tensor]]:
        for part in spans(0, delta.numel, block_numel(delta.device)):
            yield part, delta.read(part).div_(self._context.workers)

    @torch.no_grad()
    def apply(self, mean: StreamedVector) -> None:
        self.step(mean)
        answered = self._sent.popleft()
        latest = self._sent[-1] if self._sent else None
        self._move_own(lambda: self._corrected(mean, answered, latest))

    def _corrected(
        self, mean: StreamedVector, answered: StoredTensor, latest: StoredTensor | None
    ) -> Iterator[tuple[VectorPart, Tensor]]:
        """The mean, minus this worker's part of it, plus its part of the latest round."""
        share = 1 / self._context.workers
        for part, values in mean.blocks():
            # Read where they are stored: whole, they would take memory on the device.
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

    def state_dict(self) -> dict[str, Tensor]:
        own = {f"own.{key}": value for key, value in self._own.state_dict().items()}
        blanks = (torch.zeros_like(self.flat_anchor()) for _ in range(2))
        sent = [*(kept.stored() for kept in self._sent), *blanks][:2]
        places = {f"sent.{place}": delta for place, delta in enumerate(sent)}
        count = {"sent.count": torch.tensor(len(self._sent), device="cpu")}
        return super().state_dict() | own | count | places

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = {k.removeprefix("own."): v for k, v in state.items() if k.startswith("own.")}
        shared = {k: v for k, v in state.items() if not k.startswith(("own.", "sent."))}
        self._own.load_state_dict(own)  # first: it refuses the state of another overlap
        super().load_state_dict(shared)
        sent = [state[f"sent.{place}"] for place in range(int(state["sent.count"]))]
        self._sent = deque(self._context.storage.keep(delta.clone()) for delta in sent)

    def memory(self) -> dict[str, int]:
        held = super().memory()
        blanks = 2 - len(self._sent)
        held["outer state"] -= blanks * self.flat_anchor().nbytes
        return held


@dataclass(frozen=True, kw_only=True, slots=True)
class Eager(Overlap):
    """One whole round of overlap: the last round of all, and the worker's own part of this one.

        theta   = OuterOpt(theta, mean_j Delta_j^(t-H))
        theta_k = OuterOpt_k(theta_k, mean_j Delta_j^(t-H) + (Delta_k^t - Delta_k^(t-H)) / K)

    Every worker trains on from its own theta_k, from which its next Delta is measured. All workers
    share theta, which is evaluated and checked for drift. Takes twice the outer state.

    Source: Eager updates (arXiv 2502.12996). Differs: the paper keeps no theta apart; ours is the
    outer optimizer on the means as they come, and theta_k the paper's.

    >>> Eager().steps(sync_every=30)
    30
    """

    at_once = 2  # a round is sent just before the mean of the last one is applied

    def check(self, *, sync_every: int) -> None:
        """Any length of rounds will do: the mean is applied one round later."""

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

    def join(self, rule: ElementwiseOptimizer, context: FragmentContext) -> OuterState:
        """An outer state with two vectors, the shared one and the worker's own."""
        return _EagerState(rule, context)
