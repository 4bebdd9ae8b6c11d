"""Elastic workers without a network: what `thinwire.testing.ElasticHub` does to them."""

import subprocess
import sys

import pytest
import torch

import thinwire as tw
from elastic_hub import Player, crew, exchange, train
from thinwire.errors import ConfigurationError
from thinwire.testing import ElasticHub
from thinwire.transport import RoundTag


def method(**fields) -> tw.Method:
    return tw.presets.diloco(**{"sync_every": 1, **fields})


def equal(players: list[Player]) -> bool:
    anchors = [torch.cat(player.anchor()) for player in players]
    return all(torch.equal(anchor, anchors[0]) for anchor in anchors)


def test_members_come_and_go_and_end_alike() -> None:
    hub = ElasticHub()
    players = crew(hub, method(), 2)
    late = Player(hub, "late", method(), number=3)
    train(players, 1)
    hub.set_members(*(player.node for player in players), late.node)
    for player in players:
        player.inner()
        player.loop.begin()
    late.loop.join()
    assert late.loop.share == max(hub.shares)
    for player in players:
        player.loop.finish()
    everyone = [*players, late]
    train(everyone, 2)
    assert equal(everyone)
    assert [player.node.rank for player in everyone] == [0, 1, 2]
    hub.set_members(*(player.node for player in everyone[1:]))
    train(everyone[1:], 2)
    assert equal(everyone[1:])
    assert {player.node.world_size for player in everyone[1:]} == {2}
    assert len(set(hub.shares)) == len(hub.shares)


@pytest.mark.parametrize("heal_by", ["records", "snapshot"])
def test_an_uninformed_worker_is_healed(heal_by: str) -> None:
    hub = ElasticHub()
    hub.heal_by = heal_by
    players = crew(hub, method(), 3)
    hub.uninformed = {"w1"}
    for player in players:
        player.inner()
    exchange(players)
    assert not equal(players)
    hub.uninformed = set()
    for player in players:
        player.inner()
    exchange(players)
    assert equal(players)


def test_a_wait_before_all_have_sent_is_refused() -> None:
    players = crew(ElasticHub(), method(), 2)
    for player in players:
        player.inner()
    players[0].loop.begin()
    with pytest.raises(ConfigurationError, match="w1 sent nothing; do: call begin on all workers"):
        players[0].loop.finish()


def test_exchanges_in_another_order_are_refused() -> None:
    hub = ElasticHub()
    ends = [hub.connect("w0"), hub.connect("w1")]
    hub.set_members(*ends)
    tags = [RoundTag(what="a", round=1), RoundTag(what="b", round=1)]
    hub.exchange_of(ends[0], tags[0])
    with pytest.raises(ConfigurationError, match="make the same calls in the same order"):
        hub.exchange_of(ends[1], tags[1])


def test_the_package_does_not_load_it() -> None:
    code = "import sys, thinwire; print('thinwire.testing' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_a_loop_reports_its_bytes_and_waits_by_itself_and_the_rest_as_it_is_told() -> None:
    hub = ElasticHub()
    players = crew(hub, method(), 2)
    first = players[0]
    train(players, 2)
    stats, metrics = first.loop.stats, first.node.metrics
    assert (metrics.loss, metrics.tokens_per_s) == (None, None)
    # As after the last round that counted.
    assert metrics.sent_bytes == stats.sent_bytes > 0
    assert metrics.received_bytes == stats.received_bytes > 0
    assert metrics.wait_s is not None
    assert 0 < metrics.wait_s <= stats.wait_s
    first.loop.report(loss=torch.tensor(2.5, requires_grad=True), tokens_per_s=10)
    assert type(first.node.metrics.loss) is float
    train(players, 1)
    later = first.node.metrics
    assert (later.loss, later.tokens_per_s) == (2.5, 10.0)
    assert later.sent_bytes == first.loop.stats.sent_bytes > stats.sent_bytes
    first.loop.report(loss=2.0)
    assert (first.node.metrics.loss, first.node.metrics.tokens_per_s) == (2.0, 10.0)
    assert players[1].node.metrics.loss is None
