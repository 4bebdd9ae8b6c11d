"""Elastic workers in one process and one thread, without a network: a test decides what fails.

In every round, workers that were there before call `OuterLoop.begin` before newcomers do, and all
of them before any calls `finish`.
"""

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from thinwire.errors import RoundDiscarded, ThinwireError
from thinwire.membership import (
    Answer,
    Go,
    Load,
    Membership,
    Phase,
    Replay,
    RoundPlan,
    RoundRecord,
    SharedState,
    WorkerMetrics,
)
from thinwire.transport import Posts, RoundTag, Transport
from thinwire.transport.base import Round, RunningExchange
from thinwire.transport.in_process import answers_of

T = TypeVar("T")


class ElasticHub:
    """Connects K elastic workers that share a thread, and does to them what a network would.

    There is no timeout: between rounds, a test sets the members and the attributes below.
    """

    def __init__(self) -> None:
        self.discards: Callable[[RoundTag], bool] = lambda tag: False
        # Of what one worker sends another, or itself: a store has one object for all of them.
        self.tamper: Callable[[int, int, Tensor], Tensor] = lambda sender, to, payload: payload
        # Names of workers that take every round for discarded, though it counts.
        self.uninformed: set[str] = set()
        self.heal_by = "records"  # where all are known, or "snapshot"
        self.records: dict[int, RoundRecord] = {}  # by the version after them
        self.shares: list[int] = []  # that were dealt
        self.broken = False  # whether all are told in the next round that they have a new group
        self._members: list[HubTransport] = []
        self._exchanges: dict[tuple[int, int], _HubExchange] = {}
        self._arrived: list[str] = []
        self._rounds = self._step = self._dealt = 0
        self._changed = False
        self._phase = Phase.JOIN

    def connect(self, name: str) -> "HubTransport":
        """A transport for one worker, which takes part once it is among the members."""
        return HubTransport(self, name)

    def set_members(self, *members: "HubTransport") -> None:
        """Let `members`, in rank order, take part from the next round on, and no others.

        As if the group had been lost: what is under way counts for no worker.
        """
        self._members = list(members)
        self.broken, self._arrived = True, []

    def begin_round(self, node: "HubTransport", phase: Phase) -> Generator[Answer, None, None]:
        """Settle the round of `node`, and heal it if it is behind."""
        state = node.state
        assert state is not None
        state.progress(anew=True)
        if not self._arrived:
            self._open_round(state, phase)
        joins = phase is Phase.JOIN and self._phase is not Phase.JOIN
        is_last = len(self._arrived) + 1 == len(self._members)
        self._arrived = [] if is_last else [*self._arrived, node.name]
        yield from self._heal(state)
        if self._changed:
            node.group = self._rounds
        self.shares.append(self._dealt + node.rank)
        names = [member.name for member in self._members]
        known = {"phase": self._phase, "step": self._step, "dealt": self._dealt, "names": names}
        yield Go(RoundPlan(changed=self._changed, joins=joins, **known))

    def _open_round(self, state: SharedState, phase: Phase) -> None:
        self._rounds += 1
        self._changed, self.broken = self.broken, False
        self._phase, self._step = phase, state.progress().step
        known = [m.state.progress().dealt for m in self._members if m.state is not None]
        self._dealt = max([self._dealt, *known])
        for rank, member in enumerate(self._members):
            member.rank_in_round, member.members = rank, tuple(self._members)
            member.counter = itertools.count() if self._changed else member.counter

    def _heal(self, state: SharedState) -> Generator[Answer, None, None]:
        states = [member.state for member in self._members if member.state is not None]
        leader = max(states, key=lambda s: s.progress().version)
        here, there = state.progress(), leader.progress()
        if (here.version, here.digest) == (there.version, there.digest):
            return
        missed = range(here.version + 1, there.version + 1)
        if self.heal_by == "records" and missed and all(v in self.records for v in missed):
            yield Replay([self.records[version] for version in missed], there)
        else:
            yield Load(leader.capture())

    def exchange_of(self, node: "HubTransport", tag: RoundTag) -> "_HubExchange":
        """The exchange that is next for `node`, which the first of its group begins."""
        key = (node.group, next(node.counter))
        exchange = self._exchanges.setdefault(key, _HubExchange(self, node.members, tag))
        assert (exchange.tag.what, exchange.tag.round) == (tag.what, tag.round), node.name
        return exchange


class HubTransport(Transport, Membership):
    """One worker's end of an `ElasticHub`, from `ElasticHub.connect`."""

    def __init__(self, hub: ElasticHub, name: str) -> None:
        self.hub, self.name = hub, name
        self.metrics = WorkerMetrics()
        self.state: SharedState | None = None
        self.members: tuple[HubTransport, ...] = (self,)
        self.rank_in_round = self.group = 0
        self.counter: Iterator[int] = itertools.count()

    rank = property(lambda self: self.rank_in_round)
    world_size = property(lambda self: len(self.members))
    is_fixed = False

    def announce(self, card: bytes, tag: RoundTag) -> Mapping[int, bytes]:
        """Know no other's: a test gives all workers the same method."""
        del tag
        return {self.rank: card}

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Hand the exchange to the hub; it is carried when a worker waits for it."""
        running = RunningExchange(posts)
        if running.post is not None:
            exchange = self.hub.exchange_of(self, tag)
            exchange.running[self.rank] = running
            running.arrive = partial(exchange.arrive, self)
        return running

    def join(self, state: SharedState) -> None:
        self.state = state

    def begin_round(self, phase: Phase) -> Generator[Answer, None, None]:
        return self.hub.begin_round(self, phase)

    def member(self, rank: int) -> str:
        return self.members[rank].name

    def log_round(self, record: RoundRecord) -> None:
        self.hub.records.setdefault(record.version, record)

    def report(self, metrics: WorkerMetrics) -> None:
        self.metrics = metrics

    def leave(self) -> None:
        pass


class _HubExchange:
    """The exchange of each rank, carried for all of them by the first that waits."""

    def __init__(self, hub: ElasticHub, members: Sequence[HubTransport], tag: RoundTag) -> None:
        self.hub, self.members, self.tag = hub, members, tag
        self.running: dict[int, RunningExchange[Any]] = {}
        self.error: ThinwireError | None = None

    def arrive(self, node: HubTransport) -> None:
        """Carry all requests, unless that was done before."""
        assert len(self.running) == len(self.members), "call begin on all before finish on any"
        try:
            if self.error is not None:
                raise self.error
            if self.hub.discards(self.tag):
                raise self._discarded("the test discards it")
            self._carry([self.running[rank] for rank in range(len(self.members))])
        except ThinwireError as error:
            self.hub.broken |= isinstance(error, RoundDiscarded)
            self.error = error
            raise
        if node.name in self.hub.uninformed:
            self.hub.broken = True
            raise self._discarded("what the others put did not reach this worker")

    def _carry(self, everyone: Sequence[RunningExchange[Any]]) -> None:
        while any(running.post is not None for running in everyone):
            posts = [running.post for running in everyone]
            for to, answer in enumerate(answers_of(posts, self.tag)):
                post = posts[to]
                assert post is not None
                for sender, payload in answer.items():
                    answer[sender] = self.hub.tamper(sender, to, payload)
                if post.is_to_all(len(posts)):
                    own = next(iter(post.to.values()))
                    if (changed := self.hub.tamper(to, to, own)) is not own:
                        answer[to] = changed
                everyone[to].answer(answer)

    def _discarded(self, because: str) -> RoundDiscarded:
        return RoundDiscarded(f"use {self.tag}", because=because, do="nothing: it is sent again")
