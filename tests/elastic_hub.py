"""Elastic workers that train a small model over `ElasticHub`, with methods for them."""

from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor

import thinwire as tw
from elastic_twin import ElasticHub
from toy import adamw, build_model, descend, loss

H = 3
NESTEROV = tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)
PLAIN = tw.outer.SGD(lr=1.0)
TOP_K = tw.codecs.TopK(k=512)
FEEDBACK = tw.ErrorFeedback(decay=0.9)


def method(**fields) -> tw.Method:
    return tw.presets.diloco(**{"sync_every": H, "outer": NESTEROV, **fields})


def lossy(**fields) -> tw.Method:
    """A method that is lossy on purpose, for tests that look at what is left over."""
    with pytest.warns(tw.errors.LossyReduceScatterWarning):
        return method(**fields)


def streaming(**fields) -> tw.Method:
    paper = {"sync_every": H, "outer": NESTEROV, "fragments": tw.Balanced(count=2)}
    overlap = tw.Delay(tau=1, mixing=0.5)
    return tw.presets.streaming_diloco(**{**paper, "overlap": overlap, **fields})


TABLE = tw.outer.ByWorkerCount(table=((1, PLAIN), (3, NESTEROV)))
METHODS = {
    "plain": method(),
    "top-k": method(codec=TOP_K, feedback=FEEDBACK),
    "top-k, reduced": lossy(codec=TOP_K, feedback=FEEDBACK, exchange=tw.ReduceScatter()),
    "2 bit": method(codec=tw.codecs.Quantise(bits=2), exchange=tw.ReduceScatter()),
    "e3m0": method(codec=tw.codecs.E3M0(), feedback=FEEDBACK),
    "table": method(outer=TABLE),
    "streaming": streaming(),
    "adamw outside": method(outer=tw.outer.AdamW(lr=0.3)),
}


class Player:
    """A worker with a model, which trains and exchanges."""

    def __init__(
        self, hub, name, method, *, build=adamw, model=build_model, number=0, of=4, outer=None
    ):
        self.node = hub.connect(name)
        self.model = model()
        self.number, self.of = number, of
        self.optimizer = build(self.model)
        self.loop = tw.OuterLoop(
            self.model, self.optimizer, method, transport=self.node, outer_device=outer
        )
        self.state = self.loop._state
        self.trained = 0

    def inner(self, steps: int = 1) -> None:
        for _ in range(steps):
            descend(loss(self.model, self.trained, self.number, workers=self.of), self.optimizer)
            self.trained += 1

    def live(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def unsent(self) -> list[Tensor]:
        return [f.outer.pseudo_gradient().clone() for f in self.state.fragments]

    def feedback(self) -> dict[str, Tensor]:
        return {
            f"{i}.{k}": v
            for i, f in enumerate(self.state.fragments)
            for k, v in f.exchange.feedback().items()
        }

    def anchor(self) -> list[Tensor]:
        return [f.outer.flat_anchor().clone() for f in self.state.fragments]

    def shared(self) -> dict[str, Tensor]:
        return dict(self.state.capture().tensors)


def meet(hub: ElasticHub, players: Iterable[Player]) -> None:
    """Let `players` take part from the next round on."""
    hub.set_members(*(player.node for player in players))


def begin(players: Iterable[Player]) -> None:
    for player in players:
        player.loop.begin()


def finish(players: Iterable[Player]) -> None:
    for player in players:
        player.loop.finish()


def exchange(players: Sequence[Player], times: int = 1) -> None:
    for _ in range(times):
        begin(players)
        finish(players)


def inner(players: Iterable[Player], steps: int = 1) -> None:
    for player in players:
        player.inner(steps)


def train(players: Sequence[Player], steps: int) -> None:
    for _ in range(steps):
        inner(players)
        exchange(players)


def to_boundary(players: Sequence[Player]) -> None:
    """Train until only the exchange of the round is left."""
    train(players, H - 1)
    inner(players)


def begin_with(players: Sequence[Player], late: Player) -> None:
    """Begin a round with a newcomer."""
    begin(players)
    late.loop.join()
    finish(players)


def flush(players: Sequence[Player]) -> None:
    """The equivalent of flush() on all players, which share a thread."""
    for _ in range(9):
        for player in players:
            player.loop.begin(last=True)
        finish(players)
        if all(player.state.fully_synced() for player in players):
            return
    raise AssertionError("the last round never counted")


def crew(hub: ElasticHub, method, workers: int, **options) -> list[Player]:
    """Workers that have joined together."""
    players = [Player(hub, f"w{k}", method, number=k, **options) for k in range(workers)]
    meet(hub, players)
    for player in players:
        player.loop.join()
    return players


def sum_of(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([v.double().flatten() for v in values])


def same_state(a: Player, b: Player) -> bool:
    mine, theirs = a.shared(), b.shared()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
