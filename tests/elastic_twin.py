"""Elastic workers in one process and one thread, without a network: a test decides what fails.

In every round, earlier members call `OuterLoop.begin` before newcomers do, and all of them before
any calls `finish`.
"""

from collections.abc import Callable, Generator, Mapping
from typing import TypeVar

from torch import Tensor

from thinwire.errors import RoundDiscarded
from thinwire.membership import (
    Answer,
    Membership,
    Phase,
    Replay,
    RoundPlan,
    RoundRecord,
    SharedState,
    WorkerMetrics,
)
from thinwire.transport import Post, Posts, RoundTag, Transport, in_process
from thinwire.transport.base import Received, Round, wrapped

T = TypeVar("T")


class ElasticHub:
    """Connects K elastic workers that share a thread, in place of a network.

    There is no timeout: between rounds, a test sets the members and the attributes below.
    """

    def __init__(self) -> None:
        self.discards: Callable[[RoundTag], bool] = lambda tag: False
        # Changes what one worker sends another, or itself: a store has one object for all of them.
        self.tamper: Callable[[int, int, Tensor], Tensor] = lambda sender, to, payload: payload
        # Names of workers that take every round for discarded, though it counts.
        self.uninformed: set[str] = set()
        self.heal_by = "records"  # if all are known; or "snapshot"
        self.records: dict[int, RoundRecord] = {}  # by the version after each
        self.shares: list[int] = []  # that were dealt
        self.broken = False  # whether the next round tells all workers of a new group
        self._members: list[HubTransport] = []
        self._arrived: list[str] = []
        self._step = self._dealt = 0
        self._changed = False
        self._phase = Phase.JOIN

    def connect(self, name: str) -> "HubTransport":
        """A transport for one worker, which takes part once it is a member."""
        return HubTransport(self, name)

    def set_members(self, *members: "HubTransport") -> None:
        """Let `members`, in rank order, take part from the next round on, and no others.

        As if the group had been lost: a round in flight counts for no worker.
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
        self.shares.append(self._dealt + node.rank)
        names = [member.name for member in self._members]
        known = {"phase": self._phase, "step": self._step, "dealt": self._dealt, "names": names}
        yield RoundPlan(changed=self._changed, joins=joins, **known)

    def _open_round(self, state: SharedState, phase: Phase) -> None:
        self._changed, self.broken = self.broken, False
        self._phase, self._step = phase, state.progress().step
        known = [m.state.progress().dealt for m in self._members if m.state is not None]
        self._dealt = max([self._dealt, *known])
        if self._changed:
            for member, end in zip(self._members, in_process(len(self._members)), strict=True):
                member.inner, member.members = end, tuple(self._members)

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
            yield leader.capture()


class HubTransport(Transport, Membership):
    """One worker's end of an `ElasticHub`, from `ElasticHub.connect`."""

    def __init__(self, hub: ElasticHub, name: str) -> None:
        self.hub, self.name = hub, name
        self.metrics = WorkerMetrics()
        self.state: SharedState | None = None
        self.members: tuple[HubTransport, ...] = (self,)
        (self.inner,) = in_process(1)

    rank = property(lambda self: self.inner.rank)
    world_size = property(lambda self: self.inner.world_size)
    is_fixed = False

    def announce(self, card: bytes, tag: RoundTag) -> Mapping[int, bytes]:
        """Return no cards, because a test gives all workers the same method."""
        del tag
        return {self.rank: card}

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        """Carry the exchange when a worker waits for it, as the test wants it."""
        rank, workers = self.rank, self.world_size

        def carry(post: Post) -> Generator[Post, Received, Received]:
            received, tamper = (yield post), self.hub.tamper
            for sender, payload in received.items():
                received[sender] = tamper(sender, rank, payload)
            if post.is_to_all(workers):
                own = next(iter(post.to.values()))
                if (changed := tamper(rank, rank, own)) is not own:
                    received[rank] = changed
            return received

        return _HubRound(self, self.inner.run(wrapped(posts, carry), tag), tag)

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


class _HubRound(Round[T]):
    """An exchange, which the hub settles when its worker waits."""

    def __init__(self, node: HubTransport, inner: Round[T], tag: RoundTag) -> None:
        self._node, self._inner, self._tag = node, inner, tag

    def wait(self) -> T:
        hub = self._node.hub
        try:
            if hub.discards(self._tag):
                raise self._discarded("the test discards it")
            if self._node.name in hub.uninformed:
                raise self._discarded("what the others put did not reach this worker")
            return self._inner.wait()
        except RoundDiscarded:
            hub.broken = True
            raise

    def _discarded(self, because: str) -> RoundDiscarded:
        return RoundDiscarded(f"use {self._tag}", because=because, do="nothing: it is sent again")
