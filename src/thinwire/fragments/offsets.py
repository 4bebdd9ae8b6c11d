"""Offsets: after which inner steps each fragment of a plan is exchanged."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from thinwire.errors import ConfigurationError


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
        if count > sync_every:
            raise ConfigurationError(
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
        _check_tuple(self.steps)
        for step in self.steps:
            _check_whole(step)

    def of(self, count: int, *, sync_every: int) -> tuple[tuple[int, int], ...]:
        """The given offsets, checked against the number of fragments and the interval."""
        if len(self.steps) != count:
            raise ConfigurationError(
                f"use {len(self.steps)} offsets ({', '.join(map(str, self.steps))})",
                because=f"this model has {count} fragments",
                do="pass one offset for each fragment",
            )
        for p, step in enumerate(self.steps):
            if step >= sync_every:
                raise ConfigurationError(
                    f"exchange fragment {p} at an offset of {step} inner steps",
                    because=f"every fragment is exchanged every {sync_every} steps",
                    do=f"pass an offset from 0 to {sync_every - 1}",
                )
        return tuple((step, step or sync_every) for step in self.steps)


def _check_tuple(steps: object) -> None:
    if not isinstance(steps, tuple):
        raise ConfigurationError(
            f"use the offsets {steps!r}",
            because="offsets must be a tuple, with one for each fragment",
            do="pass integers, such as (0, 3, 7)",
        )


def _check_whole(step: object) -> None:
    # No step would equal an offset of 1.5: its fragment would never be exchanged.
    if not isinstance(step, int) or step < 0:
        raise ConfigurationError(
            f"exchange a fragment at an offset of {step!r} inner steps",
            because="inner steps are whole numbers and counted 0, 1, 2, ...",
            do="pass whole numbers from 0 to sync_every - 1",
        )
