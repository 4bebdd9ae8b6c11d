"""The members of a run: which workers may join, which are still there, and what they are told.

No network here: `registry_server.py` carries requests to this and answers back.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.contributions import ToldContributions
from thinwire.elastic.known_run import KnownRun, RoundRefusal
from thinwire.elastic.quorum import Member
from thinwire.handshake import first_difference
from thinwire.membership import WorkerMetrics

_MOST_UNREAD = 20
# A worker that is refused asks again and again; it is reported once in this time.
_REPORT_AGAIN_S = 60.0


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
        self.contributions = ToldContributions()
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
            for entry in self._entries.values():
                self._displace(entry, member, runs)
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

    def _displace(self, entry: _RegisteredMember, by: Member, theirs: Mapping[str, str]) -> None:
        member, refusal = entry.member, _different_run(theirs, self.run.description)
        self.report(
            f"{member.identity!r} at {member.address}: {refusal.report}, "
            f"which {by.identity!r} continues{_progress(by)}",
            (member.identity, member.nonce, "displaced"),
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
