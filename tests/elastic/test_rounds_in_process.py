"""Rounds of workers that come and go, in one process: what is lost or counts twice, who drifts."""

import copy
import dataclasses
from collections.abc import Sequence

import pytest
import torch

import thinwire as tw
from elastic_hub import (
    FEEDBACK,
    METHODS,
    PLAIN,
    TABLE,
    TOP_K,
    H,
    Player,
    begin,
    begin_with,
    crew,
    exchange,
    finish,
    flush,
    inner,
    meet,
    method,
    same_state,
    sum_of,
    to_boundary,
    train,
)
from elastic_twin import ElasticHub
from exchanges import flipped, poisoned
from thinwire.rejection import RejectReason
from toy import Team, adamw, build_model, feedback_of, muon, same_bits, sgd


@pytest.fixture
def hub() -> ElasticHub:
    return ElasticHub()


def check_alike(players: Sequence[Player]) -> None:
    assert len({p.loop.digest() for p in players}) == 1
    assert all(same_state(p, players[0]) for p in players)


def check_feedback(found: list[dict], wanted: list[dict]) -> None:
    for mine, held in zip(found, wanted, strict=True):
        assert mine.keys() == held.keys()
        assert all(torch.equal(mine[key], held[key]) for key in held)


# -- a discarded round is no round ---------------------------------------------------------------

BITS = {"codec": tw.codecs.Quantise(bits=2), "feedback": FEEDBACK}
OWNED = tw.ReduceScatter(owner_feedback=FEEDBACK)
CASES = {
    "muon": (method(), muon, build_model),
    "feedback": (method(codec=TOP_K, feedback=FEEDBACK), adamw, build_model),
    "2 bit": (method(exchange=tw.ReduceScatter(), **BITS), adamw, build_model),
    "owner feedback": (method(exchange=OWNED, **BITS), adamw, build_model),
    "bf16": (method(), adamw, lambda: build_model().to(torch.bfloat16)),
}


@pytest.mark.parametrize(("described", "build", "model"), CASES.values(), ids=CASES)
def test_discarding_every_other_round_is_half_as_many_rounds(described, build, model, hub) -> None:
    players = crew(hub, described, 3, build=build, model=model, of=3)
    for boundary in range(1, 7):
        hub.discards = lambda _, odd=boundary % 2: bool(odd)
        train(players, H)
    whole = dataclasses.replace(described, sync_every=2 * H)
    team = Team(whole, build, 3, model=model).train(6 * H)
    assert [p.loop.digest() for p in players] == team.digests()
    assert [p.loop.stats.rounds for p in players] == [3] * 3
    hub.discards = lambda _: False
    train(players, H)  # the control: one that is not discarded counts
    assert players[0].loop.stats.rounds == 4


# -- newcomers, and those who missed rounds ------------------------------------------------------


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("name", METHODS)
def test_a_newcomer_takes_over_what_the_others_have(name: str, rounds: int, hub) -> None:
    hub.heal_by = "snapshot"
    players = crew(hub, METHODS[name], 3)
    train(players, H * rounds)
    late = Player(hub, "late", METHODS[name], number=3, model=lambda: build_model(7))
    left = {}  # of its own feedback, which it keeps
    for track in late.state.fragments:
        if (residual := track.exchange.feedback_vector()) is not None:
            left[track] = torch.randn(len(residual))
            track.exchange.load_feedback_vector(left[track])
    inner(players, H)
    exchange(players, H - 1)
    everyone = [*players, late]
    meet(hub, everyone)
    begin_with(players, late)
    assert late.loop.share == max(hub.shares)
    assert same_state(late, players[0])
    if not players[0].state.fragments[0].pending:
        assert late.loop.digest() == players[0].loop.digest()
        assert name == "streaming" or same_bits(late.live(), players[0].live())
    for track, residual in left.items():
        assert torch.equal(track.exchange.feedback_vector(), residual)
    train(everyone, 2 * H)
    flush(everyone)
    check_alike(everyone)
    assert {p.loop.inner_step for p in everyone} == {H * (rounds + 3)}


@pytest.mark.parametrize("missed", [1, 4])
@pytest.mark.parametrize("name", METHODS)
def test_who_missed_rounds_replays_them_and_keeps_its_work(name: str, missed: int, hub) -> None:
    players = crew(hub, METHODS[name], 4)
    train_on, slow = players[: 2 + missed % 2], players[3]
    train(players, 2 * H)
    to_boundary(players)
    meet(hub, train_on)
    exchange(train_on)
    train(train_on, H * (missed - 1))
    to_boundary(train_on)
    back = [*train_on, slow]
    meet(hub, back)
    before, held, version = slow.unsent(), slow.feedback(), slow.loop.stats.rounds
    # What is replayed is looked at before it goes out.
    seen, sends = [], slow.loop._send_for

    def look(occasion):
        seen[:] = slow.unsent(), slow.feedback(), same_state(slow, train_on[0])
        sends(occasion)

    slow.loop._send_for = look
    exchange(back)
    unsent, feedback, was_same = seen
    assert was_same
    assert slow.loop.stats.rounds > version
    scale = max(float(w.abs().max()) for w in [*before, *slow.anchor()])
    for old, new in zip(before, unsent, strict=True):
        assert float(old.abs().max()) > 1e-4  # the control: there is work to be kept
        assert torch.allclose(old, new, rtol=0, atol=4 * torch.finfo(torch.float32).eps * scale)
    total = [sum(float(v.double().sum()) for v in f.values()) for f in (held, feedback)]
    assert total[0] == pytest.approx(total[1], rel=1e-6)
    train(back, H)
    flush(back)
    check_alike(back)


# -- rounds that were given up here and counted there --------------------------------------------


EXCHANGES = [tw.Gather(), tw.ReduceScatter(owner_feedback=tw.ErrorFeedback(decay=1.0))]


def left_over(player: Player) -> torch.Tensor:
    """What is left to be sent by the feedback."""
    return sum_of([t.exchange.feedback_vector() for t in player.state.fragments])


def done(player: Player, start: list[torch.Tensor]) -> torch.Tensor:
    return sum_of(start) - sum_of(player.anchor())


def trained(player: Player) -> torch.Tensor:
    """What an inner step adds to what is to be sent."""
    old = sum_of(player.unsent())
    player.inner()
    return sum_of(player.unsent()) - old


@pytest.mark.parametrize("heal", ["records", "snapshot"])
@pytest.mark.parametrize("exchange_kind", EXCHANGES, ids=["gather", "reduce"])
@pytest.mark.parametrize("codec", [tw.codecs.Identity(), TOP_K], ids=["exact", "top-k"])
def test_what_counted_without_its_sender_knowing_is_not_sent_twice(
    heal: str, exchange_kind, codec, hub
) -> None:
    feedback = tw.ErrorFeedback(decay=1.0)
    described = method(outer=PLAIN, exchange=exchange_kind, codec=codec, feedback=feedback)
    hub.heal_by = heal
    other, deaf = players = crew(hub, described, 2, build=sgd)
    start = other.anchor()
    work = {player: torch.zeros_like(sum_of(start)) for player in players}
    for boundary in range(4):
        hub.uninformed = {"w1"} if boundary == 1 else set()
        for _ in range(H):
            for player in players:
                if player is deaf and boundary == 2 and deaf.state.version < other.state.version:
                    # What it did after it sent cannot be told apart and is lost: it does nothing.
                    deaf.trained += 1
                else:
                    work[player] += trained(player)
            exchange(players)
    check_alike(players)
    total = 2 * done(other, start) + sum(map(left_over, players))
    assert torch.allclose(total, sum(work.values()), rtol=0, atol=2e-5)
    assert float(work[deaf].abs().max()) > 0.01  # a delta too much or too few would be seen


def watched(player: Player) -> list[tuple[str, torch.Tensor]]:
    """The fragments that `player` sends from now on, and what it has to send then."""
    sent, original = [], player.loop._send

    def send(track) -> None:
        sent.append((track.fragment.name, sum_of(player.unsent())))
        original(track)

    player.loop._send = send
    return sent


@pytest.mark.parametrize("attempts", [2, 1], ids=["with it", "without it"])
def test_a_round_that_was_lost_and_sent_again_is_not_lost_for_ever(attempts: int, hub) -> None:
    """Its second attempt counted, with this worker or without: that is not the one it gave up."""
    players = crew(hub, method(outer=PLAIN, codec=TOP_K, feedback=FEEDBACK), 3, build=sgd)
    hub.discards = lambda _: True
    train(players, H)
    hub.discards = lambda _: False
    train(players, H * (attempts - 1))  # round 1, the second attempt, with all three
    *others, slow = players
    to_boundary(players)
    meet(hub, others)
    exchange(others)
    to_boundary(others)
    meet(hub, players)
    before, sent = sum_of(slow.unsent()), watched(slow)
    exchange(players)
    assert torch.allclose(sent[0][1], before, rtol=0, atol=1e-6)
    assert float(before.abs().max()) > 1e-3


def test_a_lost_round_that_nobody_remembers_is_not_sent_twice(hub) -> None:
    hub.heal_by = "snapshot"
    *others, lost = players = crew(hub, method(outer=PLAIN), 3, build=sgd)
    hub.uninformed = {"w2"}
    train(players, H)
    hub.uninformed = set()
    meet(hub, others)
    train(others, 10 * H)
    to_boundary(others)
    for _ in range(H - 1):
        lost.loop.begin()
    meet(hub, players)
    sent = watched(lost)
    exchange(players)
    assert float(sent[0][1].abs().max()) == 0.0


# -- messages that cannot be used ----------------------------------------------------------------


@pytest.mark.parametrize("overlap", [tw.Delay(), tw.Delay(tau=1, mixing=0.5)], ids=["wait", "late"])
def test_who_is_damaged_on_the_way_comes_again(overlap, hub) -> None:
    feedback = tw.ErrorFeedback(decay=1.0)
    described = method(outer=PLAIN, codec=TOP_K, feedback=feedback, overlap=overlap)
    players = crew(hub, described, 3, build=sgd)
    twin = crew(ElasticHub(), described, 2, build=sgd)
    to_boundary(players)
    to_boundary(twin)
    held, work = players[2].feedback(), sum_of(players[2].unsent())
    hub.tamper = lambda sender, to, p: flipped(p) if sender == 2 else p
    exchange(players)
    exchange(twin)
    if overlap.tau:
        inner((*players, *twin))
        work = sum_of(players[2].unsent())
        exchange(players)
        exchange(twin)
    hub.tamper = lambda sender, to, p: p
    # as if the third had not been there, and all three have it
    assert {p.loop.digest() for p in players} == {twin[0].loop.digest()}
    assert all(torch.equal(players[2].feedback()[k], v) for k, v in held.items())
    assert torch.allclose(sum_of(players[2].unsent()), work, rtol=0, atol=1e-6)
    assert [p.loop.stats.left_out for p in players] == [{2: 1}] * 3
    start = players[0].anchor()
    before = sum(left_over(p) + sum_of(p.unsent()) for p in players)
    exchange(players, H - bool(overlap.tau))
    flush(players)
    after = sum(map(left_over, players))
    if not overlap.tau:  # the very same comes again: nothing was trained
        assert torch.allclose(3 * done(players[0], start) + after, before, rtol=0, atol=2e-5)
    check_alike(players)


WHOLE = {"codec": TOP_K, "feedback": FEEDBACK}
USELESS = {
    "a shard": {"exchange": tw.ReduceScatter(), **BITS},
    "a result": {"exchange": tw.ReduceScatter(), **BITS},
    "all that is gathered": {"exchange": EXCHANGES[0], **WHOLE},
    "all that is reduced": {"exchange": EXCHANGES[1], **WHOLE},
}


@pytest.mark.parametrize("damaged", USELESS)
def test_a_round_that_cannot_be_used_changes_nothing_and_no_work_is_lost(damaged, hub) -> None:
    players = crew(hub, method(**USELESS[damaged]), 3)
    to_boundary(players)
    before = [(p.live(), p.feedback(), p.anchor(), p.state.progress()) for p in players]
    seen = []

    def tamper(sender, to, payload):
        seen.append((sender, to))
        is_first = seen.count((sender, to)) == 1
        if damaged.startswith("all") or (sender, to, is_first) == (1, 2, damaged == "a shard"):
            in_body = is_first or damaged.startswith("all")
            return flipped(payload) if in_body else torch.cat([payload[:70] ^ 1, payload[70:]])
        return payload

    hub.tamper = tamper
    exchange(players)
    hub.tamper = lambda sender, to, p: p
    for player, (live, feedback, anchor, position) in zip(players, before, strict=True):
        assert same_bits(player.live(), live)
        assert same_bits(player.anchor(), anchor)
        assert all(torch.equal(player.feedback()[k], v) for k, v in feedback.items())
        after = player.state.progress()
        assert (after.version, after.digest) == (position.version, position.digest)
    train(players, H)
    check_alike(players)
    assert players[0].loop.stats.rounds == 1  # the control


@pytest.mark.parametrize("fault", [RejectReason.NOT_FINITE, RejectReason.OUTLIER])
def test_what_is_wrong_with_a_contribution_itself_is_not_tried_again(fault, caplog, hub) -> None:
    bf16 = {"codec": tw.codecs.CastBF16(), "feedback": FEEDBACK}
    described = method(outer=PLAIN, aggregate=tw.DropOutliers(limit=10), **bf16)
    players = crew(hub, described, 3, build=sgd)
    to_boundary(players)
    with torch.no_grad():
        next(players[1].model.parameters()).add_(100.0)
    state = players[1].state.fragments[0].exchange
    if fault is RejectReason.NOT_FINITE:
        encode = state.encode
        state.encode = lambda *given: {k: poisoned(m) for k, m in encode(*given).items()}
    held = players[1].feedback()
    exchange(players)
    if fault is RejectReason.NOT_FINITE:
        state.encode = encode
    text = {"NOT_FINITE": "is not finite", "OUTLIER": "is far longer"}[fault.name]
    assert "worker 1 was left out of fragment 0" in caplog.text
    assert text in caplog.text
    assert [p.loop.stats.left_out for p in players] == [{1: 1}] * 3
    check_alike(players)
    assert float(sum_of(players[1].unsent()).abs().max()) == 0
    assert all(torch.equal(players[1].feedback()[k], v) for k, v in held.items())
    assert list(hub.records[1].facts["counted"]) == ["w0", "w1", "w2"]  # it must not come again
    train(players, H)
    assert [p.loop.stats.left_out for p in players] == [{1: 1}] * 3


@pytest.mark.parametrize(
    ("rule", "norms", "left_out", "clipped"),
    [
        (tw.ClipNorms(limit=2), (1.0, 95.0, 1.0, 4.0, 1.0), 1, {3: 0.5}),
        # Without the one, the median is another, and by it two more would be outsized.
        (tw.MeanOverWorkers(), (1.0, 1.0, 9.0, 9.0, 95.0), 4, {}),
    ],
)
def test_an_outsized_contribution_is_left_out_or_clipped_and_alike_in_a_replay(
    rule, norms: tuple[float, ...], left_out: int, clipped: dict[int, float], hub
) -> None:
    aggregate = tw.DropOutliers(limit=8, aggregate=rule)
    described = method(outer=PLAIN, exchange=tw.Gather(), aggregate=aggregate)
    *five, sixth = players = crew(hub, described, 6, build=sgd, of=6)
    exchange(players, H - 1)
    before = sum_of(five[0].anchor())
    for player, norm in zip(five, norms, strict=True):
        with torch.no_grad():
            next(player.model.parameters()).view(-1)[0].add_(norm)
    meet(hub, five)
    exchange(five)
    moved = float((before - sum_of(five[0].anchor())).abs().sum())
    exchange(five, H - 1)
    meet(hub, players)
    exchange(players)  # the sixth replays it
    check_alike(players)
    facts = hub.records[1].facts
    assert (facts["left_out"], facts["clipped"]) == ([left_out], clipped)
    counted = [norm * clipped.get(n, 1.0) for n, norm in enumerate(norms) if n != left_out]
    assert moved == pytest.approx(sum(counted) / 4)
    counts = {f"w{left_out}": {"outlier": 1}, **{f"w{n}": {"clipped": 1} for n in clipped}}
    assert [p.loop.stats.contributions for p in five] == [counts] * 5
    assert sixth.loop.stats.contributions == {}  # it was not there


@pytest.mark.parametrize("exchange_kind", EXCHANGES, ids=["gather", "reduce"])
def test_what_is_left_to_be_sent_survives_another_number_of_workers(exchange_kind, hub) -> None:
    described = method(codec=TOP_K, feedback=FEEDBACK, exchange=exchange_kind)
    (player,) = crew(hub, described, 1, of=5)
    train([player], H)
    held = left_over(player)
    assert float(held.abs().max()) > 1e-3
    for workers in (2, 5, 3):
        player.state.set_exchange_workers(workers, 1)
        # K times a residual, divided by K again: one rounding each way
        assert torch.allclose(left_over(player), held, rtol=1e-6, atol=0)


def test_what_cannot_be_cancelled_or_handed_on_is_refused_at_once() -> None:
    for described, why in (
        (tw.presets.ddp(), r"where workers come and go.*diloco"),
        (method(overlap=tw.Eager()), r"where workers come and go.*Delay"),
        (tw.presets.noloco(sync_every=H), r"Gossip where workers come and go.*diloco"),
    ):
        with pytest.raises(tw.ConfigurationError, match=why):
            Player(ElasticHub(), "a", described)


def test_a_momentum_is_not_lost_by_a_number_of_workers_that_took_no_step(hub) -> None:
    """K = 3 has momentum and K = 2 has none: whoever saw K = 2 come to nothing still has it."""

    def momentum(player: Player) -> float:
        return float(player.shared()["0.optimizer.momentum_buffer"].abs().max())

    *others, slow = players = crew(hub, method(outer=TABLE), 3)
    train(players, 2 * H)
    assert momentum(slow) > 0
    meet(hub, others)
    hub.discards = lambda _: True
    train(others, H)
    snapshot = others[0].state.capture()
    hub.discards = lambda _: False
    inner(players, H)
    for _ in range(H - 1):
        exchange(others)
        slow.loop.begin()
    meet(hub, players)
    exchange(players)
    check_alike(players)
    late = Player(hub, "late", method(outer=TABLE))
    late.state.load(snapshot)
    late.state.set_outer_workers(3)
    assert momentum(late) > 0


# -- the end, and shares -------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_the_end_is_repeated_until_it_counts(name: str, hub) -> None:
    (player,), (twin,) = (crew(each, METHODS[name], 1, of=1) for each in (hub, ElasticHub()))
    train([player], H + 2)
    train([twin], H + 2)
    left = [True, True, True]
    hub.discards = lambda _: bool(left) and left.pop()
    player.loop.flush()
    twin.loop.flush()
    assert not left
    assert player.state.fully_synced()
    # mixing keeps a part of what was sent
    assert name == "streaming" or float(sum_of(player.unsent()).abs().max()) == 0
    if name == "plain":
        assert player.loop.digest() == twin.loop.digest()


@pytest.mark.parametrize("workers", [1, 3])
def test_with_k_fixed_shares_are_rounds_times_k_plus_rank(workers: int, hub) -> None:
    players, fixed = crew(hub, method(), workers), Team(method(), adamw, workers)
    for step in range(3 * H):
        wanted = [step // H * workers + rank for rank in range(workers)]
        assert [p.loop.share for p in players] == [loop.share for loop in fixed.loops] == wanted
        exchange(players)
        fixed.exchange()


def test_replaying_and_reseating_do_not_count_as_memory_for_ever(hub) -> None:
    one, other = players = crew(hub, method(codec=TOP_K, feedback=FEEDBACK), 2)
    train(players, H)
    peak = one.loop.stats.peak_outer_device_bytes
    for _ in range(5):
        meet(hub, [one])
        train([one], H)
        other.inner(1)
        exchange([one], H - 1)
        meet(hub, players)
        other.state.step += H - 1
        exchange(players)
    assert all(p.loop.stats.peak_outer_device_bytes <= 2 * peak for p in players)


@pytest.mark.parametrize("name", METHODS)
def test_a_checkpoint_goes_on_from_the_last_round_and_catches_up(name: str, caplog, hub) -> None:
    """What was in flight, or trained since, is lost as if the worker had been killed."""
    first, killed = crew(hub, METHODS[name], 2)
    train([first, killed], 2 * H + 1)
    saved = copy.deepcopy(killed.loop.state_dict())
    train([first, killed], H)
    meet(hub, [first])
    train([first], 2 * H - 2)
    first.inner()
    back = Player(hub, "w1 again", METHODS[name], number=1, model=lambda: build_model(7))
    fresh = feedback_of(back.loop)
    back.loop.load_state_dict(saved)
    assert back.loop.inner_step == 2 * H + 1
    # All that was trained is in the outer parameters.
    assert not any(bool(delta.any()) for delta in back.unsent())
    # Feedback of shards is cut by the number of workers, and this one is still alone.
    fits = name != "top-k, reduced"
    assert ("does not fit" in caplog.text) == (not fits)
    expected = [fragment["exchange"] for fragment in saved["fragments"]] if fits else fresh
    check_feedback(feedback_of(back.loop), expected)
    meet(hub, [first, back])
    begin_with([first], back)
    assert same_state(first, back)
    train([first, back], 2 * H)
    check_alike([first, back])


def test_a_checkpoint_takes_no_second_copy_of_the_feedback(hub) -> None:
    players = crew(hub, METHODS["top-k"], 2)
    train(players, H)
    (track,) = players[0].state.fragments
    (saved,) = players[0].loop.state_dict()["fragments"]
    here = track.exchange.state_dict()["residual"]
    assert saved["exchange"]["residual"].data_ptr() == here.data_ptr()
    assert here.any()


@pytest.mark.parametrize("tau", [0, 2], ids=["nothing in flight", "in flight"])
def test_a_fixed_run_goes_on_as_an_elastic_one(tau: int) -> None:
    described = method(codec=TOP_K, feedback=FEEDBACK, overlap=tw.Delay(tau=tau))
    fixed = Team(described, adamw, 2).train(2 * H + 1)
    state, before = fixed.loops[1].state_dict(), fixed.loops[1]
    assert any(int(f["round"]) for f in state["fragments"][0]["in_flight"]) == bool(tau)
    hub = ElasticHub()
    first = Player(hub, "w0", described, of=1)
    first.loop.load_state_dict(state)
    assert (first.loop.digest(), first.loop.inner_step) == (before.digest(), 2 * H + 1)
    assert first.loop.stats.rounds == before.stats.rounds
    assert not any(bool(delta.any()) for delta in first.unsent())
    (found,), (held,) = feedback_of(first.loop), feedback_of(fixed.loops[1])
    assert all(torch.equal(found[key], held[key]) != bool(tau) for key in held)
    meet(hub, [first])
    first.loop.join()
    # Not one of those that the fixed run assigned.
    assert first.state.capture().facts["dealt"] >= 2 * 3
    train([first], H + tau)
    assert first.loop.stats.rounds == before.stats.rounds + 1
    assert first.loop.digest() != before.digest()


@pytest.mark.parametrize("workers", [2, 3])
def test_an_elastic_run_goes_on_as_a_fixed_one(workers: int) -> None:
    described = method(codec=TOP_K, feedback=FEEDBACK)
    players = crew(ElasticHub(), described, 2)
    train(players, 2 * H + 1)
    states = [copy.deepcopy(player.loop.state_dict()) for player in players]
    again = Team(described, adamw, workers)
    for loop, state in zip(again.loops, [*states, states[0]], strict=False):
        loop.load_state_dict(state)
    assert set(again.digests()) == {players[0].loop.digest()}
    check_feedback(feedback_of(again.loops[1]), feedback_of(players[1].loop))
    assert min(loop.share for loop in again.loops) >= players[0].state.dealt
    again.train(H, first=2 * H + 1)
    assert len(set(again.digests())) == 1
    assert again.loops[0].stats.rounds == players[0].loop.stats.rounds + 1


def test_a_state_that_version_0_2_wrote_of_an_elastic_worker_is_loaded() -> None:
    described = method(codec=TOP_K, feedback=FEEDBACK)
    players = crew(ElasticHub(), described, 2)
    train(players, 2 * H)
    snapshot = players[0].state.capture()
    shared = {"facts": dict(snapshot.facts), "tensors": dict(snapshot.tensors)}
    fresh = Player(ElasticHub(), "again", described)
    fresh.loop.load_state_dict({"shared": shared, "feedback": feedback_of(players[0].loop)})
    assert same_state(fresh, players[0])
    check_feedback(feedback_of(fresh.loop), feedback_of(players[0].loop))
    with pytest.raises(tw.CheckpointError, match="not the keys of an outer loop"):
        fresh.loop.load_state_dict({})


# -- the end of a run whose workers change -------------------------------------------------------


@pytest.mark.parametrize("left", [3, 2, 1, 4])  # of three; one came
@pytest.mark.parametrize("more", [0, 1])
def test_whoever_changes_after_the_last_full_round_costs_no_outer_step(
    left: int, more: int, hub
) -> None:
    hub.heal_by = "snapshot"
    players = crew(hub, method(), 3)
    train(players, 2 * H + more)
    digest = players[0].loop.digest()
    team = [*players, Player(hub, "late", method(), number=3)][:left]
    meet(hub, team)
    flush(team)
    # The control: a step that was trained since is one to be exchanged.
    assert {p.loop.stats.rounds for p in team} == {2 + more}
    assert {p.loop.digest() == digest for p in team} == {not more}
    assert all(p.state.fully_synced() for p in team)
    assert all(p.state.progress().over for p in team)


@pytest.mark.parametrize("heal", ["records", "snapshot"])
@pytest.mark.parametrize("name", ["plain", "streaming"])
def test_who_missed_the_last_full_round_sends_nothing_that_others_do_not(
    name: str, heal: str, hub
) -> None:
    hub.heal_by = heal
    players = crew(hub, METHODS[name], 3)
    train(players, 2 * H - 1)
    hub.uninformed = {"w2"}  # it takes what was answered now for discarded
    train(players, 2 if name == "streaming" else 1)
    before = players[0].loop.stats.rounds
    assert players[2].loop.stats.rounds < before
    hub.uninformed = set()
    sent = [watched(player) for player in players]
    flush(players)
    first, second, third = ([name for name, _ in each] for each in sent)
    assert first == second == third
    check_alike(players)
    if name == "plain":
        assert {p.loop.stats.rounds for p in players} == {before}


def test_a_run_is_over_once_its_last_round_counts_and_not_before(hub) -> None:
    players = crew(hub, method(overlap=tw.Delay(tau=1)), 2)

    def over() -> set[bool]:
        return {p.state.progress().over for p in players}

    train(players, H)
    assert over() == {False}
    hub.discards = lambda _: True
    for player in players:
        player.loop.begin(last=True)
    assert over() == {False}  # it is under way
    finish(players)
    assert over() == {False}  # it counts on nobody
    hub.discards = lambda _: False
    flush(players)
    assert over() == {True}
    exchange(players)  # whoever trains on has something to contribute again
    assert over() == {False}


def unsent_residual(player: Player) -> torch.Tensor:
    """What is left to be sent by the feedback that a checkpoint would hold."""
    left = []
    for track, memory in zip(player.state.fragments, feedback_of(player.loop), strict=True):
        resumed = player.state._builder.exchange_state(
            track.fragment, player.node.world_size, player.node.rank
        )
        resumed.load_state_dict(memory)
        left.append(resumed.feedback_vector())
    return sum_of(left)


@pytest.mark.parametrize("exchange_kind", EXCHANGES, ids=["gather", "reduce"])
def test_all_work_is_in_a_checkpoint_once_whatever_is_in_flight(exchange_kind, hub) -> None:
    feedback = tw.ErrorFeedback(decay=1.0)
    described = method(
        outer=PLAIN, overlap=tw.Delay(tau=2), codec=TOP_K, feedback=feedback, exchange=exchange_kind
    )
    players = crew(hub, described, 2, build=sgd)
    start = players[0].anchor()
    work, flying, left = torch.zeros_like(sum_of(start)), 0, 0.0
    for step in range(1, 5 * H + 1):
        hub.discards = lambda _, step=step: step == 2 * H + 2  # the second round is sent again
        for player in players:
            if not player.state.fragments[0].pending:  # what is done meanwhile, tau drops
                work += trained(player)
        exchange(players)
        found = 2 * done(players[0], start)
        found += sum(sum_of(p.unsent()) + unsent_residual(p) for p in players)
        flying += bool(players[0].state.fragments[0].pending)
        left = max(left, float(unsent_residual(players[0]).abs().max()))
        assert torch.allclose(found, work, rtol=0, atol=2e-6)
    assert (players[0].loop.stats.rounds, flying) == (3, 9)
    assert left > 0.01


def test_a_newcomer_whose_first_step_fails_contributes_to_the_next_round(hub) -> None:
    players = crew(hub, method(outer=PLAIN), 2)
    to_boundary(players)
    late = Player(hub, "late", method(outer=PLAIN), number=2)
    meet(hub, [*players, late])
    begin(players)
    run, late.node.run = late.node.run, None  # sending fails
    with pytest.raises(TypeError):
        late.loop.join()
    late.node.run = run
    assert late.loop._plan is not None
    assert not late.loop._plan.joins
