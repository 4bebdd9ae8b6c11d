"""Exchanges: equal results by every way, agreement, and what happens to messages that are wrong."""

import copy
import dataclasses
import logging
import struct
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw
from changes import Changing, Tamper, Wire, of_worker_1
from exchanges import CODECS, flipped, poisoned, state_of
from thinwire import codecs
from thinwire.aggregate import Payloads, aggregate_valid
from thinwire.exchange.message import HEADER_NBYTES
from thinwire.fragments.layout import Layout
from thinwire.transport import in_process
from toy import OwnAnchors, Team, adamw, own_anchor, same_bits

FEEDBACK = tw.ErrorFeedback()
OWNED = tw.ReduceScatter(owner_feedback=FEEDBACK)
NESTEROV = tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)


def diloco(**fields) -> tw.Method:
    return tw.presets.diloco(**{"sync_every": 2, "outer": NESTEROV} | fields)


@pytest.mark.parametrize(("preset", "workers"), [("ddp", 2), ("diloco", 3), ("ddp", 5)])
def test_without_loss_both_exchanges_give_the_same_bits(preset: str, workers: int) -> None:
    method = tw.presets.by_name(preset)(sync_every=1)
    gathered, scattered = (
        Team(dataclasses.replace(method, exchange=exchange), adamw, workers).train(8)
        for exchange in (tw.Gather(), tw.ReduceScatter())
    )
    assert len({*gathered.digests(), *scattered.digests()}) == 1


@pytest.mark.filterwarnings("ignore::thinwire.LossyReduceScatterWarning")
@pytest.mark.parametrize(
    ("codec", "owner", "workers"),
    [
        pytest.param(codec, [tw.NoFeedback(), FEEDBACK][n % 2], [2, 3, 5][n % 3], id=codec.id)
        for n, codec in enumerate(CODECS)
    ],
)
def test_after_every_round_all_workers_agree_bit_for_bit(codec, owner, workers: int) -> None:
    for kind in (tw.Gather(), tw.ReduceScatter(owner_feedback=owner)):
        team = Team(diloco(codec=codec, feedback=FEEDBACK, exchange=kind), adamw, workers)
        for first in (0, 2, 4):
            assert len({*team.train(2, first=first).digests()}) == 1


def test_the_owners_second_encoding_and_its_feedback_show() -> None:
    """Feedback from the second round on; a lone worker is its own owner, and encodes once."""

    def team(exchange: tw.exchange.Exchange, workers: int = 3) -> Team:
        return Team(diloco(codec=codecs.Quantise(bits=4), exchange=exchange), adamw, workers)

    plain, fed, gathered = team(tw.ReduceScatter()), team(OWNED), team(tw.Gather())
    assert same_bits(plain.train(2).anchor(), fed.train(2).anchor())
    assert not same_bits(plain.anchor(), gathered.train(2).anchor())
    assert not same_bits(plain.train(2, first=2).anchor(), fed.train(2, first=2).anchor())
    lone = [team(each, 1).train(4).anchor() for each in (OWNED, tw.Gather())]
    assert same_bits(*lone)


@pytest.mark.parametrize("exchange", [tw.Gather(), OWNED])
def test_a_state_without_its_residuals_is_refused(exchange) -> None:
    team = Team(diloco(feedback=FEEDBACK, exchange=exchange), adamw, 3).train(2)
    state = team.loops[0].state_dict()
    state["fragments"][0]["exchange"].popitem()
    with pytest.raises(tw.CheckpointError, match="error feedback"):
        team.loops[0].load_state_dict(state)


IDENTITY = codecs.Identity()


@pytest.mark.parametrize(
    ("codec", "gathering", "reducing", "changes"),
    [
        (IDENTITY, (1, 2), (3, 5), {}),
        (codecs.CastBF16(), (4,), (5,), {}),
        (codecs.Quantise(bits=4), (8,), (16,), {}),
        (codecs.TopK(), (64,), (512,), {}),
        # Among few, what is lossless and no more to read; a single payload is no more.
        (IDENTITY, (4,), (5,), {"layout": Layout.vector(139)}),
        (IDENTITY, (), (3,), {"few": 2}),
        (IDENTITY, (2,), (), {"few": 1}),
        # Rules that guard against members judge whole vectors, and others whole tensors.
        *((IDENTITY, (4,), (), {"rule": r}) for r in (tw.TrimmedMean(), tw.DropOutliers())),
        (IDENTITY, (9,), (), {"few": 2, "rule": tw.MedianNormClip()}),
    ],
)
def test_automatic_gathers_among_few_or_while_it_is_little(
    codec, gathering, reducing, changes
) -> None:
    layout = changes.get("layout", Layout.of({"weight": (1024, 64)}))
    rule = changes.get("rule", tw.MeanOverWorkers())
    automatic = tw.Automatic(few=changes.get("few", tw.Automatic().few), otherwise=OWNED)
    for workers in (*gathering, *reducing):
        chosen = automatic.choose(codec, layout, rule, workers)
        assert chosen == (tw.Gather() if workers in gathering else OWNED)
    with pytest.raises(tw.ConfigurationError, match="few to 0"):
        tw.Automatic(few=0)


def test_an_automatic_reduce_scatter_that_loses_much_is_warned_of() -> None:
    one_bit = {"codec": codecs.Quantise(bits=1), "layout": Layout.vector(4096 * 40)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state_of(tw.Automatic(), 0, 32, **one_bit)  # gathers
        state_of(tw.Automatic(few=34), 0, 34, **one_bit)
        state_of(tw.Automatic(otherwise=OWNED), 0, 34, **one_bit)
        state_of(tw.Automatic(), 0, 34, **one_bit | {"codec": codecs.Quantise(bits=2)})
    with pytest.warns(tw.LossyReduceScatterWarning, match=r"34 workers.*Quantise.*Gather\(\)"):
        state_of(tw.Automatic(), 0, 34, **one_bit)


class WiredTeam(Team):
    """A team whose messages are changed on their way."""

    def __init__(self, method: tw.Method, workers: int) -> None:
        self.wires = [Wire(rank, workers) for rank in range(workers)]
        transports = list(map(Changing, in_process(workers), self.wires))
        super().__init__(method, adamw, workers, transports=transports)


# What else can be wrong with a message is in test_message.py.
WRONG: dict[str, tuple[Tamper, str]] = {
    "body": (of_worker_1(flipped), "body does not match"),
    "truncated": (of_worker_1(lambda m: m[:-1]), "619 bytes of 620"),
    "truncated header": (of_worker_1(lambda m: m[:10]), "10 bytes"),
    "swapped": (lambda m: [m[0], m[2], m[1]], "(sender|shard) is 2, not 1"),
}


@pytest.mark.parametrize(
    ("exchange", "where", "case"),
    [
        *((tw.Gather(), "arriving", case) for case in WRONG),
        (tw.ReduceScatter(), "shards", "body"),
        *((tw.ReduceScatter(), "arriving", case) for case in ("truncated header", "swapped")),
    ],
)
def test_a_message_that_is_wrong_is_refused_by_sender_and_round(exchange, where, case) -> None:
    team = WiredTeam(diloco(exchange=exchange), 3).train(2)
    before, (tamper, reason) = copy.deepcopy(team.anchor()), WRONG[case]
    setattr(team.wires[0], where, tamper)
    with pytest.raises(tw.ExchangeError, match=f"message of worker 1 for round 2.*{reason}"):
        team.train(2, first=2)
    assert same_bits(before, team.anchor())
    assert team.loops[0].stats.rounds == 1


@pytest.mark.parametrize(
    ("exchange", "preset"), [(tw.Gather(), "ddp"), (tw.ReduceScatter(), "diloco")]
)
def test_drift_is_noticed_by_all_in_the_next_round(exchange, preset: str) -> None:
    method = tw.presets.by_name(preset)(sync_every=1, exchange=exchange)
    team = Team(method, adamw, 3).train(2)
    # Under ddp the live weights are the anchor, of which anchor() gives a copy.
    anchor = team.models[1].state_dict() if preset == "ddp" else own_anchor(team.loops[1])
    next(iter(anchor.values()))[0, 0] += 1e-6
    before = [loop.digest() for loop in team.loops]
    assert len(set(before)) == 2
    for loop, model, optimizer in zip(team.loops, team.models, team.optimizers, strict=True):
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
        loop.begin()
    for loop in team.loops:
        with pytest.raises(tw.MismatchError, match=r"for round 3: replicas have drifted"):
            loop.finish()
    if preset == "diloco":
        assert before == [loop.digest() for loop in team.loops]


@pytest.mark.parametrize("exchange", [tw.Gather(), tw.ReduceScatter(), tw.exchange.Pairs()])
def test_anchors_of_their_own_are_no_drift(exchange) -> None:
    method = diloco(sync_every=1, exchange=exchange, outer=OwnAnchors(outer=NESTEROV))
    team = Team(method, adamw, 3).train(2)
    next(iter(own_anchor(team.loops[1]).values()))[0, 0] += 1e-6
    team.train(2, first=2)
    assert len({loop.digest() for loop in team.loops}) > 1


BAD = [float("nan"), float("inf"), float("-inf")]


AGGREGATES = [tw.MeanOverWorkers(), tw.MeanOverSenders(), tw.MedianNormClip()]


@pytest.mark.parametrize(("bad", "aggregate"), list(zip(BAD, AGGREGATES, strict=True)))
def test_a_worker_that_sends_no_number_is_left_out(bad: float, aggregate, caplog) -> None:
    method = diloco(codec=codecs.CastBF16(), aggregate=aggregate, outer=tw.outer.SGD(lr=1.0))
    team = WiredTeam(method, 3)
    team.wires[1].sending = partial(poisoned, bad=bad)
    sent: list[Tensor] = []
    team.wires[0].arriving = lambda messages: sent.extend(messages) or messages
    start = torch.cat([p.flatten() for p in copy.deepcopy(team.anchor())])
    with caplog.at_level(logging.WARNING):
        team.train(2)
    assert "worker 1 was left out" in caplog.text
    assert "in round 1" in caplog.text
    assert all(loop.stats.left_out == {1: 1} for loop in team.loops)
    assert len({loop.digest() for loop in team.loops}) == 1
    shapes = {name: tuple(p.shape) for name, p in team.models[0].named_parameters()}
    others = Payloads(
        coder=method.codec.bind(Layout.of(shapes)),
        payloads=[sent[rank][HEADER_NBYTES:] for rank in (0, 2)],
    )
    moved = torch.cat([p.flatten() for p in team.anchor()])
    assert torch.equal(moved, start - aggregate.combine(others))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_who_was_left_out_survives_a_checkpoint(tmp_path) -> None:
    import torch.distributed.checkpoint as dcp

    method = diloco(codec=codecs.CastBF16())
    team, fresh = WiredTeam(method, 3), WiredTeam(method, 3)
    team.wires[1].sending = poisoned
    state = team.train(2).loops[0].state_dict()
    dcp.save({"outer": state}, checkpoint_id=tmp_path, no_dist=True)
    assert team.train(2, first=2).loops[0].stats.left_out == {1: 2}
    team.loops[0].load_state_dict(state)
    again = {"outer": fresh.loops[0].state_dict()}
    dcp.load(again, checkpoint_id=tmp_path, no_dist=True)
    fresh.loops[0].load_state_dict(again["outer"])
    assert team.loops[0].stats.left_out == fresh.loops[0].stats.left_out == {1: 1}


def test_when_no_worker_sends_a_number_nothing_is_applied() -> None:
    team = WiredTeam(diloco(codec=codecs.CastBF16()), 2)
    before = copy.deepcopy(team.anchor())
    for wire in team.wires:
        wire.sending = poisoned
    with pytest.raises(tw.NonFiniteError, match="none of it is finite"):
        team.train(2)
    assert same_bits(before, team.anchor())


def test_a_shards_owner_leaves_out_a_worker_that_sends_no_number_and_only_it_knows() -> None:
    team = WiredTeam(diloco(codec=codecs.CastBF16(), exchange=tw.ReduceScatter()), 3)

    def poison_shard_0(message: Tensor) -> Tensor:
        (shard,) = struct.unpack_from("<H", bytes(message[22:24].tolist()))
        return poisoned(message) if shard == 0 else message

    team.wires[1].sending = poison_shard_0
    team.train(2)
    assert len({loop.digest() for loop in team.loops}) == 1
    assert [loop.stats.left_out for loop in team.loops] == [{1: 1}, {}, {}]
    assert all(bool(torch.isfinite(p).all()) for p in team.anchor())


@pytest.mark.parametrize("bad", BAD[:2])
def test_a_result_that_is_no_number_is_not_applied(bad: float) -> None:
    """No other worker has that shard: there is nothing to leave out."""
    team = WiredTeam(diloco(codec=codecs.CastBF16(), exchange=tw.ReduceScatter()), 2)
    before = copy.deepcopy(team.anchor())

    team.wires[1].arriving = lambda messages: [poisoned(messages[0], bad), messages[1]]
    with pytest.raises(tw.NonFiniteError, match="shards of worker 0 for round 1"):
        team.train(2)
    assert same_bits(before, list(own_anchor(team.loops[1]).values()))


@pytest.mark.parametrize(("workers", "times"), [(2, 2), (4, 1)])
def test_workers_of_one_process_make_a_mean_once_where_it_pays(
    workers: int, times: int, monkeypatch
) -> None:
    made: list[int] = []

    def counted(*given: Any, **more: Any) -> Any:
        made.append(1)
        return aggregate_valid(*given, **more)

    monkeypatch.setattr("thinwire.exchange.state.aggregate_valid", counted)
    method = diloco(codec=codecs.Quantise(bits=2), sync_every=1, exchange=tw.Gather())
    team = Team(method, adamw, workers).train(3)
    assert len(made) == 3 * times
    assert len({loop.digest() for loop in team.loops}) == 1
