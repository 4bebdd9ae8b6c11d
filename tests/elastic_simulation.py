"""Whole elastic sessions over a store in memory, under one scheduler: faults and invariants.

`Setup.drawn(seed)` draws a run, its store and its faults; `Simulation(setup).run()` plays it and
raises `Violation` if two workers disagree, a data share is read twice, a roll does not follow its
predecessor, or a worker does not end once the faults are over. The same seed replays the same
schedule, callback by callback:

    python tests/elastic_simulation.py --seeds 0:1000 >> results.jsonl
    python tests/elastic_simulation.py --seeds 17 --trace
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, cast

from torch import Tensor

from thinwire.elastic.events import EventLog
from thinwire.elastic.roll import View, read_as
from thinwire.elastic.run_objects import RunObjects
from thinwire.elastic.session import Session
from thinwire.elastic.shard import Shard
from thinwire.elastic.timeouts import ElasticOptions, Timeouts
from thinwire.elastic.worker_ranks import WorkerRanks, end_following, follow
from thinwire.errors import MismatchError, RoundDiscarded, ThinwireError
from thinwire.membership import (
    Phase,
    Progress,
    Replay,
    RoundPlan,
    RoundRecord,
    Snapshot,
)
from thinwire.security.token import Token
from thinwire.transport.base import Post, RoundTag, RunningExchange, to_all
from thinwire.transport.object_store import ObjectStore, now_s
from thinwire.transport.sealed_objects import SealedObjects, bytes_tensor, name_part
from virtual_time import Process, StoreFaults, VirtualLoop, VirtualRanks, VirtualStore

SYNC_EVERY = 2
CALM_S = 2 * 3600.0  # all workers end within this time after the last fault
LOOK_S = 600.0
LATE_UNTIL_S = 600.0  # if each round has some late messages, none may ever count
GIVE_UP_S = 60.0
LONG_S = 60.0  # workers find what has led to the run's position for this long
NO_WAY = "cannot go on with the run", "cannot end with the others", "cannot read roll"
RUN = "run"
TOKEN = Token("a secret of many characters")


class Violation(AssertionError):
    """An invariant was violated."""


# -- random setups ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that hits whichever process slot `slot` has at that time.

    Args:
        kind: "kill", "pause", "twin" (a second process with the same identity), "leave", or "lose":
            an object other than the newest roll vanishes from the store.
        slot: slot of a worker; -1 is all of them.
        rank: the only rank of the worker that is hit; -1 is all of them.
        after_steps: callbacks of the process before the fault; 0 to go by `at_s`.
        at_s: time of the fault, from the beginning.
        for_s: how long a pause lasts, or a killed worker stays away.
        back: how a killed worker comes back: "checkpoint", "empty", "renamed" or "never".
    """

    kind: str
    slot: int
    rank: int = -1
    after_steps: int = 0
    at_s: float = 0.0
    for_s: float = 0.0
    back: str = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run, its store and its faults.

    Args:
        late: share of the messages of each worker's last rank that are sent late.
        late_s: the longest such delay.
    """

    seed: int
    starts_s: Sequence[float]
    rounds: int
    left_over: int
    fragments: int
    kind: str
    min_workers: int
    train_s: float
    spread: float
    floor_s: float
    snapshot_after: float
    checkpoints: float
    store: StoreFaults
    ranks: int = 1
    late: float = 0.0
    late_s: float = 0.0
    is_sealed: bool = False
    faults: Sequence[Fault] = ()
    has_put_if_absent: bool = True

    @property
    def steps(self) -> int:
        return self.rounds * SYNC_EVERY + self.left_over

    @classmethod
    def drawn(cls, seed: int) -> Setup:
        random = Random(seed)
        workers, rounds = random.randint(1, 5), random.randint(1, 4)
        train_s = random.choice((0.5, 5.0, 20.0))
        floor_s = random.choice((5.0, 15.0))
        span_s = rounds * train_s + 20.0
        late = [random.random() < 0.2 for _ in range(workers)]
        starts_s = [random.random() * (span_s if is_late else 3.0) for is_late in late]
        latency_s = random.choice((0.01, 0.1, 0.5))
        store = StoreFaults(latency_s=latency_s)
        if random.random() < 0.5:
            store = StoreFaults(
                latency_s=latency_s,
                slow=random.choice((0.0, 0.02)),
                lost=random.choice((0.0, 0.05)),
                unanswered=random.choice((0.0, 0.05)),
                listing_lag_s=random.choice((0.0, 5.0)),
            )
        if random.random() < 0.1:
            start_s = random.random() * span_s
            store = replace(store, outages=[(start_s, start_s + random.choice((5.0, 30.0, 100.0)))])
        count = random.choice((0, 1, 1, 2, 2, 3, 4))
        faults = [_fault(random, workers, span_s) for _ in range(count)]
        more = Random(seed + 4)
        ranks = more.choice((1, 1, 2, 3))
        faults = [replace(f, rank=more.randrange(-1, ranks)) for f in faults]
        is_sealed = more.random() < 0.5
        if more.random() < 0.2:
            store = replace(store, damaged=more.choice((0.001, 0.02, 0.2 if is_sealed else 0.005)))
        gone = len({f.slot for f in faults if f.kind == "leave" or f.back == "never"})
        gone = workers if any(f.slot < 0 and f.back == "never" for f in faults) else gone
        return cls(
            seed=seed,
            starts_s=starts_s,
            rounds=rounds,
            left_over=random.choice((0, 0, 1)),
            fragments=random.choice((1, 1, 2)),
            kind=random.choice(("gather", "gather", "scatter")),
            min_workers=random.randint(1, max(1, workers - gone)),
            train_s=train_s,
            spread=random.choice((0.0, 0.2, 2.0)),
            floor_s=floor_s,
            snapshot_after=random.choice((0.5, 2.0, 100.0)),
            checkpoints=random.choice((0.3, 1.0)),
            store=store,
            ranks=ranks,
            late=more.choice((0.0, 0.0, 0.0, 0.3)),
            late_s=more.choice((3.0, 20.0, 60.0)),
            is_sealed=is_sealed,
            faults=faults,
        )


def _fault(random: Random, workers: int, span_s: float) -> Fault:
    kind = random.choice(("kill", "kill", "kill", "pause", "pause", "twin", "leave"))
    slot = -1 if kind == "kill" and random.random() < 0.2 else random.randrange(workers)
    backs = ["checkpoint", "checkpoint", "empty", "renamed"]
    return Fault(
        kind=kind,
        slot=slot,
        after_steps=random.choice((0, random.randint(1, 50), random.randint(1, 1000))),
        at_s=random.random() * span_s,
        for_s=random.choice((0.0, 1.0, 10.0, 30.0, 100.0, 300.0)),
        back=random.choice(backs if slot < 0 else [*backs, "never"]),
    )


# -- a worker --------------------------------------------------------------------------------------


@dataclass
class _Pending:
    tag: RoundTag
    running: RunningExchange[list[Tensor]]
    carrying: asyncio.Task[None]
    step: int


@dataclass
class _Fragment:
    name: str
    digest: bytes = b"\0" * 8
    rounds_sent: int = 0
    sent_at_step: int = 0
    applied_at_step: int = 0
    pending: _Pending | None = None


class _Link:
    """One rank's connection to the store."""

    def __init__(self, random: Random, late: float, late_s: float) -> None:
        self._random, self._late, self._late_s = random, late, late_s

    def __repr__(self) -> str:
        return "VirtualStore()"

    def late_s(self, key: str) -> float:
        """The delay with which an object is written."""
        is_late = self._late and "/message/" in key and now_s() < LATE_UNTIL_S
        if not is_late or self._random.random() >= self._late:
            return 0.0
        return self._late_s * self._random.random()


class Worker:
    """What `OuterLoop` and `Elastic` do in one rank of a worker, on a model whose outer parameters
    are hash chains."""

    def __init__(
        self,
        simulation: Simulation,
        process: Process,
        name: str,
        ranks: VirtualRanks,
        checkpoint: Snapshot | None,
    ) -> None:
        self.setup, self.checks = simulation.setup, simulation.checks
        self.simulation, self.process, self.name = simulation, process, name
        self.ranks, self.index = ranks, ranks.index
        self.outcome = ""
        self.version = self.step = self.dealt = 0
        self.ended_at_step = -1
        self.fragments = [_Fragment(f"fragment {n}") for n in range(self.setup.fragments)]
        self.plan: RoundPlan | None = None
        self.session: Session | None = None  # only on the first rank
        self.shard: Any = None
        self.may_end = True
        self.is_asked_to_leave = False
        if checkpoint is not None:
            self.load(checkpoint)

    # -- as LoopState ------------------------------------------------------------------------------

    def progress(self, *, anew: bool = False) -> Progress:
        digests = b"".join(fragment.digest for fragment in self.fragments)
        return Progress(
            version=self.version,
            step=self.step,
            digest=hashlib.sha256(digests).hexdigest()[:16],
            dealt=self.dealt,
            over=self.ended_at_step == self.step and self.fully_synced(),
        )

    def fully_synced(self) -> bool:
        return not any(f.pending or f.sent_at_step < self.step for f in self.fragments)

    def shared_nbytes(self) -> int:
        return 64

    def capture(self) -> Snapshot:
        tracks = [[f.digest.hex(), f.rounds_sent, f.applied_at_step] for f in self.fragments]
        for track, fragment in zip(tracks, self.fragments, strict=True):
            track[1] -= bool(fragment.pending)
        counts = {"version": self.version, "step": self.step, "dealt": self.dealt}
        return Snapshot(facts={**counts, "tracks": tracks}, tensors={})

    def load(self, snapshot: Snapshot) -> None:
        self.cancel_rounds()
        facts = snapshot.facts
        self.version, self.step, self.dealt = (facts[k] for k in ("version", "step", "dealt"))
        for fragment, (digest, sent, step) in zip(self.fragments, facts["tracks"], strict=True):
            fragment.digest, fragment.rounds_sent = bytes.fromhex(digest), sent
            fragment.sent_at_step = fragment.applied_at_step = step

    def replay(self, missed: Replay) -> None:
        for record in missed.records:
            facts = record.facts
            fragment = self.fragments[facts["track"]]
            needed = record.version - 1, facts["before"]
            if (self.version, fragment.digest.hex()) != needed:
                raise MismatchError("replay", because="it does not follow", do="load")
            self.cancel_rounds()
            fragment.digest = _after(fragment.digest, record.messages, facts["left_out"])
            fragment.rounds_sent = facts["round"]
            fragment.sent_at_step = fragment.applied_at_step = facts["sent_at_step"]
            self.version, self.step = record.version, max(self.step, facts["sent_at_step"])
        here, there = self.progress(), missed.until
        if here.version == there.version and here.digest != there.digest:
            raise MismatchError("replay", because="it leads elsewhere", do="load")

    def cancel_rounds(self) -> None:
        for fragment in self.fragments:
            if fragment.pending is not None:
                fragment.rounds_sent -= 1
                fragment.sent_at_step, fragment.pending = fragment.applied_at_step, None
        self.ended_at_step = -1

    # -- as OuterLoop ------------------------------------------------------------------------------

    async def run(self) -> str:
        """Train to the end; returns how it ended."""
        setup, random = self.setup, self.simulation.random
        await self.join()
        plan = await self.begin_round(Phase.JOIN)
        if plan.joins:
            self.send_for(plan.phase)
            self.plan = replace(plan, joins=False)
            await self.finish()
        while self.step < setup.steps or not await self.flush():
            if not self.index:
                self.checks.reads(self)
            # The ranks of a worker train in collectives.
            train_s = setup.train_s * (1 + setup.spread * random.random())
            saves = random.random() < setup.checkpoints
            given = self.is_asked_to_leave, train_s, saves
            is_asked, train_s, saves = (await self.ranks.gather_async(given))[0]
            if is_asked:
                await self.leave()
                return "left"
            await asyncio.sleep(train_s)
            left = setup.steps - self.step
            self.step += min(left, SYNC_EVERY - self.step % SYNC_EVERY)
            if self.step % SYNC_EVERY == 0:
                self.send_for((await self.begin_round(Phase.ROUND)).phase)
                await self.finish()
                if saves:
                    self.simulation.save(self)
        await self.leave()
        self.checks.ends(self)
        return "ended"

    async def join(self) -> None:
        """Open a session, or follow that of the first rank."""
        setup, simulation, ranks = self.setup, self.simulation, self.ranks
        late = setup.late if self.index == setup.ranks - 1 else 0.0
        store = ObjectStore(_Link(simulation.random, late, setup.late_s))
        store._obstore = simulation.store
        timeouts = Timeouts(floor_s=setup.floor_s, patience=0.5, unmeasured_s=20.0, fixed_s=None)
        objects = RunObjects(
            store,
            RUN,
            TOKEN if setup.is_sealed else None,
            index=ranks.index,
            ranks=ranks.size,
            patience_s=GIVE_UP_S,
        )
        until_s = now_s() + GIVE_UP_S
        self.name = await self._agreed(objects.new_process(self.name, until_s), of_all=False)
        self.shard = Shard(
            objects=objects,
            state=self,
            timeouts=timeouts,
            apply=self.act,
            events=EventLog(),
            ranks=cast("WorkerRanks", ranks),
        )
        if ranks.is_first:
            self.session = Session(
                self.shard,
                self.name,
                ElasticOptions(min_workers=setup.min_workers, give_up_s=GIVE_UP_S),
                snapshot_after=setup.snapshot_after,
            )
        ending = f".{ranks.index}" if ranks.index else ""
        await self._agreed(
            objects.check_description({"thinwire": "0"}, f"{self.name}{ending}", until_s)
        )

    async def _agreed(self, work: Coroutine[Any, Any, Any], *, of_all: bool = True) -> Any:
        outcome: Any = None
        if of_all or self.ranks.is_first:
            try:
                outcome = await work
            except ThinwireError as error:
                outcome = error
        else:
            work.close()
        outcomes = await self.ranks.gather_async(outcome)
        for each in outcomes:
            if isinstance(each, ThinwireError):
                raise each
        return outcomes[0]

    async def leave(self) -> None:
        """Leave the run."""
        if self.session is not None:
            await self.session.report_end()
        await self.shard.close()

    async def _answer(self, phase: Phase) -> RoundPlan:
        ranks = cast("WorkerRanks", self.ranks)
        if self.session is None:
            return await follow(ranks, self.shard)
        try:
            plan = await self.session.begin_round(phase)
        except ThinwireError as error:
            await end_following(ranks, error)
            raise
        await end_following(ranks, plan)
        return plan

    async def flush(self) -> bool:
        while True:
            if self.ended_at_step != self.step or not self.may_end:
                await self.begin_round(Phase.LAST)
            assert self.plan is not None
            self.send_for(self.plan.phase)
            await self.finish()
            if self.plan.phase is Phase.ROUND:
                self.simulation.struck["put back"] += 1
                return False
            if self.fully_synced() and self.may_end:
                return True

    async def begin_round(self, phase: Phase) -> RoundPlan:
        plan = await self._answer(phase)
        self.may_end = plan.phase is Phase.DONE
        if self.may_end:
            self.shard.leave_group()
            self.cancel_rounds()
        self.simulation.note(self, f"{phase.value}: {plan}")
        if plan.changed:
            self.cancel_rounds()
        self.plan, self.step = plan, plan.step
        self.dealt = plan.dealt + len(plan.names)
        self.checks.begins(self, plan)
        if plan.phase in (Phase.LAST, Phase.DONE):
            self.ended_at_step = self.step
        if plan.phase is Phase.DONE:
            for fragment in self.fragments:
                fragment.sent_at_step = self.step
        return plan

    async def act(self, answer: Snapshot | Replay) -> None:
        self.simulation.note(self, type(answer).__name__)
        if isinstance(answer, Snapshot):
            self.load(answer)
        else:
            self.replay(answer)

    def send_for(self, phase: Phase) -> None:
        if phase is Phase.DONE:
            return
        for fragment in self.fragments:
            if phase is not Phase.LAST or fragment.sent_at_step < self.step:
                self._send(fragment)

    def _send(self, fragment: _Fragment) -> None:
        assert self.plan is not None
        rank, workers = self.plan.names.index(self.name), len(self.plan.names)
        share = self.plan.dealt + rank
        body = (
            b"nothing."
            if self.plan.joins
            else share.to_bytes(4, "big") + _hash(f"{self.name}.{self.index}")[:4]
        )
        message = bytes_tensor(fragment.digest + body)
        tag = RoundTag(what=fragment.name, round=fragment.rounds_sent + 1, anchor=fragment.digest)
        is_scattered = self.setup.kind == "scatter" and workers > 1
        is_exact = self.setup.is_sealed or not self.setup.store.damaged
        posts = partial(_scatter, is_exact=is_exact) if is_scattered else _gather
        running = RunningExchange(posts(message, rank, workers))
        group = self.shard.group
        carrying = asyncio.create_task(group.exchange(tag, running, group.roll))
        carrying.add_done_callback(lambda task: task.cancelled() or task.exception())
        fragment.pending = _Pending(tag, running, carrying, self.step)
        fragment.rounds_sent, fragment.sent_at_step = tag.round, self.step

    async def finish(self) -> None:
        for fragment in self.fragments:
            if fragment.pending is not None:
                await self._apply(fragment, fragment.pending)

    async def _apply(self, fragment: _Fragment, pending: _Pending) -> None:
        error: ThinwireError | None = None
        try:
            await pending.carrying
        except RoundDiscarded as discarded:
            error = discarded
        found = [each for each in await self.ranks.gather_async(error) if each is not None]
        if found:
            self.simulation.note(self, str(found[0]))
            self.cancel_rounds()
            return
        messages = pending.running.wait()
        assert self.plan is not None
        names, before = self.plan.names, fragment.digest
        left_out = [rank for rank, each in enumerate(messages) if _is_unusable(each, before)]
        every = await self.ranks.gather_async(left_out)
        if any(each != left_out for each in every):
            self.simulation.note(self, f"discard a round in which ranks lack {every}")
            self.cancel_rounds()
            return
        fragment.pending = None
        fragment.applied_at_step, was = pending.step, self.progress()
        fragment.digest = _after(before, messages, left_out)
        self.version += 1
        self.checks.steps(self, pending.tag, before, fragment.digest, was)
        facts = {
            "track": self.fragments.index(fragment),
            "round": pending.tag.round,
            "sent_at_step": pending.step,
            "before": before.hex(),
            "workers": len(names),
            "left_out": left_out,
            "clipped": {},
            "kinds": {},
            "flaws": {},
            "counted": [name for rank, name in enumerate(names) if rank not in left_out],
        }
        self.simulation.note(self, f"step to {self.progress()} without {left_out}")
        record = RoundRecord(version=self.version, facts=facts, messages=messages)
        logged = self.shard.logged(record), self.progress()
        ranks = await self.ranks.gather_async(logged)
        if self.session is not None:
            self.session.log_round(ranks)


def _gather(message: Tensor, rank: int, workers: int) -> Any:
    received = yield to_all(message, rank, workers, allow_missing=workers > 1)
    messages = [{rank: message, **received}[each] for each in range(workers)]
    _check_counts(messages)
    return lambda: messages


def _scatter(message: Tensor, rank: int, workers: int, *, is_exact: bool) -> Any:
    """Every worker hashes what all sent it, and sends the hash to all.

    Another worker hashes what was sent to a lost one.
    """

    def combined(to: int, sent: Mapping[int, Tensor]) -> Tensor:
        there = [sent[sender].numpy().tobytes() for sender in sorted(sent) if sent[sender].numel()]
        is_sound = all(each.endswith(b"to%04d" % to) for each in there)
        _hold(is_sound or not is_exact, f"what was sent to {to} is {there}")
        if not is_sound:
            raise RoundDiscarded("combine a shard", because="one is damaged", do="nothing")
        return bytes_tensor(message[:8].numpy().tobytes() + _hash(b"".join(there)))

    others = [other for other in range(workers) if other != rank]
    shards = {
        other: bytes_tensor(message.numpy().tobytes() + b"to%04d" % other) for other in others
    }
    received = yield Post(shards, dict.fromkeys(others, 22), allow_missing=True)
    # A worker does not send its own shard, which no other worker gets.
    mean = combined(rank, {**received, rank: bytes_tensor(b"mine, to%04d" % rank)})
    post = to_all(mean, rank, workers, allow_missing=True)
    received = yield post._replace(stand_in=combined)
    messages = [{rank: mean, **received}[each] for each in range(workers)]
    if any(not each.numel() for each in messages):
        raise RoundDiscarded("use combined shards", because="one is missing", do="nothing")
    return lambda: messages


def _check_counts(messages: Sequence[Tensor]) -> None:
    if not any(each.numel() for each in messages):
        raise RoundDiscarded("use a round", because="no message came", do="nothing")


def _is_unusable(message: Tensor, anchor: bytes) -> bool:
    raw = message.numpy().tobytes()
    return raw[:8] != anchor or raw[8:] == b"nothing."


def _after(digest: bytes, messages: Sequence[Tensor], left_out: Sequence[int]) -> bytes:
    counted = [m.numpy().tobytes() for rank, m in enumerate(messages) if rank not in left_out]
    return _hash(digest + b"".join(counted))


def _hash(data: bytes | str) -> bytes:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).digest()[:8]


# -- invariants ------------------------------------------------------------------------------------


class Checks:
    """Invariants of every schedule, checked as it runs."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._sealed = SealedObjects(
            ObjectStore(_Link(Random(), 0.0, 0.0)), TOKEN if setup.is_sealed else None, RUN
        )
        self.rolls: list[View] = []
        self._shares: dict[int, str] = {}
        self._steps: dict[tuple[int, int, RoundTag], bytes] = {}
        self._parents: dict[tuple[int, int, str], tuple[int, str]] = {}
        self.ended: dict[str, Progress] = {}

    def wrote(self, key: str, raw: bytes) -> None:
        """An object was written."""
        if not key.startswith(f"{RUN}/roll/"):
            return
        opened = self._sealed.opened(memoryview(raw), key)
        assert opened is not None
        roll, number = read_as(View, opened.numpy().tobytes()[:-4]), int(key.rpartition("/")[2])
        before = self.rolls[-1] if self.rolls else None
        _hold(number == len(self.rolls) + 1, f"roll {number} after {len(self.rolls)}")
        self.rolls.append(roll)
        _hold(roll.number == number, f"roll {roll.number} under the name of {number}")
        identities = {name.partition(":")[0] for name in roll.names}
        _hold(len(identities) == len(roll.names), f"one identity twice in {roll.names}")
        if before is None:
            return
        was, now = before.position, roll.position
        _hold(not before.is_over, f"roll {number} after the end")
        _hold(now.version >= was.version, f"roll {number} goes back from {was} to {now}")
        _hold(now.dealt == was.dealt + len(before.names), f"roll {number} deals {now} after {was}")
        versions = [round.version for round in roll.rounds]
        # A worker back from its checkpoint does not know which rounds led there.
        ends = range(now.version - len(versions) + 1, now.version + 1)
        _hold(versions == list(ends), f"roll {number} tells of {versions} from {was} to {now}")
        for index in range(self._setup.ranks):
            at = now.version, digest_of(now, index)
            while at[0] > was.version:
                at = self._parents[index, *at]
            is_from = at == (was.version, digest_of(was, index))
            _hold(is_from, f"roll {number} does not lead from {was} to {now}")
        if roll.is_over:
            _hold(now.step == self._setup.steps, f"the end is at {now}")

    def is_passed(self, ranks: Sequence[Worker]) -> bool:
        """Whether all ranks of a worker are at one version, through which the run has passed."""
        last = self.rolls[-1].position
        if len({rank.version for rank in ranks}) > 1:
            return False
        for rank in ranks:
            at, here = (last.version, digest_of(last, rank.index)), rank.progress()
            while at[0] > here.version:
                at = self._parents[rank.index, *at]
            if at != (here.version, here.digest):
                return False
        return True

    def begins(self, worker: Worker, plan: RoundPlan) -> None:
        """A worker begins a round, or learns of the end."""
        here, last = worker.progress(), self.rolls[-1]
        entered = [roll for roll in self.rolls if roll.position.dealt == plan.dealt]
        may_be = [last] if plan.phase is Phase.DONE else entered
        may_be += [last] if last.is_over and not plan.changed else []
        _hold(
            any(self._is_at(here, roll.position, worker.index) for roll in may_be),
            f"{worker.name} at {here} begins {plan}",
        )

    def _is_at(self, here: Progress, there: Progress, index: int) -> bool:
        return (here.version, here.digest) == (there.version, digest_of(there, index))

    def reads(self, worker: Worker) -> None:
        """A worker reads its data share."""
        plan = worker.plan
        assert plan is not None
        share = plan.dealt + plan.names.index(worker.name) if worker.name in plan.names else 0
        other = self._shares.get(share)
        _hold(share not in self._shares, f"{worker.name} and {other} both read share {share}")
        self._shares[share] = worker.name

    def steps(
        self, worker: Worker, tag: RoundTag, before: bytes, after: bytes, was: Progress
    ) -> None:
        """A worker takes an outer step."""
        plan, now = worker.plan, worker.progress()
        self._parents[worker.index, now.version, now.digest] = was.version, was.digest
        assert plan is not None
        other = self._steps.setdefault((worker.index, plan.dealt, tag), after)
        # A message lost before its second read forks that reader, whose digest loses the next roll.
        may_fork = any(fault.kind == "lose" for fault in self._setup.faults)
        _hold(
            other == after or may_fork or self._setup.store.damaged > 0,
            f"{worker.name} steps from {before.hex()} to {after.hex()} in {tag} of {plan}, "
            f"another to {other.hex()}",
        )

    def ends(self, worker: Worker) -> None:
        """A worker ends normally."""
        self.ended[f"{worker.name}.{worker.index}"] = here = worker.progress()
        last = self.rolls[-1]
        _hold(last.is_over, f"{worker.name} ends at {here}, and the run has not")
        _hold(
            self._is_at(here, last.position, worker.index),
            f"{worker.name} ends at {here}, the run at {last}",
        )


def digest_of(position: Progress, index: int) -> str:
    """The digest of one rank of a worker, or "" if its ranks differ."""
    pieces = position.digest.split(".")
    return pieces[index] if index < len(pieces) else ""


def _hold(is_so: bool, what: str) -> None:
    if not is_so:
        raise Violation(what)


# -- a schedule ------------------------------------------------------------------------------------


@dataclass
class _Life:
    slot: int
    identity: str
    ranks: Sequence[Worker] = ()
    is_struck: bool = False  # somebody restarts it

    @property
    def outcome(self) -> str:
        """The first informative outcome among its ranks."""
        outcomes = [rank.outcome for rank in self.ranks]
        named = [each for each in outcomes if each and "go on as a worker of" not in each]
        return [*named, *filter(None, outcomes), ""][0] if self.is_done else ""

    @property
    def is_done(self) -> bool:
        """Whether all processes of the worker have ended."""
        return all(rank.process.is_dead for rank in self.ranks)


class Simulation:
    """One schedule.

    Args:
        setup: run, store and faults.
        trace: whether to keep `lines`.
    """

    def __init__(self, setup: Setup, *, trace: bool = False) -> None:
        self.setup, self._trace = setup, trace
        self.random = Random(setup.seed + 1)
        self.loop = VirtualLoop(Random(setup.seed + 2))
        self.loop.set_exception_handler(self._broke)
        self.checks = Checks(setup)
        self.store = VirtualStore(
            self.loop,
            Random(setup.seed + 3),
            setup.store,
            self._wrote,
            has_put_if_absent=setup.has_put_if_absent,
        )
        self.lines: list[str] = []
        self.lives: list[_Life] = []
        self.checkpoints: dict[tuple[str, int], Snapshot] = {}
        self._saving: dict[tuple[str, int], dict[int, Snapshot]] = {}
        self.errors: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self._waiting = 0  # workers yet to start
        self._over = self.loop.create_future()
        self._calm_s = 0.0
        self._faults_left: dict[int, list[Fault]] = {}
        self._names = 0
        self._retries: Counter[int] = Counter()

    def run(self) -> None:
        """Play the schedule.

        Raises:
            Violation: an invariant was violated.
        """
        try:
            for slot, start_s in enumerate(self.setup.starts_s):
                self._start_later(start_s, slot, f"w{slot}")
            for fault in self.setup.faults:
                if not fault.after_steps:
                    self.loop.world.call_later(fault.at_s, self._strike, fault)
                else:
                    slots = range(len(self.setup.starts_s)) if fault.slot < 0 else [fault.slot]
                    self._faults_left.setdefault(slots[0], []).append(fault)
            self.loop.world.call_later(LOOK_S, self._look)
            self.loop.run_until_complete(self._over)
        finally:
            self.store.is_closed = True
            self.struck["damaged read"] += self.store.damaged
            self.loop.bury(rank.process for life in self.lives for rank in life.ranks)
            self.loop.close()

    def note(self, worker: Worker | None, what: str) -> None:
        """Add a line to the trace."""
        if self._trace:
            name = "" if worker is None else worker.process.name
            self.lines.append(f"{self.loop.time():10.2f} {name:8} {what}")

    def save(self, rank: Worker) -> None:
        """Save a rank's part of a checkpoint, which is complete once all ranks have saved."""
        parts = self._saving.setdefault((rank.name, rank.version), {})
        parts[rank.index] = rank.capture()
        if len(parts) == self.setup.ranks:
            identity = rank.name.partition(":")[0]
            self.checkpoints |= {(identity, index): part for index, part in parts.items()}

    def _wrote(self, key: str, raw: bytes) -> None:
        if f"{RUN}/roll/" in key:
            self.note(None, f"{key} {'' if self.setup.is_sealed else raw[:-4].decode()}")
        try:
            self.checks.wrote(key, raw)
        except Violation as error:
            self._end(error)

    # -- processes ---------------------------------------------------------------------------------

    def _start_later(self, seconds: float, slot: int, identity: str) -> None:
        self._waiting += 1
        self.loop.world.call_later(seconds, self._start, slot, identity)

    def _start(self, slot: int, identity: str) -> None:
        self._waiting -= 1
        self._names += 1
        setup, peers = self.setup, list[VirtualRanks]()
        life = _Life(slot, identity)
        life.ranks = [
            Worker(
                self,
                Process(self.loop, f"{identity}#{self._names}.{index}"),
                identity,
                VirtualRanks(self.loop, index, setup.ranks, peers, self.random),
                self.checkpoints.get((identity, index)),
            )
            for index in range(setup.ranks)
        ]
        self.lives.append(life)
        for rank in life.ranks:
            self.note(rank, f"starts at {rank.progress()}")
        if faults := self._faults_left.get(slot):
            fault = faults.pop(0)
            process = life.ranks[max(0, fault.rank) % setup.ranks].process
            process.at_step = fault.after_steps, lambda: self._strike(fault)
        for rank in life.ranks:
            rank.process.start(self._live(life, rank))

    async def _live(self, life: _Life, rank: Worker) -> None:
        try:
            rank.outcome = await rank.run()
        except ThinwireError as error:
            rank.outcome = f"{type(error).__name__}: {error}"
        except Exception as error:
            rank.outcome = repr(error)
            self._end(error)
        self.note(rank, rank.outcome)
        self._exit(life, rank)

    def _exit(self, life: _Life, rank: Worker) -> None:
        """A process ends, with everything that it was doing, whatever its outcome."""
        if rank.process.is_dead:
            return
        rank.process.kill()
        rank.ranks.leave()
        if life.is_done and life.outcome not in ("", "ended", "left"):
            self._failed(life)
        self._look_for_end()

    def _failed(self, life: _Life) -> None:
        """A worker ended with an error: somebody restarts it, unless that is once too often."""
        self.errors[life.outcome[:40]] += 1
        if any(name in life.outcome for name in NO_WAY) and (way := self._way(life, LONG_S)):
            self._end(Violation(f"{life.ranks[0].name}: {life.outcome}, and {way}"))
        if "take part as" in life.outcome or life.is_struck or self._retries[life.slot] >= 5:
            return
        self._retries[life.slot] += 1
        self._calm_s = max(self._calm_s, self.loop.time() + 30.0)
        self._start_later(30.0, life.slot, life.identity)

    def _strike(self, fault: Fault) -> None:
        """Inject a fault."""
        if fault.kind == "lose":
            newest = max((key for key in self.store.objects if "/roll/" in key), default="")
            kinds = (f"{RUN}/roll/", f"{RUN}/message/", f"{RUN}/state/")
            keys = [key for key in self.store.objects if key.startswith(kinds) and key != newest]
            if keys:
                key = self.random.choice(keys)
                self.note(None, f"loses {key}")
                self.struck[fault.kind] += 1
                del self.store.objects[key]
            return
        lives = [life for life in self.lives if fault.slot in (life.slot, -1) and not life.is_done]
        for life in lives:
            ranks = life.ranks if fault.rank < 0 else [life.ranks[fault.rank % len(life.ranks)]]
            self.note(ranks[0], f"{fault}")
            self.struck[fault.kind] += 1
            self._calm_s = max(self._calm_s, self.loop.time() + fault.for_s)
            if fault.kind == "pause":
                for rank in ranks:
                    rank.process.freeze(fault.for_s)
            elif fault.kind == "twin":
                self._start_later(0.0, life.slot, life.identity)
            elif fault.kind == "leave":
                life.ranks[0].is_asked_to_leave = True
            elif not life.is_struck:
                life.is_struck = True
                self._bring_back(life, fault)
                # The worker's launcher ends its other ranks after a while.
                late_s = 20.0 * self.random.random()
                for rank in life.ranks:
                    if rank in ranks:
                        self._exit(life, rank)
                    else:
                        self.loop.world.call_later(late_s, self._exit, life, rank)
        self._look_for_end()

    def _bring_back(self, life: _Life, fault: Fault) -> None:
        if fault.back == "never":
            return
        identity = life.identity
        if fault.back == "renamed":
            identity += "x"
        if fault.back != "checkpoint":
            for index in range(self.setup.ranks):
                self.checkpoints.pop((identity, index), None)
        self._start_later(fault.for_s, life.slot, identity)

    # -- the end -----------------------------------------------------------------------------------

    def _way(self, life: _Life, for_s: float) -> str:
        """What has led a worker to the run's position for `for_s`; "" if nothing does."""
        last, store, size = self.checks.rolls[-1], self.store, self.setup.ranks
        shards = [f".{index}" if size > 1 else "" for index in range(size)]
        now, rolls = self.loop.time(), self.checks.rolls
        rounds = {round.version: round for roll in rolls for round in roll.rounds}

        def is_there(key: str) -> bool:
            return key in store.objects and store.written_s[key] <= now - for_s

        def is_kept(version: int) -> bool:
            round = rounds.get(version)
            if round is None or not round.place:
                return False
            ranks = range(round.facts[0]["workers"])
            return all(is_there(f"{round.place}/{n:05}{shard}") for n in ranks for shard in shards)

        states = {life.ranks[0].version: "its own"} if self.checks.is_passed(life.ranks) else {}
        for state in (state for roll in rolls for state in (roll.state, roll.next_state)):
            base = f"{RUN}/state/{state.version:012}/{name_part(state.writer)}"
            if state.writer and all(is_there(f"{base}{shard}/end") for shard in shards):
                states[state.version] = base
        # Messages in the store do not lead to a state that came from one damaged read.
        is_exact = self.setup.is_sealed or not store.damaged
        for version, base in states.items():
            if (is_exact or version == last.position.version) and all(
                map(is_kept, range(version + 1, last.position.version + 1))
            ):
                return f"version {version} {base} and the rounds after it lead to {last.position}"
        return ""

    def _look_for_end(self) -> None:
        is_over = all(life.is_done for life in self.lives)
        if is_over and not self._waiting:
            outcomes = [life.outcome for life in self.lives]
            # State that only killed workers had is lost if nothing in the store leads there.
            asked = [each for each in self.lives if any(n in each.outcome for n in NO_WAY)]
            is_lost = bool(asked) and not any(self._way(life, 0.0) for life in asked)
            gone = {life.slot for life in self.lives if life.outcome == "left"}
            gone |= {f.slot for f in self.setup.faults if f.back == "never"}
            self.struck["lost"] += "ended" not in outcomes and is_lost
            if "ended" not in outcomes and not is_lost and len(gone) < len(self.setup.starts_s):
                why = [f"{life.ranks[0].name}: {life.outcome}" for life in self.lives]
                self._end(Violation(f"no worker ended: {why}"))
            else:
                self._end(None)

    def _look(self) -> None:
        if self.loop.time() > self._calm_s + CALM_S:
            self._end(Violation("\n".join(["these do not end:", *self._stuck()])))
        else:
            self.loop.world.call_later(LOOK_S, self._look)

    def _stuck(self) -> list[str]:
        alive = (rank for life in self.lives for rank in life.ranks if not rank.process.is_dead)
        return [f"{rank.process.name} at {rank.progress()}" for rank in alive]

    def _broke(self, _: object, context: dict[str, Any]) -> None:
        if not self.loop.is_burying:
            self._end(context.get("exception") or RuntimeError(context["message"]))

    def _end(self, error: BaseException | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)


def play(seed: int, *, trace: bool = False, **changes: Any) -> tuple[Simulation, Exception | None]:
    """Play the schedule of a seed; returns it, and what went wrong."""
    simulation = Simulation(replace(Setup.drawn(seed), **changes), trace=trace)
    gc.disable()  # a schedule is short
    try:
        simulation.run()
    except Exception as error:
        return simulation, error
    finally:
        gc.enable()
    return simulation, None


def main() -> None:
    """Play schedules; print those that fail, and a line of JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", default="0:1000", help="SEED, or FIRST:AFTER_LAST")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    options = parser.parse_args()
    logging.disable()
    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end or int(first) + 1))
    began_s, failures = time.process_time(), dict[int, str]()
    struck, errors = Counter[str](), Counter[str]()
    for seed in seeds:
        simulation, error = play(seed, trace=options.trace)
        errors += simulation.errors
        struck += simulation.struck
        if options.trace:
            print(simulation.setup, *simulation.lines, sep="\n")
        if error is not None:
            failures[seed] = f"{type(error).__name__}: {error}"
            print(f"seed {seed}: {failures[seed]}", file=sys.stderr, flush=True)
    cpu_s = time.process_time() - began_s
    line = {"first": seeds[0], "schedules": len(seeds), "cpu_s": round(cpu_s, 1)}
    line["a_second"] = round(len(seeds) / cpu_s, 1)
    print(json.dumps(line | {"failures": failures, "faults": struck, "errors": errors}))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
