"""Workers that come and go by script, in one process and one thread: what a network would do.

Veterans call begin() before newcomers do, and all of them before anybody calls finish().
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import thinwire as tw
from thinwire.elastic.shared_state import RoundRecord, SharedState
from thinwire.elastic.votes import tally, vote
from thinwire.errors import RoundDiscarded, ThinwireError
from thinwire.transport import Label, Pending, Phase, RoundPlan, Transport
from thinwire.transport.base import accept_all
from toy import adamw, build_model, loss


def given_up(label: Label, because: str = "the script says so") -> RoundDiscarded:
    return RoundDiscarded(f"use {label}", because=because, do="nothing")


class Slot:
    """One exchange: what was brought, by rank, and what all agreed on."""

    def __init__(self, nodes: Sequence["Node"], label: Label) -> None:
        self.nodes, self.label = list(nodes), label
        self.brought, self.inspects, self.reduces = {}, {}, {}
        self.seen: dict[int, list[Tensor]] | None = None
        self.left_out: dict[int, dict] = {}
        self.error: Exception | None = None

    def resolve(self, hub: "Hub") -> None:
        if self.seen is not None or self.error is not None:
            return
        ranks = range(len(self.nodes))
        assert sorted(self.brought) == list(ranks), f"{self.label}: only {sorted(self.brought)}"
        try:
            if hub.discards(self.label):
                raise given_up(self.label)
            if self.reduces:
                results = [
                    self.reduces[to]([hub.carried(s, to, self.brought[s][to]) for s in ranks])
                    for to in ranks
                ]
                brought = dict(enumerate(results))
            else:
                brought = self.brought
            seen = {to: [hub.carried(s, to, brought[s]) for s in ranks] for to in ranks}
            flaws = {to: self.inspects[to](seen[to]) for to in ranks}
            votes = [vote(flaws[to], len(ranks)) for to in ranks]
            self.left_out = {to: tally(votes, flaws[to]) for to in ranks}
            bad = self.left_out[0]
            if bad and (self.reduces or len(bad) == len(ranks)):
                raise given_up(self.label, "; ".join(map(str, bad.values())))
        except RoundDiscarded as error:
            hub.broken, self.error = True, error
        except ThinwireError as error:
            self.error = error
        else:
            self.seen = seen


class Arrival(Pending):
    def __init__(self, hub: "Hub", slot: Slot, rank: int) -> None:
        self._hub, self._slot, self._rank = hub, slot, rank

    def wait(self) -> list[Tensor]:
        self._slot.resolve(self._hub)
        if self._slot.error is not None:
            raise self._slot.error
        if self._slot.nodes[self._rank].name in self._hub.deaf:
            self._hub.broken = True
            raise given_up(self._slot.label, "the votes did not reach this worker")
        assert self._slot.seen is not None
        return self._slot.seen[self._rank]

    def left_out(self):
        return self._slot.left_out[self._rank]

    def arrived_s(self) -> float | None:
        return None


class Hub:
    """Where workers meet."""

    def __init__(self, *, norm_limit: float = math.inf) -> None:
        self.team: list[Node] = []
        self.broken = False
        self.discards: Callable[[Label], bool] = lambda _: False
        self.tamper: Callable[[int, int, Tensor], Tensor] = lambda s, t, payload: payload
        self.deaf: set[str] = set()  # who does not learn that a round counts
        self.heal = "records"
        self.norm_limit = norm_limit
        self.journal: dict[int, RoundRecord] = {}
        self.slots: dict[tuple, Slot] = {}
        self.shares: list[int] = []
        self.convened = 0
        self._met: list[str] = []
        self._step = self._dealt = 0
        self._changed = self._entering = False
        self._occasion = Phase.ENTER

    def carried(self, sender: int, to: int, payload: Tensor) -> Tensor:
        return payload if sender == to else self.tamper(sender, to, payload)

    def seat(self, *nodes: "Node") -> None:
        """From the next convening on these are the team."""
        self.team = list(nodes)
        self.broken, self._met = True, []

    def meet(self, node: "Node", ward: SharedState, occasion: Phase) -> RoundPlan:
        node.ward = ward
        if not self._met:
            self.convened += 1
            self._changed, self.broken = self.broken, False
            self._occasion = occasion
            self._step = ward.position().step
            known = [n.ward.position().dealt for n in self.team if n.ward is not None]
            self._dealt = max([self._dealt, *known])
            for member in self.team:
                member.seat = (self.convened, self.team.index(member), tuple(self.team))
                member.sent = member.sent if not self._changed else itertools.count()
        joins = occasion is Phase.ENTER and self._occasion is not Phase.ENTER
        self._met = [] if len(self._met) + 1 == len(self.team) else [*self._met, node.name]
        self._bring_up(ward)
        if self._changed:
            node.group = self.convened
        self.shares.append(self._dealt + node.rank)
        return RoundPlan(
            changed=self._changed,
            occasion=self._occasion,
            joins=joins,
            step=self._step,
            names=[n.name for n in self.team],
            dealt=self._dealt,
        )

    def _bring_up(self, ward: SharedState) -> None:
        present = [n.ward for n in self.team if n.ward is not None]
        leader = max(present, key=lambda w: w.position().version)
        mine, theirs = ward.position().version, leader.position().version
        if ward.position().digest == leader.position().digest and mine == theirs:
            return
        missed = range(mine + 1, theirs + 1)
        if self.heal == "records" and missed and all(v in self.journal for v in missed):
            for version in missed:
                ward.replay(self.journal[version])
        else:
            ward.adopt(leader.capture())
        assert ward.position().version == theirs


class Node(Transport):
    """One worker's end."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.hub, self.name = hub, name
        self.ward: SharedState | None = None
        self.seat: tuple = (0, 0, (self,))
        self.sent = itertools.count()
        self.group = 0
        self.left = 0

    @property
    def rank(self) -> int:
        return self.seat[1]

    @property
    def world_size(self) -> int:
        return len(self.seat[2])

    @property
    def forgiving(self) -> bool:
        return True

    @property
    def norm_limit(self) -> float:
        return self.hub.norm_limit

    def introduce(self, card):
        return {self.rank: card}

    def convene(self, ward, occasion):
        return self.hub.meet(self, ward, occasion)

    def remember(self, record):
        made = record()
        self.hub.journal.setdefault(made.version, made)

    def leave(self) -> None:
        self.left += 1

    def start(self, payload, label, inspect=accept_all):
        return self._bring(payload, label, inspect, None)

    def start_reduce(self, payloads, reduce, label, inspect=accept_all):
        return self._bring(payloads, label, inspect, reduce)

    def _bring(self, brought, label, inspect, reduce):
        key = (self.group, next(self.sent))
        slot = self.hub.slots.setdefault(key, Slot(self.seat[2], label))
        assert slot.label == label, f"{self.name} sends {label} where {slot.label} was begun"
        slot.brought[self.rank], slot.inspects[self.rank] = brought, inspect
        if reduce is not None:
            slot.reduces[self.rank] = reduce
        return Arrival(self.hub, slot, self.rank)


class Player:
    """A worker with a model, who trains and exchanges."""

    def __init__(self, hub, name, method, *, build=adamw, model=build_model, number=0, of=4):
        self.node = Node(hub, name)
        self.model = model()
        self.number, self.of = number, of
        self.optimizer = build(self.model)
        self.loop = tw.OuterLoop(self.model, self.optimizer, method, transport=self.node)
        self.course = self.loop._course
        self.trained = 0

    def inner(self, steps: int = 1) -> None:
        for _ in range(steps):
            loss(self.model, self.trained, self.number, workers=self.of).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.trained += 1

    def live(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def unsent(self) -> list[Tensor]:
        return [track.outer.unsent().clone() for track in self.course.tracks]

    def feedback(self) -> dict[str, Tensor]:
        return {
            f"{i}.{k}": v for i, t in enumerate(self.course.tracks) for k, v in t.feedback().items()
        }

    def anchor(self) -> list[Tensor]:
        return [t.outer.flat_anchor().clone() for t in self.course.tracks]

    def shared(self) -> dict[str, Tensor]:
        return dict(self.course.capture().tensors)


def exchange(players: Sequence[Player]) -> None:
    for player in players:
        player.loop.begin()
    for player in players:
        player.loop.finish()


def train(players: Sequence[Player], steps: int) -> None:
    for _ in range(steps):
        for player in players:
            player.inner()
        exchange(players)


def flush(players: Sequence[Player]) -> None:
    """What flush() does on all of them: they share a thread."""
    for _ in range(9):
        for player in players:
            player.loop.begin_last()
        for player in players:
            player.loop.finish()
        if all(player.course.is_settled() for player in players):
            return
    raise AssertionError("the last round never counted")


def crew(hub: Hub, method, workers: int, **options) -> list[Player]:
    """Workers that have entered together."""
    players = [Player(hub, f"w{k}", method, number=k, **options) for k in range(workers)]
    hub.seat(*(p.node for p in players))
    for player in players:
        _ = player.loop.share
    return players


def sum_of(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([v.double().flatten() for v in values])
