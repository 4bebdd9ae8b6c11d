"""State of an outer optimizer for one fragment on one worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from thinwire.blocks import LazyVector, StreamedVector
from thinwire.checksums import anchor_digest
from thinwire.live_weights import LiveWeights
from thinwire.storage import StatePlacement


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentContext:
    """The worker and the fragment that an outer state is made for.

    Args:
        live: the worker's weights.
        names: of the fragment's parameters.
        workers: K.
        storage: of the state.
        alone: whether the worker is the only one, and stays so.
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
        """What `measure` gives, as a new fp32 [numel]."""
        with self.measure() as delta:
            return delta.whole()

    @abstractmethod
    def on_sent(self, delta: LazyVector) -> None:
        """`delta`, which `measure` gave, is finite and goes out now."""

    def contribution(self, delta: LazyVector) -> LazyVector:
        """The vector that is sent for `delta`, which `measure` gave: by default `delta`.

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

        Only where rounds may be cancelled.
        """
        raise NotImplementedError

    @abstractmethod
    def flat_anchor(self) -> Tensor:
        """The outer parameters as one fp32 vector [numel], to be read only."""

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
        """Bytes of `anchor` and of all else, `outer state`, that are held now."""
        held = {name: tensor.nbytes for name, tensor in self.state_dict().items()}
        anchor = held.pop("anchor", 0)
        return {"anchor": anchor, "outer state": sum(held.values())}

    def prefetch(self, *, for_step: bool) -> None:
        """Begin to bring to the device what `apply` needs, or else `pseudo_gradient`.

        By default nothing.
        """
        del for_step
