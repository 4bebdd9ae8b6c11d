"""Who takes part in a round: reports of the workers, and the roll that follows from them.

A run is a sequence of rolls, numbered from 1. Roll n lists the workers of the rounds after it and
the version of the outer parameters that they start from. The first worker to write a roll wins, and
no roll is ever deleted: so there is one run, however long a worker is cut off from it. These are
pure functions: no store, no clock, no network.
"""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec

from thinwire.membership import Phase, Progress

JOIN, LAST = Phase.JOIN.value, Phase.LAST.value
_PHASES = (JOIN, Phase.ROUND.value, LAST)
T = TypeVar("T")


def read_as(kind: type[T], text: str | bytes) -> T:
    """Parse JSON as a typed message.

    Raises:
        ValueError: the text is no such message.

    >>> read_as(list[int], "[1, 2]")
    [1, 2]
    """
    try:
        # Not `msgspec.json.decode`: earlier versions wrote NaN, which it refuses.
        return msgspec.convert(json.loads(text), kind, str_keys=True)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def text_of(message: Any) -> str:
    """Serialize a typed message as JSON.

    >>> text_of([1, 2])
    '[1, 2]'
    """
    return json.dumps(msgspec.to_builtins(message))


def identity_of(name: str) -> str:
    """The identity in a worker's name.

    >>> identity_of("a:b:1")
    'a:b'
    """
    return name.rpartition(":")[0]


class NewestState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The newest complete snapshot of the run.

    Args:
        version: version of the outer parameters in it; -1 if there is no snapshot.
        roll: number of the roll that had this version.
        writer: name of the worker that wrote it.
    """

    version: int = -1
    roll: int = 0
    writer: str = ""


_NO_STATE = NewestState()


class LoggedRound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An outer step and the place of its messages: enough to replay it.

    Args:
        version: version of the outer parameters after it.
        place: prefix of the messages' names.
        nbytes: size of all its messages.
        facts: facts of its `RoundRecord`, for each rank of a worker; with `uncounted` ranks in
            place of the names that counted, so that reports do not grow with K.
    """

    version: int
    place: str
    nbytes: int
    facts: tuple[Mapping[str, Any], ...]


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's report before a roll.

    Args:
        name: the worker's identity and the number of its process.
        phase: "join", "round" or "last".
        position: outer step, inner step and digest of its state.
        lacks: whether it cannot reach the state of the last roll and needs a snapshot.
        leaves: whether it leaves the run; its outer steps count if others can replay them.
        round_s: the usual length of a round; None before one was measured.
        settled: whether the outer parameters have all inner steps, so that none need be exchanged.
        state: the newest snapshot that it wrote.
        rounds: outer steps since the last roll, which lead to `position`.

    >>> position = Progress(version=3, step=30, digest="ab")
    >>> call = WorkerReport(name="a:1", phase="round", position=position)
    >>> read_as(WorkerReport, text_of(call)) == call
    True
    """

    name: str
    phase: Annotated[str, msgspec.Meta(pattern=r"^(join|round|last)\Z")]
    position: Progress
    lacks: bool = False
    leaves: bool = False
    round_s: float | None = None
    settled: bool = False
    state: NewestState = _NO_STATE
    rounds: tuple[LoggedRound, ...] = ()


class View(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who takes part from now on.

    Args:
        number: the roll's number, from 1.
        names: the workers' names, in rank order.
        phase: "join", "round", "last", or "done": the run is over, and no worker takes part now.
        position: the run's position; `dealt` counts data shares handed out before this roll.
        new: workers that have just joined and have nothing to contribute yet.
        behind: workers that first have to replay the latest outer steps.
        lacking: workers that wait for a snapshot and do not take part.
        rounds: outer steps since the previous roll.
        state: the newest snapshot.
        next_state: the snapshot that is being written, of this roll's version or an earlier one;
            its writer is "" while none is needed.
        log_nbytes: size of all messages since the newest snapshot.
        round_s: the usual length of a round, for workers that have measured none.

    >>> roll = View(number=1, names=("a:1",), phase="join", position=Progress(
    ...     version=0, step=0, digest="ab"))
    >>> read_as(View, text_of(roll)) == roll
    True
    """

    number: int
    names: tuple[str, ...]
    phase: str
    position: Progress
    new: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    rounds: tuple[LoggedRound, ...] = ()
    state: NewestState = _NO_STATE
    next_state: NewestState = _NO_STATE
    log_nbytes: int = 0
    round_s: float | None = None

    @property
    def is_over(self) -> bool:
        """True if this roll ends the run."""
        return self.phase == Phase.DONE.value

    def changes(self, before: "View | None") -> bool:
        """True if this roll cancels rounds under way since the roll `before`."""
        if before is None or before.number != self.number - 1:
            return True
        return before.names != self.names or bool(self.behind)


def latest_calls(calls: Sequence[WorkerReport]) -> list[WorkerReport]:
    """One report per identity: that of its last process, if a worker was restarted.

    >>> at = Progress(version=0, step=0, digest="ab")
    >>> names = ("a:1", "a:2", "b:1")
    >>> calls = [WorkerReport(name=name, phase="join", position=at) for name in names]
    >>> [call.name for call in latest_calls(calls)]
    ['a:2', 'b:1']
    """
    latest: dict[str, WorkerReport] = {}
    for call in sorted(calls, key=lambda call: call.name):
        latest[identity_of(call.name)] = call
    return list(latest.values())


def next_roll(
    before: View | None,
    calls: Sequence[WorkerReport],
    *,
    me: str,
    min_workers: int,
    largest_log: int,
) -> View | None:
    """The roll after `before`, computed by worker `me`; None if it must not write one.

    The run goes on from the state with the most outer steps; among equals, from the most common
    one. A worker that is behind may write the roll, too, if a report lists the outer steps that
    lead there: the workers that took them may be dead, or have left.

    Args:
        before: the previous roll; None before the first.
        calls: one report per identity.
        me: name of this worker.
        min_workers: no roll with fewer workers; those that wait for a snapshot count.
        largest_log: bytes of messages since the newest snapshot above which another one is due.
    """
    there = [call for call in calls if not call.leaves]
    fit = _fit(before, [call for call in calls if not call.lacks])
    mine = next((call.position for call in fit if call.name == me), None)
    # Workers that wait for a snapshot count: without a roll there would never be one.
    if mine is None or len(there) < min_workers:
        return None
    best = _furthest(fit, mine)
    at, known = best.position, best.rounds
    passed = {round.version - 1 for round in known}
    if not is_at(mine, at) and mine.version not in passed:
        return None
    members = [c for c in fit if is_at(c.position, at) or c.position.version in passed]
    members = sorted((c for c in members if not c.leaves), key=lambda call: call.name)
    lacking = tuple(sorted({call.name for call in there} - {call.name for call in members}))
    # Workers about to end do not wait for others to begin.
    phase = max((call.phase for call in members), key=_PHASES.index)
    concerned = [call for call in members if call.phase == phase]
    step = max(at.step if best.leaves else 0, *(call.position.step for call in concerned))
    if phase == LAST and before is not None:
        is_done = all(call.settled for call in concerned)
        # A worker that cannot replay to the end gets a snapshot first.
        if is_done and set(lacking) <= set(before.lacking):
            return last_roll(before, replace(at, step=step), known)
    states = [call.state for call in calls] + ([before.state] if before else [])
    state = max(states, key=lambda s: (s.version, s.roll, s.writer))
    log_nbytes = _log_nbytes(before, state, known)
    if before is not None and len(known) < at.version - before.position.version:
        # From a checkpoint: nothing in the store leads there.
        log_nbytes += largest_log + 1
    measured = [call.round_s for call in members if call.round_s is not None]
    roll = View(
        number=1 if before is None else before.number + 1,
        names=tuple(call.name for call in members),
        phase=phase,
        position=replace(at, step=step, dealt=_dealt(before, fit), over=False),
        new=tuple(c.name for c in members if c.phase == JOIN and phase != JOIN),
        behind=tuple(c.name for c in members if c.position.version < at.version),
        lacking=lacking,
        rounds=known,
        state=state,
        log_nbytes=log_nbytes,
        round_s=statistics.median(measured) if measured else before and before.round_s,
    )
    return msgspec.structs.replace(roll, next_state=_next_state(roll, before, largest_log))


def last_roll(before: View, position: Progress, rounds: Sequence[LoggedRound]) -> View:
    """The roll that ends a run, after the outer steps `rounds`.

    Args:
        before: the last roll.
        position: the run's final position.
        rounds: the outer steps since `before`.
    """
    return msgspec.structs.replace(
        before,
        number=before.number + 1,
        names=(),
        phase=Phase.DONE.value,
        new=(),
        behind=(),
        position=replace(position, dealt=_dealt(before, ()), over=True),
        rounds=tuple(rounds),
        log_nbytes=_log_nbytes(before, before.state, rounds),
    )


def is_at(a: Progress, b: Progress) -> bool:
    """True if both have the same version and digest."""
    return (a.version, a.digest) == (b.version, b.digest)


def is_since(position: Progress, roll: View) -> bool:
    """True if outer steps since `roll` led to `position`: each roll deals new data shares.

    A checkpoint remembers the shares, too. Outer steps that follow an earlier roll and are not in
    `roll` did not count for the workers that wrote it.
    """
    return position.version > roll.position.version and position.dealt == _dealt(roll, ())


def _fit(before: View | None, calls: Sequence[WorkerReport]) -> Sequence[WorkerReport]:
    """Reports of workers that can continue the run."""
    if before is None:
        return calls
    fit = [c for c in calls if is_at(c.position, before.position) or is_since(c.position, before)]
    # If none can, workers that have taken more outer steps since an earlier roll.
    return fit or [c for c in calls if c.position.version > before.position.version]


def _furthest(fit: Sequence[WorkerReport], mine: Progress) -> WorkerReport:
    """A report with the most outer steps; among those, one with the most common digest."""
    furthest = max(call.position.version for call in fit)
    ahead = [call for call in fit if call.position.version == furthest]
    counts = Counter(call.position.digest for call in ahead)
    return max(
        ahead,
        key=lambda c: (counts[c.position.digest], is_at(c.position, mine), len(c.rounds)),
    )


def _dealt(before: View | None, fit: Sequence[WorkerReport]) -> int:
    """Number of data shares handed out before this roll; its own come next."""
    if before is None:
        return max(call.position.dealt for call in fit)
    return before.position.dealt + len(before.names)


def leading_to(
    version: int, rounds: Sequence[LoggedRound], before: View | None
) -> tuple[LoggedRound, ...]:
    """The `rounds` that lead to `version` without a gap, oldest first."""
    least = 0 if before is None else before.position.version
    by_version = {round.version: round for round in rounds}
    found: list[LoggedRound] = []
    while version > least and version in by_version:
        found.append(by_version[version])
        version -= 1
    return tuple(found[::-1])


def _log_nbytes(before: View | None, state: NewestState, rounds: Sequence[LoggedRound]) -> int:
    new = sum(round.nbytes for round in rounds)
    if before is None or state.version > before.state.version:
        return new
    return before.log_nbytes + new


def _next_state(roll: View, before: View | None, largest_log: int) -> NewestState:
    """The snapshot to write next: one at a time, each time by another worker."""
    if roll.state.version == roll.position.version:
        return _NO_STATE
    coming = _NO_STATE if before is None else before.next_state
    if coming.writer in roll.names and coming.version > roll.state.version:
        return coming
    if not roll.lacking and roll.log_nbytes <= largest_log:
        return _NO_STATE
    behind = set(roll.behind)
    able = [name for name in roll.names if name not in behind] or roll.names
    return NewestState(
        version=roll.position.version, roll=roll.number, writer=able[roll.number % len(able)]
    )
