"""Signs of life: one object per worker, which it overwrites while it trains.

The others notice a lost worker within seconds, however long a round is. Nothing else depends
on these signs: a worker that is assumed lost too soon counts as late, like any slow one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from thinwire.elastic.run_objects import RunObjects
from thinwire.errors import ThinwireError
from thinwire.membership import WorkerMetrics
from thinwire.transport.object_store import now_s, together

_LOG = logging.getLogger(__name__)

PER_LOSS: Final = 3
"""Missed signs after which a worker is assumed lost."""
FEW: Final = 16
"""The most workers to look up one by one; a longer list begins with this many."""


class _Sign(NamedTuple):
    stamp: tuple[str, float] | None
    since_s: float
    looked_s: float


class LostWorkers:
    """Finds workers that gave no sign of life for too long, by this process's clock.

    Args:
        objects: the run's objects.
        after_s: seconds without a new sign after which a worker is lost.
    """

    def __init__(self, objects: RunObjects, after_s: float) -> None:
        self._objects, self._after_s = objects, after_s
        self._signs: dict[str, _Sign] = {}

    async def first_of(self, names: Sequence[str]) -> set[str]:
        """Return the lost workers among the first of `names`; if all of those are, among all."""
        lost = await self.among(names[:FEW])
        return lost | await self.among(names[FEW:]) if len(lost) == FEW else lost

    async def among(self, names: Collection[str]) -> set[str]:
        """Return the lost workers among `names`; asks the store only now and then."""
        now, never = now_s(), _Sign(None, 0.0, float("-inf"))
        known = {name: self._signs.get(name, never) for name in names}
        often_s = self._after_s / (2 * PER_LOSS)
        due = [name for name, sign in known.items() if now - sign.looked_s >= often_s]
        until_s = now + self._after_s
        try:
            stamps = await together(*(self._objects.sign_of_life(name, until_s) for name in due))
        except ThinwireError:  # no sign can get through while the store is silent
            self._signs.clear()
            return set()
        for name, stamp in zip(due, stamps, strict=True):
            sign = known[name]
            was_lost = sign.looked_s - sign.since_s >= self._after_s
            # Nobody looked for long: this process, and the other worker, may have been suspended.
            is_old = now - sign.looked_s > self._after_s and not was_lost
            is_new = is_old or sign.stamp != stamp
            known[name] = _Sign(stamp, now if is_new else sign.since_s, now)
        self._signs |= known
        return {name for name, sign in known.items() if now - sign.since_s >= self._after_s}


async def give_signs(
    objects: RunObjects, name: str, after_s: float, measured: Callable[[], WorkerMetrics]
) -> None:
    """Overwrite the sign of life of worker `name` until cancelled.

    Args:
        objects: the run's objects.
        name: this worker's name.
        after_s: seconds without a sign after which the others assume it lost.
        measured: returns the worker's metrics, which each sign carries.
    """
    while True:
        try:
            await objects.put_sign_of_life(name, measured(), now_s() + after_s)
        except ThinwireError as error:
            _LOG.info("the others may take this worker for lost: %s", error)
        await asyncio.sleep(after_s / PER_LOSS)
