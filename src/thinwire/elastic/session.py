"""A worker in an elastic run, from joining to leaving: what its first rank decides for it."""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

from thinwire.contributions import CLIPPED
from thinwire.elastic.events import check_asked_to_leave, note_who_came_and_went
from thinwire.elastic.heartbeat import Heartbeat, PeerPolicy
from thinwire.elastic.lighthouse import LighthouseClient
from thinwire.elastic.quorum import Member, Quorum, elect, identities_of, identity_of
from thinwire.elastic.rank_session import Action, RankSession, RankStatus
from thinwire.elastic.registry_server import RefusedError, RegistryClient
from thinwire.elastic.relay import LoopbackForward
from thinwire.elastic.timeouts import RetryBudget, with_retry
from thinwire.errors import ExchangeError, MismatchError, ThinwireError
from thinwire.membership import Answer, Phase, Progress, RoundPlan, RoundRecord, WorkerMetrics

T = TypeVar("T")

_Command: TypeAlias = tuple[RoundPlan, str]
"""A round, and the key of the link that it is exchanged over; "" if the run is over."""

_PAUSE_S = 0.2
_STILL_THERE_S = 10.0


class ElasticSession:
    """What the first rank of a worker keeps open while the worker takes part, and decides for it.

    Args:
        here: this rank.
        description: of this rank: what must be the same on all workers.
        asked_to_leave: says so; asked while waiting for the others or the registry, which then ends
            with `RunStopped`.

    Attributes:
        link: of this rank to the same one of the other workers.
        names: of the workers of the round, in rank order.
        rank: this worker's place among them.
        run: starts an exchange among them.

    Raises:
        ExchangeError: the lighthouse does not answer.
        MismatchError: the registry refuses this worker.
    """

    def __init__(
        self,
        here: RankSession,
        description: Mapping[str, str],
        *,
        asked_to_leave: Callable[[], bool] = lambda: False,
    ) -> None:
        self._asked_to_leave = asked_to_leave
        self._here, self._ranks = here, here.ranks
        self._settings, self._state, self.link = here.settings, here.state, here.link
        self.names, self.rank = here.names, here.rank
        self.run, self._note = here.run, here.note
        self._connections_failed = self._rounds_begun = 0
        self._caught_up_to = -1
        self._statuses: list[RankStatus] = []
        self._told_s = time.monotonic()
        self._retries = RetryBudget(self._settings.host, self._settings.options.give_up_s)
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
        self._ranks.broadcast(("joined", self.name, reply.heartbeat_timeout_s))
        self._here.joined(self.name, reply.heartbeat_timeout_s)
        self.timeouts = self._here.timeouts
        forward = LoopbackForward(self._here.dialer, settings.lighthouse, "lighthouse")
        self._opened.callback(forward.close)
        self._lighthouse = LighthouseClient(
            forward.address,
            self.name,
            heartbeat_timeout_s=reply.heartbeat_timeout_s,
            give_up_s=options.give_up_s,
            on_change=lambda lost: self._note(
                "lighthouse", why=f"is lost: {lost}" if lost else "is there again"
            ),
        )
        self._opened.callback(self._lighthouse.close)
        # Some heartbeats may be lost before the registry counts this worker as gone.
        every_s = min(1.0, reply.heartbeat_timeout_s / 5)
        self._heartbeat = Heartbeat(
            registry,
            self._glance,
            reply,
            every_s=every_s,
            members=lambda: self.link.names,
            # The lighthouse takes the floor to miss this worker's heartbeats.
            lenient_s=lambda: self.timeouts.late() - self.timeouts.floor_s,
            on_awaited=self._lighthouse.pause,
            on_gone=self._here.lost_workers.tell,
            on_refused=lambda line: self._note("refused", why=line),
        )
        self._opened.callback(self._heartbeat.close)
        self._peers = PeerPolicy(options, self._heartbeat, self._is_lighthouse_new)

    def _with_retry(self, ask: Callable[[], T], *silence: type[ThinwireError]) -> T:
        def asked() -> T:
            self._check_waiting()
            return ask()

        return with_retry(
            asked,
            silence=silence,
            refusal=(RefusedError,),
            give_up_s=self._settings.options.give_up_s,
            log=lambda why: self._note("lighthouse", why=f"does not answer: {why}"),
        )

    def _is_lighthouse_new(self) -> bool:
        # A worker that trained while the lighthouse was away may not have missed it, but the
        # registry says how old it is.
        is_new = self._heartbeat.registry_age_s < self.timeouts.floor_s
        return is_new or self._lighthouse.was_lost_lately()

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
        here, known = self._state.progress(wait=False), self._known_progress
        if self._ranks.size == 1:
            return here
        return known if here.version <= known.version else replace(here, digest="", over=False)

    def _tell_failure(self, error: BaseException) -> None:
        """Let the other ranks of this worker fail with the same error, if they are still there."""
        if isinstance(error, ThinwireError):
            with contextlib.suppress(ThinwireError):
                self._ranks.broadcast(error)

    # -- before a round ----------------------------------------------------------------------------

    def begin_round(self, phase: Phase) -> Generator[Answer, None, None]:
        """Agree with the others on the next round, and catch up if this worker is behind."""
        self._heartbeat.wait_begins()
        paused_s = self._lighthouse.paused_s()
        if paused_s > self.timeouts.floor_s:
            self._note("late", why=f"for {paused_s:.1f} s the others were not asked to wait")
        began_s = time.monotonic()
        try:
            yield from self._all(("report",))
            command = None
            while command is None:
                command = yield from self._try(phase, began_s)
        except BaseException as error:
            self._tell_failure(error)
            raise
        finally:
            self._heartbeat.wait_ends()
        self.timeouts.round_began()
        plan, key = command
        self._ranks.broadcast(("begin", plan, key))
        answer = self._here.begin(plan, key)
        self.names, self.rank = self._here.names, self._here.rank
        yield answer

    def _try(self, phase: Phase, began_s: float) -> Generator[Answer, None, _Command | None]:
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
            behind = quorum.position.version - mine[0].position.version
            why = f"{behind} outer steps behind" if behind else "its outer parameters were others"
            yield from self._catch_up(quorum.leader, why)
            return None
        # Workers that came to the end by themselves, or start again from there, may train further.
        if quorum.has_only_caught_up and (over := self._end_if_over()) is not None:
            return over
        if self._peers.lacks_members(quorum):
            time.sleep(_PAUSE_S)
            return None
        connects = yield from self._reach(quorum)
        if connects:
            statuses = yield from self._all(("connect", quorum))
            connects = all(status.worked for status in statuses)
        if not connects:
            # Part of the next group's key: no worker may wait at a key that others have left.
            self._connections_failed += 1
            why = "the workers of the round could not connect"
            self._retries.failed("form a group", because=why, newcomer=phase is Phase.JOIN)
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
        check_asked_to_leave(self._asked_to_leave())

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
            oldest=self._here.log.oldest(progress.version),
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
            others = " and ".join(identities_of({*lacks, *lacked}))
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

    def _round(self, quorum: Quorum, phase: Phase, began_s: float) -> _Command:
        names = tuple(member.name for member in quorum.members)
        self._rounds_begun += 1
        lost_s, before = time.monotonic() - began_s, self._peers.names
        self._peers.met(frozenset(names))
        note_who_came_and_went(self._note, self.name, names, before, lost_s)
        plan = RoundPlan(
            changed=quorum.key != self.link.key,
            phase=Phase(quorum.phase),
            joins=phase is Phase.JOIN and quorum.phase != Phase.JOIN.value,
            step=quorum.position.step,
            names=names,
            dealt=quorum.position.dealt,
        )
        return plan, quorum.key

    # -- becoming equal ----------------------------------------------------------------------------

    def _catch_up_with_peers(self) -> Generator[Answer, None, _Command | None]:
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

    def _end_if_over(self) -> _Command | None:
        """That the run is over, if it ended at the version that this worker has."""
        self._heartbeat.send()
        run, here = self._heartbeat.run, self._progress()
        if not run.over or (run.version, run.digest) != (here.version, here.digest):
            return None
        self._lighthouse.pause()
        # If its schedule is longer, it goes on from here knowingly, like one that ended by itself.
        self._caught_up_to = -1
        plan = RoundPlan(
            changed=True,
            phase=Phase.DONE,
            joins=False,
            # By missed rounds a worker catches up in version, and not in inner steps.
            step=run.step,
            names=(self.name,),
            dealt=run.dealt,
        )
        return plan, ""

    def _catch_up(self, member: Member, why: str) -> Generator[Answer, None, bool]:
        began_s = time.monotonic()
        self._lighthouse.pause()
        statuses = yield from self._all(("catch up", member.addresses))
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
        statuses = yield from self._all(("replay", quorum.leader.addresses, there.version))
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

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the run; if it went to its end, stay until the others need nothing more."""
        try:
            if self._state.progress().over:
                for _ in self._all(("report",)):
                    pass
                # Only now do heartbeats of several ranks say that the run is over.
                self._progress()
                self._registry.finished = True
                # Not before: a worker that comes back would go on without knowing that.
                self._lighthouse.pause()
                self._peers.linger(
                    self.timeouts.round_s or 0.0, to_come_back_s=2 * self.timeouts.floor_s
                )
                self._ranks.broadcast(("leave",))
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
