"""A worker in an elastic run, from joining to leaving: its rounds, and how it catches up."""

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar, final

from thinwire.elastic.carrier import Carrier
from thinwire.elastic.events import EventLog
from thinwire.elastic.group import RankLink
from thinwire.elastic.healing import HealingServer, fetch_position
from thinwire.elastic.heartbeat import Heartbeat, HeartbeatCallbacks
from thinwire.elastic.lighthouse_client import LighthouseClient
from thinwire.elastic.options import ElasticSettings
from thinwire.elastic.peer_policy import PeerPolicy
from thinwire.elastic.quorum import Member, Quorum, elect, identity_of
from thinwire.elastic.reachability import Reachability
from thinwire.elastic.recovery import Recovery
from thinwire.elastic.registry_server import RegistryClient
from thinwire.elastic.retry import RetryBudget, with_retry
from thinwire.elastic.round_log import RoundLog
from thinwire.elastic.timeouts import Timeouts
from thinwire.errors import ExchangeError, MismatchError, ThinwireError
from thinwire.membership import Answer, Go, Over, Phase, RoundPlan, RoundRecord, SharedState
from thinwire.transport.address import address_text

__all__ = ["ElasticSession"]

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_UNMEASURED_ROUND_S = 60.0  # a round is taken to last so long until one was measured
_PAUSE_S = 0.2
_LOGGED_STATES = 2  # a longer log takes longer to fetch than the state itself


@final
class ElasticSession:
    """What a worker keeps open while it takes part: servers, heartbeats, the rank's link.

    Args:
        settings: of the transport.
        state: this worker's, for reading.
        description: what must be the same on all workers.
        events: what happens is noted here.
        carrier: moves bytes between this rank and those of the other workers.

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
        carrier: Carrier,
    ) -> None:
        self._settings, self._state, self._events = settings, state, events
        described = json.dumps(description, sort_keys=True).encode()
        self._description_digest = hashlib.sha256(described).hexdigest()[:16]
        self.names: tuple[str, ...] = ("",)
        self.rank = self._groups_lost = self._rounds_begun = 0
        self.link = RankLink(carrier, self._note_broken)
        self._round_began_s: float | None = None
        self._retries = RetryBudget(settings.host, settings.options.give_up_s)
        self._log = RoundLog(_LOGGED_STATES * state.shared_nbytes())
        self._opened = contextlib.ExitStack()
        try:
            self._open(description)
        except BaseException:
            self._opened.close()
            raise

    def _open(self, description: Mapping[str, str]) -> None:
        settings, state, options = self._settings, self._state, self._settings.options
        self._server = HealingServer(
            settings.token,
            state.capture,
            state.progress,
            self._log,
            host=settings.host,
            on_helped=lambda who: self._note("helped", who=(who,)),
        )
        self._opened.callback(self._server.close)
        self._address = address_text(settings.host, self._server.port)
        registry = RegistryClient(
            settings.token, settings.lighthouse, settings.identity, description
        )
        self._nonce = registry.nonce
        self.name = f"{settings.identity}:{registry.nonce}"
        self._registry = registry
        # A token or clock that is wrong at the start stays so: it is told at once.
        reply = self._with_retry(
            lambda: registry.join(state.progress(), self._address), ExchangeError
        )
        self.timeouts = Timeouts(
            floor_s=reply.heartbeat_timeout_s,
            patience=options.patience,
            unmeasured_s=_UNMEASURED_ROUND_S,
            fixed_s=options.timeout_s,
        )
        self._lighthouse = LighthouseClient(
            reply.lighthouse,
            self.name,
            heartbeat_timeout_s=reply.heartbeat_timeout_s,
            give_up_s=options.give_up_s,
            on_change=self._note_lighthouse,
        )
        self._opened.callback(self._lighthouse.close)
        # Some heartbeats may be lost before the registry counts this worker as gone.
        every_s = min(1.0, reply.heartbeat_timeout_s / 5)
        self._heartbeat = Heartbeat(
            registry, state.glance, reply, every_s=every_s, callbacks=self._heartbeat_callbacks()
        )
        self._opened.callback(self._heartbeat.close)
        self._peers = PeerPolicy(options, self._heartbeat, self._is_lighthouse_new)
        self._recovery = Recovery(
            token=settings.token,
            state=state,
            identity=settings.identity,
            timeout_s=max(10.0, 2 * reply.heartbeat_timeout_s),
        )
        self._reachability = Reachability(
            lambda address: fetch_position(
                settings.token,
                address,
                who=settings.identity,
                timeout_s=reply.heartbeat_timeout_s,
            )
        )

    def _with_retry(self, ask: Callable[[], T], *silence: type[ThinwireError]) -> T:
        return with_retry(
            ask,
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
            on_gone=self.link.lose,
            on_refused=lambda line: self._note("refused", why=line),
        )

    # -- before a round ----------------------------------------------------------------------------

    def begin_round(self, phase: Phase) -> Generator[Answer, None, None]:
        """Agree with the others on the next round, and catch up if this worker is behind."""
        self._heartbeat.wait_begins()
        paused_s = self._lighthouse.paused_s()
        if paused_s > self.timeouts.floor_s:
            self._note("late", why=f"for {paused_s:.1f} s the others were not asked to wait")
        began_s = time.monotonic()
        # From the tensors and not from memory: if they changed since the last round, this worker
        # has drifted and is to be healed.
        self._state.progress(anew=True)
        try:
            answer = None
            while answer is None:
                answer = yield from self._try(phase, began_s)
        finally:
            self._heartbeat.wait_ends()
        self._measure_round()
        yield answer

    def _try(self, phase: Phase, began_s: float) -> Generator[Answer, None, Go | Over | None]:
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
            yield from self._catch_up(quorum.leader.address, quorum.what_differs(mine[0]))
            return None
        if self._peers.lacks_members(quorum):
            time.sleep(_PAUSE_S)
            return None
        reached = yield from self._reach(quorum)
        if not reached or not self._form_group(quorum):
            # Part of the next group's key: no worker may wait at a key that others have left.
            self._groups_lost += 1
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
        return Go(self._plan(quorum, phase, began_s))

    def _check_may_take_part(self) -> None:
        if self._heartbeat.refusal is not None:
            raise self._heartbeat.refusal
        self._peers.check_alone()

    def _member(self, phase: Phase) -> Member:
        progress, run = self._state.progress(), self._heartbeat.run
        return Member(
            identity=self._settings.identity,
            nonce=self._nonce,
            description=self._description_digest,
            address=self._address,
            store=self.link.address,
            position=self._heartbeat.with_dealt_shares(progress),
            phase=phase.value,
            generation=self._groups_lost,
            oldest=self._log.oldest(progress.version),
            group=self.link.usable_key,
            awaits=self._peers.awaited(),
            rounds=self._rounds_begun,
            unreachable=self._reachability.unreachable,
            known=run.digest if run.version == progress.version else "",
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
                    do=f"check that {others} can connect to {self._settings.host} and this machine "
                    "to theirs, at all ports (thinwire doctor)",
                )
            why = f"it and {others} do not reach each other"
            self._note("refused", who=(member.identity,), why=why)

    def _form_group(self, quorum: Quorum) -> bool:
        had_this = quorum.key == self.link.key
        why_not = self.link.form(quorum, self.name, self.timeouts)
        if not why_not:
            self._reachability.connected()
        elif not had_this:
            self._note("discarded", why=why_not)
            others = [member for member in quorum.members if member.name != self.name]
            self._reachability.not_connected(others)
        return not why_not

    def _plan(self, quorum: Quorum, phase: Phase, began_s: float) -> RoundPlan:
        changed, self.link.key = quorum.key != self.link.key, quorum.key
        self.names = tuple(member.name for member in quorum.members)
        self.rank = self.names.index(self.name)
        self._rounds_begun += 1
        self._note_who_came_and_went(lost_s=time.monotonic() - began_s)
        return RoundPlan(
            changed=changed,
            phase=Phase(quorum.phase),
            joins=phase is Phase.JOIN and quorum.phase != Phase.JOIN.value,
            step=quorum.position.step,
            names=self.names,
            dealt=quorum.position.dealt,
        )

    def _measure_round(self) -> None:
        now_s = time.monotonic()
        if self._round_began_s is not None:
            self.timeouts.finished_round(now_s - self._round_began_s)
        self._round_began_s = now_s

    # -- becoming equal ----------------------------------------------------------------------------

    def _catch_up_with_peers(self) -> Generator[Answer, None, Over | None]:
        """Catch up with the worker that is furthest, if that is not this one.

        Returns:
            That the run is over, if it is.
        """
        here = self._state.progress()
        peers = [p for p in self._heartbeat.send() if p.position.version > here.version]
        if not peers:
            return None
        best = max(peers, key=lambda p: (p.position.over, p.position.version))
        ahead = best.position.version - here.version
        why = f"{best.identity} is {ahead} outer steps ahead"
        if not (yield from self._catch_up(best.address, why)):
            return None
        # Asked after the state was taken: what it was then may have been the last but one.
        there = self._recovery.look(best.address) if best.position.over else best.position
        here = self._state.progress()
        if not there.over or there.version != here.version:
            return None
        self.names, self.rank = (self.name,), 0
        return Over(
            RoundPlan(
                changed=True,
                phase=Phase.DONE,
                joins=False,
                step=here.step,
                names=self.names,
                dealt=here.dealt,
            )
        )

    def _catch_up(self, address: str, why: str) -> Generator[Answer, None, bool]:
        began_s = time.monotonic()
        self._lighthouse.pause()
        try:
            how = yield from self._recovery.catch_up(address)
        except (ExchangeError, MismatchError, KeyError, ValueError) as error:
            _LOG.warning("healing from %s failed: %s", address, error)
            self._retries.failed(f"heal from {address}", because=str(error))
            time.sleep(_PAUSE_S)
            return False
        self._log.clear()
        self._note("healed", why=f"{how}; {why}", lost_s=time.monotonic() - began_s)
        return True

    def _reach(self, quorum: Quorum) -> Generator[Answer, None, bool]:
        """Replay the rounds up to the quorum's position; returns whether that worked."""
        here, there = self._state.progress(), quorum.position
        if (here.version, here.digest) == (there.version, there.digest):
            return True
        reached = yield from self._recovery.replay(quorum.leader.address, there)
        self._log.clear()
        if reached:
            self._note("healed", why=f"by the rounds up to {there.version}")
        return bool(reached) and self._state.progress().version == there.version

    # -- notes -------------------------------------------------------------------------------------

    def log_round(self, record: RoundRecord) -> None:
        """Keep a round for workers that missed it."""
        self._log.append(record)
        self._server.release()
        self._note("committed")
        rejected: Mapping[int, str] = record.facts["flaws"]
        for rank in sorted(rejected):
            self._note("left out", who=_identities([self.names[int(rank)]]), why=rejected[rank])

    def _note_broken(self, why: str, lost_s: float) -> None:
        self._groups_lost += 1
        self._note("discarded", why=why, lost_s=lost_s)

    def _note_lighthouse(self, lost: str) -> None:
        self._note("lighthouse", why=f"is lost: {lost}" if lost else "is there again")

    def _note_who_came_and_went(self, *, lost_s: float) -> None:
        now, before = frozenset(self.names), self._peers.names
        self._peers.met(now)
        if not before:
            self._note("joined", who=_identities(now), why=f"as worker {self.rank} of {len(now)}")
            return
        if before - now:
            self._note("left", who=_identities(before - now), lost_s=lost_s)
        if now - before:
            self._note("arrived", who=_identities(now - before))

    def _note(self, kind: Any, **fields: Any) -> None:
        self._events.note(kind, round=self._state.glance().version, **fields)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the run; if it went to its end, stay until the others need nothing more."""
        try:
            if self._state.progress().over:
                self._lighthouse.pause()
                self._heartbeat.finish()
                self._peers.linger(
                    self.timeouts.round_s or 0.0, to_come_back_s=2 * self.timeouts.floor_s
                )
        finally:
            self.link.close()
            self._opened.close()


def _identities(names: Any) -> tuple[str, ...]:
    return tuple(sorted(map(identity_of, names)))
