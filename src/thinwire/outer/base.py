"""The outer optimizer interface: what is averaged over workers, and what the mean moves."""

from abc import ABC, abstractmethod

from thinwire.outer.overlap import Overlap
from thinwire.outer.state import FragmentContext, OuterState


class OuterOptimizer(ABC):
    """Description of an outer optimizer: chooses what is averaged, and applies the mean."""

    def check(self, *, sync_every: int, overlap: Overlap) -> None:
        """Raise `ConfigurationError` if this optimizer does not work with such rounds."""
        del sync_every, overlap

    def check_rounds(self) -> None:
        """Raise `ConfigurationError` if this optimizer is not for rounds that all take together.

        By default it is.
        """
        return

    elastic_refusal: str | None = None
    """Why workers that come and go cannot train by this optimizer; None if they can."""

    has_own_anchors: bool = False
    """True if workers have different outer parameters: then digests and checkpoints differ."""

    averages_weights: bool = False
    """True if workers send their weights; by default they send pseudo-gradients."""

    takes_momentum: bool = False
    """True if `OuterState.apply` expects the momentum of `Feedback.gives_momentum`, not a mean."""

    @abstractmethod
    def bind(self, context: FragmentContext, overlap: Overlap) -> OuterState:
        """A fresh state for one fragment, whose means are merged by `overlap`."""
