"""Exchanges take as long as their messages, followed one by one, and TCP adds what it adds."""

import itertools
import math

import pytest

from plan_scenarios import same
from thinwire.plan.link import Link, OverTcp, Ring, Star

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


def passed_on(workers: int):
    """Around the ring; items are (origin, origin)."""
    for hop, w in itertools.product(range(workers - 1), range(workers)):
        yield hop, w, (w + 1) % workers, [((w - hop) % workers,) * 2]


def direct(workers: int):
    """Each to its receiver; hops below 0 do not wait for each other."""
    for distance, w in itertools.product(range(1, workers), range(workers)):
        yield -1, w, (w + distance) % workers, [(w, (w + distance) % workers)]


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8, 13])
def test_a_ring_takes_as_long_as_its_messages(workers) -> None:
    link = Link(up_bits_per_s=8e3, down_bits_per_s=5e3, latency_s=0.3)
    for taken, sends in ((Ring().gather, passed_on), (Ring().scatter, direct)):
        seconds, held = carry(sends(workers), workers=workers, nbytes=700, link=link)
        assert same(taken(700, workers, link).total_s, seconds)
        for w, mine in enumerate(held):
            others = set(range(workers)) - {w}
            assert {(o, o) if sends is passed_on else (o, w) for o in others} <= mine


def test_a_star_takes_two_hops() -> None:
    link = Link(up_bits_per_s=80, down_bits_per_s=160, latency_s=1)
    assert Star().gather(10, 5, link).total_s == 1 + 1 + 1 + 2
    assert Star().scatter(10, 5, link).total_s == 1 + 4 + 1 + 2


def test_packets_and_announcements_come_on_top_by_hand() -> None:
    link, tcp = Link.of(8 * 1526, latency_s=0.5), OverTcp(late_s=0.25)
    # Two packets of 1448 bytes, each way: a second each, and their receiver is ready after 0.5 s.
    taken = tcp.gather(1448, 3, link)
    assert taken.total_s == 2 * 1 + 2 * 0.5 + 0.5 + 0.25
    assert taken.held_s == 2 * 1 + 0.5
    assert tcp.scatter(1448, 3, link).total_s == 2 * 1 + 0.5 + 0.5 + 0.25
    assert OverTcp(over=Star()).gather(1448, 3, link).total_s == 1 + 2 + 2 * 0.5 + 0.5


def test_large_packets_are_those_of_the_bare_link() -> None:
    link = Link.of(1e6)
    for topology in (Ring(), Star()):
        bare = topology.gather(10**6, 4, link).total_s
        large = OverTcp(over=topology, packet_nbytes=10**12).gather(10**6, 4, link).total_s
        assert large == pytest.approx(bare, rel=1e-9)
        assert OverTcp(over=topology).gather(10**6, 4, link).total_s > 1.05 * bare
    assert math.isclose(OverTcp().gather(1e9, 2, Link.of(math.inf)).total_s, 0)
