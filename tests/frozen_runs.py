"""Short runs whose every bit is fixed, which `test_frozen.py` compares with stored results.

"Training" adds numbers made of integers to the live weights, without matrix products or random
numbers. Outer rates and momenta are powers of two, so that a fused multiply-add on one machine
rounds like two operations on another.
"""

import dataclasses
import hashlib
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from elastic_hub import Player, crew, exchange, flush, train
from elastic_twin import ElasticHub
from toy import Team

FOLDER = Path(__file__).parent / "frozen"
H = 4
DEMO = (
    "ddp",
    "diloco",
    "streaming_diloco:tau=2",
    "muloco",
    "muloco:bits=2",
    "sparseloco:density=1/32",
    "sparse_muloco:density=1/32",
)
NESTEROV = tw.outer.SGD(lr=0.5, momentum=0.5, nesterov=True)
FEEDBACK = tw.ErrorFeedback(decay=0.5)
FOUR_BITS, TOP_K = tw.codecs.Quantise(bits=4), tw.codecs.TopK(k=128)
LATE = {"fragments": tw.Strided(layers=2), "overlap": tw.Delay(tau=2, mixing=0.5)}


class Model(nn.Module):
    """Odd shapes, four layers, and 331 rows, which make more than one chunk of 4096 numbers."""

    def __init__(self, *, rows: int = 331, shift: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, 13)
        layers = (nn.Sequential(nn.Linear(13, 7), nn.Linear(7, 13)) for _ in range(4))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(13, 3)
        add(self, 0, 99 + shift, scale=0)


def pattern(numel: int, *seeds: int) -> Tensor:
    """Integers of magnitude below 2^19, divided by 2^21: -1/4 to 1/4."""
    x = torch.arange(numel, dtype=torch.int64)
    for seed in seeds:
        x = (x * 1_103_515_245 + 12_345 + seed * 40_503) & 0x7FFFFFFF
        x = x ^ (x >> 15)
    return ((x & 0xFFFFF) - 0x80000).float() / 2**21


def add(model: nn.Module, step: int, worker: int, *, scale: float = 1.0) -> None:
    """Scale the old weights and add a pattern: an inner step, or a start."""
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.mul_(scale).add_(pattern(p.numel(), step, worker, number).view_as(p))


class Workers(Team):
    """K workers in one process, stepped in turn."""

    def __init__(self, method: tw.Method, workers: int, *, rows: int = 331) -> None:
        def build(model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.25)

        super().__init__(method, build, workers, model=partial(Model, rows=rows))
        self.takes_gradients = isinstance(method.outer, tw.outer.GradientAveraging)
        self.step = 0

    def train(self, steps: int) -> "Workers":
        super().train(steps, first=self.step)
        self.step += steps
        return self

    def descend(self, worker: int, step: int) -> None:
        model = self.models[worker]
        if not self.takes_gradients:
            add(model, step, worker)
            return
        for number, p in enumerate(model.parameters()):
            p.grad = pattern(p.numel(), step, worker, number).view_as(p)
        self.optimizers[worker].step()

    def result(self) -> dict[str, Any]:
        """The frozen digests and counts of a run."""
        (digest,) = {loop.digest() for loop in self.loops}
        stats = self.loops[0].stats
        return {
            "outer": digest,
            "live": live_digest(self.models[-1]),
            "sent": stats.sent_bytes,
            "received": stats.received_bytes,
            "rounds": stats.rounds,
        }

    def states(self) -> list[Any]:
        return [(state["model"], state["outer"]) for state in super().states()]

    def load(self, states: list[Any], step: int) -> "Workers":
        for (model, outer), mine, loop in zip(states, self.models, self.loops, strict=True):
            loop.load_state_dict(outer)
            mine.load_state_dict(model)
        self.step = step
        return self


def live_digest(model: nn.Module) -> str:
    parts = (p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(b"".join(parts)).hexdigest()


def demo(name: str) -> tw.Method:
    """A method of the demo, with rates that round equally everywhere and a short round."""
    method = tw.presets.from_text(name)
    if name == "ddp":
        return method
    method = dataclasses.replace(method, sync_every=H)
    if "sparse" in name:  # the rule when digests were written; "gather, senders" has today's
        method = dataclasses.replace(method, aggregate=tw.MeanOverWorkers())
    if isinstance(method.outer, tw.outer.SGD) and method.outer.momentum == 0:
        return method
    return dataclasses.replace(method, outer=NESTEROV)


def diloco(**fields: Any) -> tw.Method:
    return tw.presets.diloco(**{"sync_every": H, "outer": NESTEROV, **fields})


REDUCED = tw.ReduceScatter()
OWNED = tw.ReduceScatter(owner_feedback=FEEDBACK)
METHODS: dict[str, tw.Method] = {
    **{name: demo(name) for name in DEMO},
    "gather": diloco(codec=FOUR_BITS, exchange=tw.Gather()),
    "gather, feedback": diloco(codec=FOUR_BITS, feedback=FEEDBACK, exchange=tw.Gather()),
    "gather, senders": diloco(
        codec=TOP_K, feedback=FEEDBACK, exchange=tw.Gather(), aggregate=tw.MeanOverSenders()
    ),
    "gather, median": diloco(exchange=tw.Gather(), aggregate=tw.MedianNormClip()),
    "reduce-scatter": diloco(codec=FOUR_BITS, feedback=FEEDBACK, exchange=REDUCED),
    "reduce-scatter, owner feedback": diloco(codec=FOUR_BITS, feedback=FEEDBACK, exchange=OWNED),
    "reduce-scatter, top-k": diloco(codec=TOP_K, feedback=FEEDBACK, exchange=OWNED),
    "late": diloco(codec=FOUR_BITS, feedback=FEEDBACK, **LATE),
    "late, reduce-scatter": diloco(codec=FOUR_BITS, feedback=FEEDBACK, exchange=OWNED, **LATE),
    "eager": diloco(overlap=tw.Eager()),
    "eager, late, feedback": diloco(
        codec=FOUR_BITS, feedback=FEEDBACK, fragments=tw.Strided(layers=2), overlap=tw.Eager()
    ),
}
IN_FLIGHT = ("streaming_diloco:tau=2", "late", "late, reduce-scatter", "eager, late, feedback")
FILES = {"late": "late.pt", "eager": "eager.pt"}
STOP, STEPS = 9, 14  # after step 9 fragments are in flight if the overlap allows it


def build(name: str) -> Workers:
    # An eager worker's own share is 1/K; K is a power of two, so that products are not rounded.
    return Workers(METHODS[name], 2 if name.startswith("eager") else 3)


def finished(workers: Workers) -> dict[str, Any]:
    """The result after `STEPS` steps in all, and the last exchange."""
    return workers.train(STEPS - workers.step).flush().result()


def small(name: str) -> Workers:
    """Two workers whose state is small enough for a file in this repository."""
    return Workers(METHODS[name], 2, rows=23)


# -- elastic ---------------------------------------------------------------------------------------

TABLE = tw.outer.ByWorkerCount(table=((1, tw.outer.SGD(lr=1.0)), (3, NESTEROV)))
ELASTIC = {
    "elastic": diloco(outer=TABLE),
    "elastic, top-k": diloco(codec=TOP_K, feedback=FEEDBACK),
    "elastic, reduce-scatter": diloco(codec=FOUR_BITS, feedback=FEEDBACK, exchange=OWNED),
    "elastic, late": diloco(codec=FOUR_BITS, feedback=FEEDBACK, **LATE),
}
HEALED = "elastic, top-k"


def _works(player: Player) -> Player:
    def inner(steps: int = 1) -> None:
        for _ in range(steps):
            add(player.model, player.trained, player.number)
            player.trained += 1

    player.inner = inner
    return player


def team(hub: ElasticHub, name: str, workers: int, rows: int = 331) -> list[Player]:
    model = partial(Model, rows=rows)
    return [_works(p) for p in crew(hub, ELASTIC[name], workers, build=lambda _: [], model=model)]


def elastic(name: str, heal: str) -> dict[str, Any]:
    """Three workers: one misses two rounds, one of them discarded, and returns; a fourth joins."""
    hub = ElasticHub()
    hub.heal_by = heal
    players = team(hub, name, 3)
    train(players, 3 * H - 1)
    _work_to_boundary(players, 1)
    hub.set_members(*(p.node for p in players[:2]))
    exchange(players[:2])
    hub.discards = lambda _: True
    train(players[:2], H)
    hub.discards = lambda _: False
    _work_to_boundary(players[:2])
    hub.set_members(*(p.node for p in players))
    exchange(players)
    _work_to_boundary(players)
    start = partial(Model, shift=1 if heal == "snapshot" else 0)
    new = _works(Player(hub, "new", ELASTIC[name], number=3, build=lambda _: [], model=start))
    everyone = [*players, new]
    hub.set_members(*(p.node for p in everyone))
    for player in players:
        player.loop.begin()
    new.loop.join()
    share = new.loop.share
    for player in players:
        player.loop.finish()
    train(everyone, H)
    flush(everyone)
    (outer,) = {p.loop.digest() for p in everyone}
    return {
        "outer": outer,
        "live": live_digest(new.model),
        "sent": [p.loop.stats.sent_bytes for p in everyone],
        "received": [p.loop.stats.received_bytes for p in everyone],
        "rounds": [p.loop.stats.rounds for p in everyone],
        "share": share,
    }


def _work_to_boundary(players: list[Player], steps: int = H) -> None:
    train(players, steps - 1)
    for player in players:
        player.inner()


# -- run folders -----------------------------------------------------------------------------------

# Run in a folder with model.json and corpus.jsonl; writes `out`.
COMPARE = shlex.split(
    "compare --methods ddp,streaming_diloco:tau=2 --seeds 0 --out out --model model.json "
    "--corpus corpus.jsonl --sequence-length 16 --global-batch 4 --workers 2 --steps 12 "
    "--sync-every 4 --log-steps 1 --evaluate-steps 6 --checkpoint-steps 5 --keep-checkpoints 1 "
    "--device cpu --threads 1"
)
