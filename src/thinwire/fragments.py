"""Fragments: which parameters travel together, and after which inner steps."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

__all__ = ["Fragment", "Fragments", "Whole"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """Parameters that are exchanged together, every `sync_every` inner steps.

    Args:
        index: its place in the plan, and in the state of the outer loop.
        names: parameter names, in the order in which they are laid out on the wire.
        offset_steps: t_p; the fragment is due when (t - t_p) mod H = 0.

    >>> Fragment(index=0, names=("w",), offset_steps=0).is_due(step=20, sync_every=10)
    True
    """

    index: int
    names: tuple[str, ...]
    offset_steps: int

    def is_due(self, *, step: int, sync_every: int) -> bool:
        """Whether the fragment is sent after inner step `step` (counted from 1).

        Source: Streaming DiLoCo (arXiv 2501.18512), Algorithm 2.
        """
        return step >= sync_every and (step - self.offset_steps) % sync_every == 0


class Fragments(ABC):
    """A rule that puts every parameter into exactly one fragment."""

    @abstractmethod
    def plan(self, names: Sequence[str], *, sync_every: int) -> tuple[Fragment, ...]:
        """The fragments of a model whose parameters are called `names`."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Whole(Fragments):
    """One fragment that holds the whole model, as in DiLoCo (arXiv 2311.08105).

    >>> Whole().plan(["a", "b"], sync_every=30)
    (Fragment(index=0, names=('a', 'b'), offset_steps=0),)
    """

    def plan(self, names: Sequence[str], *, sync_every: int) -> tuple[Fragment, ...]:
        """One fragment without an offset, whatever the interval."""
        del sync_every
        return (Fragment(index=0, names=tuple(names), offset_steps=0),)
