"""Feedback: what a worker adds to a pseudo-gradient from earlier rounds before it is encoded."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from torch import Tensor

__all__ = ["Feedback", "FeedbackState", "NoFeedback"]


class FeedbackState(ABC):
    """The memory of one fragment."""

    @abstractmethod
    def add(self, delta: Tensor) -> Tensor:
        """What is to be encoded: `delta` [numel] (fp32) and what was left behind."""

    @abstractmethod
    def settle(self, wanted: Tensor, sent: Tensor) -> None:
        """Keep what `sent` (the decoded payload) lacks of `wanted`; both [numel], fp32."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """The memory as plain tensors."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a memory that `state_dict` returned."""


class Feedback(ABC):
    """Description of a feedback rule."""

    @abstractmethod
    def bind(self) -> FeedbackState:
        """A fresh memory for one fragment."""


@final
class _Nothing(FeedbackState):
    def add(self, delta: Tensor) -> Tensor:
        return delta

    def settle(self, wanted: Tensor, sent: Tensor) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class NoFeedback(Feedback):
    """e = Delta: a round forgets what it could not send.

    >>> NoFeedback().bind().state_dict()
    {}
    """

    def bind(self) -> FeedbackState:
        """A memory that stays empty."""
        return _Nothing()
