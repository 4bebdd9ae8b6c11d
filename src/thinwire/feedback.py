"""Error feedback: encoding errors of earlier pseudo-gradients are sent again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from thinwire.blocks import LazyVector, StreamedVector, VectorPart
from thinwire.checksums import refuse_vector
from thinwire.codecs import BoundCodec
from thinwire.errors import CheckpointError, check_range
from thinwire.storage import StatePlacement, choose_storage


class FeedbackState:
    """The feedback of one vector on one worker; by default encoding errors are dropped."""

    def encode_to(
        self, out: Tensor, delta: LazyVector, codec: BoundCodec, round: int = 0
    ) -> Tensor:
        """Encode `delta` plus what earlier rounds did not send into `out`.

        Args:
            out: uint8 [codec.nbytes].
            delta: [numel]; read part by part, each part once.
            codec: codec for [numel].
            round: number of the exchange.

        Returns:
            A sum [] that is finite if all encoded numbers are; drop `out` if it is not.

        Raises:
            NonFiniteError: `delta` or its sum with the residual is not finite. Raised only on a
                CPU, where the check needs no synchronisation.
        """
        totals = [torch.zeros((), dtype=torch.float32, device=out.device)]
        for piece in codec.pieces:
            payload = out[piece.where]
            numbers = piece.codec.as_numbers(payload)
            values = delta.read(piece.part, numbers)
            totals.append(_proof(values))
            if numbers is None:
                piece.codec.encode_to(payload, values, round)
        total = torch.stack(totals).sum()
        if out.is_cpu and not bool(total.isfinite()) and delta.is_finite():
            return totals[0]  # finite numbers, whose sum is not
        return total

    def absorb(self, mean: StreamedVector) -> StreamedVector:
        """Return the vector that the outer optimizer applies, given the `mean` of a round.

        By default this is the mean itself. Call it once per round, in order, and read the vector
        once.
        """
        return mean

    def prefetch(self) -> None:
        """Start copying the residual to the device; by default there is none."""

    def state_dict(self) -> dict[str, Tensor]:
        """The residual as plain tensors; by default there is none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state_dict` returned; by default nothing."""


class Feedback(ABC):
    """Description of a feedback rule."""

    gives_momentum: bool = False
    """True if `FeedbackState.absorb` returns a momentum, not the mean; by default False."""

    @abstractmethod
    def bind(self, numel: int, storage: StatePlacement) -> FeedbackState:
        """A fresh state for a vector of `numel` elements, kept in `storage`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoFeedback(Feedback):
    """payload = encode(Delta): the encoding error of a round is dropped.

    >>> from thinwire.storage import StatePlacement
    >>> NoFeedback().bind(3, StatePlacement(torch.device("cpu"))).state_dict()
    {}
    """

    def bind(self, numel: int, storage: StatePlacement) -> FeedbackState:
        """A state without a residual."""
        return FeedbackState()


class _Residual(FeedbackState):
    def __init__(
        self, decay: float, numel: int, storage: StatePlacement, *, returns_mean: bool
    ) -> None:
        self._decay, self._returns_mean = decay, returns_mean
        self._memory = storage.zeros(numel)

    def encode_to(
        self, out: Tensor, delta: LazyVector, codec: BoundCodec, round: int = 0
    ) -> Tensor:
        if out.is_cpu and not delta.is_finite():
            refuse_vector()
        residual = self._memory.fetch()
        totals = [torch.zeros((), dtype=torch.float32, device=out.device)]
        for piece in codec.pieces:
            part = piece.part.read(residual)
            piece.codec.encode_feedback_to(
                out[piece.where], part, delta.read(piece.part), decay=self._decay, round=round
            )
            piece.part.write(residual, part)
            totals.append(_proof(part))  # the residual is finite if the encoded numbers are
        self._memory.store(residual)
        total = torch.stack(totals).sum()
        if out.is_cpu and not bool(total.isfinite()):
            if not bool(torch.isfinite(residual).all()):
                refuse_vector("its sum with the feedback leaves the range of fp32")
            total = totals[0]  # finite numbers, whose sum is not
        return total

    def absorb(self, mean: StreamedVector) -> StreamedVector:
        if not self._returns_mean:
            return mean
        return StreamedVector(mean.numel, mean.device, partial(self._absorbed, mean))

    def _absorbed(self, mean: StreamedVector) -> Iterator[tuple[VectorPart, Tensor]]:
        momentum = self._memory.fetch()
        for place, values in mean.blocks():
            part = place.read(momentum)
            part.add_(values)
            place.write(momentum, part)
            yield place, torch.mul(part, self._decay, out=values)
        self._memory.store(momentum)

    def prefetch(self) -> None:
        self._memory.prefetch()

    def state_dict(self) -> dict[str, Tensor]:
        return {"residual": self._memory.stored()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        shape = self._memory.stored().shape
        if list(state) != ["residual"] or state["residual"].shape != shape:
            raise CheckpointError(
                "load the state of error feedback",
                because=f"it has {sorted(state)}, not a residual of {shape[0]} elements",
                do="pass what state_dict() of a loop with the same method returned",
            )
        self._memory.load(state["residual"])


def _proof(values: Tensor) -> Tensor:
    """A number that is finite only if all of `values` are.

    On a CPU a sum is fastest. It may overflow, and then the caller checks the numbers; on a GPU
    that would need a synchronisation.
    """
    return values.sum() if values.is_cpu or not len(values) else values.abs().amax()


@dataclass(frozen=True, kw_only=True, slots=True)
class _WithResidual(Feedback):
    decay: float = 0.9
    device: str | None = field(default=None, metadata={"describe": False})

    def __post_init__(self) -> None:
        check_range("decay of what was not sent", self.decay, most=1)

    def bind(self, numel: int, storage: StatePlacement) -> FeedbackState:
        """A residual of zeros."""
        if self.device is not None:
            storage = choose_storage(self.device, storage.device, storage.ledger)
        return _Residual(self.decay, numel, storage, returns_mean=self.gives_momentum)


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorFeedback(_WithResidual):
    """e = beta e + Delta; payload = encode(e); e = e - decode(payload); e in fp32.

    e does not contain the outer learning rate, which the outer optimizer applies once.

    Args:
        decay: beta in [0, 1]; with 1 everything is sent sooner or later.
        device: where e is between rounds: "cpu" for the host's memory, None for the place of the
            outer loop's state. It does not change the numbers, so workers may differ in it.

    Raises:
        ConfigurationError: the decay is outside [0, 1].

    Source: SparseLoCo (arXiv 2508.15706), Algorithm 1; MuLoCo (arXiv 2505.23725).

    >>> from thinwire.storage import StatePlacement
    >>> storage = StatePlacement(torch.device("cpu"))
    >>> ErrorFeedback(decay=0.95).bind(2, storage).state_dict()
    {'residual': tensor([0., 0.])}
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoupledMomentum(_WithResidual):
    """m = beta m + Delta; payload = encode(m); m = m - decode(payload) + mean of all payloads.

    Workers share only the part of their momenta that they send. The outer optimizer gets beta m
    instead of the mean.

    Args:
        decay: beta in [0, 1].
        device: where m is between rounds, as in `ErrorFeedback`.

    Raises:
        ConfigurationError: the decay is outside [0, 1].

    Source: the released code of arXiv 2510.03371.

    >>> DecoupledMomentum(decay=0.9).gives_momentum
    True
    """

    gives_momentum = True
