"""What is known of a run over an object store, and how a worker gets to where the run is."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from thinwire.elastic.bucket.roll import LoggedRound, NewestState, View
from thinwire.elastic.bucket.run_objects import RunObjects
from thinwire.elastic.snapshot import unpack
from thinwire.elastic.timeouts import Timeouts
from thinwire.errors import ExchangeError, ThinwireError, check
from thinwire.membership import Answer, Load, Progress, Replay, RoundRecord, SharedState
from thinwire.transport.object_store import together

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_HEADROOM_BYTES: Final = 64 << 20
_AT_ONCE: Final = 16
_JOIN_S: Final = 5.0
_SLOWEST_BYTES_PER_S: Final = 125_000
_MALFORMED: Final = (ThinwireError, KeyError, IndexError, TypeError, ValueError)

Steps: TypeAlias = Generator[Answer, None, T]
"""What the loop has to do, and what came of it."""


class RunHistory:
    """The rolls and rounds since the newest snapshot, as far as this worker has read them.

    Args:
        objects: of the run.
        timeouts: that learn from rolls how long rounds take.
        state: this worker's, for reading.
        run: waits for what asks the store.
        give_up_s: for how long the store is asked.

    Attributes:
        roll: the newest that is known; None before the first.
        rounds: by the version after them.
        digests: of the outer parameters, by their version.
    """

    def __init__(
        self,
        objects: RunObjects,
        timeouts: Timeouts,
        state: SharedState,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
        give_up_s: float,
    ) -> None:
        self.roll: View | None = None
        self.rounds: dict[int, LoggedRound] = {}
        self.digests: dict[int, str] = {}
        self._objects, self._timeouts, self._state = objects, timeouts, state
        self._run, self._give_up_s = run, give_up_s
        self._read_up_to = 0
        self._unusable: set[NewestState] = set()

    def learn_newest(self) -> None:
        """Read what was decided without this worker."""
        known = 0 if self.roll is None else self.roll.number
        if self.roll is None or not self.roll.is_over:
            number = self._run(self._objects.newest_roll(known, self._until_s()))
            if number > known:
                self.learn(*self._rolls([number]))

    def learn(self, roll: View) -> None:
        """Take `roll` for the newest, with the rounds that it tells of."""
        if self._timeouts.round_s is None and roll.round_s is not None:
            self._timeouts.finished_round(roll.round_s)
        is_next = self._read_up_to == roll.number - 1
        self.roll = roll
        self.digests[roll.position.version] = roll.position.digest
        self.rounds |= {round.version: round for round in roll.rounds}
        if is_next:
            self._read_up_to = roll.number
        # What the newest snapshot has need not be taken again.
        least = roll.state.version
        self.rounds = {v: r for v, r in self.rounds.items() if v > least}
        self.digests = {v: d for v, d in self.digests.items() if v >= least}

    def _read_rolls(self) -> None:
        """Read the rolls between the newest snapshot and the newest roll."""
        assert self.roll is not None
        newest, first = self.roll, max(self.roll.state.roll, self._read_up_to) + 1
        for start in range(first, newest.number, _AT_ONCE):
            for roll in self._rolls(range(start, min(start + _AT_ONCE, newest.number))):
                self.learn(roll)
        self.learn(newest)
        self._read_up_to = newest.number

    def _rolls(self, numbers: Sequence[int]) -> list[View]:
        until_s = self._until_s()
        found = self._run(together(*(self._objects.roll(n, until_s) for n in numbers)))
        gone = [number for number, roll in zip(numbers, found, strict=True) if roll is None]
        check(
            not gone,
            f"read roll {', '.join(map(str, gone))} of the run in {self._objects.store.url}",
            because="it is gone, and others after it are there",
            do="end the lifecycle rule, or whatever deletes objects of the run; then go on from "
            "checkpoints, under another name as run",
            kind=ExchangeError,
        )
        return found

    def is_at(self, position: Progress) -> bool:
        """Whether this worker has the outer parameters of `position`."""
        here = self._state.progress()
        return (here.version, here.digest) == (position.version, position.digest)

    def lead_to(self, roll: View) -> Steps[str]:
        """Get to where `roll` is, and say how: by the rounds that were missed, or by a snapshot and
        the rounds after it; empty if nothing leads there."""
        here = self._state.progress()
        self._read_rolls()
        if here.version < roll.position.version and (yield from self._replay(roll.position)):
            return "by the rounds"
        return "by a snapshot" if (yield from self._load(roll)) else ""

    def _replay(self, target: Progress) -> Steps[bool]:
        """Take the outer steps that lead to `target`, as far as they are known."""
        while (version := self._state.progress().version) < target.version:
            until = min(v for v in self.digests if v > version)
            records: list[RoundRecord] = []
            for v in range(version + 1, until + 1):
                record = self._record(self.rounds.get(v))
                if record is None:
                    return False
                records.append(record)
            there = Progress(version=until, step=target.step, digest=self.digests[until])
            try:
                yield Replay(records, there)
            except _MALFORMED as error:
                _LOG.info("the rounds do not follow on this worker's state: %s", error)
                return False
        return self.is_at(target)

    def _record(self, round: LoggedRound | None) -> RoundRecord | None:
        if round is None or not round.place:
            return None
        workers = int(round.facts["workers"])
        # All of them share this worker's link.
        until_s = self._until_s() + round.nbytes / _SLOWEST_BYTES_PER_S
        reading = self._objects.messages(round.place, workers, until_s, nbytes=round.nbytes)
        messages = self._run(reading)
        if messages is None:
            return None
        return RoundRecord(version=round.version, facts=round.facts, messages=messages)

    def _load(self, roll: View) -> Steps[bool]:
        """Take the newest snapshot, and the outer steps after it."""
        largest = 2 * self._state.shared_nbytes() + _HEADROOM_BYTES
        for state in (roll.next_state, roll.state):
            if state in self._unusable or not 0 <= state.version <= roll.position.version:
                continue
            file = self._run(self._objects.state(state, self._give_up_s, largest=largest))
            if file is None:
                continue
            try:
                yield Load(unpack(file))
            except _MALFORMED as error:
                _LOG.warning("the snapshot of version %d cannot be used: %s", state.version, error)
                self._unusable.add(state)
                continue
            if (yield from self._replay(roll.position)):
                return True
            self._unusable.add(state)
        return False

    async def has_come(self, roll: View) -> bool:
        """Whether the snapshot is there that was being written when `roll` was."""
        return self.may_come(roll) and await self._objects.has_state(
            roll.next_state, self._until_s()
        )

    def may_come(self, roll: View) -> bool:
        """Whether a snapshot was being written when `roll` was, that may be usable."""
        return bool(roll.next_state.writer) and roll.next_state not in self._unusable

    def _until_s(self) -> float:
        return time.monotonic() + self._give_up_s


class LoopThread:
    """Runs coroutines in a daemon thread of its own.

    >>> async def one(): return 1
    >>> thread = LoopThread()
    >>> thread.run(one())
    1
    >>> thread.close()
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        serve = partial(_serve, self._loop)
        thread = threading.Thread(target=serve, name="thinwire-store", daemon=True)
        thread.start()
        # Also at the end of the interpreter, which must not find the thread inside a request.
        self._closing = weakref.finalize(self, _end, self._loop, thread)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns, once it has; from any other thread."""
        return self.start(work).result()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin `work`, which goes on beside what this thread does."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what is under way and end the thread."""
        self._closing()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if not thread.is_alive():  # as in a process that was forked
        return
    asyncio.run_coroutine_threadsafe(_cancel_all(), loop).add_done_callback(
        lambda _: loop.call_soon_threadsafe(loop.stop)
    )
    thread.join(_JOIN_S)
    if not thread.is_alive():
        loop.close()
