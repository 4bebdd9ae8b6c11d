"""One rank's shard of a worker: it catches up with the run from what is in the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from thinwire.elastic.alive import LostWorkers
from thinwire.elastic.events import EventLog
from thinwire.elastic.group import KEPT_ROLLS, StoreGroup
from thinwire.elastic.roll import LoggedRound, NewestState, View
from thinwire.elastic.run_objects import RunObjects
from thinwire.elastic.snapshot import snapshot_parts, unpack
from thinwire.elastic.timeouts import Timeouts
from thinwire.elastic.worker_ranks import WorkerRanks
from thinwire.errors import ThinwireError
from thinwire.membership import MALFORMED, Progress, Replay, RoundRecord, SharedState, Snapshot
from thinwire.transport.object_store import now_s

_LOG = logging.getLogger(__name__)

_HEADROOM_BYTES: Final = 64 << 20
_LOOK_S: Final = 1.0

Apply: TypeAlias = Callable[[Snapshot | Replay], Awaitable[None]]
"""Has the loop load a snapshot or replay rounds; raises if it cannot."""


class Leg(NamedTuple):
    """Rounds that lead to a version whose digest is known.

    Args:
        rounds: oldest first, without a gap.
        until: the worker's progress after them.
    """

    rounds: Sequence[LoggedRound]
    until: Progress


@dataclass(kw_only=True)
class Shard:
    """One rank of a worker: all ranks make these calls in the same order.

    Args:
        objects: the run's objects.
        state: this rank's state, only to be read.
        timeouts: the worker's timeouts, from how long others took so far.
        apply: has the loop of this rank load a snapshot or replay rounds.
        events: log of what happens.
        ranks: the worker's ranks.

        lost: finds workers that gave no sign of life; exchanges share it, so that a lost worker is
            not waited for again before the next roll.
        group: carries exchanges with the same rank of the other workers; None before the first
            round.
        written: the newest snapshot that this worker wrote.
        writing: the snapshot that is being written, if any.
        is_awaited: whether another worker waits for that snapshot.
    """

    objects: RunObjects
    state: SharedState
    timeouts: Timeouts
    apply: Apply
    events: EventLog
    ranks: WorkerRanks
    lost: LostWorkers = field(init=False)
    group: StoreGroup | None = None
    written: NewestState = field(default_factory=NewestState)
    writing: asyncio.Task[None] | None = None
    is_awaited: bool = False

    def __post_init__(self) -> None:
        self.lost = LostWorkers(self.objects, self.timeouts.floor_s)

    async def progress(self) -> Progress:
        """Progress from the tensors as they are now: a state that changed within a round has
        drifted, and takes no part."""
        return self.state.progress(anew=True)

    # -- catching up -------------------------------------------------------------------------------

    async def replay(self, legs: Sequence[Leg]) -> bool:
        """Replay the outer steps of `legs`; returns whether all could be replayed."""
        for leg in legs:
            here = self.state.progress().version
            if here >= leg.until.version:
                continue
            missed = [round for round in leg.rounds if round.version > here]
            records = [await self._record(round) for round in missed]
            there = [record for record in records if record is not None]
            digest = leg.until.digest.split(".")[self.ranks.index]
            until = Progress(version=leg.until.version, step=leg.until.step, digest=digest)
            if len(there) < len(missed):
                return False
            try:
                await self.apply(Replay(there, until))
            except MALFORMED as error:
                _LOG.info("the rounds do not follow on this worker's state: %s", error)
                return False
        self.objects.sealed.free_memory()
        return True

    async def _record(self, round: LoggedRound) -> RoundRecord | None:
        facts = round.facts[self.ranks.index]
        if not round.place:
            return None
        until_s = self.objects.until_s(round.nbytes)
        messages = await self.objects.messages(
            round.place, int(facts["workers"]), until_s, nbytes=round.nbytes
        )
        roll = await self.objects.roll(int(round.place.split("/")[2]), until_s)
        if messages is None or roll is None:
            return None
        uncounted = set(facts["uncounted"])
        counted = [name for rank, name in enumerate(roll.names) if rank not in uncounted]
        facts = {**facts, "counted": counted}
        return RoundRecord(version=round.version, facts=facts, messages=messages)

    async def load(self, newest: NewestState) -> bool | None:
        """Load a snapshot; None if it is absent, false if it cannot be used."""
        largest = 2 * self.state.shared_nbytes() + _HEADROOM_BYTES
        file = await self.objects.state(newest, largest=largest)
        if file is None:
            return None
        # Loaded or useless: either way it is not read again.
        self.objects.forget_parts()
        try:
            await self.apply(unpack(file))
        except MALFORMED as error:
            _LOG.warning("the snapshot of version %d cannot be used: %s", newest.version, error)
            return False
        return True

    # -- rounds ------------------------------------------------------------------------------------

    async def enter(self, roll: View, name: str, is_changed: bool) -> None:  # noqa: FBT001
        """Begin the round of `roll` as worker `name`, and its snapshot if that falls to it."""
        if is_changed or self.group is None:
            self.leave_group()
            self.objects.forget_parts()  # left by a restart, after which rounds led here
            rank = roll.names.index(name)
            self.group = StoreGroup(self.objects, roll.names, rank, self.timeouts, self.lost)
        self.group.roll, self.is_awaited = roll.number, bool(roll.lacking)
        newest = roll.next_state
        if newest.writer == name and newest.roll == roll.number:
            self.writing = asyncio.ensure_future(
                self._write(self.state.capture(), newest, before=roll.state)
            )

    async def close(self) -> None:
        """Leave, once any snapshot that another worker waits for is written."""
        self.leave_group()
        if self.writing is not None and self.is_awaited:
            left_s = self.objects.until_s(self.state.shared_nbytes()) - now_s()
            await asyncio.wait([self.writing], timeout=left_s)

    def leave_group(self) -> None:
        """Cancel exchanges under way with the other workers."""
        if self.group is not None:
            self.group.close()
            self.group = None

    def logged(self, record: RoundRecord) -> LoggedRound:
        """Record where this rank's messages of a round are."""
        assert self.group is not None
        counted = set(record.facts["counted"])
        uncounted = [rank for rank, name in enumerate(self.group.names) if name not in counted]
        return LoggedRound(
            version=record.version,
            place=self.group.place_of(record.messages),
            nbytes=sum(message.nbytes for message in record.messages),
            facts=({**record.facts, "uncounted": uncounted},),
        )

    # -- snapshots ---------------------------------------------------------------------------------

    async def _write(self, snapshot: Snapshot, newest: NewestState, *, before: NewestState) -> None:
        objects, parts, written = self.objects, snapshot_parts(snapshot), set[str]()
        while True:
            try:
                await objects.put_state(parts, newest, written)
                if self.ranks.index:
                    return
                while not await objects.has_state(newest, objects.until_s()):
                    await asyncio.sleep(_LOOK_S)  # the worker's other ranks still write theirs
                break
            except ThinwireError as error:
                why = f"a snapshot of version {newest.version}: {error}"
                self.events.note("unsaved", round=newest.version, why=why)
                await asyncio.sleep(self.timeouts.late())
        self.written = newest
        if before.version < 0:
            return
        try:
            await objects.delete_states(objects.until_s())
            oldest = min(before.roll, newest.roll - KEPT_ROLLS)
            await objects.delete_messages(oldest, objects.until_s())
        except ThinwireError as error:
            _LOG.warning("old objects stay where they are: %s", error)
