"""The state that workers share: what is refused, and what a look at it meanwhile sees."""

import copy
import dataclasses
import threading

import pytest
import torch

import thinwire as tw
from elastic_hub import METHODS, H, crew, meet, method, train
from elastic_twin import ElasticHub
from speed.measuring import peak_temporary_nbytes
from thinwire.errors import CheckpointError, MismatchError
from thinwire.membership import Snapshot
from toy import build_model, same_bits


@pytest.mark.parametrize("name", ["plain", "top-k, reduced", "streaming"])
def test_nobody_sees_half_a_step(name: str) -> None:
    hub = ElasticHub()
    players = crew(hub, METHODS[name], 2)
    shared, seen, stop = players[0].state, {}, threading.Event()
    wrong: list[str] = []

    def look() -> None:
        while not stop.is_set():
            position, snapshot = shared.progress(), shared.capture()
            version = snapshot.facts["version"]
            sends = sum(track["sends"] for track in snapshot.facts["tracks"])
            if sends != version:
                wrong.append(f"{sends} rounds at version {version}")
            state = torch.cat([t.double().flatten() for t in snapshot.tensors.values()])
            if not torch.equal(seen.setdefault(version, state), state):
                wrong.append(f"two states at version {version}")
            if seen.setdefault(f"digest {position.version}", position.digest) != position.digest:
                wrong.append(f"two digests at version {position.version}")

    watchers = [threading.Thread(target=look) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    for boundary in range(20):
        hub.discards = lambda _, odd=boundary % 4 == 1: odd
        train(players, H)
    stop.set()
    for watcher in watchers:
        watcher.join()
    assert wrong == []
    assert len(seen) > 10


@pytest.mark.parametrize("outer_device", [None, "cpu"])
def test_a_snapshot_is_copied_only_if_an_outer_step_overtakes_it(outer_device) -> None:
    model = torch.nn.Linear(64, 64)
    adam = dataclasses.replace(tw.presets.diloco(sync_every=1), outer=tw.outer.AdamW(lr=0.1))
    loop = tw.OuterLoop(model, [], adam, outer_device=outer_device)
    (fragment,) = loop._state.fragments

    def step() -> list[int]:
        with torch.no_grad():
            model.weight.add_(1)
        loop.step()
        return [tensor.data_ptr() for tensor in fragment.shared().values() if tensor.ndim]

    places = step()
    snapshot, nbytes = peak_temporary_nbytes(loop._state.capture)
    assert nbytes == 0
    assert {t.data_ptr() for t in snapshot.tensors.values()} >= {*places}
    before = copy.deepcopy(snapshot.tensors)
    elsewhere = step()
    assert same_bits([*snapshot.tensors.values()], [*before.values()])
    assert not {*places} & {*elsewhere}
    assert all(not torch.equal(t, before[n]) for n, t in loop._state.capture().tensors.items())
    del snapshot
    assert step() == elsewhere, "nothing shares that memory"


@pytest.mark.parametrize("name", METHODS)
def test_no_snapshot_changes_whatever_comes_after_it(name: str) -> None:
    """Not by rounds, other workers, other snapshots that are taken over, nor by training."""
    hub = ElasticHub()
    players = crew(hub, METHODS[name], 3)
    kept = list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]()

    def keep() -> Snapshot:
        for player in players:
            tensors = dict(player.state.capture().tensors)
            kept.append((tensors, copy.deepcopy(tensors)))
        return players[0].state.capture()

    # What streams has a round under way that another team would have to cancel.
    for members in (3,) * 4 if name == "streaming" else (3, 3, 2, 3):
        meet(hub, players[:members])
        for _ in range(H):
            keep()
            train(players[:members], 1)
    earlier = keep()
    train(players, H)
    for player in players:
        player.state.load(earlier)
        keep()
    train(players, H)
    changed = [
        n for tensors, before in kept for n in before if not torch.equal(tensors[n], before[n])
    ]
    assert changed == []
    first, last = kept[0][0], kept[-1][0]
    assert any(not torch.equal(first[n], last[n]) for n in first), "nothing was trained"


def wider():
    return torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 3))


# Who gives a state, the tensor of it that is changed, and how; and what the error names.
MISFITS = {
    "model": (method(), wider, {}, "parameters|wire order"),
    "method": (method(sync_every=5), build_model, {}, "sync_every"),
    "shape": (method(), build_model, {"0.anchor": lambda x: x[:-1]}, "anchor"),
    "dtype": (method(), build_model, {"0.anchor": torch.Tensor.double}, "anchor"),
    "optimizer": (method(), build_model, {"0.optimizer.momentum_buffer": None}, "momentum"),
}
HOW = {
    "adopt": lambda taker, state: taker.state.load(state),
    "resume": lambda taker, state: taker.loop.load_state_dict(
        {"shared": {"facts": state.facts, "tensors": state.tensors}, "feedback": [{}]}
    ),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", MISFITS)
def test_a_state_of_something_else_is_refused_and_changes_nothing(kind: str, how: str) -> None:
    described, model, changes, named = MISFITS[kind]
    (giver,) = crew(ElasticHub(), described, 1, model=model, of=1)
    snapshot = giver.state.capture()
    tensors = dict(snapshot.tensors)
    for name, change in changes.items():
        old = tensors.pop(name)
        tensors |= {name: change(old)} if change else {}
    snapshot = dataclasses.replace(snapshot, tensors=tensors)
    players = crew(ElasticHub(), method(), 3)
    taker = players[0]
    train(players, H + 1)
    before = taker.live(), taker.shared(), taker.state.progress(), taker.feedback()
    with pytest.raises(MismatchError, match=named):
        HOW[how](taker, snapshot)
    assert same_bits(taker.live(), before[0])
    assert all(torch.equal(taker.shared()[k], v) for k, v in before[1].items())
    assert taker.state.progress() == before[2]
    train(players, 2 * H)
    assert len({p.loop.digest() for p in players}) == 1


def test_a_record_that_does_not_follow_is_refused_and_changes_nothing() -> None:
    hub = ElasticHub()
    players = crew(hub, method(), 2)
    other = crew(ElasticHub(), method(), 1)[0]
    train(players, 2 * H)
    before = other.live(), other.shared(), other.state.progress()
    damaged = hub.records[1].messages[0].clone()
    damaged[80] ^= 1
    with pytest.raises(tw.ExchangeError, match="checksum"):
        other.state.replay_one(dataclasses.replace(hub.records[1], messages=[damaged] * 2))
    with pytest.raises(MismatchError, match="follows on version 1"):
        other.state.replay_one(hub.records[2])
    assert same_bits(other.live(), before[0])
    assert other.state.progress() == before[2]
    other.state.replay_one(hub.records[1])
    other.state.replay_one(hub.records[2])
    assert other.loop.digest() == players[0].loop.digest()
    assert other.state.step == 2 * H, "alone it would go back to the run's first step"


@pytest.mark.parametrize("buffer", ["anchor", "optimizer.momentum_buffer"])
def test_a_position_tells_states_apart_that_differ_in_any_part(buffer: str) -> None:
    """A momentum that differs would show as drift one round late."""
    players = crew(ElasticHub(), method(), 2)
    train(players, H)
    first, second = (player.state.progress() for player in players)
    assert first == second
    snapshot = players[1].state.capture()
    snapshot.tensors[f"0.{buffer}"][3] += 1e-3
    players[1].state.load(snapshot)
    third = players[1].state.progress()
    assert (third.version, third.digest != first.digest) == (first.version, True)


def test_a_loop_reports_its_bytes_and_waits_by_itself_and_the_rest_as_it_is_told() -> None:
    players = crew(ElasticHub(), method(sync_every=1), 2)
    first, node = players[0].loop, players[0].node
    train(players, 2)
    assert (node.metrics.loss, node.metrics.tokens_per_s) == (None, None)
    # As after the last round that counted.
    stats, metrics = first.stats, node.metrics
    assert metrics.sent_bytes == stats.sent_bytes > 0
    assert metrics.received_bytes == stats.received_bytes > 0
    assert 0 < (metrics.wait_s or 0) <= stats.wait_s
    first.report(loss=torch.tensor(2.5, requires_grad=True), tokens_per_s=10)
    assert type(node.metrics.loss) is float
    train(players, 1)
    assert (node.metrics.loss, node.metrics.tokens_per_s) == (2.5, 10.0)
    assert node.metrics.sent_bytes == first.stats.sent_bytes > stats.sent_bytes
    first.report(loss=2.0)
    assert (node.metrics.loss, node.metrics.tokens_per_s) == (2.0, 10.0)
    assert players[1].node.metrics.loss is None


@pytest.mark.parametrize("shape", [[1], [2, 3]])
def test_a_checkpoint_of_another_shape_is_refused_and_not_spread(shape: list[int]) -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    transport = tw.transport.in_process(1)[0]
    loop = tw.OuterLoop(model, optimizer, method(), transport=transport)
    outer = loop._state.fragments[0].outer
    before = outer.digest()
    with pytest.raises(CheckpointError, match="load the state of an outer optimizer"):
        outer.load_state_dict({**outer.state_dict(), "anchor": torch.ones(shape)})
    assert outer.digest() == before
