"""Topologies take as long as their messages, followed one by one."""

import itertools

import pytest

from plan_scenarios import same
from thinwire.plan.link import Link
from thinwire.plan.topology import Mesh, Ring, Topology, Tree

Item = tuple[int, int]  # origin, receiver


def carry(sends, *, workers: int, nbytes: float, link: Link) -> tuple[float, list[set[Item]]]:
    """Message by message: (hop, from, to, items) in order; a hop waits for the one before it."""
    up_free, down_free = [0.0] * workers, [0.0] * workers
    came: dict[tuple[int, Item], float] = {}
    received_s = [0.0] * workers  # of the hop before
    for hop, group in itertools.groupby(sends, key=lambda send: send[0]):
        arrivals = list(received_s)
        for _, source, target, items in group:
            ready = max([came.get((source, item), 0.0) for item in items], default=0.0)
            ready = max(ready, received_s[source] if hop >= 0 else 0.0)
            begin = max(up_free[source], down_free[target], ready)
            end = begin + len(items) * link.seconds(nbytes)
            up_free[source] = down_free[target] = end
            for item in items:
                came[target, item] = end + link.latency_s
            arrivals[target] = max(arrivals[target], end + link.latency_s)
        received_s = arrivals
    held = [{item for (worker, item) in came if worker == w} for w in range(workers)]
    return max(came.values()), held


def gather_sends(topology: Topology, workers: int):
    """Items are (origin, origin); hops below 0 do not wait for each other."""
    everyone = range(workers)
    if isinstance(topology, Ring):
        for hop in range(workers - 1):
            for w in everyone:
                yield hop, w, (w + 1) % workers, [((w - hop) % workers,) * 2]
    elif isinstance(topology, Mesh):
        for distance in range(1, workers):
            for w in everyone:
                yield -1, w, (w + distance) % workers, [(w, w)]
    else:
        for hop in range((workers - 1).bit_length()):
            count = min(2**hop, workers - 2**hop)
            for w in everyone:
                items = [((w - i) % workers,) * 2 for i in range(count)]
                yield hop, w, (w + 2**hop) % workers, items


def scatter_sends(topology: Topology, workers: int):
    everyone = range(workers)
    if isinstance(topology, Ring | Mesh):
        for distance in range(1, workers):
            for w in everyone:
                yield -1, w, (w + distance) % workers, [(w, (w + distance) % workers)]
        return
    for hop in range((workers - 1).bit_length()):
        for w in everyone:
            # Item (o, r) is at o plus the lower bits of its distance by now.
            items = [
                (o, (o + d) % workers)
                for d in everyone
                if d >> hop & 1
                for o in [(w - (d & (2**hop - 1))) % workers]
            ]
            yield hop, w, (w + 2**hop) % workers, items


@pytest.mark.parametrize("topology", [Ring(), Mesh(), Tree()], ids=repr)
@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8, 13])
def test_topologies_take_as_long_as_their_messages(topology, workers) -> None:
    link = Link(up_bits_per_s=8e3, down_bits_per_s=5e3, latency_s=0.3)
    kinds = {
        "gather": (topology.gather, gather_sends),
        "scatter": (topology.scatter, scatter_sends),
    }
    for name, (taken, sends) in kinds.items():
        plan = list(sends(topology, workers))
        seconds, held = carry(plan, workers=workers, nbytes=700, link=link)
        assert same(taken(700, workers, link).total_s, seconds), name
        for w, mine in enumerate(held):
            others = set(range(workers)) - {w}
            wanted = {(o, o) if name == "gather" else (o, w) for o in others}
            assert wanted <= mine, name
