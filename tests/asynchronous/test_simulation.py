"""The asynchronous run as a whole: what it is equal to, and what it is not."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn

import thinwire as tw
from asynchronous_team import AsyncTeam, method
from reference_loops import reference_async_diloco
from thinwire.asynchronous import AsyncOptions
from thinwire.blocks import DenseVector
from toy import Team, adamw, build_model, largest_difference, loss, same_bits, sgd

ROUNDING = 2e-6
SAME_STEPS = AsyncOptions(dynamic_steps=False)
NESTEROV = tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)


# AdamW divides by a small moment in the first steps, which enlarges rounding.
@pytest.mark.parametrize(("build", "most"), [(sgd, ROUNDING), (adamw, 1e-4)])
@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (4.0, 2.0, 1.0), (3.0, 2.1, 1.3), (1.0, 5.0)])
@pytest.mark.parametrize(("every", "c"), [(3, 0.0), (2, 0.3), (1, 0.0)])
def test_it_computes_what_the_paper_says(build, most, speeds, every, c) -> None:
    team = AsyncTeam(method(every=every, c=c), speeds, build=build).run()
    of, known = partial(loss, workers=len(speeds)), {"total_steps": 90, "sync_every": 6}
    known["outer"] = (0.7, 0.9, every, c)
    expected, other = (
        reference_async_diloco(build_model, build, of, speeds=order, **known)
        for order in (speeds, speeds[::-1])
    )
    assert largest_difference(team.theta(), expected) < most
    if speeds != speeds[::-1]:
        assert largest_difference(team.theta(), other) > 10 * most


@pytest.mark.parametrize("build", [sgd, adamw])
def test_equal_workers_and_n_equal_to_k_are_synchronous_diloco(build) -> None:
    """Up to fp32: theta takes K small steps where SGD takes one."""
    found = AsyncTeam(method(every=3), (2.0, 2.0, 2.0), build=build).run()
    synchronous = tw.presets.diloco(sync_every=6, outer=NESTEROV)
    expected = Team(synchronous, build, 3).train(30).anchor()
    assert largest_difference(found.theta(), expected) < (ROUNDING if build is sgd else 1e-4)
    for change in ({"every": 2}, {"c": 0.2}, {"momentum": 0.8}):  # the control
        other = AsyncTeam(method(**change), (2.0, 2.0, 2.0), build=build).run()
        assert largest_difference(found.theta(), other.theta()) > 1e-3


def test_one_worker_is_one_worker_of_diloco() -> None:
    alone = AsyncTeam(method(outer=NESTEROV), (1.0,), build=sgd, total_steps=30).run()
    expected = Team(tw.presets.diloco(sync_every=6, outer=NESTEROV), sgd, 1).train(30).anchor()
    assert largest_difference(alone.theta(), expected) < ROUNDING


def test_a_slow_worker_gets_fewer_steps_or_all_take_h() -> None:
    team = AsyncTeam(method(), (4.0, 2.0, 1.0), total_steps=None).run(4)
    assert team.given[:3] == [(0, 6, 0), (1, 3, 0), (2, 1, 0)]
    assert team.simulation.now_s == 1.5 * 2
    # Worker 2 arrives at 1 and 2 s, the others at 1.5 s, all of them at 3 s.
    assert team.given[3:] == [(2, 1, 1), (0, 6, 10), (1, 3, 10), (2, 1, 11)]
    team = AsyncTeam(method(), (4.0, 2.0, 1.0), options=SAME_STEPS, total_steps=None).run(5)
    assert {steps for _, steps, _ in team.given} == {6}
    # In 6 s four answers of worker 0, two of worker 1, one of worker 2; then one of worker 0.
    assert team.simulation.now_s == 7.5
    assert team.server.stats.arrivals == 8
    assert team.server.stats.steps_of == {0: 30, 1: 12, 2: 6}


def test_staleness_is_the_number_of_steps_between() -> None:
    """Two workers, one twice as fast: between its fetch and its answer the other one arrives."""
    team = AsyncTeam(method(), (2.0, 0.9), options=SAME_STEPS, total_steps=None).run(3)
    # Arrivals at 3 (worker 0, staleness 0), 6 (0, 0), 6.67 (1, started at version 0: 2).
    assert team.server.stats.staleness_counts == {0: 2, 2: 1}
    assert team.server.stats.mean_staleness == pytest.approx(2 / 3)
    assert team.server.stats.largest_staleness == 2


def test_grace_lets_those_who_arrive_within_it_start_from_the_same_theta() -> None:
    options = AsyncOptions(dynamic_steps=False, grace_s=0.4)
    team = AsyncTeam(method(), (2.0, 1.9, 0.5), options=options, total_steps=None).run(1)
    # Worker 0 arrives at 3.0, worker 1 at 3.16; they start again at 3.4, worker 2 is on its way.
    assert team.simulation.now_s == pytest.approx(3.4)
    team.run(1)
    assert [given[::2] for given in team.given[3:5]] == [(0, 12), (1, 12)]
    without = AsyncTeam(method(), (2.0, 1.9, 0.5), options=SAME_STEPS, total_steps=None).run(2)
    assert [given[::2] for given in without.given[3:4]] == [(0, 6)]
    # It ends when all have arrived.
    options = AsyncOptions(dynamic_steps=False, grace_s=100.0)
    team = AsyncTeam(method(), (2.0, 1.9, 0.5), options=options, total_steps=None, build=sgd)
    assert team.run(1).simulation.now_s == 12.0
    synchronous = tw.presets.diloco(sync_every=6, outer=NESTEROV)
    expected = Team(synchronous, sgd, 3).train(24).anchor()
    assert largest_difference(team.run(3).theta(), expected) < ROUNDING


@pytest.mark.parametrize("codec", [tw.codecs.TopK(k=64), tw.codecs.RandomK(k=64, seed=1)])
def test_with_feedback_everything_is_sent_sooner_or_later(codec) -> None:
    """decay 1, plain averaging by one worker: theta plus what is owed is what was trained."""
    feedback = {"codec": codec, "feedback": tw.ErrorFeedback(decay=1.0)}
    compressed = method(outer=tw.outer.SGD(lr=1.0), sync_every=1, **feedback)
    team = AsyncTeam(compressed, (1.0,), total_steps=40, build=sgd)

    def flat() -> torch.Tensor:
        return torch.cat([t.flatten() for t in team.server.anchor().values()])

    begin, original = flat(), team.workers[0].finish
    moved = torch.zeros_like(begin)

    def finish():
        live = dict(team.models[0].named_parameters())
        moved.add_(flat() - torch.cat([live[n].detach().flatten() for n in team.server.anchor()]))
        return original()

    team.workers[0].finish = finish  # type: ignore[method-assign]
    team.run()
    owed = team.workers[0].state_dict()["feedback"]["residual"]
    assert float(owed.abs().max()) > 1e-3
    assert float((begin - flat() + owed - moved).abs().max()) < 1e-5


TWO_BITS = {"codec": tw.codecs.Quantise(bits=2), "feedback": tw.ErrorFeedback(decay=0.9)}
BF16 = {"codec": tw.codecs.CastBF16()}


@pytest.mark.parametrize(("fields", "stop"), [(TWO_BITS, 1), (TWO_BITS, 5), (BF16, 2)])
def test_a_run_resumes_bit_for_bit(fields, stop) -> None:
    def team(**known) -> AsyncTeam:
        return AsyncTeam(method(**fields), (3.0, 2.0, 1.1), total_steps=89, **known)

    def resumed(state: dict) -> AsyncTeam:
        return team(outer_device="cpu").load_state_dict(state).run()  # which changes no bit

    whole = team().run()
    assert whole.server.stats.steps_done == sum(whole.taken) == 89
    file = io.BytesIO()
    torch.save(team().run(stop).state_dict(), file)
    file.seek(0)
    state = torch.load(file)  # plain tensors, numbers and texts
    found = resumed(copy.deepcopy(state))
    assert same_bits(found.theta(), whole.theta())
    assert found.server.digest() == whole.server.digest()
    assert found.server.stats == whole.server.stats
    assert found.simulation.now_s == whole.simulation.now_s
    if "feedback" in fields:  # the control: without what is owed it differs
        for worker in state["workers"]:
            worker["feedback"]["residual"].zero_()
        assert not same_bits(resumed(state).theta(), whole.theta())


def test_bf16_workers_keep_an_fp32_theta() -> None:
    def half() -> nn.Module:
        return build_model().to(torch.bfloat16)

    team = AsyncTeam(method(), (2.0, 1.0), total_steps=6, model=half, build=sgd)
    # Nothing trained moves nothing, although bf16 cannot hold theta.
    with torch.no_grad():
        numel = sum(p.numel() for p in half().parameters())
        team.server._outer.apply(DenseVector(torch.full((numel,), 1e-4)))
        team.server._prepare_theta()
        team.workers[0].start(team.server.assign(0, now_s=0.0), team.server.theta_message)
        message = team.workers[0].finish()
    assert not message[64:].any()
    assert team.theta()[0].dtype == torch.float32
