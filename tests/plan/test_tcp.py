"""What TCP adds to an exchange."""

import math
from typing import Any

import pytest

import thinwire as tw
from thinwire.plan.link import Link
from thinwire.plan.tcp import OverTcp
from thinwire.plan.topology import Mesh, Ring, Star


def test_packets_and_announcements_come_on_top_by_hand() -> None:
    link, tcp = Link.of(8 * 1526, latency_s=0.5), OverTcp(late_s=0.25)
    # Two packets of 1448 bytes, each way: a second each, and their receiver is ready after 0.5 s.
    taken = tcp.gather(1448, 3, link)
    assert taken.total_s == 2 * 1 + 2 * 0.5 + 0.5 + 0.25
    assert taken.held_s == 2 * 1 + 0.5
    assert tcp.scatter(1448, 3, link).total_s == 2 * 1 + 0.5 + 0.5 + 0.25
    star = OverTcp(over=Star()).gather(1448, 3, link)
    assert star.total_s == 1 + 2 + 2 * 0.5 + 0.5


def test_large_packets_are_those_of_the_bare_link() -> None:
    link = Link.of(1e6)
    for topology in (Ring(), Mesh()):
        bare = topology.gather(10**6, 4, link).total_s
        large = OverTcp(over=topology, packet_nbytes=10**12).gather(10**6, 4, link).total_s
        assert large == pytest.approx(bare, rel=1e-9)
        assert OverTcp(over=topology).gather(10**6, 4, link).total_s > 1.05 * bare


@pytest.mark.parametrize("fields", [{"packet_nbytes": 52}, {"late_s": -1.0}, {"late_s": math.nan}])
def test_packets_without_room_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(tw.ConfigurationError, match="headers take 52 bytes"):
        OverTcp(**fields)
