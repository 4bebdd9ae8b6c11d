"""A worker in an elastic run, from joining to leaving: what its first rank decides for it."""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from thinwire.contributions import CLIPPED
from thinwire.elastic.events import EventLog
from thinwire.elastic.group import RankLink
from thinwire.elastic.heartbeat import Heartbeat, HeartbeatCallbacks
from thinwire.elastic.lighthouse_client import LighthouseClient
from thinwire.elastic.options import ElasticSettings
from thinwire.elastic.peer_policy import PeerPolicy
from thinwire.elastic.quorum import Member, Quorum, elect, identity_of
from thinwire.elastic.rank_session import (
    Action,
    Begin,
    CatchUp,
    Connect,
    End,
    Fail,
    Joined,
    Leave,
    RankSession,
    RankStatus,
    ReplayUpTo,
    Report,
)
from thinwire.elastic.registry_server import RegistryClient
from thinwire.elastic.relay import LoopbackForward
from thinwire.elastic.retry import RetryBudget, with_retry
from thinwire.elastic.worker_ranks import WorkerRanks
from thinwire.errors import ExchangeError, MismatchError, RunStopped, ThinwireError
from thinwire.membership import (
    Answer,
    Phase,
    Progress,
    RoundPlan,
    RoundRecord,
    SharedState,
    WorkerMetrics,
)

T = TypeVar("T")

_PAUSE_S = 0.2
_STILL_THERE_S = 10.0


class ElasticSession:
    """What the first rank of a worker keeps open while the worker takes part, and decides for it.

    Args:
        settings: of the transport.
        state: this rank's, for reading.
        description: of this rank: what must be the same on all workers.
        events: what happens is noted here.
        here: this rank.
        ranks: of this worker.
        asked_to_leave: says so; asked while waiting for the others or the registry, which then ends
            with `RunStopped`.

    Raises:
        ExchangeError: the lighthouse does not answer.
        MismatchError: the registry refuses this worker.
    """

    def __init__(
        self,
        settings: ElasticSettings,
        state: SharedState,
        description: Mapping[str, str],
        events: EventLog,
        here: RankSession,
        ranks: WorkerRanks,
        *,
        asked_to_leave: Callable[[], bool] = lambda: False,
    ) -> None:
        self._asked_to_leave = asked_to_leave
        self._settings, self._state, self._events = settings, state, events
        self._here, self._ranks = here, ranks
        self._connections_failed = self._rounds_begun = 0
        self._caught_up_to = -1
        self._statuses: list[RankStatus] = []
        self._round_began_s: float | None = None
        self._told_s = time.monotonic()
        self._retries = RetryBudget(settings.host, settings.options.give_up_s)
        self._opened = contextlib.ExitStack()
        try:
            self._open(description)
        except BaseException as error:
            self._tell_failure(error)
            self._opened.close()
            here.close()
            raise

    def _open(self, description: Mapping[str, str]) -> None:
        settings, options = self._settings, self._settings.options
        introduced = self._here.introduce(description)
        self._addresses = [address for address, _, _ in introduced]
        # Not this rank's alone: its digest is that of its shards.
        self._known_progress = progress_of_worker([progress for _, _, progress in introduced])
        description = merge_descriptions([described for _, described, _ in introduced])
        described = json.dumps(description, sort_keys=True).encode()
        self._description_digest = hashlib.sha256(described).hexdigest()[:16]
        registry = RegistryClient(
            settings.token, settings.lighthouse, settings.identity, description
        )
        self._nonce = registry.nonce
        self.name = f"{settings.identity}:{registry.nonce}"
        self._registry = registry
        # A token that is wrong at the start stays so: it is told at once.
        reply = self._with_retry(
            lambda: registry.join(self._known_progress, *self._addresses), ExchangeError
        )
        joined = Joined(self.name, reply.heartbeat_timeout_s)
        self._ranks.broadcast(joined)
        self._here.joined(joined)
        self.timeouts = self._here.timeouts
        forward = LoopbackForward(self._here.dialer, settings.lighthouse, "lighthouse")
        self._opened.callback(forward.close)
        self._lighthouse = LighthouseClient(
            forward.address,
            self.name,
            heartbeat_timeout_s=reply.heartbeat_timeout_s,
            give_up_s=options.give_up_s,
            on_change=self._note_lighthouse,
        )
        self._opened.callback(self._lighthouse.close)
        # Some heartbeats may be lost before the registry counts this worker as gone.
        every_s = min(1.0, reply.heartbeat_timeout_s / 5)
        self._heartbeat = Heartbeat(
            registry, self._glance, reply, every_s=every_s, callbacks=self._heartbeat_callbacks()
        )
        self._opened.callback(self._heartbeat.close)
        self._peers = PeerPolicy(options, self._heartbeat, self._is_lighthouse_new)

    @property
    def link(self) -> RankLink:
        """Of this rank to the same one of the other workers."""
        return self._here.link

    @property
    def names(self) -> tuple[str, ...]:
        """Of the workers of the round, in rank order."""
        return self._here.names

    @property
    def rank(self) -> int:
        """This worker's place among them."""
        return self._here.rank

    def _with_retry(self, ask: Callable[[], T], *silence: type[ThinwireError]) -> T:
        def asked() -> T:
            self._check_waiting()
            return ask()

        return with_retry(
            asked,
            silence=silence,
            give_up_s=self._settings.options.give_up_s,
            tell=lambda why: self._note("lighthouse", why=f"does not answer: {why}"),
        )

    def _is_lighthouse_new(self) -> bool:
        # A worker that trained while the lighthouse was away may not have missed it, but the
        # registry says how old it is.
        is_new = self._heartbeat.registry_age_s < self.timeouts.floor_s
        return is_new or self._lighthouse.was_lost_lately()

    def _heartbeat_callbacks(self) -> HeartbeatCallbacks:
        return HeartbeatCallbacks(
            members=lambda: self.link.names,
            lenient_s=self.timeouts.lenient,
            on_awaited=self._lighthouse.pause,
            on_gone=self._here.lost_workers.tell,
            on_refused=lambda line: self._note("refused", why=line),
        )

    # -- the ranks of this worker ------------------------------------------------------------------

    def _all(self, action: Action) -> Generator[Answer, None, list[RankStatus]]:
        """Have every rank do something; returns where that left them."""
        self._ranks.broadcast(action)
        self._told_s = time.monotonic()
        mine = yield from self._here.act(action)
        self._statuses = self._ranks.gather(mine)
        return self._statuses

    def _progress(self) -> Progress:
        """How far this worker is, by what its ranks said last, and this one says now."""
        self._statuses[0] = self._here.status()
        self._known_progress = progress_of_worker([status.progress for status in self._statuses])
        return self._known_progress

    def _glance(self) -> Progress:
        """The same for heartbeats, at once.

        What the other ranks have after a round that has just counted is asked before the next one;
        until then the digest of the worker's state is not known, and is "".
        """
        here, known = self._state.glance(), self._known_progress
        if self._ranks.size == 1:
            return here
        return known if here.version <= known.version else replace(here, digest="", over=False)

    def _tell_failure(self, error: BaseException) -> None:
        """Let the other ranks of this worker fail with the same error, if they are still there."""
        if isinstance(error, ThinwireError):
            with contextlib.suppress(ThinwireError):
                self._ranks.broadcast(Fail(error))

    # -- before a round ----------------------------------------------------------------------------

    def begin_round(self, phase: Phase) -> Generator[Answer, None, None]:
        """Agree with the others on the next round, and catch up if this worker is behind."""
        self._heartbeat.wait_begins()
        paused_s = self._lighthouse.paused_s()
        if paused_s > self.timeouts.floor_s:
            self._note("late", why=f"for {paused_s:.1f} s the others were not asked to wait")
        began_s = time.monotonic()
        try:
            yield from self._all(Report())
            command = None
            while command is None:
                command = yield from self._try(phase, began_s)
        except BaseException as error:
            self._tell_failure(error)
            raise
        finally:
            self._heartbeat.wait_ends()
        self._measure_round()
        self._ranks.broadcast(command)
        yield self._here.begin(command)

    def _try(self, phase: Phase, began_s: float) -> Generator[Answer, None, Begin | End | None]:
        """One attempt to begin a round; None if it has to be made again."""
        self._check_may_take_part()
        over = yield from self._catch_up_with_peers()
        if over is not None:
            return over
        if phase is Phase.JOIN and self._heartbeat.registry_age_s < self.timeouts.floor_s:
            # Workers of a run that goes on may not have reached a new registry yet.
            time.sleep(_PAUSE_S)
            return None
        # Not before: the others must not wait for a worker that is still catching up.
        self._lighthouse.resume()
        members = self._lighthouse.quorum(
            lambda: self._member(phase), self._settings.token, check=self._check_may_take_part
        )
        mine = [member for member in members if member.nonce == self._nonce]
        if not mine:
            return None
        # Every worker has the same members from the lighthouse and elects the same from them, so
        # they need not ask each other again.
        quorum = elect(members)
        self._check_description(quorum)
        self._check_reachable(quorum)
        if self.name not in {member.name for member in quorum.members}:
            yield from self._catch_up(quorum.leader, quorum.what_differs(mine[0]))
            return None
        # Workers that came to the end by themselves, or start again from there, may train further.
        if quorum.has_only_caught_up and (over := self._end_if_over()) is not None:
            return over
        if self._peers.lacks_members(quorum):
            time.sleep(_PAUSE_S)
            return None
        reached = yield from self._reach(quorum)
        if not reached or not (yield from self._connect(quorum)):
            # Part of the next group's key: no worker may wait at a key that others have left.
            self._connections_failed += 1
            is_new = phase is Phase.JOIN
            fail = self._retries.failed_newcomer if is_new else self._retries.failed
            fail("form a group", because="the workers of the round could not connect")
            return None
        self._retries.worked()
        refusal = self._with_retry(
            lambda: self._registry.begin_round(quorum.position, [m.name for m in quorum.members]),
            ExchangeError,
            MismatchError,
        )
        if not self._peers.may_begin(refusal):
            time.sleep(_PAUSE_S)
            return None
        return self._round(quorum, phase, began_s)

    def _check_may_take_part(self) -> None:
        self._check_waiting()
        if self._heartbeat.refusal is not None:
            raise self._heartbeat.refusal
        self._peers.check_alone()

    def _check_waiting(self) -> None:
        if time.monotonic() - self._told_s > _STILL_THERE_S:
            # The other ranks of this worker wait with it, and would take long silence for a fault.
            self._ranks.broadcast(None)
            self._told_s = time.monotonic()
        if self._asked_to_leave():
            raise RunStopped(
                "wait for the others",
                because="this worker was asked to stop",
                do="start it again to take part",
            )

    def _member(self, phase: Phase) -> Member:
        progress, run = self._progress(), self._heartbeat.run
        links = {status.link for status in self._statuses}
        return Member(
            identity=self._settings.identity,
            nonce=self._nonce,
            description=self._description_digest,
            address=self._addresses[0],
            further=tuple(self._addresses[1:]),
            position=self._heartbeat.with_dealt_shares(progress),
            phase=phase.value,
            generation=self._connections_failed + sum(s.links_lost for s in self._statuses),
            oldest=self._here.log_reaches_back_to(progress.version),
            group=links.pop() if len(links) == 1 else "",
            awaits=self._peers.awaited(),
            rounds=self._rounds_begun,
            unreachable=tuple(sorted({name for s in self._statuses for name in s.unreachable})),
            known=run.digest if run.version == progress.version else "",
            caught_up=progress.version == self._caught_up_to,
        )

    def _check_description(self, quorum: Quorum) -> None:
        refused = [member.identity for member in quorum.refused]
        if self._settings.identity in refused:
            raise MismatchError(
                f"take part as {self._settings.identity!r}",
                because=f"{quorum.leader.identity!r} and others run another model, method or "
                "version",
                do="start all workers from the same script, arguments and thinwire version",
            )
        for identity in refused:
            self._note("refused", who=(identity,), why="it runs another model, method or version")

    def _check_reachable(self, quorum: Quorum) -> None:
        everyone = (*quorum.members, *quorum.cut_off)
        for member in quorum.cut_off:
            lacks = (w.name for w in everyone if w.name in member.unreachable)
            lacked = (w.name for w in everyone if member.name in w.unreachable)
            others = " and ".join(_identities({*lacks, *lacked}))
            if member.name == self.name:
                raise ExchangeError(
                    "take part in a round",
                    because=f"this worker and {others} do not reach each other, though all of "
                    "them reach the lighthouse",
                    do=f"see whether this machine and {others} reach the lighthouse all the time "
                    "(thinwire doctor)",
                )
            why = f"it and {others} do not reach each other"
            self._note("refused", who=(member.identity,), why=why)

    def _connect(self, quorum: Quorum) -> Generator[Answer, None, bool]:
        statuses = yield from self._all(Connect(quorum))
        return all(status.worked for status in statuses)

    def _round(self, quorum: Quorum, phase: Phase, began_s: float) -> Begin:
        names = tuple(member.name for member in quorum.members)
        self._rounds_begun += 1
        self._note_who_came_and_went(names, lost_s=time.monotonic() - began_s)
        plan = RoundPlan(
            changed=quorum.key != self.link.key,
            phase=Phase(quorum.phase),
            joins=phase is Phase.JOIN and quorum.phase != Phase.JOIN.value,
            step=quorum.position.step,
            names=names,
            dealt=quorum.position.dealt,
        )
        return Begin(plan, quorum.key)

    def _measure_round(self) -> None:
        now_s = time.monotonic()
        if self._round_began_s is not None:
            self.timeouts.finished_round(now_s - self._round_began_s)
        self._round_began_s = now_s

    # -- becoming equal ----------------------------------------------------------------------------

    def _catch_up_with_peers(self) -> Generator[Answer, None, End | None]:
        """Catch up with the worker that is furthest, if that is not this one.

        Returns:
            That the run is over, if it is.
        """
        here = self._progress()
        peers = [p for p in self._heartbeat.send() if p.position.version > here.version]
        if not peers:
            return None
        best = max(peers, key=lambda p: (p.position.over, p.position.version))
        ahead = best.position.version - here.version
        why = f"{best.identity} is {ahead} outer steps ahead"
        if not (yield from self._catch_up(best, why)):
            return None
        return self._end_if_over() if best.position.over else None

    def _end_if_over(self) -> End | None:
        """That the run is over, if it ended at the version that this worker has."""
        self._heartbeat.send()
        run, here = self._heartbeat.run, self._progress()
        if not run.over or (run.version, run.digest) != (here.version, here.digest):
            return None
        self._lighthouse.pause()
        # If its schedule is longer, it goes on from here knowingly, like one that ended by itself.
        self._caught_up_to = -1
        return End(
            RoundPlan(
                changed=True,
                phase=Phase.DONE,
                joins=False,
                # By missed rounds a worker catches up in version, and not in inner steps.
                step=run.step,
                names=(self.name,),
                dealt=run.dealt,
            )
        )

    def _catch_up(self, member: Member, why: str) -> Generator[Answer, None, bool]:
        began_s = time.monotonic()
        self._lighthouse.pause()
        statuses = yield from self._all(CatchUp(member.addresses))
        # The other worker trains on: its ranks may have given away their states of two rounds.
        reached = {status.progress.version for status in statuses}
        failed = [status.outcome for status in statuses if not status.worked]
        if failed:
            self._retries.failed(f"heal from {member.address}", because=failed[0])
        if failed or len(reached) > 1:
            time.sleep(_PAUSE_S)
            return False
        self._caught_up_to = statuses[0].progress.version
        self._note("healed", why=f"{statuses[0].outcome}; {why}", lost_s=time.monotonic() - began_s)
        return True

    def _reach(self, quorum: Quorum) -> Generator[Answer, None, bool]:
        """Replay the rounds up to the quorum's position; returns whether that worked."""
        here, there = self._progress(), quorum.position
        if (here.version, here.digest) == (there.version, there.digest):
            return True
        statuses = yield from self._all(ReplayUpTo(quorum.leader.addresses, there.version))
        if not all(status.worked for status in statuses):
            return False
        self._caught_up_to = there.version
        self._note("healed", why=f"by the rounds up to {there.version}")
        return True

    # -- notes -------------------------------------------------------------------------------------

    def report(self, metrics: WorkerMetrics) -> None:
        """Say in all later heartbeats what this worker measured.

        Bytes are those of all its ranks: of the others, as they were when the round began.
        """
        self._here.report(metrics)
        ranks = [metrics, *(status.metrics for status in self._statuses[1:])]
        totals: dict[str, int] = {}
        for name in ("sent_bytes", "received_bytes"):
            known = [n for rank in ranks if (n := getattr(rank, name)) is not None]
            totals |= {name: sum(known)} if known else {}
        self._registry.report(replace(metrics, **totals))

    def log_round(self, record: RoundRecord) -> None:
        """Keep a round for workers that missed it, and tell the registry what it left out."""
        self._here.log_round(record)
        facts = record.facts
        for rank, kind in facts["kinds"].items():
            who = identity_of(self.names[rank])
            self._registry.note_contribution(record.version, who, kind)
            if kind == CLIPPED:
                why = f"scaled to {facts['clipped'][rank]:.2g} of its length"
                self._note("clipped", who=(who,), why=why)
            else:
                self._note("left out", who=(who,), why=facts["flaws"][rank])

    def _note_lighthouse(self, lost: str) -> None:
        self._note("lighthouse", why=f"is lost: {lost}" if lost else "is there again")

    def _note_who_came_and_went(self, names: Sequence[str], *, lost_s: float) -> None:
        now, before = frozenset(names), self._peers.names
        self._peers.met(now)
        if not before:
            self._note(
                "joined",
                who=_identities(now),
                why=f"as worker {names.index(self.name)} of {len(now)}",
            )
            return
        if before - now:
            self._note("left", who=_identities(before - now), lost_s=lost_s)
        if now - before:
            self._note("arrived", who=_identities(now - before))

    def _note(self, kind: Any, **fields: Any) -> None:
        self._here.note(kind, **fields)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the run; if it went to its end, stay until the others need nothing more."""
        try:
            if self._state.progress().over:
                for _ in self._all(Report()):
                    pass
                # Only now do heartbeats of several ranks say that the run is over.
                self._progress()
                self._heartbeat.finish()
                # Not before: a worker that comes back would go on without knowing that.
                self._lighthouse.pause()
                self._peers.linger(
                    self.timeouts.round_s or 0.0, to_come_back_s=2 * self.timeouts.floor_s
                )
                self._ranks.broadcast(Leave())
        finally:
            self._here.close()
            self._opened.close()


def progress_of_worker(ranks: Sequence[Progress]) -> Progress:
    """How far a worker is whose ranks are so far; a rank that is behind holds it back.

    Args:
        ranks: one for each rank, in rank order; the digest is that of its shards.

    >>> one = Progress(version=3, step=30, digest="ab")
    >>> progress_of_worker([one]) == one
    True
    >>> progress_of_worker([one, Progress(version=2, step=20, digest="cd")]).version
    2
    """
    if len(ranks) == 1:
        return ranks[0]
    told = json.dumps([(rank.version, rank.digest) for rank in ranks])
    behind = min(ranks, key=lambda rank: rank.version)
    return Progress(
        version=behind.version,
        step=behind.step,
        digest=hashlib.sha256(told.encode()).hexdigest()[:16],
        dealt=max(rank.dealt for rank in ranks),
        over=all(rank.over for rank in ranks),
    )


def merge_descriptions(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What a worker runs, from what each of its ranks does: its shards differ from rank to rank.

    >>> merge_descriptions([{"method": "diloco", "shard": "0"}, {"method": "diloco", "shard": "1"}])
    {'ranks': '2', 'method': 'diloco', 'shard of rank 0': '0', 'shard of rank 1': '1'}
    """
    merged = {"ranks": str(len(ranks))}
    for field in dict.fromkeys(field for rank in ranks for field in rank):
        texts = [rank.get(field, "none") for rank in ranks]
        if len(set(texts)) == 1:
            merged[field] = texts[0]
        else:
            merged |= {f"{field} of rank {index}": text for index, text in enumerate(texts)}
    return merged


def _identities(names: Any) -> tuple[str, ...]:
    return tuple(sorted(map(identity_of, names)))
