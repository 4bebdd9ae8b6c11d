"""One worker of a run over an object store, from joining to leaving.

All of it runs on one event loop and waits by the loop's clock: a simulation can run whole sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from thinwire.elastic.alive import FEW, give_signs
from thinwire.elastic.events import Kind
from thinwire.elastic.roll import (
    LoggedRound,
    NewestState,
    View,
    WorkerReport,
    identity_of,
    is_at,
    is_since,
    latest_calls,
    leading_to,
    next_roll,
)
from thinwire.elastic.run_objects import unmarked
from thinwire.elastic.shard import Leg, Shard
from thinwire.elastic.timeouts import ElasticOptions
from thinwire.elastic.worker_ranks import on_all_ranks
from thinwire.errors import ExchangeError, MismatchError, ThinwireError, check
from thinwire.membership import Phase, Progress, RoundPlan, WorkerMetrics
from thinwire.transport.object_store import now_s, together

_LOG = logging.getLogger(__name__)

_PAUSE_S, _LONGEST_PAUSE_S, _GROWTH = 0.05, 1.0, 1.5
_SETTLE_S = 2.0  # without a new worker, before the first roll
_LEAST_TURN_S = 1.0
_SILENCE_S = 0.5  # a request that takes longer was perhaps retried
_AT_ONCE: Final = 16
_OWN_FACTS: Final = ("counted", "clipped", "flaws")  # no replay needs them
_REMEMBERED: Final = 5  # recent waits for a roll; no roll is expected sooner than the shortest


class Session:
    """A worker from joining to leaving, run by its first rank.

    Args:
        shard: this rank's shard.
        name: this worker's identity and the number of its process.
        options: how long to wait, and for how many workers.
        snapshot_after: write a snapshot once messages have this many times the last one's bytes.

    Attributes:
        names: the round's workers, in rank order.
        metrics: measured by this worker; part of its signs of life.
    """

    def __init__(
        self, shard: Shard, name: str, options: ElasticOptions, *, snapshot_after: float
    ) -> None:
        self.shard, self.name, self.names, self.metrics = shard, name, (name,), WorkerMetrics()
        self._objects, self._timeouts, self._ranks = shard.objects, shard.timeouts, shard.ranks
        self._options, self._snapshot_after = options, snapshot_after
        self._roll: View | None = None  # the newest known
        self._read_up_to = 0
        self._rounds: dict[int, LoggedRound] = {}  # by the version that each leads to
        self._digests: dict[int, str] = {}  # of the run, by version
        self._began: dict[int, Progress] = {}  # where rolls began, by data shares dealt with them
        self._passed: dict[int, str] = {}  # this worker's, since it last entered a roll
        self._states: set[NewestState] = set()  # snapshots that rolls name
        self._unusable: set[NewestState] = set()
        self._entered: View | None = None  # the last roll that this worker took part in
        self._here = shard.state.progress()
        self._trained_to = 0  # the inner step at which its training ended
        self._is_stale = True  # the run may have gone on without this worker
        self._lacks = self._has_ended = self._has_told = False
        self._forgetting: asyncio.Task[None] | None = None
        # One long wait, as for a worker that was lost, must not make the next one long.
        self._absent_s = deque([0.0] * _REMEMBERED, maxlen=_REMEMBERED)
        self._living: asyncio.Task[None] | None = None

    async def _on_all(self, command: str, *args: Any) -> list[Any]:
        """Call method `command` of the shards on all ranks of this worker; returns the results."""
        return await on_all_ranks(self._ranks, self.shard, command, *args)

    async def _look(self) -> Progress:
        """Progress of this worker, with digests of its tensors as they are now."""
        self._here = _joined(await self._on_all("progress"))
        return self._here

    # -- before a round ----------------------------------------------------------------------------

    async def begin_round(self, phase: Phase) -> RoundPlan:
        """Agree with the others on the next roll, and catch up if this worker is behind."""
        began_s = now_s()
        self._timeouts.trained(began_s)
        if self._has_ended and self._roll is not None:
            position = self._roll.position
            raise ExchangeError(
                "train further",
                because=f"the run is over, at version {position.version} and inner step "
                f"{position.step}, and this worker was to take more steps",
                do="take the model as it is now; to train on from there, start all workers from it "
                "with another name as run",
            )
        here = await self._look()
        if phase is Phase.LAST:
            self._trained_to = max(self._trained_to, here.step)
        known = self._passed.get(here.version, here.digest)
        if known != here.digest and len(self.names) > 1:
            self._note("refused", why="its outer parameters have changed since its last round")
            self._lacks = True
        while True:
            if self._is_stale:
                self._is_stale = False
                await self._learn_newest()
                await self._get_to(self._roll)
            if self._roll is not None and self._roll.is_over:
                if self._lacks and await self._wait_for_snapshot(self._roll):
                    self._is_stale = True
                    continue
                return self._end(self._roll)
            if phase is Phase.LAST and self._here.step < self._trained_to:
                # The run went on without this worker's last steps, and must not end without them.
                phase = Phase.ROUND
            roll = await self._meet(phase)
            if roll is None:
                self._is_stale = True
                continue
            before = self._roll
            self._learn(roll)
            self._check_superseded(roll)
            if self.name in roll.names and await self._get_to(roll):
                break
            self._is_stale = True
            is_lost = self.name not in (*roll.names, *roll.lacking) and not roll.is_over
            if is_lost and before is not None and self._entered is before:
                self._note("late", why=f"roll {roll.number} was written without this worker")
        self._timeouts.round_began(now_s())
        return await self._enter(roll, began_s)

    async def _meet(self, phase: Phase) -> View | None:
        """Wait for the next roll, and write it if this worker's turn comes first.

        Returns:
            The roll; None if the snapshot that this worker waits for is complete.
        """
        number, pause_s, began_s = self._next_number(), _PAUSE_S, now_s()
        objects = self._objects
        if self._living is None:
            self._living = asyncio.ensure_future(
                give_signs(objects, self.name, self._timeouts.floor_s, lambda: self.metrics)
            )
        call = self._call(phase)
        meeting = _Meeting(self._turn_s(), began_s, call)
        expected_s, absent_s, asked_s = min(self._absent_s, default=0.0), 0.0, 0.0
        put = objects.put_call(number, call, objects.until_s(), is_of_many=self._are_many())
        roll, _ = await together(self._ask(number, meeting), put)
        while roll is None:
            if meeting.has_turn:
                roll = await self._conclude(number, phase, meeting)
                if roll is not None:
                    break
            absent_s = asked_s
            if self._lacks and self._roll is not None and await self._has_come(self._roll):
                return None
            self._note_wait(meeting)
            self._check_waits_in_vain(meeting)
            await asyncio.sleep(max(pause_s, began_s + expected_s - now_s()))
            pause_s, asked_s = min(_LONGEST_PAUSE_S, _GROWTH * pause_s), now_s() - began_s
            roll = await self._ask(number, meeting)
        self._absent_s.append(absent_s)
        return roll

    async def _ask(self, number: int, meeting: _Meeting) -> View | None:
        """Read the roll, if it exists, and the reports, if this worker may have to write it."""
        asked_s = now_s()
        meeting.is_deserted = await self._is_deserted()
        meeting.has_turn = meeting.is_deserted or meeting.waited_s >= meeting.turn_s
        reading = self._read_calls(number, meeting) if meeting.has_turn else together()
        roll, _ = await together(self._objects.roll(number, self._objects.until_s()), reading)
        silent_s = now_s() - asked_s
        meeting.began_s += silent_s if silent_s > _SILENCE_S else 0.0
        return roll

    async def _is_deserted(self) -> bool:
        """True if this worker is not in the last roll, and all workers that are in it are lost."""
        names = () if self._roll is None else self._roll.names
        if not names or identity_of(self.name) in map(identity_of, names):
            return False
        return await self.shard.lost.first_of(names) == {*names}

    async def _read_calls(self, number: int, meeting: _Meeting) -> None:
        until_s, waited_s = self._objects.until_s(), meeting.waited_s
        objects, missing = self._objects, self._missing(meeting)
        # A listing may lag behind: after this long, reports are also asked for by name.
        are_many = self._are_many() and waited_s < self._patience_s()
        # List all now and then: a restarted worker has a new name.
        listed: list[str] = []
        if are_many or waited_s >= meeting.listing_s:
            listed = await objects.call_keys(number, until_s)
            meeting.listing_s = waited_s + (self._turn_length_s() if self._roll else 0.0)
        if self._roll is None and not (listed and self._has_first_turn(number, meeting, listed)):
            meeting.has_turn = False
            return
        known = {objects.call_key(number, name) for name in (self.name, *meeting.calls)}
        polled = () if are_many else (objects.call_key(number, name) for name in missing)
        keys = [k for k in dict.fromkeys([*polled, *listed]) if unmarked(k) not in known]
        said = [meeting.mine]
        while keys:
            told = objects.alike(number, said, missing)
            meeting.calls |= {told[key].name: told[key] for key in keys if key in told}
            keys = [key for key in keys if key not in told]
            said, keys = await objects.calls(keys[:FEW], until_s), keys[FEW:]
            meeting.calls |= {call.name: call for call in said}

    def _has_first_turn(self, number: int, meeting: _Meeting, listed: Sequence[str]) -> bool:
        """True if this worker may write the first roll: nobody has joined for long enough."""
        if len(listed) > meeting.listed:
            meeting.listed, meeting.last_arrival_s = len(listed), meeting.waited_s
        mine = self._objects.call_key(number, self.name)
        turn_s = min(_SETTLE_S, self._timeouts.floor_s)
        turn_s += self._turns_s(sum(key < mine for key in listed))
        meeting.listing_s = meeting.last_arrival_s + turn_s
        return meeting.waited_s >= meeting.listing_s

    def _are_many(self) -> bool:
        return self._roll is not None and len(self._roll.names) > FEW

    def _missing(self, meeting: _Meeting) -> list[str]:
        names = () if self._roll is None else self._roll.names
        return [name for name in names if name not in meeting.calls and name != self.name]

    async def _conclude(self, number: int, phase: Phase, meeting: _Meeting) -> View | None:
        """Write the next roll, once all expected workers reported or the wait was long enough."""
        until_s, waited_s = self._objects.until_s(), meeting.waited_s
        is_late = meeting.is_deserted or waited_s >= self._patience_s()
        lost = await self.shard.lost.first_of(self._missing(meeting))
        names = () if self._roll is None else self._roll.names
        expected = [name for name in names if name not in lost]
        all_calls = [self._call(phase), *meeting.calls.values()]
        calls = latest_calls(all_calls)
        here = {identity_of(call.name) for call in calls}
        # However long a round is, a newcomer begins no other beside workers that are alive.
        may = is_late and self.name in names
        if not may and any(identity_of(name) not in here for name in expected):
            return None
        roll = self._next_roll(calls)
        if roll is None and is_late:
            # Some may have got further and died, and nothing in the store leads there.
            lost = await self.shard.lost.among([c.name for c in all_calls if c.name != self.name])
            roll = self._next_roll(latest_calls([c for c in all_calls if c.name not in lost]))
        if roll is None:
            meeting.listing_s = 0.0  # only a worker that is not known yet can change that
        if roll is None or await self._objects.put_roll(roll, until_s):
            return roll
        return await self._objects.roll(number, until_s)

    def _next_roll(self, calls: Sequence[WorkerReport]) -> View | None:
        return next_roll(
            self._roll,
            calls,
            me=self.name,
            min_workers=self._options.min_workers,
            largest_log=int(self._snapshot_after * self.shard.state.shared_nbytes()),
        )

    def _call(self, phase: Phase) -> WorkerReport:
        return WorkerReport(
            name=self.name,
            phase=phase.value,
            position=self._here,
            lacks=self._lacks,
            round_s=self._timeouts.round_s,
            settled=self.shard.state.fully_synced(),
            state=self.shard.written,
            rounds=leading_to(self._here.version, list(self._rounds.values()), self._roll),
        )

    def _next_number(self) -> int:
        return 1 if self._roll is None else self._roll.number + 1

    def _turn_length_s(self) -> float:
        return max(_LEAST_TURN_S, self._timeouts.late() / 4)

    def _turns_s(self, earlier: int) -> float:
        """Seconds until the turn of a worker after `earlier` others: turns double in size."""
        return earlier.bit_length() * self._turn_length_s()

    def _patience_s(self) -> float:
        """Seconds to wait for the workers of the last roll."""
        late_s = self._timeouts.late()
        if self._roll is None or self.name in self._roll.names:
            # The others give up its exchanges when this worker does.
            return late_s
        # They may still wait in an exchange for a lost worker, and then be further than this one.
        nbytes = max((round.nbytes for round in self._roll.rounds), default=0)
        return late_s + self._timeouts.exchange(nbytes)

    def _turn_s(self) -> float:
        """Seconds after which this worker writes the roll itself; each worker has its own turn."""
        if self._roll is None:
            return 0.0
        identities = [identity_of(name) for name in self._roll.names]
        mine = identity_of(self.name)
        if mine in identities:
            return self._turns_s(identities.index(mine))
        # The others know more than a newcomer does.
        return self._patience_s() + self._turns_s(len(identities))

    def _note_wait(self, meeting: _Meeting) -> None:
        """Note once what this worker waits for before its first round."""
        # By then, lost workers are known to be lost.
        is_long = meeting.waited_s >= 1.5 * self._timeouts.floor_s
        if self._has_told or self._entered is not None or not is_long:
            return
        others, why = list[str](), ""
        if self._roll is not None:
            mine = identity_of(self.name)
            others = [name for name in self._roll.names if identity_of(name) != mine]
            why = "to end the round" if others else ""
        elif (there := max(1, meeting.listed)) < (needed := self._options.min_workers):
            why = f"{needed - there} more of min_workers={needed}"
        if why:
            self._has_told = True
            self._note("waits for", others, why=why)

    def _check_waits_in_vain(self, meeting: _Meeting) -> None:
        waited_s = meeting.waited_s
        if waited_s <= meeting.turn_s + max(self._options.give_up_s, 3 * self._timeouts.late()):
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
        position = self._here if self._roll is None else self._roll.position
        check(
            not self._lacks,
            "go on with the run",
            because=f"it is at version {position.version}, digest {position.digest}; what is "
            "left in the store does not lead this worker there, and no worker with that state "
            f"appeared for {waited_s:.0f} s",
            do="start one of them again, with --resume; or start all from the same seed or "
            "checkpoint, with another name as run",
            kind=ExchangeError,
        )
        # Otherwise the others are in a slow round, and this worker waits for it.

    def _check_superseded(self, roll: View) -> None:
        mine = identity_of(self.name)
        check(
            all(identity_of(name) != mine or name <= self.name for name in roll.names),
            f"take part as {mine!r}",
            because="another process that was started later has this name, too",
            do="end one of them, or give each worker a name of its own",
            kind=MismatchError,
        )

    async def _enter(self, roll: View, began_s: float) -> RoundPlan:
        changed = roll.changes(self._entered)
        was, now = set(() if self._entered is None else self._entered.names), set(roll.names)
        self._entered, self.names = roll, roll.names
        self._passed = {roll.position.version: roll.position.digest}
        if changed:
            self._absent_s.extend([0.0] * _REMEMBERED)
        if not was:
            why = f"as worker {roll.names.index(self.name)} of {len(now)}"
            self._note("joined", now, why=why)
        elif gone := was - now:
            self._note("left", gone, lost_s=now_s() - began_s)
        if was and (arrived := now - was):
            self._note("arrived", arrived)
        await self._on_all("enter", roll, self.name, changed)
        # No round waits for it.
        self._forgetting = asyncio.ensure_future(self._objects.forget_calls())
        return self._plan(roll, changed=changed)

    def _plan(self, roll: View, *, changed: bool) -> RoundPlan:
        return RoundPlan(
            phase=Phase(roll.phase),
            changed=changed,
            joins=self.name in roll.new,
            step=roll.position.step,
            names=self.names,
            dealt=roll.position.dealt,
        )

    def _end(self, roll: View) -> RoundPlan:
        check(
            not self._lacks,
            "end with the others",
            because=f"the run is over, at version {roll.position.version}, and what is left in the "
            "store does not lead this worker there",
            do="take the model that another worker wrote; for another run pass another name",
            kind=ExchangeError,
        )
        self._has_ended = True
        changed = self._entered is None or self._entered.number != roll.number - 1
        if changed:
            self.names = (self.name,)
        return self._plan(roll, changed=changed)

    async def _wait_for_snapshot(self, roll: View) -> bool:
        """Wait for the snapshot that was being written for this worker when the run ended."""
        until_s = self._objects.until_s(self.shard.state.shared_nbytes())
        while self.name in roll.lacking and self._may_come(roll) and now_s() < until_s:
            if await self._has_come(roll):
                return True
            await asyncio.sleep(_LONGEST_PAUSE_S)
        return False

    # -- what is known of the run ------------------------------------------------------------------

    async def _learn_newest(self) -> None:
        """Read the newest roll, written without this worker."""
        known = 0 if self._roll is None else self._roll.number
        if self._roll is None or not self._roll.is_over:
            number = await self._objects.newest_roll(known, self._objects.until_s())
            if number > known:
                self._learn(*await self._rolls([number]))

    def _learn(self, roll: View) -> None:
        """Remember `roll` as the newest, and its rounds."""
        if self._timeouts.round_s is None and roll.round_s is not None:
            self._timeouts.finished_round(roll.round_s)
        is_next = self._read_up_to == roll.number - 1
        self._roll = roll
        self._digests[roll.position.version] = roll.position.digest
        self._began[roll.position.dealt + len(roll.names)] = roll.position
        self._rounds |= {round.version: round for round in roll.rounds}
        if is_next:
            self._read_up_to = roll.number
        # The newest snapshot contains all earlier rounds.
        least = roll.state.version
        self._rounds = {v: r for v, r in self._rounds.items() if v > least}
        states = {*self._states, roll.state, roll.next_state}
        self._states = {state for state in states if state.version >= max(0, least)}
        self._digests = {v: d for v, d in self._digests.items() if v >= least}
        self._began = {shares: at for shares, at in self._began.items() if at.version >= least}

    async def _read_rolls(self) -> None:
        """Read the rolls between the newest snapshot and the newest roll."""
        assert self._roll is not None
        newest, first = self._roll, max(self._roll.state.roll, self._read_up_to) + 1
        for start in range(first, newest.number, _AT_ONCE):
            for roll in await self._rolls(range(start, min(start + _AT_ONCE, newest.number))):
                self._learn(roll)
        self._learn(newest)
        self._read_up_to = newest.number

    async def _rolls(self, numbers: Sequence[int]) -> list[View]:
        until_s = self._objects.until_s()
        found = await together(*(self._objects.roll(n, until_s) for n in numbers))
        gone = [number for number, roll in zip(numbers, found, strict=True) if roll is None]
        check(
            not gone,
            f"read roll {', '.join(map(str, gone))} of the run in {self._objects.store.url}",
            because="it is gone, but later ones exist",
            do="stop the lifecycle rule, or whatever deletes the run's objects; then resume from "
            "checkpoints, with another name as run",
            kind=ExchangeError,
        )
        return found

    # -- catching up -------------------------------------------------------------------------------

    async def _get_to(self, roll: View | None) -> bool:
        """Catch up with `roll` by the missed rounds, or by a snapshot and the rounds after it;
        returns whether this worker can take part from there."""
        if roll is None or is_at(self._here, roll.position):
            self._lacks = False
            return True
        began_s, at, how = now_s(), roll.position, ""
        is_further = self._here.version > at.version and not self._lacks and not roll.is_over
        if is_further and (is_since(self._here, roll) or await self._has_passed(at)):
            # From a checkpoint, or late: the next roll decides.
            return True
        await self._read_rolls()
        if self._here.version < at.version and await self._replay(at):
            how = "by the rounds"
        elif await self._load(roll):
            how = "by a snapshot"
        if how:
            why = f"{how} up to version {at.version}"
            self._note("healed", why=why, lost_s=now_s() - began_s)
        elif not self._lacks:
            why = f"it has to wait for a snapshot: nothing leads to version {at.version}"
            self._note("refused", why=why)
        self._lacks = not how
        return not self._lacks

    async def _has_passed(self, at: Progress) -> bool:
        """True if this worker was at the last roll's position before its latest steps."""
        await self._read_rolls()
        # A checkpoint's data shares tell in which roll it was taken.
        entered = self._began.get(self._here.dealt)
        is_from = entered is not None and is_at(entered, at)
        return is_from or self._passed.get(at.version) == at.digest

    async def _replay(self, target: Progress) -> bool:
        """Replay the outer steps that lead to `target`, if all are known; returns success."""
        version, legs = self._here.version, list[Leg]()
        while version < target.version:
            until = min(v for v in self._digests if v > version)
            rounds = [self._rounds.get(v) for v in range(version + 1, until + 1)]
            known = [round for round in rounds if round is not None]
            if len(known) < len(rounds):
                return False
            there = Progress(version=until, step=target.step, digest=self._digests[until])
            legs.append(Leg(known, there))
            version = until
        await self._on_all("replay", legs)
        await self._look()
        return is_at(self._here, target)

    async def _load(self, roll: View) -> bool:
        """Load the newest usable snapshot, and replay the outer steps after it."""
        # Only an earlier roll names a snapshot whose writer has left since.
        states = self._states - self._unusable
        for newest in sorted(states, key=lambda s: (s.version, s.roll, s.writer), reverse=True):
            if newest.version > roll.position.version:
                continue
            found = await self._on_all("load", newest)
            await self._look()
            if None in found:
                continue
            if all(found) and await self._replay(roll.position):
                return True
            self._unusable.add(newest)
        return False

    async def _has_come(self, roll: View) -> bool:
        """True if the snapshot that `roll` calls for is complete."""
        return self._may_come(roll) and await self._objects.has_state(
            roll.next_state, self._objects.until_s()
        )

    def _may_come(self, roll: View) -> bool:
        """True if `roll` calls for a snapshot that may be usable."""
        return bool(roll.next_state.writer) and roll.next_state not in self._unusable

    # -- after a round -----------------------------------------------------------------------------

    def log_round(self, ranks: Sequence[tuple[LoggedRound, Progress]]) -> None:
        """Remember the messages of the round that was just applied.

        Args:
            ranks: `Shard.logged` and the progress after the round, for each rank of this worker.
        """
        logged = [each for each, _ in ranks]
        self._here = here = _joined([progress for _, progress in ranks])
        self._rounds[here.version] = msgspec.structs.replace(
            logged[0],
            place=logged[0].place if len({each.place for each in logged}) == 1 else "",
            nbytes=sum(each.nbytes for each in logged),
            facts=tuple(
                {name: fact for name, fact in facts.items() if name not in _OWN_FACTS}
                for each in logged
                for facts in each.facts
            ),
        )
        facts = logged[0].facts[0]
        for rank, why in facts["flaws"].items():
            self._note("left out", [self.names[rank]], why=why)
        for rank, factor in facts["clipped"].items():
            why = f"clipped: scaled to {factor:.2g} of its length"
            self._note("clipped", [self.names[rank]], why=why)
        self._note("committed")
        self._passed[here.version] = here.digest

    def _note(self, kind: Kind, names: Iterable[str] = (), **fields: Any) -> None:
        who = tuple(sorted(map(identity_of, names)))
        self.shard.events.note(kind, round=self._here.version, who=who, **fields)

    # -- the end -----------------------------------------------------------------------------------

    async def report_end(self) -> None:
        """Tell the others that this worker leaves; what was written stays."""
        if self._living is not None:
            self._living.cancel()
        until_s = now_s() + self._timeouts.floor_s
        try:
            if self._living is not None:
                await self._objects.put_sign_of_life(self.name, self.metrics, until_s)
            if not self._here.over and not self._has_ended and self._living is not None:
                # Its last outer step may be in no roll yet, and in nobody else's state.
                call = msgspec.structs.replace(self._call(Phase.ROUND), leaves=True)
                await self._objects.put_call(self._next_number(), call, until_s)
        except ThinwireError as error:
            _LOG.info("the others will wait for this worker: %s", error)


def _joined(ranks: Sequence[Progress]) -> Progress:
    """Progress of a worker, from that of its ranks."""
    first = min(ranks, key=lambda each: each.version)
    are_equal = all(each.version == first.version for each in ranks)
    # Ranks of different versions get a digest that no run has.
    return replace(first, digest=".".join(each.digest for each in ranks) if are_equal else "-")


@dataclass
class _Meeting:
    """State of a worker that waits for a roll.

    Args:
        turn_s: wait after which this worker writes the roll.
        began_s: when the wait began.
        mine: this worker's report.
        listing_s: wait after which it lists all reports again, to find unknown workers.
        listed: how many reports the longest listing had, before the first roll.
        last_arrival_s: wait after which that listing last grew.
        has_turn: whether it may write the roll, and so reads the reports.
        is_deserted: whether all the workers that it waits for are lost.
        calls: reports by name.
    """

    turn_s: float
    began_s: float
    mine: WorkerReport
    listing_s: float = 0.0
    listed: int = 0
    last_arrival_s: float = 0.0
    has_turn: bool = False
    is_deserted: bool = False
    calls: dict[str, WorkerReport] = field(default_factory=dict[str, WorkerReport])

    @property
    def waited_s(self) -> float:
        """Seconds of waiting, not counting those in which the store did not answer."""
        return now_s() - self.began_s
