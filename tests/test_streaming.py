"""Fragments, overlap, mixing, eager updates, host memory: what is sent when, and what for."""

import copy
import dataclasses
import gc
import itertools
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import thinwire as tw
from fake_device import FakeDevice
from reference_loops import reference_streaming
from thinwire.live_weights import OpenWeights
from toy import Team, adamw, build_model, descend, largest_difference, loss, muon, same_bits, sgd

NESTEROV = tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)
PLAIN = tw.outer.SGD(lr=0.5)
FEEDBACK = tw.ErrorFeedback()


def streaming(**fields) -> tw.Method:
    paper = {"sync_every": 6, "outer": NESTEROV, "fragments": tw.Balanced(count=3)}
    return tw.presets.streaming_diloco(**paper | fields)


def exact(**fields) -> tw.Method:
    """Without E3M0, so that numbers can be compared with what was not sent."""
    return streaming(codec=tw.codecs.Identity(), **fields)


@pytest.mark.parametrize(
    ("fragments", "build", "workers", "changed"),
    [
        (tw.Balanced(count=1), adamw, 1, {"overlap": tw.Delay(tau=1)}),
        (tw.Balanced(count=1), muon, 3, {"overlap": tw.Delay(mixing=0.5)}),
        (tw.Whole(), sgd, 2, {"fragments": tw.Balanced(count=2)}),
        (tw.ByModule(modules=(("0", "1", "3"),)), adamw, 2, {"overlap": tw.Eager()}),
        # Full precision acts on every number by itself, so how they are grouped is no matter.
        (tw.Balanced(count=3, offsets=tw.At(steps=(0,) * 3)), muon, 2, {"codec": tw.codecs.E3M0()}),
    ],
)
def test_one_fragment_without_overlap_is_diloco(fragments, build, workers: int, changed) -> None:
    method = exact(fragments=fragments, overlap=tw.Delay())
    plain = tw.presets.diloco(sync_every=6, outer=NESTEROV)
    other = dataclasses.replace(method, **changed)  # the control
    streamed, blocked, changed = (
        Team(m, build, workers).train(20).anchor() for m in (method, plain, other)
    )
    assert same_bits(streamed, blocked)
    assert largest_difference(changed, blocked) > 1e-4


@pytest.mark.parametrize(
    ("build", "tau", "alpha", "workers"),
    [
        *((adamw, 0, 0.0, 1), (sgd, 0, 0.5, 3), (adamw, 0, 1.0, 3)),
        *((sgd, 1, 0.0, 3), (adamw, 1, 0.5, 1), (sgd, 1, 1.0, 1)),
        *((adamw, 3, 0.0, 3), (adamw, 3, 0.5, 3), (sgd, 3, 1.0, 1)),
    ],
)
def test_streaming_follows_its_reference_loop(build, tau: int, alpha: float, workers: int) -> None:
    h, steps = 6, 23
    method = exact(
        outer=PLAIN,
        overlap=tw.Delay(tau=tau, mixing=alpha),
        fragments=tw.ByModule(modules=(("0",), ("1",), ("3",))),
    )
    streamed = Team(method, build, workers).train(steps)
    expected = reference_streaming(
        build_model,
        build,
        partial(loss, workers=workers),
        workers=workers,
        steps=steps,
        schedule=(h, tau, alpha),
        fragments=[(0, (0,)), (2, (1, 2)), (4, (3, 4))],
        eta=0.5,
    )
    assert largest_difference(streamed.anchor(), expected) < 2e-6


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize("workers", [1, 3])
def test_eager_updates_follow_the_papers_recursion(workers: int) -> None:
    """theta_k = OuterOpt_k(theta_k, mean_j Delta_j^(t-H) + (Delta_k^t - Delta_k^(t-H)) / K)."""
    h, steps = 4, 16
    replicas = [build_model() for _ in range(workers)]
    optimizers = [adamw(replica) for replica in replicas]
    own = [parameters_to_vector(replica.parameters()).detach() for replica in replicas]
    momenta, last = ([torch.zeros_like(theta) for theta in own] for _ in range(2))
    for t in range(steps):
        for worker, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            descend(loss(replica, t, worker, workers=workers), optimizer)
        if (t + 1) % h == 0:
            live = [parameters_to_vector(replica.parameters()).detach() for replica in replicas]
            deltas = [theta - x for theta, x in zip(own, live, strict=True)]
            for k, replica in enumerate(replicas):
                step = torch.stack(last).mean(0) + (deltas[k] - last[k]) / workers
                momenta[k] = 0.9 * momenta[k] + step
                own[k] = own[k] - 0.7 * (step + 0.9 * momenta[k])
                vector_to_parameters(own[k].clone(), replica.parameters())
            last = deltas
    method = exact(sync_every=h, overlap=tw.Eager(), fragments=tw.Whole())
    team = Team(method, adamw, workers).train(steps)
    for model, theta in zip(team.models, own, strict=True):
        live = parameters_to_vector(model.parameters()).detach()
        assert largest_difference([live], [theta]) < 1e-5


class Stack(nn.Module):
    """Equal layers and nothing else, so that fragments are equal."""

    def __init__(self, layers: int = 4, width: int = 16) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def stack_loss(model: nn.Module, step: int, worker: int, *, workers: int) -> Tensor:
    x, y = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(10 * step + worker))
    return (model(x) - y).square().mean()


def train_stack(method: tw.Method, steps: int, **options) -> Team:
    return Team(method, adamw, 2, model=Stack, loss=stack_loss, **options).train(steps)


def test_the_peak_is_what_the_transport_carried_after_one_step() -> None:
    """Unequal fragments, two of which are sent after the same step."""
    fragments = tw.ByModule(modules=(("0",), ("1",), ("3",)), offsets=tw.At(steps=(0, 2, 2)))
    team = Team(exact(fragments=fragments, overlap=tw.Delay(tau=1)), adamw, 3)
    sums = [0, *(team.train(1, first=n).loops[0].stats.sent_bytes for n in range(20))]
    carried = [after - before for before, after in itertools.pairwise(sums)]
    assert team.loops[0].stats.peak_sent_bytes_per_step == max(carried)
    assert sorted({*carried}) == [0, 4 * 66 + 64, 4 * (49 + 24) + 2 * 64]
    # The last exchanges, of all three fragments, need not be carried at once.
    assert team.flush().loops[0].stats.peak_sent_bytes_per_step == max(carried)


@pytest.mark.parametrize("overlap", [tw.Delay(tau=4, mixing=0.5), tw.Eager()])
def test_flush_calls_in_everything_and_loses_no_step(overlap) -> None:
    """With outer SGD(1), one worker and no mixing, what was trained is what the anchor has."""
    team = Team(exact(outer=tw.outer.SGD(lr=1.0), overlap=overlap), adamw, 2).train(15)
    team.flush()
    tracks = [track for loop in team.loops for track in loop._state.fragments]
    assert all(not track.pending and track.sent_at_step == 15 for track in tracks)
    assert len({*team.digests()}) == 1
    rounds = team.loops[0].stats.rounds
    team.flush()
    assert team.loops[0].stats.rounds == rounds


# The answer overwrites what was trained while it travelled (alpha 0): -1/2 of 8, and no more. Or
# the workers are at -6 and -18; Delta from -4 is 2 and 14, mean 8, half of it 4.
@pytest.mark.parametrize(("mixing", "anchor"), [(0.0, -4.0), (1.0, -8.0)])
def test_flush_in_mid_flight_sends_no_movement_twice(mixing: float, anchor: float) -> None:
    """4 steps are on their way, 2 more were taken since: the anchor must have all six once."""
    overlap = tw.Delay(tau=3, mixing=mixing)
    method = exact(sync_every=4, outer=PLAIN, fragments=tw.Balanced(count=1), overlap=overlap)
    team = Team(method, lambda _: [], 2, model=Scalar)
    for _ in range(6):
        for model, moved in zip(team.models, (1.0, 3.0), strict=True):
            model.w.data -= moved
        team.exchange()
    assert float(team.flush().anchor()[0]) == anchor


def train_one(team: Team, worker: int, step: int) -> tw.OuterLoop:
    """Inner step `step` of one worker, as far as begin()."""
    team.descend(worker, step)
    team.loops[worker].begin()
    return team.loops[worker]


def held(state: dict) -> list[Tensor]:
    return [
        value
        for fragment in state["fragments"]
        for part in ("outer", "exchange")
        for value in fragment[part].values()
    ]


REDUCED = tw.ReduceScatter(owner_feedback=FEEDBACK)


def test_who_runs_ahead_changes_nothing_that_another_worker_saves() -> None:
    """Who waits first reduces everybody's shards, also of a worker that is writing its state."""
    team = Team(streaming(overlap=tw.Delay(tau=1), exchange=REDUCED), adamw, 2)
    fresh = copy.deepcopy(team.loops[1].state_dict())
    team.train(12)
    being_written = team.loops[1].state_dict()
    before = copy.deepcopy(being_written)
    train_one(team, 0, 12).finish()
    after = team.loops[1].state_dict()
    assert same_bits(held(being_written), held(before))
    assert same_bits(held(after), held(before))
    assert after["traffic"] == before["traffic"]
    team.loops[1].load_state_dict(fresh)
    assert same_bits(held(team.loops[1].state_dict()), held(fresh))
    assert not same_bits(held(before), held(fresh))


def test_a_shard_reduced_early_twice_is_saved_as_before_the_one_still_in_flight() -> None:
    method = streaming(sync_every=2, fragments=tw.Whole(), overlap=tw.Eager(), exchange=REDUCED)
    lockstep, team = Team(method, adamw, 2).train(4), Team(method, adamw, 2).train(3)
    train_one(team, 0, 3)
    late = train_one(team, 1, 3)
    team.loops[0].finish()
    for step in (4, 5):
        train_one(team, 0, step).finish()
    late.finish()
    expected = lockstep.loops[1].state_dict()
    assert same_bits(held(late.state_dict()), held(expected))
    assert late.state_dict()["traffic"]["sent_bytes"] == expected["traffic"]["sent_bytes"]
    assert late.state_dict()["traffic"]["received_bytes"] == expected["traffic"]["received_bytes"]


TOGETHER = tw.Strided(layers=1, offsets=tw.At(steps=(0, 0, 2, 2)))


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({"overlap": tw.Delay()}, 15),
        ({"overlap": tw.Delay(mixing=0.5), "feedback": FEEDBACK}, 15),
        ({"overlap": tw.Delay(tau=3, mixing=0.5), "feedback": FEEDBACK}, 30),
        ({"overlap": tw.Delay(tau=3), "feedback": FEEDBACK}, 16),
        ({"overlap": tw.Delay(tau=3), "feedback": FEEDBACK}, 17),
        ({"overlap": tw.Eager(), "feedback": FEEDBACK}, 18),
        # At every second step two are sent, and what was sent two steps before comes back.
        ({"overlap": tw.Delay(tau=2, mixing=0.5), "fragments": TOGETHER, "sync_every": 4}, 30),
        ({"overlap": tw.Eager(), "fragments": TOGETHER, "sync_every": 4}, 30),
    ],
)
def test_on_the_device_there_is_never_more_than_one_fragments_state(fields, steps: int) -> None:
    """Neither when all are flushed; and nothing once the loop is closed."""
    method = streaming(**{"sync_every": 8, "fragments": tw.Strided(layers=1)} | fields)
    team = train_stack(method, steps, outer_device="cpu")
    loop, held = team.loops[0], team.loops[0].memory()
    # Anchor and momentum, or anchor and feedback: never all three.
    assert loop.stats.peak_outer_device_bytes == 2 * held["anchor"] / 4
    if fields["overlap"] != tw.Eager():
        state_bytes = held["anchor"] + held["outer state"] + held["feedback"]
        assert loop.stats.peak_outer_host_bytes == state_bytes
        here = train_stack(method, steps).loops[0].stats
        assert (here.peak_outer_device_bytes, here.peak_outer_host_bytes) == (state_bytes, 0)
    team.flush()
    assert loop.stats.peak_outer_device_bytes == 2 * held["anchor"] / 4
    loop.close()
    assert loop._storage.ledger.device_bytes == 0


def test_what_eager_updates_sent_is_counted_and_rests_where_outer_state_does() -> None:
    """Two vectors with momentum, and one more for what is on its way; two while one comes back."""
    method = streaming(fragments=tw.Strided(layers=1), sync_every=8, overlap=tw.Eager())
    here, there = (train_stack(method, 30, outer_device=device) for device in (None, "cpu"))
    n = here.loops[0].memory()["anchor"]
    counts_nbytes = 4 * 8
    for team in (here, there):
        held = team.loops[0].memory()
        assert held["outer state"] == 4 * n + counts_nbytes
    on_device, on_host = here.loops[0].stats, there.loops[0].stats
    assert (on_device.peak_outer_device_bytes, on_device.peak_outer_host_bytes) == (5.25 * n, 0)
    # Of one fragment the vector and its momentum, and nothing between rounds.
    assert on_host.peak_outer_device_bytes == 2 * n / 4
    assert on_host.peak_outer_host_bytes == 5.25 * n
    for loop in (*here.loops, *there.loops):
        ledger = loop._storage.ledger
        assert ledger.device_bytes + ledger.host_bytes == 5 * n
        loop.load_state_dict(copy.deepcopy(loop.state_dict()))
        assert ledger.device_bytes + ledger.host_bytes == 5 * n


@pytest.mark.parametrize("overlap", [tw.Delay(), tw.Delay(tau=2), tw.Eager()])
def test_weights_of_16_bits_that_rest_move_no_anchor(overlap) -> None:
    """The anchor has bits that live weights have not: their loss is no movement."""
    method = exact(outer=PLAIN, overlap=overlap)
    team = Team(method, sgd, 2, model=lambda: build_model().bfloat16()).train(14)
    for optimizer in team.optimizers:
        optimizer.param_groups[0]["lr"] = 0.0
    team.train(18, first=14)
    at_rest = team.loops[0].digest()
    assert any(bool((p != p.bfloat16().float()).any()) for p in team.anchor())
    assert team.train(12, first=32).loops[0].digest() == at_rest


LAYERS, LAYER_BYTES = 8, 4 * 64 * 65


def rounds_of_layers(device: FakeDevice | str, outer_device: str | None) -> tuple[str, int]:
    """Digest of two workers, and the most bytes that one has on the device between steps."""
    overlap = tw.Delay(tau=3, mixing=0.5)
    method = streaming(sync_every=16, fragments=tw.Strided(layers=1), overlap=overlap)

    def build() -> nn.Module:
        model = Stack(LAYERS, 64)
        return model.to(device) if isinstance(device, str) else device.to_device(model)

    def held() -> int:
        gc.collect()
        return torch.cuda.memory_allocated() if isinstance(device, str) else device.held_nbytes()

    before, most = held(), 0
    team = Team(method, sgd, 2, model=build, outer_device=outer_device)
    for step in range(24):
        for worker, model in enumerate(team.models):
            for i, p in enumerate(model.parameters()):
                p.data.mul_(1 - 0.001 * (i + worker))
        team.exchange()
        if step % 3 == 0:
            most = max(most, held() - before)
    return team.loops[0].digest(), most // 2 - LAYERS * LAYER_BYTES


def check_one_fragments_state(device: FakeDevice | str) -> None:
    """Between steps."""
    (here, here_bytes), (there, there_bytes) = (rounds_of_layers(device, d) for d in (None, "cpu"))
    assert here == there
    state_bytes = 2 * LAYERS * LAYER_BYTES  # anchor and momentum
    # And payloads in flight, at half a byte a number.
    assert 0.95 * state_bytes < here_bytes < 1.05 * state_bytes
    # At most what was prefetched.
    assert there_bytes < 1.05 * state_bytes / LAYERS + LAYER_BYTES


def test_between_steps_a_device_holds_one_fragments_state() -> None:
    with FakeDevice() as fake:
        check_one_fragments_state(fake)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_between_steps_a_gpu_holds_one_fragments_state() -> None:
    check_one_fragments_state("cuda")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: streaming(overlap=tw.Delay(tau=6)), "tau=6 steps late with sync_every=6"),
        (lambda: tw.Delay(tau=-1), "set tau, .* to -1"),
        (lambda: tw.presets.from_text("streaming_diloco:tau=1/2"), r"set tau, .* to 0\.5"),
        (lambda: tw.Delay(mixing=1.5), "set mixing to 1.5"),
        (lambda: tw.presets.ddp(overlap=tw.Delay(mixing=0.5)), "average gradients .* with Delay"),
        (lambda: tw.presets.ddp(overlap=tw.Eager()), "average gradients .* with Eager"),
        (lambda: Team(streaming(sync_every=2), adamw, 1), "2"),
        (lambda: Team(streaming(), adamw, 1, outer_device="meta"), "outer state on 'meta'"),
    ],
)
def test_what_cannot_be_is_refused_at_once(make, reason: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=reason):
        make()


def test_a_worker_that_lags_by_a_fragment_is_named_and_not_mixed_in() -> None:
    """Worker 1 missed three steps: it sends its first fragment when the other sends its second."""
    method = exact(fragments=tw.Strided(layers=2), sync_every=6, overlap=tw.Delay(tau=1))
    team = train_stack(method, 7)
    before = team.loops[0].digest()
    team.loops[1]._state.step -= 3
    with pytest.raises(tw.ExchangeError, match=r"worker 1 .* its fragment is 0, not 1"):
        _ = [team.exchange() for _ in range(6)]
    assert team.loops[0].stats.rounds == 1
    assert team.loops[0].digest() == before


@pytest.mark.parametrize(
    ("overlap", "begins"), [(tw.Delay(), 12), (tw.Delay(tau=5), 6), (tw.Eager(), 12)]
)
def test_beginning_again_before_finishing_is_refused(overlap, begins: int) -> None:
    team = Team(exact(overlap=overlap, fragments=tw.Whole()), adamw, 1).train(6)
    for _ in range(begins - 1):
        team.loops[0].begin()
    with pytest.raises(tw.ConfigurationError, match="begun and not finished"):
        team.loops[0].begin()


@pytest.mark.parametrize("exchange", [tw.Gather(), tw.ReduceScatter()])
def test_finishing_again_once_the_late_worker_is_there_takes_the_outer_step(exchange) -> None:
    """Worker 0 asks too early and then again: both fragments must move on both workers."""
    both = tw.Balanced(count=2, offsets=tw.At(steps=(0, 0)))
    team = Team(exact(fragments=both, sync_every=1, overlap=tw.Delay(), exchange=exchange), sgd, 2)
    for worker in range(2):
        team.descend(worker, 0)
    team.loops[0].begin()
    with pytest.raises(tw.ExchangeTimeout, match=r"fragment 0 .*worker 1 of 2"):
        team.loops[0].finish()
    with pytest.raises(tw.CheckpointError, match="due was not applied yet"):
        team.loops[0].state_dict()
    team.loops[1].begin()
    for loop in team.loops:
        loop.finish()
    assert [loop.stats.rounds for loop in team.loops] == [2, 2]
    assert team.loops[0].digest() == team.loops[1].digest()


@pytest.mark.parametrize("overlap", [tw.Delay(), tw.Delay(tau=2, mixing=0.5), tw.Eager()])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_while_weights_are_written_leaves_a_whole_outer_step(
    overlap, workers: int, monkeypatch
) -> None:
    """Wherever the state rests, vector and momentum are both of before the step or of after."""
    digests = []
    for device in (None, "cpu"):
        team = Team(exact(overlap=overlap), adamw, workers, outer_device=device).train(11)
        for worker in range(workers):
            train_one(team, worker, 11)
        with monkeypatch.context() as patch:
            patch.setattr(OpenWeights, "mix", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                team.loops[0].finish()
        outer = [track.outer.state_dict().values() for track in team.loops[0]._state.fragments]
        totals = [[float(tensor.double().sum()) for tensor in tensors] for tensors in outer]
        digests.append([team.loops[0].digest(), *totals])
        if device == "cpu":
            assert team.loops[0]._storage.ledger.device_bytes == 0
    assert digests[0] == digests[1]


@pytest.mark.filterwarnings("ignore::thinwire.LossyReduceScatterWarning")
@pytest.mark.parametrize(("bad", "broken_after"), [(float("nan"), 5), (float("inf"), 11)])
@pytest.mark.parametrize(
    "fields",
    [
        {"overlap": tw.Delay(tau=2, mixing=0.5), "feedback": FEEDBACK, "codec": tw.codecs.TopK()},
        {"overlap": tw.Eager(), "feedback": FEEDBACK, "exchange": tw.ReduceScatter()},
    ],
)
def test_what_is_refused_for_it_is_not_finite_is_not_sent_and_leaves_no_trace(
    fields, bad: float, broken_after: int
) -> None:
    """A worker that is put right again trains on; nothing of the bad number is in its state."""
    team = Team(streaming(fragments=tw.Whole(), **fields), adamw, 2).train(broken_after)
    healthy = [copy.deepcopy(model.state_dict()) for model in team.models]
    fragment, stats = team.loops[0]._state.fragments[0], team.loops[0].stats
    before = copy.deepcopy(fragment.state_dict())
    for model in team.models:
        with torch.no_grad():
            model[1].bias[3] = bad
    for loop in team.loops:
        with pytest.raises(tw.NonFiniteError, match=rf"'1\.bias' at inner step {broken_after + 1}"):
            loop.begin()
    after = fragment.state_dict()
    assert after["sends"] == before["sends"]
    assert same_bits(held({"fragments": [after]}), held({"fragments": [before]}))
    assert team.loops[0].stats.sent_bytes == stats.sent_bytes
    for model, weights in zip(team.models, healthy, strict=True):
        model.load_state_dict(weights)
    for loop in team.loops:
        loop.finish()
    team.train(12, first=broken_after + 1)
    assert len({loop.digest() for loop in team.loops}) == 1
    assert all(bool(torch.isfinite(p).all()) for model in team.models for p in model.parameters())
