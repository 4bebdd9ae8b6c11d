"""The outer side of one fragment on one worker."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from thinwire.replica import Replica
from thinwire.storage import Storage

__all__ = ["OuterState", "Seat"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Whose outer parameters a state holds.

    Args:
        replica: the worker's live weights.
        names: of the fragment's parameters.
        workers: K.
        storage: where the state rests.
    """

    replica: Replica
    names: tuple[str, ...]
    workers: int
    storage: Storage


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
