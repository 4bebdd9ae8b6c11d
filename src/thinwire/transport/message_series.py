"""Which tags belong to which transport on a gloo group: its ranks agree on that.

A tag has room for 63 transports. A later one gets the number of a former one only when nothing of
that one can still arrive: it is closed or gone on every rank, and all that it began there has been
carried to its end. gloo keeps what was sent or awaited in vain, and the next message with that tag
would be taken for it.
"""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from thinwire.errors import ConfigurationError, MismatchError
from thinwire.transport.base import to_all
from thinwire.transport.gloo_messages import SERIES_COUNT, GlooMessages

_AGREEMENT = SERIES_COUNT - 1
"""The series in which ranks agree on all others."""

_HELD: "weakref.WeakKeyDictionary[Any, list[MessageSeries]]" = weakref.WeakKeyDictionary()
"""Those of this process that have a number, by group."""


class MessageSeries:
    """The exchanges of one transport, and the number that their tags have on its gloo group.

    >>> series = MessageSeries()
    >>> series.begin(), series.begin()
    (1, 2)
    >>> series.end()
    >>> series.close()
    >>> series.is_free
    False
    """

    def __init__(self) -> None:
        # Each count has one thread that changes it.
        self._begun = self._ended = 0
        self._is_closed = False
        self.number: int | None = None

    def begin(self) -> int:
        """Count an exchange that begins; returns its number, from 1."""
        self._begun += 1
        return self._begun

    def end(self) -> None:
        """Count an exchange of which everything has arrived, and everything was sent."""
        self._ended += 1

    def close(self) -> None:
        """No exchange begins any more."""
        self._is_closed = True

    @property
    def is_free(self) -> bool:
        """Whether nothing of this series can still be on its way from or to this rank."""
        return self._is_closed and self._begun == self._ended

    def take_number(self, group: Any, *, place: int) -> int:
        """Take a number that no transport has on any rank; all ranks of the group call this.

        Args:
            group: over gloo.
            place: of this transport among those that have begun exchanges on the group.

        Raises:
            ConfigurationError: all are taken; on every rank alike.
            MismatchError: another rank is at another place.
            RuntimeError: a rank is gone or stays silent.
        """
        held = _HELD.setdefault(group, [])
        for is_last_try in (False, True):
            if is_last_try:
                # A traceback, or a cycle, may be all that still refers to a transport.
                gc.collect()
            held[:] = [series for series in held if not series.is_free]
            mine = sum(1 << series.number for series in held if series.number is not None)
            masks = _gather(group, place, mine)
            taken = 0
            for mask in masks:
                taken |= mask
            free = [number for number in range(_AGREEMENT) if not taken >> number & 1]
            if free:
                self.number = free[0]
                held.append(self)
                return free[0]
        raise ConfigurationError(
            f"exchange over one process group with more than {_AGREEMENT} transports",
            because="its messages have numbers for no more, and "
            + ", ".join(f"rank {rank} holds {mask.bit_count()}" for rank, mask in enumerate(masks))
            + " of them: alive, or left with an exchange under way",
            do="close() the transports of outer loops that have ended, or drop both; or pass "
            "another torch.distributed.new_group() to Distributed",
        )


def _gather(group: Any, place: int, mask: int) -> Sequence[int]:
    """Every rank's `mask`."""
    mine = torch.tensor([place, mask], dtype=torch.int64).view(torch.uint8)
    rank, workers = group.rank(), group.size()
    post = to_all(mine, rank, workers)
    found = {rank: mine, **GlooMessages(group, _AGREEMENT, 0).start(post, 0)()}
    by_rank = (found[each].view(torch.int64).tolist() for each in range(workers))
    places, masks = zip(*by_rank, strict=True)
    for rank, theirs in enumerate(places):
        if theirs != places[0]:
            raise MismatchError(
                "begin exchanges over this process group",
                because=f"rank 0 does so with its transport number {places[0] + 1} there, and rank "
                f"{rank} with number {theirs + 1}",
                do="build outer loops in the same order on all workers; after an interrupted or "
                "failed start, start all workers again",
            )
    return masks
