"""The members of a run: which workers may join, which are still there, and what they are told.

A run is one sequence of outer steps. A worker that was stopped or cut off for a long time still has
an older version of it, and from there it would make a second run. So every round is begun at the
registry, by each of its workers, and the rule is:

    The version that the registry knows may go on, however few workers have it.
    An older one may not, unless a majority of the last round's workers have nothing newer
    (all of them start again from checkpoints), the run is not over, and it is not version 0.

No network here: `registry_server.py` carries requests to this and answers back.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from thinwire.contributions import ContributionDeduplicator
from thinwire.elastic.quorum import Member, identity_of
from thinwire.handshake import first_difference
from thinwire.membership import Progress, WorkerMetrics

_MOST_UNREAD = 20
# A worker that is refused asks again and again; it is reported once in this time.
_REPORT_AGAIN_S = 60.0
_FORK = (
    "to train on from this worker's state all the same, start the lighthouse anew, "
    "with thinwire lighthouse --allow-fork"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRefusal:
    """Why a worker may not take part.

    Args:
        status: of HTTP; after 409 it may once the other worker is gone.
        reason: for the worker itself.
        report: the same reason as told to the other workers.
        do: what the worker can do about it.
        retry_s: seconds after which the answer may be another one.
    """

    status: int
    reason: str
    report: str
    do: str
    retry_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberStatus:
    """A worker as its last heartbeat left it.

    Args:
        member: what it said of itself.
        metrics: what it measured.
        heartbeat_age_s: since that heartbeat.
    """

    member: Member
    metrics: WorkerMetrics
    heartbeat_age_s: float


@dataclass  # state: replaced with every heartbeat
class _RegisteredMember:
    member: Member
    last_seen_s: float
    metrics: WorkerMetrics = field(default_factory=WorkerMetrics)
    unread_refusals: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_UNREAD))


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRefusal:
    """Why a round does not carry the run on.

    Args:
        reason: for the worker.
        do: what can be done about it.
        is_final: whether waiting does not help.
    """

    reason: str
    do: str
    is_final: bool = False


class KnownRun:
    """The run that workers have told of; it stays when the last of them has left.

    Args:
        allow_fork: whether any version may go on.

    Attributes:
        description: of its model, method and versions.
        position: the highest version that a worker said, with its digest once that is known, all
            shares that were dealt, and whether the run is over.
        team: identities of the workers of the last round that was begun.

    >>> run = KnownRun()
    >>> run.learn(Progress(version=7, step=70, digest="ab", over=True))
    >>> older = Progress(version=3, step=30, digest="cd")
    >>> run.begin_round(older, ["c:1"], there=["c"]).reason
    'the run is over: version 7, digest ab'
    """

    def __init__(self, *, allow_fork: bool = False) -> None:
        self._allow_fork = allow_fork
        self.description: Mapping[str, str] = {}
        self.position = Progress(version=0, step=0, digest="")
        self.team: frozenset[str] = frozenset()
        self._begun: tuple[frozenset[str], int, int] | None = None

    def learn(self, position: Progress) -> None:
        """Note how far a worker says that it has come."""
        known, dealt = self.position, max(self.position.dealt, position.dealt)
        is_more = (position.version, position.digest != "") > (known.version, known.digest != "")
        # Inner steps, too, are those at which it ended: others may have fewer at this version.
        is_its_end = position.over and _same(position, known)
        self.position = replace(position if is_more or is_its_end else known, dealt=dealt)

    def begin_round(
        self, position: Progress, names: Collection[str], *, there: Collection[str]
    ) -> RoundRefusal | None:
        """Note that a round is begun, or say why it must not; each of its workers asks.

        Args:
            position: that it is begun from; the shares from `position.dealt` on are its workers'.
            names: of its workers.
            there: identities of those of them that the registry sees and that have nothing newer.
        """
        round, known = (frozenset(names), position.version, position.dealt), self.position
        if round == self._begun:
            return None  # another of its workers asked before
        has_it = position.version > known.version or _same(position, known)
        is_majority = 2 * len(self.team.intersection(there)) > len(self.team)
        starts_again = is_majority and not known.over and position.version > 0
        # At the beginning of a run no worker has anything to lose.
        if not (has_it or known.version == 0 or self._allow_fork or starts_again):
            return self._refusal(position)
        if position.dealt < self.position.dealt:
            return RoundRefusal(
                reason=f"data shares up to {self.position.dealt} were dealt meanwhile",
                do="nothing: the round is begun again",
            )
        self._begun, self.team = round, frozenset(map(identity_of, names))
        self.position = replace(position, dealt=position.dealt + len(names), over=False)
        return None

    def _refusal(self, position: Progress) -> RoundRefusal:
        known, had_it = self.position, " ".join(sorted(self.team)) or "other workers"
        run = f"version {known.version}, digest {known.digest}"
        if known.over:
            return RoundRefusal(
                reason=f"the run is over: {run}",
                do=f"take the model that {had_it} wrote; for another run start another lighthouse; "
                f"{_FORK}",
                is_final=True,
            )
        return RoundRefusal(
            reason=f"the run is at {run}, this worker has version {position.version}, digest "
            f"{position.digest}, and no worker that has that of the run is there",
            do=f"start these again, with --resume: {had_it}; {_FORK}",
        )


class MemberRegistry:
    """The workers that are there, by identity; not safe from several threads.

    The description of the first workers is the run's. It is forgotten with the last of them if the
    run has taken no outer step. Until then, a worker whose state has taken outer steps displaces
    workers of another description: after a restart of the registry, the first to join may be the
    wrong one.

    Args:
        expiry_s: without a heartbeat, after which a worker is gone.
        allow_fork: whether a round may begin from an older version than the run's.
        clock: seconds, of any origin.

    Attributes:
        run: what is known of it.
        contributions: which members' were rejected or clipped, as members tell it.
        refusals: how many there were; the same one counts once a minute.
    """

    def __init__(
        self,
        *,
        expiry_s: float,
        allow_fork: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.expiry_s = expiry_s
        self.run = KnownRun(allow_fork=allow_fork)
        self.contributions = ContributionDeduplicator()
        self.refusals = 0
        self._allow_fork, self._clock = allow_fork, clock
        self._entries: dict[str, _RegisteredMember] = {}
        self._reported: dict[tuple[str, ...], float] = {}
        self._log: list[str] = []

    def join(self, member: Member, description: Mapping[str, str]) -> JoinRefusal | None:
        """Add `member`, or say why not.

        Args:
            member: the worker.
            description: of its model, method and versions, one text per field.
        """
        holder = self._entries.get(member.identity)
        if holder is not None and holder.member.nonce != member.nonce:
            return self._refuse(member, self._identity_taken(holder))
        has_begun = self.run.position.version > 0
        if not has_begun and not self._entries:
            self.run = KnownRun(allow_fork=self._allow_fork)
            self.run.description = description
        runs = self.run.description
        differs = dict(description) != dict(runs)
        if differs and (has_begun or member.position.version == 0):
            return self._refuse(member, _different_run(description, runs))
        if differs:
            self.run.description = description
            why = _different_run(runs, description).report
            for old in [entry.member for entry in self._entries.values()]:
                self.report(
                    f"{old.identity!r} at {old.address}: {why}, which {member.identity!r} "
                    f"continues{_progress(member)}",
                    (old.identity, old.nonce, "displaced"),
                )
            self._entries.clear()
        if holder is None:
            self._log.append(f"{member.identity} joined from {member.address}{_progress(member)}")
        self._entries[member.identity] = _RegisteredMember(member, self._clock())
        self.run.learn(member.position)
        return None

    def begin_round(self, member: Member, names: Collection[str]) -> RoundRefusal | None:
        """Note that a worker begins a round, or say why it must not.

        Args:
            member: the worker, at the position that the round is begun from.
            names: of all workers of the round.
        """
        position = member.position
        here = (entry.member for entry in self._entries.values() if entry.member.name in names)
        there = [m.identity for m in here if m.position.version <= position.version]
        refusal = self.run.begin_round(position, names, there=there)
        if refusal is not None:
            key = (member.name, "round", str(position.version))
            self.report(f"a round to {member.identity!r}: {refusal.reason}", key)
        return refusal

    def heartbeat(self, member: Member) -> bool:
        """Note that a worker is there and how far it is; False if it has not joined."""
        entry = self._find(member.identity, member.nonce)
        if entry is None:
            return False
        if member.finished and not entry.member.finished:
            self._log.append(f"{member.identity} has finished{_progress(member)}")
        entry.member, entry.last_seen_s = member, self._clock()
        self.run.learn(member.position)
        return True

    def note_metrics(self, identity: str, said: Any) -> None:
        """Keep what a worker that is there measured, and log by name what cannot be true.

        Args:
            identity: of the worker.
            said: by it; any JSON.
        """
        self._entries[identity].metrics, flaws = WorkerMetrics.read(said)
        for flaw in flaws:
            name, _, _ = flaw.partition(" is ")
            if self._is_new((identity, "metrics", name)):
                self._log.append(f"dropped a metric of {identity}: {flaw}")

    def note_contributions(self, identity: str, said: Any) -> None:
        """Count the contributions that were rejected or clipped, and log what cannot be true.

        Args:
            identity: of the worker that is there and tells of them.
            said: by it; any JSON.
        """
        flaw = self.contributions.note(said, among={*self._entries, *self.run.team})
        if flaw and self._is_new((identity, "contributions")):
            self._log.append(f"dropped what {identity} says of contributions: {flaw}")

    def leave(self, identity: str, nonce: str) -> None:
        """Forget a worker, if it is there."""
        entry = self._find(identity, nonce)
        if entry is not None:
            del self._entries[identity]
            self._log.append(f"{identity} left{_progress(entry.member)}")

    def expire(self) -> None:
        """Forget workers that sent no heartbeat for too long."""
        now_s = self._clock()
        for identity, entry in list(self._entries.items()):
            silent_s = now_s - entry.last_seen_s
            if silent_s > self.expiry_s:
                del self._entries[identity]
                gone = f"{identity} is gone{_progress(entry.member)}"
                self._log.append(f"{gone}: no heartbeat for {silent_s:.1f} s")
        self._reported = {
            key: since_s
            for key, since_s in self._reported.items()
            if now_s - since_s < _REPORT_AGAIN_S
        }

    def others(self, identity: str = "") -> list[Member]:
        """All workers that are there but `identity`."""
        return [entry.member for name, entry in self._entries.items() if name != identity]

    def statuses(self) -> list[MemberStatus]:
        """All workers that are there, as their last heartbeats left them."""
        now_s = self._clock()
        return [
            MemberStatus(
                member=entry.member,
                metrics=entry.metrics,
                heartbeat_age_s=now_s - entry.last_seen_s,
            )
            for entry in self._entries.values()
        ]

    def take_refusals(self, identity: str) -> list[str]:
        """The refusals since this member last asked, a line each."""
        unread = self._entries[identity].unread_refusals
        lines = list(unread)
        unread.clear()
        return lines

    def take_log(self) -> list[str]:
        """What happened since the last call, a line each."""
        lines, self._log = self._log, []
        return lines

    def report(self, line: str, key: Iterable[str]) -> None:
        """Tell the lighthouse and all members of a refusal, unless `key` was just reported."""
        if not self._is_new(tuple(key)):
            return
        self.refusals += 1
        self._log.append(f"refused {line}")
        for entry in self._entries.values():
            entry.unread_refusals.append(line)

    def _is_new(self, key: tuple[str, ...]) -> bool:
        return self._reported.setdefault(key, now_s := self._clock()) == now_s

    def _find(self, identity: str, nonce: str) -> _RegisteredMember | None:
        entry = self._entries.get(identity)
        return entry if entry is not None and entry.member.nonce == nonce else None

    def _refuse(self, member: Member, refusal: JoinRefusal) -> JoinRefusal:
        line = f"{member.identity!r} at {member.address}: {refusal.report}"
        self.report(line, (member.identity, member.nonce, str(refusal.status)))
        return refusal

    def _identity_taken(self, holder: _RegisteredMember) -> JoinRefusal:
        silent_s = self._clock() - holder.last_seen_s
        reason = (
            f"identity {holder.member.identity!r} is taken by a worker at "
            f"{holder.member.address}, whose last heartbeat was {silent_s:.1f} s ago"
        )
        return JoinRefusal(
            status=409,
            reason=reason,
            report=reason,
            do="give every worker an identity of its own: --identity NAME, or identity= in Python",
            retry_s=max(0.0, self.expiry_s - silent_s),
        )


def _different_run(description: Mapping[str, str], runs: Mapping[str, str]) -> JoinRefusal:
    name = str(first_difference(description, runs))
    theirs, ours = description.get(name, "none"), runs.get(name, "none")
    return JoinRefusal(
        status=403,
        reason=f"{name} is {theirs} here and {ours} in the run",
        report=f"{name} is {theirs} there and {ours} in the run",
        do="start all workers from the same script, arguments and thinwire version; "
        "another run needs a lighthouse of its own",
    )


def _progress(member: Member) -> str:
    return f" (version {member.position.version}, step {member.position.step})"


def _same(a: Progress, b: Progress) -> bool:
    # A worker of several ranks knows no digest of the version that it has just reached.
    return a.version == b.version and (a.digest == b.digest or "" in (a.digest, b.digest))
