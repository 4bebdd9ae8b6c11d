"""One rank of an elastic worker: what it keeps open, and what it does when the first rank says so.

The first rank speaks with the lighthouse and decides; commands tell all ranks, itself included,
what to do next. A worker of one rank goes the same way.
"""

import contextlib
import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from thinwire.elastic.carrier import StreamCarrier
from thinwire.elastic.dialer import Dialer, open_stream
from thinwire.elastic.events import EventLog
from thinwire.elastic.group import RankLink
from thinwire.elastic.healing import HealingServer, fetch_position
from thinwire.elastic.lost_workers import LostWorkers
from thinwire.elastic.options import ElasticSettings
from thinwire.elastic.quorum import Quorum
from thinwire.elastic.reachability import Reachability
from thinwire.elastic.recovery import Recovery
from thinwire.elastic.relay import RelayedServer
from thinwire.elastic.round_log import RoundLog
from thinwire.elastic.timeouts import Timeouts
from thinwire.elastic.worker_ranks import WorkerRanks
from thinwire.errors import ExchangeError, MismatchError, ThinwireError
from thinwire.membership import (
    Answer,
    Go,
    Over,
    Phase,
    Progress,
    RoundPlan,
    RoundRecord,
    SharedState,
    WorkerMetrics,
)
from thinwire.transport.address import address_text

_LOG = logging.getLogger(__name__)
_UNMEASURED_ROUND_S = 60.0  # a round is taken to last so long until one was measured
_HEADROOM_BYTES = 64 << 20
_LOGGED_STATES = 2  # a longer log takes longer to fetch than the state itself


# -- what the first rank tells all -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """The registry has taken this worker under `name`, which misses it after some seconds."""

    name: str
    heartbeat_timeout_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """Say how far this rank is, by a digest of the state as it is now."""


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Become equal to the worker whose ranks have these healing servers."""

    addresses: Sequence[str]


@dataclass(frozen=True, slots=True)
class ReplayUpTo:
    """Take the rounds up to `version` from the worker whose ranks have these healing servers."""

    addresses: Sequence[str]
    version: int


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to the same rank of the other workers of `quorum`."""

    quorum: Quorum


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin the round that is exchanged over the link with this key."""

    plan: RoundPlan
    key: str


@dataclass(frozen=True, slots=True)
class End:
    """The run is over, and this worker has nothing left to do in it."""

    plan: RoundPlan


@dataclass(frozen=True, slots=True)
class Fail:
    """This worker cannot go on."""

    error: ThinwireError


@dataclass(frozen=True, slots=True)
class Leave:
    """No other worker needs anything of this one any more."""


Action: TypeAlias = Report | CatchUp | ReplayUpTo | Connect
"""What a rank does and then says where that left it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """Where an action left a rank.

    Args:
        progress: of its shards.
        link: key of its link to the other workers, if it can be used.
        links_lost: how many it has lost so far.
        unreachable: names of workers that it does not reach.
        metrics: what it measured so far.
        worked: whether the action did what it was to do.
        outcome: what it came to, or why it did not work, for people.
    """

    progress: Progress
    link: str
    links_lost: int
    unreachable: tuple[str, ...]
    metrics: WorkerMetrics
    worked: bool
    outcome: str


class RankSession:
    """What one rank keeps open: its healing server, its rounds, its link to the other workers.

    Args:
        settings: of the transport.
        state: this rank's, for reading.
        ranks: of this worker.
        events: what happens is noted here.

    Attributes:
        link: to the same rank of the other workers.
        names: of the workers of the round, in rank order.
        rank: of this worker among them.
        address: HOST:PORT of this rank's server, for healing and for payloads.
        dialer: connects to servers of the run.
        lost_workers: ends at once what is under way with them, on all ranks.
        timeouts: once it has joined.

    Raises:
        OSError: this machine does not have the address.
    """

    def __init__(
        self,
        settings: ElasticSettings,
        state: SharedState,
        ranks: WorkerRanks,
        events: EventLog,
    ) -> None:
        self._settings, self._state, self._ranks, self._events = settings, state, ranks, events
        self.dialer = Dialer(settings.token, settings.lighthouse)
        streams = StreamCarrier(
            lambda address, target, timeout_s: open_stream(
                self.dialer, address, target, timeout_s=timeout_s
            ),
            largest_nbytes=2 * state.shared_nbytes() + _HEADROOM_BYTES,
        )
        self.link = RankLink(streams, self._note_broken, index=ranks.index)
        self.names: tuple[str, ...] = ("",)
        self.rank = self._links_lost = 0
        self._name = ""
        self._metrics = WorkerMetrics()
        self._log = RoundLog(_LOGGED_STATES * state.shared_nbytes())
        self._server = HealingServer(
            settings.token,
            state.capture,
            state.progress,
            self._log,
            host=settings.host,
            on_helped=lambda who: self.note("helped", who=(who,)),
            tunnels={"payload": streams.accept},
        )
        self.address = address_text(settings.host, self._server.port)
        self._relayed = RelayedServer(
            self.dialer, settings.lighthouse, self.address, self._server.serve
        )
        self.lost_workers = LostWorkers(ranks, settings.host, self.link.lose)

    # -- joining -----------------------------------------------------------------------------------

    def introduce(
        self, description: Mapping[str, str]
    ) -> list[tuple[str, Mapping[str, str], Progress]]:
        """Tell the other ranks of this worker where this one is, what it runs and how far it is.

        Returns:
            address, description and progress of every rank, in rank order.
        """
        return self._ranks.gather((self.address, description, self._state.progress()))

    def join(self, description: Mapping[str, str]) -> None:
        """Join the run with the first rank, which asks for all; raises what it failed with."""
        try:
            self.introduce(description)
            while (told := self._ranks.broadcast()) is None:
                pass  # the first rank waits for the registry, and is still there
            if isinstance(told, Fail):
                raise told.error
            self.joined(told)
        except BaseException:
            self.close()
            raise

    def joined(self, joined: Joined) -> None:
        """Prepare for rounds."""
        self._name, floor_s = joined.name, joined.heartbeat_timeout_s
        self.timeouts = Timeouts(
            floor_s=floor_s,
            patience=self._settings.options.patience,
            unmeasured_s=_UNMEASURED_ROUND_S,
            fixed_s=self._settings.options.timeout_s,
        )
        self._recovery = Recovery(
            dialer=self.dialer,
            state=self._state,
            identity=self._settings.identity,
            timeout_s=max(10.0, 2 * floor_s),
        )
        self._reachability = Reachability(
            lambda address: fetch_position(
                self.dialer, address, who=self._settings.identity, timeout_s=floor_s
            ),
            index=self._ranks.index,
        )

    # -- rounds ------------------------------------------------------------------------------------

    def begin_round(self, phase: Phase) -> Generator[Answer, None, None]:
        """Do what the first rank says until a round begins; that of all other ranks."""
        del phase  # the first rank has the same
        while True:
            match self._ranks.broadcast():
                case None:
                    continue  # it waits for other workers, and is still there
                case Fail(error):
                    raise error
                case Begin() | End() as command:
                    yield self.begin(command)
                    return
                case Leave():
                    return
                case action:
                    status = yield from self.act(action)
                    told: Sequence[RankStatus | Fail] = self._ranks.gather(status)
                    if isinstance(told[0], Fail):
                        raise told[0].error

    def act(self, action: Action) -> Generator[Answer, None, RankStatus]:
        """Do one thing; returns where it left this rank."""
        worked, outcome = True, ""
        match action:
            case Report():
                # From the tensors and not from memory: if they changed since the last round, this
                # worker has drifted and is to be healed.
                self._state.progress(anew=True)
            case CatchUp(addresses):
                worked, outcome = yield from self._catch_up(addresses[self._ranks.index])
            case ReplayUpTo(addresses, version):
                worked = yield from self._replay(addresses[self._ranks.index], version)
            case Connect(quorum):
                outcome = self._connect(quorum)
                worked = not outcome
        return self.status(worked=worked, outcome=outcome)

    def status(self, *, worked: bool = True, outcome: str = "") -> RankStatus:
        """Where this rank is now."""
        return RankStatus(
            progress=self._state.progress(),
            link=self.link.usable_key,
            links_lost=self._links_lost,
            unreachable=self._reachability.unreachable,
            metrics=self._metrics,
            worked=worked,
            outcome=outcome,
        )

    def begin(self, command: Begin | End) -> Go | Over:
        """Take part in a round, or in none any more."""
        self.names = tuple(command.plan.names)
        self.rank = self.names.index(self._name)
        match command:
            case Begin(plan, key):
                self.link.key = key
                return Go(plan)
            case End(plan):
                return Over(plan)

    def _catch_up(self, address: str) -> Generator[Answer, None, tuple[bool, str]]:
        try:
            how = yield from self._recovery.catch_up(address)
        except (ExchangeError, MismatchError, KeyError, ValueError) as error:
            _LOG.warning("healing from %s failed: %s", address, error)
            return False, str(error)
        self._log.clear()
        return True, how

    def _replay(self, address: str, version: int) -> Generator[Answer, None, bool]:
        try:
            there = self._recovery.look(address)
        except (ExchangeError, MismatchError):
            return False
        if there.version != version:
            return False
        how = yield from self._recovery.replay(address, there)
        self._log.clear()
        return bool(how) and self._state.progress().version == version

    def _connect(self, quorum: Quorum) -> str:
        had_this = quorum.key == self.link.key
        why_not = self.link.form(quorum, self._name, self.timeouts)
        if not why_not:
            self._reachability.connected()
        elif not had_this:
            self.note("discarded", why=why_not)
            others = [member for member in quorum.members if member.name != self._name]
            self._reachability.not_connected(others)
        return why_not

    def log_round(self, record: RoundRecord) -> None:
        """Keep a round for workers that missed it."""
        self._log.append(record)
        self._server.release()
        self.note("committed")

    def report(self, metrics: WorkerMetrics) -> None:
        """Note what this rank measured; the first one says so for the worker."""
        self._metrics = metrics

    def log_reaches_back_to(self, version: int) -> int:
        """The version from which this rank's rounds lead to `version`."""
        return self._log.oldest(version)

    def note(self, kind: Any, **fields: Any) -> None:
        """Note an event of now."""
        self._events.note(kind, round=self._state.glance().version, **fields)

    def _note_broken(self, why: str, lost_s: float) -> None:
        self._links_lost += 1
        self.note("discarded", why=why, lost_s=lost_s)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close what is open; a rank that is not the first first waits until that one leaves."""
        try:
            if not self._ranks.is_first and self._state.progress().over:
                with contextlib.suppress(ThinwireError):
                    for _ in self.begin_round(Phase.DONE):
                        pass
        finally:
            self.lost_workers.close()
            self.link.close()
            self._relayed.close()
            self._server.close()
