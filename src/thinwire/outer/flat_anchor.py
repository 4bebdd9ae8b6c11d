"""The outer parameters of one fragment as a vector, and the rule that moves them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.blocks import LazyVector, StreamedVector, VectorPart
from thinwire.checksums import BlockSums, anchor_digest, column_sums, digest_of
from thinwire.errors import CheckpointError
from thinwire.host_copy import HostCopy
from thinwire.outer.state import FragmentContext
from thinwire.storage import StoredTensor


class StepRule(ABC):
    """An elementwise rule that moves a vector: its buffers, and the step."""

    @abstractmethod
    def buffers(self, like: Tensor) -> dict[str, Tensor]:
        """The state before the first step, for a vector like `like`; `step` counts the steps."""

    @abstractmethod
    def step(
        self, position: Tensor | None, gradient: Tensor, state: Mapping[str, Tensor]
    ) -> Tensor:
        """Move a part of the vector, [numel], and the same part of the buffers in place.

        Args:
            position: fp32 [numel], which may be overwritten; None are zeros.
            gradient: fp32 [numel]; it may be overwritten.
            state: the buffers' parts, and `step` as it was before, which is not changed.

        Returns:
            the new position.
        """


class FlatAnchor:
    """theta = OuterOpt(theta, mean), stored between rounds and moved part by part.

    A rule steps a *position*: the vector minus an origin. By default the origin is the vector
    itself, so the position starts at zero and becomes the update. A lone worker passes its own
    weights: (anchor - local) - 1 * (anchor - local) is exactly zero, where anchor minus the rounded
    difference would be its weights with a rounding error.

    Args:
        rule: moves the vector.
        context: the worker and its fragment, whose local weights the vector starts from.
        averages_weights: a mean is one of weights, and the gradient is the vector minus it.
    """

    def __init__(
        self,
        rule: StepRule,
        context: FragmentContext,
        *,
        averages_weights: bool = False,
    ) -> None:
        self.averages_weights, self._rule = averages_weights, rule
        # With other workers' by its digest, which steps find beside their work.
        self._is_compared = not context.alone
        start, storage = context.live.read(context.names), context.storage
        # They exist from the start: then the checkpoint of a fresh loop has every key for
        # torch.distributed.checkpoint to fill.
        buffers = rule.buffers(start)
        # AdamW counts its steps in a scalar tensor on the host, which stays there.
        self._scalars = {key: value for key, value in buffers.items() if value.ndim == 0}
        self._buffers = {k: storage.keep(v) for k, v in buffers.items() if v.ndim > 0}
        self._vector = storage.keep(start)
        self._digest, self._digest_version = b"", 0
        self._sums: tuple[HostCopy, int] | None = None

    def prefetch_reading(self) -> None:
        """Begin to copy the vector to the device."""
        self._vector.prefetch()

    def prefetch_stepping(self) -> None:
        """Begin to copy vector and buffers to the device."""
        for kept in (self._vector, *self._buffers.values()):
            kept.prefetch()

    @contextmanager
    def reading(self) -> Generator[Tensor]:
        """The vector on the device, not to be changed."""
        try:
            yield self._vector.fetch()
        finally:
            self._vector.release()

    def stored(self) -> Tensor:
        """The vector where it is stored, not to be changed."""
        return self._vector.stored()

    def step(
        self,
        mean: StreamedVector,
        then: Callable[[VectorPart, Tensor], None],
        origin: LazyVector | None = None,
    ) -> None:
        """Take an outer step.

        Args:
            mean: [numel], of pseudo-gradients or of weights.
            then: given every part of the new vector as it is made, not to be changed.
            origin: subtracted from the vector for the step; the vector itself by default.
        """
        vector = self._vector.fetch()
        buffers = {key: kept.fetch() for key, kept in self._buffers.items()}
        failure: BaseException | None = None
        self._digest, self._sums, sums = b"", None, BlockSums()
        try:
            for part, values in mean.blocks():
                self._step_part(part, values, vector, buffers, origin)
                if self._is_compared and vector.is_cpu:  # while it is in a core's cache
                    sums.add(part, part.read(vector))
                # Also if writing the local weights is interrupted, all parts take this step.
                if failure is None:
                    try:
                        then(part, part.read(vector))
                    except BaseException as error:
                        failure = error
        finally:
            for key, kept in self._buffers.items():
                kept.store(buffers[key])
            self._vector.store(vector)
            for steps in self._scalars.values():
                steps += 1
        if failure is not None:
            raise failure
        if self._is_compared and not vector.is_cpu:
            # On its way while the worker trains on: no later round waits for it.
            self._sums = HostCopy(column_sums(vector)), self.stored()._version
        if len(vector) and sums.numel == len(vector):
            self._digest, self._digest_version = sums.digest(), self.stored()._version

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
            anchor.add_(self._rule.step(None, gradient, state))
        else:
            start = origin.read(part)
            position = self._rule.step(anchor.sub_(start), gradient, state)
            torch.add(position, start, out=anchor)
        part.write(vector, anchor)
        for key, buffer in buffers.items():
            part.write(buffer, parts[key])

    def digest(self) -> bytes:
        """`anchor_digest` of the vector, which a step on a CPU has found beside its work."""
        vector = self.stored()
        # torch counts changes in place: also those that another made through a view.
        if self._sums is not None:
            (sums, self._digest_version), self._sums = self._sums, None
            self._digest = digest_of(sums.read())
        if not self._digest or self._digest_version != vector._version:
            self._digest, self._digest_version = anchor_digest(vector), vector._version
        return self._digest

    def state_dict(self) -> dict[str, Tensor]:
        """`anchor` and the optimizer's buffers, where they are stored."""
        buffers = {key: kept.stored() for key, kept in self._buffers.items()} | self._scalars
        return {"anchor": self.stored()} | {f"optimizer.{k}": v for k, v in buffers.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`.

        Raises:
            CheckpointError: it has other keys.
        """
        mine = self.state_dict()
        if state.keys() != mine.keys():
            raise CheckpointError(
                "load the state of an outer optimizer",
                because=f"it has {sorted(state)} and needs {sorted(mine)}",
                do="pass what state_dict() of a loop with the same method returned",
            )
        self._digest, self._sums = b"", None
        _put(self._vector, state["anchor"])
        for key, kept in self._buffers.items():
            _put(kept, state[f"optimizer.{key}"])
        self._scalars = {
            key: state[f"optimizer.{key}"].to("cpu", copy=True) for key in self._scalars
        }


def _put(kept: StoredTensor, value: Tensor) -> None:
    kept.store(value.to(kept.stored().device, copy=True))
