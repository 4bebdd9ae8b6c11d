"""One rank of an elastic worker: what it keeps open, and what it does when the first rank says so.

The first rank speaks with the lighthouse and decides; commands tell all ranks, itself included,
what to do next. A worker of one rank goes the same way.
"""

import contextlib
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from thinwire.elastic.carrier import StreamCarrier
from thinwire.elastic.dialer import Dialer, open_stream
from thinwire.elastic.events import EventLog
from thinwire.elastic.group import RankLink
from thinwire.elastic.healing import (
    HealingServer,
    RoundLog,
    fetch_position,
    fetch_records,
    fetch_snapshot,
)
from thinwire.elastic.quorum import Member, Quorum
from thinwire.elastic.relay import RelayedServer
from thinwire.elastic.timeouts import ElasticSettings, Timeouts
from thinwire.elastic.worker_ranks import AgreedRound, LostWorkers, WorkerRanks
from thinwire.errors import ExchangeError, MismatchError, ThinwireError
from thinwire.membership import (
    Answer,
    Go,
    Load,
    Over,
    Phase,
    Progress,
    Replay,
    RoundPlan,
    RoundRecord,
    SharedState,
    WorkerMetrics,
)
from thinwire.transport import Posts, Round, RoundTag
from thinwire.transport.address import address_text

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_UNMEASURED_ROUND_S = 60.0  # a round is taken to last so long until one was measured
_HEADROOM_BYTES = 64 << 20
_LOGGED_STATES = 2  # a longer log takes longer to fetch than the state itself


Action: TypeAlias = tuple[Any, ...]
"""What the first rank tells all to do, after which each says where that left it:

    "report"                      say how far this rank is, by a digest of the state as it is now
    "catch up", addresses         become equal to the worker whose ranks have these healing servers
    "replay", addresses, version  take the rounds up to `version` from there
    "connect", quorum             connect to the same rank of the other workers

Or what it tells them in the end, for which there is no answer:

    "joined", name, seconds       the registry has taken this worker under `name`, and misses it
                                  after some seconds
    "begin", plan, key            begin a round over the link with this key; "" if the run is over
    "leave"                       no other worker needs anything of this one any more

Or a `ThinwireError`: this worker cannot go on. Or None: it still waits for others.
"""


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


class Reachability:
    """Looks for the others once workers could not connect to each other twice in a row.

    Args:
        look: asks the healing server at an address; a `ThinwireError` says that it cannot.
        index: of this rank in its worker, which looks for the same rank of the others.
    """

    def __init__(self, look: Callable[[str], object], *, index: int = 0) -> None:
        self._look, self._index = look, index
        self._tried: frozenset[str] = frozenset()
        self.unreachable: tuple[str, ...] = ()

    def connected(self) -> None:
        """Note that all workers of a round reach each other."""
        self._tried, self.unreachable = frozenset(), ()

    def not_connected(self, others: Sequence[Member]) -> None:
        """Note that this worker could not connect to `others`, or they not to each other.

        Those that it tried the last time, too, and that do not answer are unreachable. Once is not
        enough: to look for a worker that was just stopped is to wait for it a second time.
        """
        again = [member for member in others if member.name in self._tried]
        with ThreadPoolExecutor(max(1, len(again))) as pool:
            answers = list(pool.map(self._answers, again))
        missed = (m.name for m, answer in zip(again, answers, strict=True) if not answer)
        self.unreachable = tuple(sorted(missed))
        self._tried = frozenset(member.name for member in others)

    def _answers(self, member: Member) -> bool:
        try:
            self._look(member.addresses[self._index])
        except ThinwireError:
            return False
        return True


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
        log: of the last rounds.
        lost_workers: ends at once what is under way with them, on all ranks.
        timeouts: once it has joined.

    Raises:
        OSError: this machine does not have the address.
    """

    def __init__(
        self, settings: ElasticSettings, state: SharedState, ranks: WorkerRanks, events: EventLog
    ) -> None:
        self.settings, self.state, self.ranks, self.events = settings, state, ranks, events
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
        self.log = RoundLog(_LOGGED_STATES * state.shared_nbytes())
        self._server = HealingServer(
            settings.token,
            state.capture,
            state.progress,
            self.log,
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
        return self.ranks.gather((self.address, description, self.state.progress()))

    def join(self, description: Mapping[str, str]) -> None:
        """Join the run with the first rank, which asks for all; raises what it failed with."""
        try:
            self.introduce(description)
            while (told := self._told()) is None:
                pass  # the first rank waits for the registry, and is still there
            self.joined(*told[1:])
        except BaseException:
            self.close()
            raise

    def _told(self) -> Action | None:
        told: Any = self.ranks.broadcast()
        if isinstance(told, ThinwireError):
            raise told
        return told

    def joined(self, name: str, floor_s: float) -> None:
        """Prepare for rounds under `name`; the registry misses this worker after `floor_s`."""
        self._name, options = name, self.settings.options
        self.timeouts = Timeouts(
            floor_s=floor_s,
            patience=options.patience,
            unmeasured_s=_UNMEASURED_ROUND_S,
            fixed_s=options.timeout_s,
        )
        self._healing_s = max(10.0, 2 * floor_s)
        self._reachability = Reachability(
            lambda address: self._look(address, floor_s), index=self.ranks.index
        )

    # -- rounds ------------------------------------------------------------------------------------

    def begin_round(self, phase: Phase) -> Generator[Answer, None, None]:
        """Do what the first rank says until a round begins; that of all other ranks."""
        del phase  # the first rank has the same
        while True:
            match self._told():
                case None:
                    continue  # it waits for other workers, and is still there
                case "begin", plan, key:
                    yield self.begin(plan, key)
                    return
                case ("leave",):
                    return
                case action:
                    status = yield from self.act(action)
                    first: RankStatus | ThinwireError = self.ranks.gather(status)[0]
                    if isinstance(first, ThinwireError):
                        raise first

    def act(self, action: Action) -> Generator[Answer, None, RankStatus]:
        """Do one thing; returns where it left this rank."""
        worked, outcome = True, ""
        match action:
            case "catch up", addresses:
                address = addresses[self.ranks.index]
                try:
                    outcome = yield from self._catch_up(address)
                    self.log.clear()
                except (ExchangeError, MismatchError, KeyError, ValueError) as error:
                    _LOG.warning("healing from %s failed: %s", address, error)
                    worked, outcome = False, str(error)
            case "replay", addresses, version:
                worked = yield from self._replay_up_to(addresses[self.ranks.index], version)
            case "connect", quorum:
                outcome = self._connect(quorum)
                worked = not outcome
            case _:
                # From the tensors and not from memory: if they changed since the last round, this
                # worker has drifted and is to be healed.
                self.state.progress(anew=True)
        return self.status(worked=worked, outcome=outcome)

    def status(self, *, worked: bool = True, outcome: str = "") -> RankStatus:
        """Where this rank is now."""
        return RankStatus(
            progress=self.state.progress(),
            link=self.link.usable_key,
            links_lost=self._links_lost,
            unreachable=self._reachability.unreachable,
            metrics=self._metrics,
            worked=worked,
            outcome=outcome,
        )

    def begin(self, plan: RoundPlan, key: str) -> Go | Over:
        """Take part in a round, or in none any more."""
        self.names = tuple(plan.names)
        self.rank = self.names.index(self._name)
        if not key:
            return Over(plan)
        self.link.key = key
        return Go(plan)

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Start an exchange; it counts if those of all ranks of this worker do."""
        running = self.link.run(posts, tag)
        return running if self.ranks.size == 1 else AgreedRound(running, self.ranks)

    def _look(self, address: str, timeout_s: float) -> Progress:
        """How far the worker has come whose healing server is at `address`."""
        who = self.settings.identity
        return fetch_position(self.dialer, address, who=who, timeout_s=timeout_s)

    def _catch_up(self, address: str) -> Generator[Answer, None, str]:
        """Take over the state of the worker at `address`; returns how.

        Raises:
            ExchangeError: it is gone. MismatchError: its state does not fit.
        """
        there, here = self._look(address, self._healing_s), self.state.progress()
        if (here.version, here.digest) == (there.version, there.digest):
            return "it had the same state"
        if here.version and (yield from self._replay(address, there)):
            return f"by the rounds up to {self.state.progress().version}"
        snapshot = fetch_snapshot(
            self.dialer,
            address,
            who=self.settings.identity,
            largest=2 * self.state.shared_nbytes() + _HEADROOM_BYTES,
            timeout_s=self._healing_s,
        )
        yield Load(snapshot)
        return f"by the state after round {self.state.progress().version}"

    def _replay(self, address: str, there: Progress) -> Generator[Answer, None, bool]:
        """Replay the rounds of the worker at `address` that lead to `there`, if they do."""
        try:
            records = fetch_records(
                self.dialer,
                address,
                self.state.progress().version,
                who=self.settings.identity,
                largest=4 * self.state.shared_nbytes() + _HEADROOM_BYTES,
                timeout_s=self._healing_s,
            )
            if records is None:
                return False
            yield Replay(records, there)
        except (ThinwireError, KeyError, IndexError, TypeError, ValueError):
            # It is gone, or its rounds do not follow on this worker's state, which has drifted.
            return False
        return self.state.progress().version >= there.version

    def _replay_up_to(self, address: str, version: int) -> Generator[Answer, None, bool]:
        try:
            there = self._look(address, self._healing_s)
        except (ExchangeError, MismatchError):
            return False
        if there.version != version:
            return False
        worked = yield from self._replay(address, there)
        self.log.clear()
        return worked and self.state.progress().version == version

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
        self.log.append(record)
        self._server.release()
        self.note("committed")

    def report(self, metrics: WorkerMetrics) -> None:
        """Note what this rank measured; the first one says so for the worker."""
        self._metrics = metrics

    def note(self, kind: Any, **fields: Any) -> None:
        """Note an event of now."""
        self.events.note(kind, round=self.state.progress(wait=False).version, **fields)

    def _note_broken(self, why: str, lost_s: float) -> None:
        self._links_lost += 1
        self.note("discarded", why=why, lost_s=lost_s)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close what is open; a rank that is not the first first waits until that one leaves."""
        try:
            if not self.ranks.is_first and self.state.progress().over:
                with contextlib.suppress(ThinwireError):
                    for _ in self.begin_round(Phase.DONE):
                        pass
        finally:
            self.lost_workers.close()
            self.link.close()
            self._relayed.close()
            self._server.close()
