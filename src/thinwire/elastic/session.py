"""A worker's part in an elastic run, from its arrival to its departure."""

import contextlib
import datetime
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, final

import torch.distributed as dist

from thinwire.elastic.address import address_text
from thinwire.elastic.events import EventLog
from thinwire.elastic.group import (
    ElasticGroup,
    discarded,
    failed,
    reason_of,
    reconfigurable_group,
)
from thinwire.elastic.healing import HealingServer
from thinwire.elastic.heartbeat import Heartbeat, HeartbeatCallbacks
from thinwire.elastic.lighthouse_client import LighthouseClient
from thinwire.elastic.options import ElasticSettings
from thinwire.elastic.peer_policy import PeerPolicy
from thinwire.elastic.quorum import Member, Quorum, elect
from thinwire.elastic.recovery import Recovery
from thinwire.elastic.registry_server import RegistryClient
from thinwire.elastic.retry import RetryBudget, join_with_retry
from thinwire.elastic.round_log import RoundLog
from thinwire.elastic.shared_state import RoundRecord, SharedState
from thinwire.elastic.timeouts import Timeouts
from thinwire.errors import ExchangeError, MismatchError
from thinwire.transport.base import Label, Pending, Phase, RoundPlan

__all__ = ["ElasticSession"]

_LOG = logging.getLogger(__name__)
_UNMEASURED_ROUND_S = 60.0
_PAUSE_S = 0.2
_JOURNAL_STATES = 2  # a longer journal takes longer to fetch than the state itself


@final
class ElasticSession:
    """Everything that is open while a worker takes part.

    Args:
        settings: of the transport.
        ward: the worker's state.
        card: what must be the same on all workers.
        events: what happens is noted here.

    Raises:
        ExchangeError: nobody answers at the lighthouse.
        MismatchError: the door refuses this worker.
    """

    def __init__(
        self,
        settings: ElasticSettings,
        ward: SharedState,
        card: Mapping[str, str],
        events: EventLog,
    ) -> None:
        self._settings, self._ward, self._events = settings, ward, events
        self._card = hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()[:16]
        self.names: tuple[str, ...] = ("",)
        self.rank = self._generation = 0
        self.group: ElasticGroup | None = None
        self._key = ""
        self._convened_at_s: float | None = None
        self._tries = RetryBudget(settings.host, settings.terms.give_up_s)
        self._journal = RoundLog(_JOURNAL_STATES * ward.shared_nbytes())
        self._opened = contextlib.ExitStack()
        try:
            self._open(card)
        except BaseException:
            self._opened.close()
            raise

    def _open(self, card: Mapping[str, str]) -> None:
        settings, ward = self._settings, self._ward
        self._network = reconfigurable_group(settings.host)
        stores: Any = dist
        self._store: Any = stores.TCPStore(settings.host, 0, is_master=True, wait_for_workers=False)
        self._server = HealingServer(
            settings.token,
            ward.capture,
            ward.position,
            self._journal,
            host=settings.host,
            card=lambda: json.dumps(dict(card)).encode(),
            on_helped=lambda who: self._note("helped", who=(who,)),
        )
        self._opened.callback(self._server.close)
        self._address = address_text(settings.host, self._server.port)
        door = RegistryClient(settings.token, settings.lighthouse, settings.identity, card)
        self._nonce = door.nonce
        welcome = join_with_retry(
            door,
            ward.position(),
            self._address,
            give_up_s=settings.terms.give_up_s,
            tell=lambda why: self._note("lighthouse", why=why),
        )
        self.timeouts = Timeouts(
            floor_s=welcome.heartbeat_timeout_s,
            patience=settings.terms.patience,
            unmeasured_s=_UNMEASURED_ROUND_S,
            fixed_s=settings.terms.timeout_s,
        )
        self._lighthouse = LighthouseClient(
            welcome.lighthouse,
            f"{settings.identity}:{door.nonce}",
            heartbeat_timeout_s=welcome.heartbeat_timeout_s,
            give_up_s=settings.terms.give_up_s,
            tell=self._tell_lighthouse,
        )
        self._opened.callback(self._lighthouse.close)
        every_s = min(1.0, welcome.heartbeat_timeout_s / 5)
        self._attendance = Heartbeat(
            door, ward.glance, welcome, every_s=every_s, concerns=self._concerns()
        )
        self._opened.callback(self._attendance.close)
        self._company = PeerPolicy(settings.terms, self._attendance, self._is_lighthouse_new)
        self._recovery = Recovery(
            token=settings.token,
            ward=ward,
            who=settings.identity,
            timeout_s=max(10.0, 2 * welcome.heartbeat_timeout_s),
        )

    def _is_lighthouse_new(self) -> bool:
        # A worker that trained while it was away may not have missed it, but the door says its age.
        return self._attendance.door_age_s < self.timeouts.floor_s or self._lighthouse.is_new()

    def _concerns(self) -> HeartbeatCallbacks:
        return HeartbeatCallbacks(
            team=lambda: frozenset(self.names),
            lenient_s=self.timeouts.lenient,
            on_awaited=self._lighthouse.hold_back,
            on_gone=self._lose,
            on_refused=lambda line: self._note("refused", why=line),
        )

    # -- convening ---------------------------------------------------------------------------------

    def convene(self, occasion: Phase) -> RoundPlan:
        """Meet the others, and catch up with them if this worker is behind."""
        self._attendance.wait_begins()
        held_s = self._lighthouse.held_s()
        if held_s > self.timeouts.floor_s:
            self._note("late", why=f"for {held_s:.1f} s the others were not asked to wait")
        began_s = time.monotonic()
        try:
            convened = None
            while convened is None:
                convened = self._try(occasion, began_s)
        finally:
            self._attendance.wait_ends()
        self._measure_round()
        return convened

    def _try(self, occasion: Phase, began_s: float) -> RoundPlan | None:
        self._check_place()
        over = self._catch_up_with_peers()
        if over is not None:
            return over
        if occasion is Phase.ENTER and self._attendance.door_age_s < self.timeouts.floor_s:
            # A run that goes on may not have come in again at a door that was opened anew.
            time.sleep(_PAUSE_S)
            return None
        # Not before: whoever is still healing shall not be waited for.
        self._lighthouse.beat_on()
        standings = self._lighthouse.quorum(
            lambda: self._standing(occasion), self._settings.token, check=self._check_place
        )
        mine = [s for s in standings if s.nonce == self._nonce]
        if not mine:
            return None
        team = elect(standings)
        self._check_card(team)
        names = tuple(member.name for member in team.members)
        if mine[0].name not in names:
            self._heal(team.leader.address, team.what_differs(mine[0]))
            return None
        if self._company.lacks_somebody(team):
            time.sleep(_PAUSE_S)
            return None
        if not self._reach(team) or not self._form(team):
            self._generation += 1
            entering = occasion is Phase.ENTER
            fail = self._tries.failed_newcomer if entering else self._tries.failed
            fail("form a group", because="the workers of the round could not connect")
            return None
        self._tries.worked()
        return self._take_seat(team, occasion, names, began_s)

    def _check_place(self) -> None:
        if self._attendance.refusal is not None:
            raise self._attendance.refusal
        self._company.check_alone()

    def _standing(self, occasion: Phase) -> Member:
        return Member(
            identity=self._settings.identity,
            nonce=self._nonce,
            card=self._card,
            address=self._address,
            store=address_text(self._settings.host, self._store.port),
            position=self._attendance.heard(self._ward.position()),
            occasion=occasion.value,
            generation=self._generation,
            oldest=self._journal.oldest(self._ward.position().version),
            group=self._key if self.group is not None and not self.group.broken else "",
            awaits=self._company.awaited(),
        )

    def _check_card(self, team: Quorum) -> None:
        refused = [s.identity for s in team.refused]
        if self._settings.identity in refused:
            raise MismatchError(
                f"take part as {self._settings.identity!r}",
                because=f"{team.leader.identity!r} and others run another model, method or version",
                do="start all workers from the same script, arguments and thinwire version",
            )
        for identity in refused:
            self._note("refused", who=(identity,), why="it runs another model, method or version")

    def _take_seat(
        self, team: Quorum, occasion: Phase, names: tuple[str, ...], began_s: float
    ) -> RoundPlan:
        changed, self._key = team.key != self._key, team.key
        me = f"{self._settings.identity}:{self._nonce}"
        self.names, self.rank = names, names.index(me)
        lost_s = time.monotonic() - began_s
        joins = occasion is Phase.ENTER and team.occasion != Phase.ENTER.value
        self._tell_who_came_and_went(names, lost_s)
        return RoundPlan(
            changed=changed,
            occasion=Phase(team.occasion),
            joins=joins,
            step=team.position.step,
            names=names,
            dealt=team.position.dealt,
        )

    def _tell_who_came_and_went(self, names: tuple[str, ...], lost_s: float) -> None:
        now, before = frozenset(names), self._company.names
        self._company.met(now)
        if not before:
            self._note("joined", who=_identities(now), why=f"as worker {self.rank} of {len(now)}")
            return
        if before - now:
            self._note("left", who=_identities(before - now), lost_s=lost_s)
        if now - before:
            self._note("arrived", who=_identities(now - before))

    def _measure_round(self) -> None:
        now_s = time.monotonic()
        if self._convened_at_s is not None:
            self.timeouts.finished_round(now_s - self._convened_at_s)
        self._convened_at_s = now_s

    # -- becoming equal ----------------------------------------------------------------------------

    def _catch_up_with_peers(self) -> RoundPlan | None:
        """Heal from whoever is furthest, if that is not this worker; says if the run is over."""
        here = self._ward.position()
        peers = [p for p in self._attendance.ask() if p.position.version > here.version]
        if not peers:
            return None
        best = max(peers, key=lambda p: (p.position.over, p.position.version))
        ahead = best.position.version - here.version
        if not self._heal(best.address, f"{best.identity} is {ahead} outer steps ahead"):
            return None
        # Asked after the state was taken: what it was then may have been the last but one.
        there = self._recovery.look(best.address) if best.position.over else best.position
        if not there.over or there.version != self._ward.position().version:
            return None
        # What this worker did is in no round, and there will be none any more.
        self._ward.drop_work()
        here = self._ward.position()
        self.names, self.rank = (f"{self._settings.identity}:{self._nonce}",), 0
        return RoundPlan(
            changed=True,
            occasion=Phase.OVER,
            joins=False,
            step=here.step,
            names=self.names,
            dealt=here.dealt,
        )

    def _heal(self, address: str, why: str) -> bool:
        began_s = time.monotonic()
        self._lighthouse.hold_back()
        try:
            how = self._recovery.reach(address)
        except (ExchangeError, MismatchError, KeyError, ValueError) as error:
            _LOG.warning("healing from %s failed: %s", address, error)
            self._tries.failed(f"heal from {address}", because=str(error))
            time.sleep(_PAUSE_S)
            return False
        self._journal.clear()
        self._note("healed", why=f"{how}; {why}", lost_s=time.monotonic() - began_s)
        return True

    def _reach(self, team: Quorum) -> bool:
        """Come to where the team stands by its last rounds; whether that worked."""
        here = self._ward.position()
        if (here.version, here.digest) == (team.position.version, team.position.digest):
            return True
        reached = self._recovery.replay(team.leader.address, team.position)
        self._journal.clear()
        if reached:
            self._note("healed", why=f"by the rounds up to {team.position.version}")
        return reached and self._ward.position().version == team.position.version

    # -- the group ---------------------------------------------------------------------------------

    def _form(self, team: Quorum) -> bool:
        """Have a group of exactly the team; whether that worked."""
        if team.key == self._key and self.group is not None:
            # One that broke since all said that they had it is gone for all.
            return not self.group.broken
        if self.group is not None:
            self.group.close()
        self.group = None
        try:
            members = self._connect(team) if len(team.members) > 1 else None
        except (RuntimeError, ValueError) as error:
            self.timeouts.not_connected()
            self._note("discarded", why=f"the workers could not connect: {reason_of(error)}")
            return False
        self.timeouts.connected()
        self.group = ElasticGroup(members, self.timeouts, self._break)
        return True

    def _connect(self, team: Quorum) -> Any:
        self._network.set_timeout(datetime.timedelta(seconds=self.timeouts.connect()))
        names = [member.name for member in team.members]
        me = f"{self._settings.identity}:{self._nonce}"
        where = f"{team.members[0].store}/thinwire/{team.key}"
        self._network.configure(where, me, names.index(me), len(names))
        return self._network.parent

    def _break(self, why: str, lost_s: float) -> None:
        self._generation += 1
        self._note("discarded", why=why, lost_s=lost_s)

    def _lose(self, names: frozenset[str]) -> None:
        group = self.group
        if group is not None:
            group.lose(f"{' and '.join(_identities(names))} is gone")

    def carry(self, start: Callable[[ElasticGroup], Pending], label: Label) -> Pending:
        """Start an exchange in the team's group; without one it fails when it is waited for."""
        if self.group is None:
            return failed(discarded(label, "the workers are not connected"))
        return start(self.group)

    # -- notes -------------------------------------------------------------------------------------

    def remember(self, record: Callable[[], RoundRecord]) -> None:
        """Keep a round for those who missed it."""
        kept = record()
        self._journal.append(kept)
        self._server.release()
        self._note("committed")
        flaws: Mapping[int, str] = kept.facts["flaws"]
        for rank in sorted(flaws):
            who = _identities([self.names[int(rank)]])
            self._note("left out", who=who, why=f"{flaws[rank]}")

    def _tell_lighthouse(self, lost: str) -> None:
        self._note("lighthouse", why=f"is lost: {lost}" if lost else "is there again")

    def _note(self, kind: Any, **fields: Any) -> None:
        self._events.note(kind, round=self._ward.glance().version, **fields)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave; after a run that went to its end, not before the others need nothing more."""
        try:
            if self._ward.position().over:
                self._lighthouse.hold_back()
                self._attendance.finish()
                self._company.linger(
                    self.timeouts.round_s or 0.0, to_come_back_s=2 * self.timeouts.floor_s
                )
        finally:
            if self.group is not None:
                self.group.close()
            self._network.abort(errored=False)
            self._store = None
            self._opened.close()


def _identities(names: Any) -> tuple[str, ...]:
    return tuple(sorted(name.rpartition(":")[0] for name in names))
