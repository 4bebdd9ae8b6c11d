"""The outer side of one fragment on one worker."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from thinwire.live_weights import LiveWeights
from thinwire.storage import StatePlacement

__all__ = ["FragmentContext", "OuterState"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentContext:
    """Whose outer parameters a state holds.

    Args:
        replica: the worker's live weights.
        names: of the fragment's parameters.
        workers: K.
        storage: where the state rests.
        alone: whether the worker is the only one, and stays so.
    """

    replica: LiveWeights
    names: tuple[str, ...]
    workers: int
    storage: StatePlacement
    alone: bool = False


class OuterState(ABC):
    """The outer side of one fragment on one worker."""

    @abstractmethod
    def collect(self) -> Tensor:
        """What this worker wants averaged now: a new fp32 [numel], which may yet be refused."""

    def sending(self, delta: Tensor) -> None:
        """Take note of what was collected: it is finite and goes out now. By default nothing."""
        del delta

    @abstractmethod
    def apply(self, mean: Tensor) -> None:
        """Move the outer parameters by the `mean` [numel] of what was collected, then merge.

        Means come in the order in which they were collected.
        """

    @abstractmethod
    def anchor(self) -> Mapping[str, Tensor]:
        """The outer parameters by name; they share memory with this state, wherever it rests."""

    @abstractmethod
    def flat_anchor(self) -> Tensor:
        """The outer parameters as one fp32 vector [numel], to be read only."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Everything `load_state_dict` needs, as plain tensors; the same keys at any time."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`, bit for bit."""

    # -- for runs whose workers come and go --------------------------------------------------------

    def shared(self) -> dict[str, Tensor]:
        """The part of `state_dict` that is equal on all workers, with the keys that K asks for."""
        return self.state_dict()

    def adopt(self, shared: Mapping[str, Tensor]) -> None:
        """Take over what `shared` returned elsewhere; `place` must follow."""
        self.load_state_dict(shared)

    def advance(self, mean: Tensor) -> None:
        """Take the outer step of a round that this worker missed; `place` must follow."""
        self.apply(mean)

    def unsent(self) -> Tensor:
        """What this worker did that is in no outer step: a new fp32 [numel]."""
        return self.collect()

    @abstractmethod
    def place(self, unsent: Tensor | None) -> None:
        """Put the live weights at the outer parameters minus `unsent` [numel]; None is nothing.

        From here on nothing that was sent is waited for.
        """

    def abandon(self) -> None:
        """What was sent counts on nobody: what is collected next has it, too."""
        return

    def memory(self) -> dict[str, int]:
        """Bytes of `anchor` and of all else, `outer state`, that are held now."""
        held = {name: tensor.nbytes for name, tensor in self.state_dict().items()}
        anchor = held.pop("anchor", 0)
        return {"anchor": anchor, "outer state": sum(held.values())}

    def prefetch_collect(self) -> None:
        """Begin to bring to the device what `collect` needs: by default nothing."""
        return

    def prefetch_apply(self) -> None:
        """Begin to bring to the device what `apply` needs: by default nothing."""
        return

    def close(self) -> None:
        """Undo whatever `bind` did to the worker's optimizers: by default nothing."""
        return
