"""What an outer optimizer is: what it wants averaged, and what it does with the mean."""

from abc import ABC, abstractmethod

from thinwire.outer.overlap import Overlap
from thinwire.outer.state import FragmentContext, OuterState

__all__ = ["OuterOptimizer"]


class OuterOptimizer(ABC):
    """Description of an outer optimizer."""

    def check(self, *, sync_every: int, overlap: Overlap) -> None:
        """Raise `ConfigurationError` if this optimizer cannot serve such rounds."""
        del sync_every, overlap

    @abstractmethod
    def bind(self, seat: FragmentContext, overlap: Overlap) -> OuterState:
        """A fresh state for the fragment of `seat`, whose answers are merged as `overlap` says."""
