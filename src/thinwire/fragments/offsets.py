"""Offsets: after which inner steps each fragment of a plan is exchanged."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from thinwire.errors import check, check_whole


class Offsets(ABC):
    """A rule for the (offset, first step) of every fragment, in inner steps."""

    @abstractmethod
    def of(self, count: int, *, sync_every: int) -> tuple[tuple[int, int], ...]:
        """(t_p, first step) of each of `count` fragments.

        Fragment p is due after inner step t (from 1) when (t - t_p) mod H = 0 and t is not before
        its first step.

        Args:
            count: P, fragments.
            sync_every: H, inner steps from one exchange of a fragment to the next.

        Raises:
            ConfigurationError: the rule does not fit so many fragments or so short an interval.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread(Offsets):
    """t_p = floor(p H / P): evenly over the interval, the first exchange after H steps or more.

    Raises:
        ConfigurationError: P > H, when `of` is called.

    >>> Spread().of(3, sync_every=10)
    ((0, 10), (3, 10), (6, 10))

    Source: Streaming DiLoCo (arXiv 2501.18512), section 3.
    """

    def of(self, count: int, *, sync_every: int) -> tuple[tuple[int, int], ...]:
        """Offsets of `count` fragments, no two of them equal."""
        check(
            count <= sync_every,
            f"spread {count} fragments over {sync_every} inner steps",
            because="two fragments would be due after the same step",
            do=f"pass sync_every >= {count}, or a rule that makes fewer fragments",
        )
        return tuple((p * sync_every // count, sync_every) for p in range(count))


@dataclass(frozen=True, kw_only=True, slots=True)
class At(Offsets):
    """Offsets given one by one; a fragment's first exchange is after t_p steps, not H + t_p.

    An offset of 0 means step H: at step 0 nothing has been trained.

    Args:
        steps: t_p in [0, H) for each fragment; equal ones are exchanged after the same step.

    Raises:
        ConfigurationError: an offset is negative or not an integer; when `of` is called, there is
            not one offset for each fragment, or one is not below H.

    >>> At(steps=(4, 0)).of(2, sync_every=10)
    ((4, 4), (0, 10))
    """

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        for step in self.steps:
            # No step would equal an offset of 1.5: its fragment would never be exchanged.
            check_whole("the offset of a fragment, in inner steps,", step, least=0)

    def of(self, count: int, *, sync_every: int) -> tuple[tuple[int, int], ...]:
        """The given offsets, checked against the number of fragments and the interval."""
        check(
            len(self.steps) == count,
            f"use {len(self.steps)} offsets ({', '.join(map(str, self.steps))})",
            because=f"this model has {count} fragments",
            do="pass one offset for each fragment",
        )
        for p, step in enumerate(self.steps):
            check_whole(f"the offset of fragment {p}", step, least=0, most=sync_every - 1)
        return tuple((step, step or sync_every) for step in self.steps)
