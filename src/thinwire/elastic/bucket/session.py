"""A worker among others that come and go over an object store: from joining to leaving."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from thinwire.elastic.bucket.group import KEPT_ROLLS, BucketGroup
from thinwire.elastic.bucket.history import LoopThread, RunHistory, Steps
from thinwire.elastic.bucket.roll import (
    LoggedRound,
    NewestState,
    View,
    WorkerReport,
    last_roll,
    latest_calls,
    next_roll,
)
from thinwire.elastic.bucket.run_objects import RunObjects
from thinwire.elastic.events import EventLog, check_asked_to_leave, note_who_came_and_went
from thinwire.elastic.quorum import identity_of
from thinwire.elastic.snapshot import snapshot_parts
from thinwire.elastic.timeouts import ElasticOptions, Timeouts, pauses
from thinwire.errors import ExchangeError, MismatchError, ThinwireError, check
from thinwire.membership import (
    Answer,
    Go,
    Over,
    Phase,
    RoundPlan,
    RoundRecord,
    SharedState,
    Snapshot,
    WorkerMetrics,
)
from thinwire.transport.base import Posts, Round, RoundTag
from thinwire.transport.object_store import together

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_PAUSE_S, _LONGEST_PAUSE_S, _GROWTH = 0.05, 1.0, 1.5
_SETTLE_S = 2.0  # in which no other worker comes before the first roll
_LEAST_TURN_S = 1.0
_LOOK_S = 0.5
_SILENCE_S = 0.5  # a request that takes longer was perhaps made again


class BucketSession:
    """What a worker does from joining to leaving.

    Args:
        objects: of the run.
        name: of this worker, with that of its process.
        options: how long it waits, and for how many.
        timeouts: from how long others took so far.
        state: this worker's, for reading.
        events: what happens is noted here.
        asked_to_leave: says so; asked while waiting for others, which then ends with `RunStopped`.
        snapshot_after: so many times a snapshot's bytes of messages another one is written.

    Attributes:
        names: of the workers of the round, in rank order.
        rank: of this worker among them.
        group: of the round; None before the first.
        may_end: whether the run ended where this worker is, as far as it knows.
    """

    def __init__(
        self,
        objects: RunObjects,
        name: str,
        options: ElasticOptions,
        timeouts: Timeouts,
        *,
        state: SharedState,
        events: EventLog,
        asked_to_leave: Callable[[], bool],
        snapshot_after: float,
    ) -> None:
        self.name, self.names, self.rank, self.may_end = name, (name,), 0, True
        self.group: BucketGroup | None = None
        self._objects, self._options, self._timeouts = objects, options, timeouts
        self._state, self._events, self._asked_to_leave = state, events, asked_to_leave
        self._snapshot_after = snapshot_after
        self._thread = LoopThread()
        self._history = RunHistory(objects, timeouts, state, self._run, options.give_up_s)
        self._entered: View | None = None  # the last that this worker took part in
        self._lacks = self._is_stale = self._has_called = self._has_ended = False
        self._written = NewestState()
        self._writing: concurrent.futures.Future[None] | None = None
        self._metrics = WorkerMetrics()

    @property
    def _roll(self) -> View | None:
        return self._history.roll

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange among the workers of the round."""
        assert self.group is not None, "a round was begun"
        return self.group.run(posts, tag)

    # -- joining -----------------------------------------------------------------------------------

    def join(self, description: Mapping[str, str]) -> None:
        """See that this worker runs what the others do.

        Raises:
            MismatchError: it does not. ExchangeError: the store cannot be used.
        """
        self._run(self._objects.check_description(description, self.name, self._until_s()))
        self._is_stale = True

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns, which may ask a store that does not answer.

        Raises:
            RunStopped: this worker is asked to stop meanwhile.
        """
        running = self._thread.start(work)
        while not concurrent.futures.wait([running], timeout=_LOOK_S).done:
            self._check_asked_to_leave(running)
        return running.result()

    def _check_asked_to_leave(self, running: concurrent.futures.Future[Any] | None = None) -> None:
        is_asked = self._asked_to_leave()
        if is_asked and running is not None:
            running.cancel()
        check_asked_to_leave(is_asked)

    # -- before a round ----------------------------------------------------------------------------

    def begin_round(self, phase: Phase) -> Generator[Answer, None, None]:
        """Agree with the others on the next roll, and catch up if this worker is behind."""
        began_s = time.monotonic()
        if self._has_ended and self._roll is not None:
            position = self._roll.position
            raise ExchangeError(
                "train further",
                because=f"the run is over, at version {position.version} and inner step "
                f"{position.step}, and this worker was to take more steps",
                do="take the model as it is now; to train on from there, start all workers from it "
                "with another name as run",
            )
        self.may_end = True
        # From the tensors and not from memory: with outer parameters that have changed since the
        # last round this worker takes no part.
        here = self._state.progress(anew=True)
        known = self._history.digests.get(here.version, here.digest)
        if known != here.digest and len(self.names) > 1:
            self._note("refused", why="its outer parameters have changed since its last round")
            self._lacks = True
        while True:
            if self._is_stale:
                self._is_stale = False
                self._history.learn_newest()
                yield from self._get_to(self._roll)
            if self._roll is not None and self._roll.is_over:
                if self._lacks and self._wait_for_snapshot(self._roll):
                    self._is_stale = True
                    continue
                yield self._end(self._roll)
                return
            roll = self._meet(phase)
            if roll is None:
                self._is_stale = True
                continue
            before = self._roll
            self._history.learn(roll)
            self._check_superseded(roll)
            if self.name in roll.names and (yield from self._get_to(roll)):
                break
            self._is_stale = True
            is_lost = self.name not in (*roll.names, *roll.lacking) and not roll.is_over
            if is_lost and before is not None and self._entered is before:
                self._note("late", why=f"roll {roll.number} was written without this worker")
        self._timeouts.round_began()
        yield Go(self._enter(roll, began_s))

    def _meet(self, phase: Phase) -> View | None:
        """Wait for the next roll, and write it if that is for this worker to do.

        Returns:
            The roll; None if the snapshot is there that this worker waits for.
        """
        number, growing = self._next_number(), pauses(_PAUSE_S, _LONGEST_PAUSE_S, _GROWTH)
        run, objects = self._run, self._objects
        self._has_called = True
        run(objects.put_call(number, self._call(phase), self._until_s()))
        meeting = _Meeting(turn_s=self._turn_s(), listing_s=self._turn_length_s())
        while (roll := run(meeting.timed(objects.roll(number, self._until_s())))) is None:
            self._check_asked_to_leave()
            if meeting.waited_s >= meeting.turn_s:
                roll = run(self._conclude(number, phase, meeting))
                if roll is not None:
                    return roll
            if self._lacks and self._roll is not None and run(self._history.has_come(self._roll)):
                return None
            self._check_waits_in_vain(meeting)
            time.sleep(next(growing))
        return roll

    async def _conclude(self, number: int, phase: Phase, meeting: _Meeting) -> View | None:
        """Write the next roll if all are there that are to be waited for, or it was long enough."""
        until_s, waited_s = self._until_s(), meeting.waited_s
        expected = () if self._roll is None else self._roll.names
        missing = [name for name in expected if name not in meeting.calls and name != self.name]
        found = await together(*(self._objects.call(number, name, until_s) for name in missing))
        meeting.calls |= {call.name: call for call in found if call is not None}
        is_late = waited_s >= self._patience_s()
        if not is_late and any(name not in meeting.calls for name in missing):
            # Now and then: a worker that was started again has another name.
            if waited_s < meeting.listing_s:
                return None
            meeting.listing_s = waited_s + self._turn_length_s()
        known = [self.name, *meeting.calls]
        further = await self._objects.further_calls(number, known, until_s)
        if further:
            meeting.last_arrival_s = waited_s
        meeting.calls |= {call.name: call for call in further}
        calls = latest_calls([self._call(phase), *meeting.calls.values()])
        here = {identity_of(call.name) for call in calls}
        if not is_late and any(identity_of(name) not in here for name in expected):
            return None
        if self._roll is None:
            earlier = sum(call.name < self.name for call in calls)
            turn_s = min(_SETTLE_S, self._timeouts.floor_s) + earlier * self._turn_length_s()
            if waited_s - meeting.last_arrival_s < turn_s:
                return None
        rounds = list(self._history.rounds.values())
        roll = next_roll(
            self._roll,
            calls,
            rounds,
            me=self.name,
            min_workers=self._options.min_workers,
            largest_log=int(self._snapshot_after * self._state.shared_nbytes()),
        )
        if roll is None or await self._objects.put_roll(roll, until_s):
            return roll
        return await self._objects.roll(number, until_s)

    def _call(self, phase: Phase) -> WorkerReport:
        return WorkerReport(
            name=self.name,
            phase=phase.value,
            position=self._state.progress(),
            lacks=self._lacks,
            round_s=self._timeouts.round_s,
            settled=self._state.fully_synced(),
            state=self._written,
            metrics=self._metrics,
        )

    def _next_number(self) -> int:
        return 1 if self._roll is None else self._roll.number + 1

    def _turn_length_s(self) -> float:
        return max(_LEAST_TURN_S, self._timeouts.late() / 4)

    def _patience_s(self) -> float:
        """How long the workers of the last roll are waited for."""
        late_s = self._timeouts.late()
        if self._roll is None or self.name in self._roll.names:
            # They end its exchanges when this worker does.
            return late_s
        # They may still wait there for one that is lost, and are then further than this worker.
        nbytes = max((round.nbytes for round in self._roll.rounds), default=0)
        return late_s + self._timeouts.exchange(nbytes)

    def _turn_s(self) -> float:
        """After how long this worker writes a roll itself: one after the other."""
        if self._roll is None:
            return 0.0
        identities = [identity_of(name) for name in self._roll.names]
        mine = identity_of(self.name)
        if mine in identities:
            return identities.index(mine) * self._turn_length_s()
        # The others know more than a newcomer does.
        return self._patience_s() + len(identities) * self._turn_length_s()

    def _check_waits_in_vain(self, meeting: _Meeting) -> None:
        waited_s = meeting.waited_s
        if waited_s <= max(self._options.give_up_s, 3 * self._timeouts.late()):
            return
        there = 1 + sum(not call.leaves for call in meeting.calls.values())
        check(
            there >= self._options.min_workers,
            "begin a round",
            because=f"it needs min_workers={self._options.min_workers}, and only {there} were "
            f"there for {waited_s:.0f} s",
            do="start the others, or ask for fewer workers",
            kind=ExchangeError,
        )
        if self._lacks:
            position = self._roll.position if self._roll is not None else self._state.progress()
            raise ExchangeError(
                "go on with the run",
                because=f"it is at version {position.version}, digest {position.digest}; this "
                "worker cannot get there by what lies in the store, and no worker that was there "
                f"came for {waited_s:.0f} s",
                do="start one of them again, with --resume; or start all from the same seed or "
                "checkpoint, with another name as run",
            )
        # Anything else is a slow round of others, which this worker waits for.

    def _check_superseded(self, roll: View) -> None:
        mine = identity_of(self.name)
        check(
            all(identity_of(name) != mine or name <= self.name for name in roll.names),
            f"take part as {mine!r}",
            because="another process that was started later has this name, too",
            do="end one of them, or give each worker a name of its own",
            kind=MismatchError,
        )

    def _enter(self, roll: View, began_s: float) -> RoundPlan:
        before, changed = self._entered, roll.changes(self._entered)
        lost_s, was = time.monotonic() - began_s, () if before is None else before.names
        note_who_came_and_went(self._note, self.name, roll.names, was, lost_s)
        self._entered, self.names = roll, roll.names
        self.rank = roll.names.index(self.name)
        if changed or self.group is None:
            self._close_group()
            self.group = BucketGroup(self._objects, self.names, self.rank, self._timeouts)
        self.group.roll = roll.number
        self.group.forget_call(roll.number)
        state = roll.next_state
        if state.writer == self.name and state.roll == roll.number:
            work = self._wrote(self._state.capture(), state, roll.state)
            self._writing = self._thread.start(work)
        return RoundPlan(
            phase=Phase(roll.phase),
            changed=changed,
            joins=self.name in roll.new,
            step=roll.position.step,
            names=roll.names,
            dealt=roll.position.dealt,
        )

    def _end(self, roll: View) -> Go | Over:
        check(
            not self._lacks,
            "end with the others",
            because=f"the run is over, at version {roll.position.version}, and this worker cannot "
            "get there by what lies in the store",
            do="take the model that another worker wrote; for another run pass another name",
            kind=ExchangeError,
        )
        self._has_ended = True
        plan = RoundPlan(
            phase=Phase.DONE,
            changed=True,
            joins=False,
            step=roll.position.step,
            names=(self.name,),
            dealt=roll.position.dealt,
        )
        entered = self._entered
        if entered is not None and entered.number == roll.number - 1 and self._state.fully_synced():
            # It has gone all the way with the others, and has nothing left to drop.
            names, dealt = entered.names, entered.position.dealt
            return Go(replace(plan, phase=Phase.LAST, changed=False, names=names, dealt=dealt))
        self._close_group()
        self.names, self.rank = tuple(plan.names), 0
        return Over(plan)

    def _wait_for_snapshot(self, roll: View) -> bool:
        """Wait for the snapshot that was being written for this worker when the run ended."""
        until_s = self._until_s()
        while self.name in roll.lacking and time.monotonic() < until_s:
            if self._run(self._history.has_come(roll)):
                return True
            if not self._history.may_come(roll):
                break
            self._check_asked_to_leave()
            time.sleep(_LONGEST_PAUSE_S)
        return False

    # -- becoming equal ----------------------------------------------------------------------------

    def _get_to(self, roll: View | None) -> Steps[bool]:
        """Get to where `roll` is, if anything leads there."""
        if roll is None or self._history.is_at(roll.position):
            self._lacks = False
            return True
        began_s = time.monotonic()
        here = self._state.progress()
        if here.version > roll.position.version and not self._lacks and not roll.is_over:
            # From a checkpoint after the last roll: the next one says whether that is the run's.
            return True
        how = yield from self._history.lead_to(roll)
        if not how:
            if not self._lacks:
                version = roll.position.version
                why = f"it has to wait for a snapshot: nothing leads to version {version}"
                self._note("refused", why=why)
            self._lacks = True
            return False
        self._lacks = False
        why = f"{how} up to version {roll.position.version}"
        self._note("healed", why=why, lost_s=time.monotonic() - began_s)
        return True

    # -- snapshots ---------------------------------------------------------------------------------

    async def _wrote(self, snapshot: Snapshot, state: NewestState, before: NewestState) -> None:
        objects, timeout_s = self._objects, self._options.give_up_s
        parts = snapshot_parts(snapshot)
        while True:
            try:
                await objects.put_state(parts, state, timeout_s)
                break
            except ThinwireError as error:
                self._note("unsaved", why=f"a snapshot of version {state.version}: {error}")
                await asyncio.sleep(self._timeouts.late())
        self._written = state
        if before.version < 0:
            return
        try:
            await objects.delete_states(time.monotonic() + timeout_s)
            oldest = min(before.roll, state.roll - KEPT_ROLLS)
            await objects.delete_messages(oldest, time.monotonic() + timeout_s)
        except ThinwireError as error:
            _LOG.warning("old objects stay where they are: %s", error)

    # -- after a round -----------------------------------------------------------------------------

    def log_round(self, record: RoundRecord) -> None:
        """Remember by which messages the run came to its version, and say if that was its end."""
        group, before, facts = self.group, self._entered, record.facts
        assert group is not None
        assert before is not None
        self._history.rounds[record.version] = LoggedRound(
            version=record.version,
            place=group.place_of(record.messages),
            nbytes=sum(message.nbytes for message in record.messages),
            facts=facts,
        )
        for rank, kind in facts["kinds"].items():
            if rank in facts["flaws"]:
                who = (identity_of(self.names[rank]),)
                self._note("left out", who=who, why=facts["flaws"][rank])
            elif rank in facts["clipped"]:
                why = f"{kind}: scaled to {facts['clipped'][rank]:.2g} of its length"
                self._note("clipped", who=(identity_of(self.names[rank]),), why=why)
        self._note("committed")
        here = self._state.progress()
        self._history.digests[here.version] = here.digest
        if here.over:
            roll = last_roll(before, here, list(self._history.rounds.values()))
            if not self._run(self._objects.put_roll(roll, self._until_s())):
                self.may_end = False
                self._note("late", why="the others have gone on from its last round without it")

    def report(self, metrics: WorkerMetrics) -> None:
        """Say it before the next roll."""
        self._metrics = metrics

    # -- notes -------------------------------------------------------------------------------------

    def _note(self, kind: Any, **fields: Any) -> None:
        self._events.note(kind, round=self._state.progress(wait=False).version, **fields)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the run; what was written stays."""
        self._close_group()
        here = self._state.progress(wait=False)
        try:
            if here.over and self._writing and self._entered and self._entered.lacking:
                # Another worker waits for the snapshot that this one writes.
                until_s = self._until_s()
                while not concurrent.futures.wait([self._writing], timeout=_LOOK_S).done:
                    if self._asked_to_leave() or time.monotonic() > until_s:
                        break
            elif not here.over and self._has_called:
                call = WorkerReport(
                    name=self.name, phase=Phase.ROUND.value, position=here, leaves=True
                )
                until_s = time.monotonic() + self._timeouts.floor_s
                self._thread.run(self._objects.put_call(self._next_number(), call, until_s))
        except ThinwireError as error:
            _LOG.info("the others will wait for this worker: %s", error)
        finally:
            self._thread.close()

    def _close_group(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None

    def _until_s(self) -> float:
        return time.monotonic() + self._options.give_up_s


class _Meeting:
    """What is known while a worker waits for a roll.

    Args:
        turn_s: after how long a wait this worker writes the roll.
        listing_s: after how long it looks for workers that it does not know.
    """

    def __init__(self, *, turn_s: float, listing_s: float) -> None:
        self.turn_s, self.listing_s, self.last_arrival_s = turn_s, listing_s, 0.0
        self.calls: dict[str, WorkerReport] = {}
        self._began_s = time.monotonic()

    @property
    def waited_s(self) -> float:
        """For how long, less the time in which the store did not answer: no call could come."""
        return time.monotonic() - self._began_s

    async def timed(self, request: Coroutine[Any, Any, T]) -> T:
        """The answer to `request`, which may have taken too long."""
        asked_s = time.monotonic()
        answer = await request
        silent_s = time.monotonic() - asked_s
        self._began_s += silent_s if silent_s > _SILENCE_S else 0.0
        return answer
