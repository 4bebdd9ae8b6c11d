"""What an outer optimizer is: what it wants averaged, and what it does with the mean."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from thinwire.replica import Replica

__all__ = ["OuterOptimizer", "OuterState"]


class OuterState(ABC):
    """The outer side of one fragment on one worker."""

    @abstractmethod
    def collect(self) -> Tensor:
        """What this worker wants averaged now: a new fp32 vector [numel]."""

    @abstractmethod
    def apply(self, mean: Tensor) -> None:
        """Move the outer parameters by the `mean` [numel] of what was collected, then merge."""

    @abstractmethod
    def anchor(self) -> Mapping[str, Tensor]:
        """The outer parameters by name; they share memory with this state."""

    @abstractmethod
    def flat_anchor(self) -> Tensor:
        """The outer parameters as one fp32 vector [numel], to be read only."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Everything `load_state_dict` needs, as plain tensors."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`, bit for bit."""

    def close(self) -> None:
        """Undo whatever `bind` did to the worker's optimizers: by default nothing."""
        return


class OuterOptimizer(ABC):
    """Description of an outer optimizer."""

    def check(self, *, sync_every: int) -> None:
        """Raise `ConfigurationError` if this optimizer cannot serve rounds of that length."""
        del sync_every

    @abstractmethod
    def bind(self, replica: Replica, names: Sequence[str], *, workers: int) -> OuterState:
        """A fresh state for the fragment `names` of `replica`, one of `workers`."""
